"""What workers compare of global tensors under ``DISTDL_DEBUG=1``: that all of them call the same function on them.

Global tensors agree on nothing, so where workers run different code, blocks of different tensors would meet. What is
compared before each exchange (see :mod:`distdl.exchange.watching`) then says which function it belongs to, and which
were called since the last one that all workers took part in: functions of elements exchange nothing. What a function is
called with is compared, too: layouts and dtypes, numbers, and what plain tensors hold.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from zlib import crc32

import torch

from distdl import environment
from distdl.exchange import watching
from distdl.globals.consistency.checksums import checksum
from distdl.globals.layouts.context import opened
from distdl.globals.tensor.observers import AROUND_CALLS, AROUND_MOVES
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.tensor.table import name_of
from distdl.partition import Layout, dims
from distdl.tensors.modes import unobserved
from distdl.transport import Communicator
from distdl.transport.callsite import current_path
from distdl.transport.communicator import name_workers


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[str] = []
        self.past: deque[str] = deque(maxlen=1000)  # calls since the last exchange of all workers, which have made none
        self.exchanges = 0


_calls = _Calls()
_SAME = (torch.Tensor, torch.nn.Parameter, Replica)  # types of tensors that are the same on every worker
_SHOWN = 1000  # characters of what a function is called with
# (what one worker may ask by itself, in a line that it prints)
_ASKED_ALONE = frozenset(
    ["__get__", "__repr__", "__str__", "__len__", "dim", "size", "numel", "stride", "type", "cuda"]
)
_WRITING = frozenset(["copy_", "fill_"])  # functions that write all of their first argument, which may not be filled
_ALIKE = frozenset(
    ["expand_as", "view_as", "reshape_as", "type_as", "to"]
)  # those that ask for shapes and dtypes alone
_NUMBERS = (bool, int, float, complex, slice, torch.dtype)
_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")  # those of lists, as optimisers call them: blocks stand there, too


def watch(comm: Communicator) -> None:
    """Let every exchange of operators through a communicator be compared first."""
    if not AROUND_CALLS:
        AROUND_CALLS.append(noted)
        AROUND_MOVES.append(_moving)
    watching.describe_by(_described_here, _past)
    watching.watch(comm)


def _watch_if_asked(comm: Communicator) -> None:
    if environment.debug():
        watch(comm)


opened.append(_watch_if_asked)


def noted(handler: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a handler, and remember meanwhile what it is called for."""
    with _calling(_described(func, args, kwargs, not _calls.open), name_of(func) in _ASKED_ALONE):
        return handler(func, args, kwargs)


@contextmanager
def _calling(text: str, alone: bool = False) -> Iterator[None]:
    """A context for a call that may exchange; behind it, one that has not is remembered.

    Args:
        alone: whether one worker may call it by itself, as it exchanges nothing.
    """
    outermost, exchanges = not _calls.open, _calls.exchanges
    _calls.open.append(text)
    try:
        yield
    finally:
        _calls.open.pop()
    if outermost and exchanges == _calls.exchanges and not alone:
        path = current_path()
        _calls.past.append(f"{text} in module {path}" if path else text)


def _moving(what: str, x: Any, to: Any) -> AbstractContextManager[None]:
    """The same for what moves a global tensor; see :func:`distdl.globals.tensor.observers.moving`."""
    target = place_of(to) if isinstance(to, Layout) else f"on {'every worker' if to is None else f'worker {to}'}"
    return _calling(f"{what}({_split(x, x._layout)}; to lie {target})")


def note_plain(what: str, x: torch.Tensor) -> None:
    """Remember, where workers compare, what was called with a plain tensor that is the same on every worker."""
    if AROUND_CALLS:
        _calls.past.append(f"{what} {_plain(x, True)}")


def _past() -> list[str]:
    """What this worker has called since the last exchange of all workers, which begins now."""
    found = list(_calls.past)
    _calls.past.clear()
    _calls.exchanges += 1
    return found


def _described_here(what: str) -> str:
    backward = torch._C._current_graph_task_id() != -1
    if backward and not what.startswith("the backward"):
        what = f"the backward of {what}"
    elif not backward and _calls.open:
        what = _calls.open[-1]
    path = current_path()
    return f"{what} in module {path}" if path else what


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> str:
    """A call, for people.

    Args:
        whole: whether its plain tensors are the same on every worker: those of a user's call. (Inside of a handler,
            they may be blocks.)
    """
    name = name_of(func)
    listed = name.startswith(_LISTS)
    split = any(one.__dict__["_layout"].extents for one in tensors_in((args, kwargs)) if "_layout" in one.__dict__)
    given = (args, {key: value for key, value in kwargs.items() if key != "out"})
    written = {id(one) for one in tensors_in(kwargs.get("out"))} - {id(one) for one in tensors_in(given)}
    if name in _WRITING or (name == "__setitem__" and _is_all(args[1])):
        written.add(id(args[0]))

    def tell(one: torch.Tensor) -> str:
        layout = one.__dict__.get("_layout")
        if layout is not None or listed:
            return "" if layout is None else _split(one, layout)
        # (beside numbers alone, each worker may have another number, as a loss of its block: worker 0's counts)
        same = split or type(one) is torch.nn.Parameter or (type(one) is torch.Tensor and one.numel() > 1)
        return _plain(one, same and whole and name not in _ALIKE and id(one) not in written)

    text = "; ".join(filter(None, _texts((args, kwargs), tell, whole)))
    return f"{name}({text if len(text) <= _SHOWN else f'{text[:_SHOWN]}.. {crc32(text.encode()):08x}'})"


def _is_all(index: Any) -> bool:
    return index is ... or (type(index) is slice and index == slice(None))


def _texts(value: Any, tell: Callable[[torch.Tensor], str], whole: bool) -> Iterator[str]:
    """Nested arguments as texts: tensors; of a user's call, numbers and generators, too. (Devices may differ.)"""
    if isinstance(value, torch.Tensor):
        yield tell(value)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _texts(one, tell, whole)
    elif isinstance(value, dict):
        for name, one in value.items():
            if isinstance(name, str):  # (in the memo of a deep copy, all that has been copied stands under numbers)
                yield from (text and f"{name}={text}" for text in _texts(one, tell, whole))
    elif whole and isinstance(value, _NUMBERS):
        yield repr(value)
    elif whole and isinstance(value, torch.Generator):
        yield f"a generator with checksum {checksum(value.get_state()):08x}"


def _plain(x: torch.Tensor, whole: bool) -> str:
    text = f"a plain {'nested' if x.is_nested else dims(x.shape)} {x.dtype}"
    if not whole or type(x) not in _SAME or x.is_nested or x.layout is not torch.strided or x.is_meta:
        return text
    with torch._C.DisableTorchFunction(), unobserved():
        return f"{text} with checksum {checksum(x):08x}"


def _split(x: Any, layout: Any) -> str:
    # (without grad mode nothing follows from it, and what enters is a leaf on the worker that has it alone)
    gradient = " with gradient" if x._block.requires_grad and torch.is_grad_enabled() else ""
    shape = f"{dims(layout.extents)} {x.dtype}" if layout.extents else f"a number, {x.dtype},"
    return f"{shape} {place_of(layout)}{gradient}"


def place_of(layout: Layout) -> str:
    """Where a tensor of this layout lies, for people."""
    sizes = ", ".join("+".join(str(stop - start) for start, stop in along) for along in layout.intervals)
    if not sizes:
        return f"on {name_workers(layout.partition.workers.ravel().tolist())}"
    return f"over {layout.partition} in blocks {sizes}"
