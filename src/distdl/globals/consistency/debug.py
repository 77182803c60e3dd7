"""The debugging mode, ``DISTDL_DEBUG=1``: all workers compare which functions of global tensors they call.

Global tensors agree on nothing, so where workers run different code, blocks of different tensors would meet. Before
each exchange the workers compare a text (see :mod:`distdl.exchange.watching`). It says to which function the exchange
belongs, and which functions were called since the last exchange of all workers, as those of elements exchange nothing.
The text of a call has its arguments: layouts and dtypes, numbers, and checksums of plain tensors.
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
from distdl.tensors.private_torch import DisableTorchFunction, current_graph_task_id
from distdl.tensors.recorders import aside
from distdl.transport import Communicator
from distdl.transport.callsite import current_path
from distdl.transport.communicator import name_workers


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[str] = []
        # calls since the last exchange of all workers, none of which has exchanged anything
        self.past: deque[str] = deque(maxlen=1000)
        self.exchanges = 0


_calls = _Calls()
_SAME = (torch.Tensor, torch.nn.Parameter, Replica)  # types of tensors that are the same on every worker
_SHOWN = 1000  # characters of the arguments in the text of a call
# functions that one worker may call by itself, for a line that it prints
_ASKED_ALONE = frozenset(
    ["__get__", "__repr__", "__str__", "__len__", "dim", "size", "numel", "stride", "type", "cuda"]
)
_WRITING = frozenset(["copy_", "fill_"])  # they write all of their first argument, whose old values do not matter
_ALIKE = frozenset(
    ["expand_as", "view_as", "reshape_as", "type_as", "to"]
)  # those that ask for shapes and dtypes alone
_NUMBERS = (bool, int, float, complex, slice, torch.dtype)
_LISTS = ("_foreach_", "_fused_", "_amp_foreach_")  # functions of optimisers on lists, in which blocks stand, too


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
    """Call a handler; while it runs, an exchange of this worker belongs to this call."""
    with _calling(_described(func, args, kwargs, not _calls.open), name_of(func) in _ASKED_ALONE):
        return handler(func, args, kwargs)


@contextmanager
def _calling(text: str, alone: bool = False) -> Iterator[None]:
    """A context for a call. A call of a user's that has exchanged nothing is compared before the next exchange.

    Args:
        text: the call, for people.
        alone: whether one worker may make the call by itself, so that it is not compared.
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
    """A context for a move of a global tensor; see :func:`distdl.globals.tensor.observers.moving`."""
    target = place_of(to) if isinstance(to, Layout) else f"on {'every worker' if to is None else f'worker {to}'}"
    return _calling(f"{what}({_split(x, x._layout)}; to lie {target})")


def note_plain(what: str, x: torch.Tensor) -> None:
    """Remember, where workers compare, what was called with a plain tensor that is the same on every worker."""
    if AROUND_CALLS:
        _calls.past.append(f"{what} {_plain(x, True)}")


def _past() -> list[str]:
    """The calls of this worker since the last exchange of all workers. A new one begins now."""
    found = list(_calls.past)
    _calls.past.clear()
    _calls.exchanges += 1
    return found


def _described_here(what: str) -> str:
    """The text of an exchange: the call, or the backward, to which it belongs, and the module in which it is made."""
    backward = current_graph_task_id() != -1
    if backward and not what.startswith("the backward"):
        what = f"the backward of {what}"
    elif not backward and _calls.open:
        what = _calls.open[-1]
    path = current_path()
    return f"{what} in module {path}" if path else what


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], whole: bool) -> str:
    """The text of a call.

    Args:
        whole: whether its plain tensors are the same on every worker. They are in a user's call; in a call that a
            handler makes, they may be blocks.
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
        # without a split tensor, each worker may have a number of its own, as the loss of its block; worker 0's counts
        same = split or type(one) is torch.nn.Parameter or (type(one) is torch.Tensor and one.numel() > 1)
        return _plain(one, same and whole and name not in _ALIKE and id(one) not in written)

    text = "; ".join(filter(None, _texts((args, kwargs), tell, whole)))
    return f"{name}({text if len(text) <= _SHOWN else f'{text[:_SHOWN]}.. {crc32(text.encode()):08x}'})"


def _is_all(index: Any) -> bool:
    """Whether an index selects the whole tensor."""
    return index is ... or (type(index) is slice and index == slice(None))


def _texts(value: Any, tell: Callable[[torch.Tensor], str], whole: bool) -> Iterator[str]:
    """Nested arguments as texts: tensors, and in a user's call numbers and generators. Devices may differ."""
    if isinstance(value, torch.Tensor):
        yield tell(value)
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _texts(one, tell, whole)
    elif isinstance(value, dict):
        for name, one in value.items():
            if isinstance(name, str):  # the memo of a deep copy has everything that was copied under numbers
                yield from (text and f"{name}={text}" for text in _texts(one, tell, whole))
    elif whole and isinstance(value, _NUMBERS):
        yield repr(value)
    elif whole and isinstance(value, torch.Generator):
        with aside():
            state = checksum(value.get_state())
        yield f"a generator with checksum {state:08x}"


def _plain(x: torch.Tensor, whole: bool) -> str:
    """The text of a plain tensor, with a checksum if it is the same on every worker."""
    text = f"a plain {'nested' if x.is_nested else dims(x.shape)} {x.dtype}"
    if not whole or type(x) not in _SAME or x.is_nested or x.layout is not torch.strided or x.is_meta:
        return text
    with DisableTorchFunction(), unobserved(), aside():
        return f"{text} with checksum {checksum(x):08x}"


def _split(x: Any, layout: Any) -> str:
    """The text of a global tensor."""
    # compared in grad mode only: without it, workers may differ, and no graph follows from that
    gradient = " with gradient" if x._block.requires_grad and torch.is_grad_enabled() else ""
    shape = f"{dims(layout.extents)} {x.dtype}" if layout.extents else f"a number, {x.dtype},"
    return f"{shape} {place_of(layout)}{gradient}"


def place_of(layout: Layout) -> str:
    """The workers and the sizes of blocks of a layout, for people."""
    sizes = ", ".join("+".join(str(stop - start) for start, stop in along) for along in layout.intervals)
    if not sizes:
        return f"on {name_workers(layout.partition.workers.ravel().tolist())}"
    return f"over {layout.partition} in blocks {sizes}"
