"""The environment variables that distdl reads."""

from distdl.environment.variables import (
    LONGEST_TIMEOUT,
    chosen_backend,
    cuda_aware_mpi,
    debug,
    grace,
    recycled_memory,
    timeout,
    tunes_malloc,
    whole,
)

__all__ = [
    "LONGEST_TIMEOUT",
    "chosen_backend",
    "cuda_aware_mpi",
    "debug",
    "grace",
    "recycled_memory",
    "timeout",
    "tunes_malloc",
    "whole",
]
