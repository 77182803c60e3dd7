"""What workers compare under ``DISTDL_DEBUG=1``: that all of them call the same function on the same global tensors.

Global tensors agree on nothing, so where workers run different code, blocks of different tensors would meet. Each
exchange is then preceded by a message that says which function it belongs to, and a difference is an error on every
worker that takes part in it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from distdl import environment
from distdl.globals.paths import current_path
from distdl.partition import dims
from distdl.partition.sharing import gather_values
from distdl.transport import Communicator
from distdl.transport.communicator import Group


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls: list[str] = []


_here = _Here()
on = False
"""Whether any worker of this process compares: then functions are noted."""


def wanted() -> bool:
    """Whether workers are to compare, by the environment variable."""
    return environment.debug()


def watch(comm: Communicator) -> None:
    """Let every exchange of operators through a communicator be compared first."""

    def compare(label: object, members: Group, dtype: torch.dtype | None = None) -> None:
        if len(members) < 2:
            return
        told = gather_values(comm, members, _fingerprint(label, dtype))
        for worker, other in zip(members, told, strict=True):
            if other != told[0]:
                raise RuntimeError(
                    f"workers differ before an exchange (DISTDL_DEBUG): worker {members[0]} is in {told[0]}, "
                    f"and worker {worker} in {other}. Every worker has to call the same functions of global tensors, "
                    f"in the same order"
                )

    global on
    on, comm.watch = True, compare


def noted(handler: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a handler, and remember meanwhile what it is called for."""
    _here.calls.append(_described(func, args, kwargs))
    try:
        return handler(func, args, kwargs)
    finally:
        _here.calls.pop()


def _fingerprint(label: object, dtype: torch.dtype | None) -> str:
    backward = torch._C._current_graph_task_id() != -1
    what = f"the backward of {label}" if backward else _here.calls[-1] if _here.calls else str(label)
    path = current_path()
    moving = "" if dtype is None else f", moving {dtype}"
    return f"{what}{moving}{f' in module {path}' if path else ''}"


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    found = [_plain(one) if layout is None else _split(one, layout) for one, layout in _tensors((args, kwargs))]
    return f"{getattr(func, '__name__', func)}({'; '.join(found)})"


def _tensors(value: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """The tensors in nested arguments, with their layouts."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, torch.Tensor):
        yield value, value.__dict__.get("_layout")


def _plain(x: torch.Tensor) -> str:
    return f"a plain {dims(x.shape)} {x.dtype}"


def _split(x: Any, layout: Any) -> str:
    sizes = ", ".join("+".join(str(stop - start) for start, stop in along) for along in layout.intervals)
    gradient = " with gradient" if x._block.requires_grad else ""
    return f"{dims(layout.extents)} {x.dtype} over {layout.partition} in blocks {sizes}{gradient}"
