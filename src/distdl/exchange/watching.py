"""What workers compare under ``DISTDL_DEBUG=1``: that all members of an exchange make the same one.

Each exchange is then preceded by a message that says which it is: in the forward and in the backward, also where shapes
are fixed and nothing is agreed on, and for collectives, which carry no tag. So a difference is an error before anything
is sent, on every member, and not at their next agreement.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from distdl import environment
from distdl.partition.sharing import gather_values
from distdl.transport.calls import numbered
from distdl.transport.communicator import CommunicationError, Communicator, Group

Describe = Callable[[str], str]
Past = Callable[[], list[str]]
_describe: list[tuple[Describe, Past]] = []
_BEGUN = object()


def begin(comm: Communicator) -> None:
    """Let every exchange through a communicator be compared, if the variable says so when this is first called."""
    if _BEGUN not in comm.kept:
        comm.kept[_BEGUN] = True
        if environment.debug():
            watch(comm)


def describe_by(describe: Describe, past: Past) -> None:
    """Let functions say more of what this worker does.

    Args:
        describe: gets the name of a layer, and returns a text.
        past: what this worker has called since it was asked last, which is before each exchange of all workers.
    """
    _describe[:] = [(describe, past)]


def watch(comm: Communicator) -> None:
    """Let every exchange through a communicator be compared first."""

    def compare(label: object, members: Group, dtype: torch.dtype | None = None) -> None:
        if len(members) < 2 or comm.imagined:
            return
        calls = comm.calls(members)
        what = calls.coming(numbered(label))
        called: list[str] = []
        for describe, past in _describe:
            what = describe(what)
            if len(members) == comm.size:
                called += past()
        if dtype is not None:
            what = f"{what}, moving {dtype}"
        source = calls.underive()  # in which the members may differ: it is compared with the rest
        mine = [what, *called]
        told = gather_values(comm, members, "what is compared before an exchange (DISTDL_DEBUG)", mine, shown=what)
        if source:
            calls.derive(source)
        for worker, other in zip(members, told, strict=True):
            if other == told[0]:
                continue
            steps = zip(_steps(*told[0]), _steps(*other), strict=False)
            one, another = next(pair for pair in steps if pair[0] != pair[1])
            raise CommunicationError(
                f"workers differ before an exchange (DISTDL_DEBUG): worker {members[0]} {one}, and worker {worker} "
                f"{another}. Every worker has to call the same layers and the same functions of global tensors, and "
                "their backward, in the same order, with the same numbers and plain tensors"
            )

    comm.watch = compare


def _steps(what: str, *called: str) -> list[str]:
    """What a worker has called since the last exchange of all workers, and what it is in."""
    return [*(f"has called {one}" for one in called), f"is in {what}"]
