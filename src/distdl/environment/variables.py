"""Environment variables, each with its rule: a value that breaks it is a ValueError that names variable and rule.

Nothing else in distdl reads a variable that has a rule, so that none is taken for another value than it says.
"""

from __future__ import annotations

import math
import os
from typing import NoReturn

from distdl.environment.arguments import checks_arguments
from distdl.environment.types import Count

DEFAULT_TIMEOUT = 600.0
LONGEST_TIMEOUT = 2_000_000  # seconds; gloo counts milliseconds in 32 bits
LARGEST_MEMORY = 1 << 40  # MiB


def timeout() -> float:
    """``DISTDL_TIMEOUT``: longest wait for other workers, in seconds.

    Raises: ValueError unless it is a number above 0 and at most ``LONGEST_TIMEOUT``; so no wait is without limit.
    """
    return _seconds("DISTDL_TIMEOUT", DEFAULT_TIMEOUT, zero=False)


def grace() -> float:
    """``DISTDL_GRACE``: how many seconds a worker gets to end after SIGTERM, until it is killed."""
    return _seconds("DISTDL_GRACE", 30.0, zero=True)


def recycled_memory() -> int:
    """``DISTDL_RECYCLED_MEMORY``, which is in MiB, as a number of bytes."""
    return whole("DISTDL_RECYCLED_MEMORY", 512, largest=LARGEST_MEMORY, unit="MiB") << 20


def tunes_malloc() -> bool:
    """Whether variables of glibc's say which freed memory it keeps: ``MALLOC_TRIM_THRESHOLD_`` and its kin."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables for name in _KEPT)


_KEPT = ("mmap_threshold", "mmap_max", "trim_threshold", "top_pad")


def chosen_backend() -> str | None:
    """``DISTDL_BACKEND``: the name of a back-end; None if it is not set, or empty."""
    return os.environ.get("DISTDL_BACKEND") or None


def debug() -> bool:
    """``DISTDL_DEBUG``: whether workers compare what they do before each exchange."""
    return bool(_flag("DISTDL_DEBUG"))


def cuda_aware_mpi() -> bool | None:
    """``DISTDL_CUDA_AWARE_MPI``: whether MPI takes addresses of GPU memory; None if it is not set."""
    return _flag("DISTDL_CUDA_AWARE_MPI")


@checks_arguments
def whole(name: str, default: Count, largest: Count = (1 << 31) - 1, unit: str = "") -> int:
    """A variable that is a whole number from 0 to ``largest``.

    Raises: ValueError if it is something else, or the default is.
    """
    if default > largest:
        raise ValueError(f"whole needs a default of {name} from 0 to {largest}; got {default}")
    text = os.environ.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal()) or len(text) > 18 or int(text) > largest:
        _refuse(name, f"a whole number {f'of {unit} ' if unit else ''}from 0 to {largest}", text)
    return int(text)


def _seconds(name: str, default: float, zero: bool) -> float:
    """A variable that is a number of seconds, at most ``LONGEST_TIMEOUT``, and 0 only if that is one of them."""
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= LONGEST_TIMEOUT or (seconds == 0 and not zero):  # true of nan, too
        limits = f"from 0 to {LONGEST_TIMEOUT}" if zero else f"above 0 and at most {LONGEST_TIMEOUT}"
        _refuse(name, f"a number of seconds {limits}", text)
    return seconds


def _flag(name: str) -> bool | None:
    text = os.environ.get(name)
    if text is None:
        return None
    if text not in ("", "0", "1"):
        _refuse(name, "0 or 1", text)
    return text == "1"


def _refuse(name: str, rule: str, text: str) -> NoReturn:
    raise ValueError(f"the environment variable {name} has to be {rule}; it is {text!r}")
