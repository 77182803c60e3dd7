"""What every worker does by itself, and all of them learn how it went: the same error everywhere, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distdl.partition.sharing import gather_values
from distdl.transport.communicator import Communicator, name_workers

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (ValueError, TypeError, OSError, FileNotFoundError, ImportError, RuntimeError)
}


def together(comm: Communicator, what: str, work: Callable[[], Any]) -> list[Any]:
    """Do something on every worker, and gather what came of it. Collective over the world.

    Args:
        what: the user's call, for errors.
        work: returns what can be sent (see :func:`distdl.partition.encoding.encode`).
    Returns: what it returned on each worker, in their order.
    Raises: the same error on every worker, if it has failed on one of them.
    """
    comm.where = what
    own: Exception | None = None
    report: tuple[Any, ...]
    try:
        report = (work(),)
    except Exception as error:  # whatever it is, the others wait
        own = error
        report = (_kind(error), _text(error))
    comm.where = what
    told = gather_values(comm, tuple(range(comm.size)), what, report)
    failed = [worker for worker, one in enumerate(told) if len(one) == 2]
    if failed:
        kind, text = told[failed[0]]
        alike = [worker for worker in failed if told[worker] == told[failed[0]]]
        where = "" if len(alike) == comm.size else f" (on {name_workers(alike)})"
        raise _KINDS[kind](f"{text}{where}") from own
    return [one[0] for one in told]


def _kind(error: Exception) -> str:
    """The name of the kind that is raised for an error: its own, or else what it is one of."""
    kinds = (type(error), OSError, ValueError, RuntimeError)
    return next((k.__name__ for k in kinds if _KINDS.get(k.__name__) is k and isinstance(error, k)), "RuntimeError")


def _text(error: Exception) -> str:
    expected = type(error).__name__ in _KINDS or isinstance(error, OSError)  # the text of an OSError says what it is
    return str(error) if expected else f"{type(error).__name__}: {error}"
