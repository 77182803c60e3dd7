"""The back-ends by name. Each registers itself when its module is imported, and that is when its name is first used.

A back-end is one class, a communicator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from distdl.environment import chosen_backend
from distdl.environment.arguments import checks_fields
from distdl.transport.communicator import Communicator
from distdl.transport.job import Job, job

__all__ = ["BACKENDS", "Backend", "Job", "Work", "before_threads", "chosen", "find", "job", "names", "register"]

_OWN = {
    "serial": "distdl.backends.serial",
    "threads": "distdl.backends.threaded",
    "mpi": "distdl.backends.mpi",
    "gloo": "distdl.backends.torch_distributed",
    "nccl": "distdl.backends.torch_distributed",
}
BACKENDS = tuple(_OWN)

Work = Callable[[Communicator], Any]

before_threads: list[Callable[[], None]] = []
"""What is called before workers start that are threads of one process, and share what torch keeps for it."""


@checks_fields
class Backend(NamedTuple):
    """What is registered under a name; see :func:`register`."""

    opener: Callable[[], Communicator]
    check: Callable[[], None] | None
    start: Callable[[Work, int], list[Any]] | None
    command: Callable[[int, Sequence[str]], list[str]] | None


_registered: dict[str, Backend] = {}


def register(
    name: str,
    opener: Callable[[], Communicator],
    *,
    check: Callable[[], None] | None = None,
    start: Callable[[Work, int], list[Any]] | None = None,
    command: Callable[[int, Sequence[str]], list[str]] | None = None,
) -> None:
    """Make a back-end known by a name. A name registered again stands for the later one.

    Args:
        name: what ``distdl.world``, ``run_workers``, ``distdl run --backend`` and ``DISTDL_BACKEND`` then take. A name
            that nobody has registered is taken for that of a module, which is imported and then has to register it.
        opener: ``opener()`` returns the communicator over all workers of the job that this process was launched in.
            From ``job(name)`` it learns its number and how to find the others. It raises RuntimeError, saying what is
            missing, where the back-end cannot work. Other processes import it, so it stands at the top of a module.
        check: ``check()`` raises that error before any worker is started.
        start: ``start(work, workers)`` starts the workers, calls ``work(communicator)`` on each, and returns the
            results in their order. None: ``run_workers`` starts processes, and each calls ``opener``.
        command: ``command(workers, [script, *arguments])`` returns the command line by which ``distdl run`` launches a
            job. None: torchrun's; or, where there is ``start``, the workers that it starts execute the script.
    Raises: ValueError if the name is one of distdl's own; TypeError for what is no name or no function.
    """
    if not isinstance(name, str):
        raise TypeError(f"a back-end needs a name, a string; got {name!r}")
    for role, function in (("opener", opener), ("check", check), ("start", start), ("command", command)):
        if not callable(function) and (function is not None or role == "opener"):
            raise TypeError(f"the back-end {name!r} needs {role} to be a function; got {function!r}")
    if name in _OWN and not opener.__module__.startswith("distdl.backends."):
        raise ValueError(f"{name!r} is a back-end of distdl's own ({', '.join(BACKENDS)}); register another name")
    _registered[name] = Backend(opener, check, start, command)


def find(name: str) -> Backend:
    """What is registered under a name. The module that registers it is imported if it was not yet.

    Raises: ValueError, which lists the registered names, if this is none of them.
    """
    if not isinstance(name, str):
        raise TypeError(f"a back-end is found by its name, a string; got {name!r}")
    if name not in _registered:
        _import(_OWN.get(name, name))
    if name not in _registered:
        raise ValueError(
            f"the back-ends are {', '.join(names())}; got {name!r}, and no module of that name registers it "
            f"(distdl.backends.register)"
        )
    return _registered[name]


def chosen() -> str:
    """The name of the back-end that ``DISTDL_BACKEND`` names; threads if it is not set.

    Raises: ValueError, which names the variable, if there is none of that name.
    """
    name = chosen_backend() or "threads"
    try:
        find(name)
    except ValueError as error:
        raise ValueError(f"the environment variable DISTDL_BACKEND is {name!r}: {error}") from None
    return name


def names() -> list[str]:
    """distdl's own names, and then all others that have been registered."""
    return [*BACKENDS, *sorted(set(_registered) - set(BACKENDS))]


def _import(module: str) -> None:
    if not all(part.isidentifier() for part in module.split(".")):
        return
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and lacks another module
