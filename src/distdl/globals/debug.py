"""What workers compare of global tensors under ``DISTDL_DEBUG=1``: that all of them call the same function on them.

Global tensors agree on nothing, so where workers run different code, blocks of different tensors would meet. What is
compared before each exchange (see :mod:`distdl.exchange.watching`) then says which function it belongs to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from distdl.exchange import watching
from distdl.globals.paths import current_path
from distdl.partition import dims
from distdl.transport import Communicator


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls: list[str] = []


_here = _Here()
on = False
"""Whether any worker of this process compares: then functions are noted."""


def watch(comm: Communicator) -> None:
    """Let every exchange of operators through a communicator be compared first."""
    global on
    on = True
    watching.describe_by(_described_here)
    watching.watch(comm)


def noted(handler: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a handler, and remember meanwhile what it is called for."""
    _here.calls.append(_described(func, args, kwargs))
    try:
        return handler(func, args, kwargs)
    finally:
        _here.calls.pop()


def _described_here(what: str) -> str:
    backward = torch._C._current_graph_task_id() != -1
    if backward and not what.startswith("the backward"):
        what = f"the backward of {what}"
    elif not backward and _here.calls:
        what = _here.calls[-1]
    path = current_path()
    return f"{what} in module {path}" if path else what


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
    return f"a plain {'nested' if x.is_nested else dims(x.shape)} {x.dtype}"


def _split(x: Any, layout: Any) -> str:
    sizes = ", ".join("+".join(str(stop - start) for start, stop in along) for along in layout.intervals)
    gradient = " with gradient" if x._block.requires_grad else ""
    return f"{dims(layout.extents)} {x.dtype} over {layout.partition} in blocks {sizes}{gradient}"
