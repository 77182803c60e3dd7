"""The job of processes that this one was started in: by ``run_workers``, by torchrun, or by the user's own means."""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from distdl import environment
from distdl.environment.arguments import checks_arguments, checks_fields
from distdl.environment.types import Count
from distdl.transport.communicator import CommunicationError
from distdl.transport.stores import connect

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@checks_fields
class Job(NamedTuple):
    """A worker's place in its job, and a store that all workers of it share.

    Attributes:
        rank, size: this worker's number, and how many there are.
        local_rank: its number among those of the same machine.
        store: maps strings to bytes. ``store.get(key)`` waits until some worker has made ``store.set(key, value)``.
        host: the address at which workers listen for each other, if all are on this machine; None: any of it.
    """

    rank: Count
    size: Count
    local_rank: Count
    store: dist.Store
    host: str | None = None

    def _check(self) -> None:
        if self.rank >= self.size:
            raise ValueError(f"a Job needs a rank from 0 to {self.size - 1}, as there are {self.size}; got {self.rank}")


_joined: Job | None = None
_opened: dict[str, Iterator[int]] = defaultdict(itertools.count)


def join(job: Job) -> None:
    """Make this process a worker of a job."""
    global _joined
    _joined = job


@checks_arguments
def job(backend: str) -> Job:
    """The job that this process was started in. Collective: each call gives a store with no entries in it.

    Args:
        backend: the name of the back-end that asks: the entries of different back-ends do not meet.
    Raises: RuntimeError, saying how to launch one, if this process was started in none; CommunicationError if its
        store does not answer within the time limit.
    """
    if not dist.is_available():
        raise RuntimeError(f"the {backend} back-end needs a build of torch that has torch.distributed")
    if _joined is None and dist.is_initialized():
        joined = of_group(dist.group.WORLD)
    elif _joined is None and all(variable in os.environ for variable in TORCHRUN):
        joined = _of_torchrun()
        join(joined)
    elif _joined is None:
        raise RuntimeError(
            f"the {backend} back-end needs a job that torchrun has launched (its variables {', '.join(TORCHRUN)} are "
            f"not all set), or torch.distributed.init_process_group before it: torchrun --nproc-per-node 4 SCRIPT; or "
            f"distdl.run_workers(function, workers=4, backend={backend!r})"
        )
    else:
        joined = _joined
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun's store outlives the workers of a start
    prefix = f"distdl/{restart}/{backend}/{next(_opened[backend])}"
    return joined._replace(store=dist.PrefixStore(prefix, joined.store))


def of_group(group: Any) -> Job:
    """The job of a process group that the user made, with a part of its store for us alone."""
    store = dist.PrefixStore("distdl", group.get_group_store())
    return Job(dist.get_rank(group), dist.get_world_size(group), _local_rank(), store)


def _of_torchrun() -> Job:
    """The job that torchrun's variables tell of. Its store is kept by torchrun, or else by the first worker."""
    rank, size = environment.whole("RANK", 0), environment.whole("WORLD_SIZE", 1)
    if rank >= size:
        raise ValueError(f"the environment variable RANK has to be less than WORLD_SIZE; they are {rank} and {size}")
    host, port = os.environ["MASTER_ADDR"], environment.whole("MASTER_PORT", 0, largest=65535)
    keep = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = connect(host, port, environment.timeout(), keep)
    except RuntimeError as error:
        raise CommunicationError(
            f"worker {rank} of {size} {error} (DISTDL_TIMEOUT; the address is MASTER_ADDR and MASTER_PORT, where "
            f"{'torchrun' if 'TORCHELASTIC_RUN_ID' in os.environ else 'worker 0'} keeps the store of the job)"
        ) from error
    return Job(rank, size, _local_rank(), store)


def _local_rank() -> int:
    """The number of this worker on its machine; srun tells it by a variable of its own."""
    return environment.whole("LOCAL_RANK", environment.whole("SLURM_LOCALID", 0))
