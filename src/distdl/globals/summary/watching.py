"""Watching a model that runs on meta tensors: what each module computes, saves for backward, and sends."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import swap_tensors

from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.writes_into_plain import why_not_global
from distdl.globals.rules.fallback import Fallbacks
from distdl.globals.summary.results import GRADIENTS, Rehearsal, Row
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import name_of, writes
from distdl.tensors.derivatives import KEEPS_TENSORS, next_node
from distdl.tensors.memory import parts_of, without_memory
from distdl.tensors.private_torch import DisableTorchFunctionSubclass, current_autograd_node
from distdl.transport import Communicator
from distdl.transport.callsite import current_path
from distdl.transport.recording import Call, Recording
from distdl.workers.footprint import Footprint

_VALUES = (
    "called on meta tensors", "correct data-independent implementation does not exist", "out of meta tensor",
    "attempted to run this operator with Meta tensors", "unsupported format string passed to",
)  # fmt: skip
"""Texts of torch's errors about meta tensors that are asked for values."""


class Watch(TorchFunctionMode):
    """Runs a distributed model on meta tensors, and notes what each of its modules saves for backward and sends."""

    def __init__(self, model: torch.nn.Module, comm: Communicator) -> None:
        super().__init__()
        self._model, self._comm = model, comm
        self._rows: dict[str, Row] = {}
        self._functions: list[str] = []  # the torch functions that run, one inside another
        self._marks: list[tuple[int, str]] = [(-1, GRADIENTS)]  # autograd nodes from a number on are of a path's module
        self._weights = {one.untyped_storage()._cdata for one in _stored(model)}
        self._saved: dict[int, StorageWeakRef] = {}
        self._kinds = {path: type(module).__name__ for path, module in model.named_modules()}

    def run(self, inputs: Sequence[torch.Tensor], backward: bool) -> Rehearsal:
        """Run the forward and, if asked for and if parameters require gradients, the backward, from ones.

        Raises: RuntimeError if the forward asks for values of tensors; else what the model raises.
        """
        for path, module in self._model.named_modules():
            module.register_forward_hook(self._result_hook(path))
        blocks = [one._block if type(one) is GlobalTensor else one for one in inputs]
        self._comm.recorder = Recording(self._comm, ended=self._note_call)
        gradients = backward and any(one.requires_grad for one in self._model.parameters())
        with Footprint(meta=True) as footprint, torch.set_grad_enabled(gradients):
            footprint.count(*_stored(self._model), *blocks)
            with torch.autograd.graph.saved_tensors_hooks(_CountSaved(self._save), lambda saved: saved):
                y = self._forward(inputs)
            if gradients:
                self._backward(y)
        self._note_weights()
        order = [path for path in (*self._kinds, GRADIENTS) if path in self._rows]
        return Rehearsal([self._rows[path] for path in order], footprint.peak)

    def _forward(self, inputs: Sequence[torch.Tensor]) -> Any:
        try:
            with self:
                return self._model(*inputs)
        except (RuntimeError, TypeError) as error:
            if not any(text in str(error) for text in _VALUES):
                raise
            raise RuntimeError(
                "a model is summed up from shapes alone, on meta tensors; its forward asks for values: " + str(error)
            ) from error

    def _backward(self, y: Any) -> None:
        ends: list[torch.Tensor] = []

        def collect(one: torch.Tensor) -> None:
            block = one._block if type(one) is GlobalTensor else one
            if block.requires_grad:
                ends.append(block)

        map_tensors(y if isinstance(y, (torch.Tensor, tuple, list, dict)) else vars(y), collect)
        del y
        seeds = [torch.ones_like(end) for end in ends]
        torch.autograd.backward(ends, seeds)

    def _row(self, path: str) -> Row:
        found = self._rows.get(path)
        if found is None:
            found = self._rows[path] = Row(path, self._kinds.get(path, ""))
        return found

    def _result_hook(self, path: str) -> Callable[..., None]:
        """A forward hook that notes the shape and the split of the first result of a module."""

        def note(module: torch.nn.Module, inputs: Any, result: Any) -> None:
            row = self._row(path)
            row.layout = row.shape = row.split = row.block = None
            first = _first_global(tensors_in(result))
            if first is not None:
                row.layout, row.shape = first._layout, tuple(first.shape)
                row.split, row.block = _grid(first._layout), tuple(first._layout.local)

        return note

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name == "__get__":
            return func(*args, **kwargs)
        found = tensors_in((args, kwargs))
        first = _first_global(found)
        if any(one.is_meta for one in found):  # beside them may stand tables that the model made on the way
            if writes(func, kwargs) and type(args[0]) is torch.Tensor:
                _become_meta(args[0])
            args, kwargs = map_tensors((args, kwargs), _as_meta if first is None else _dense_as_meta)
        if first is not None and current_path() != self._marks[-1][1]:
            self._marks.append((next_node(), current_path()))
        self._functions.append(name)
        try:
            y = func(*args, **kwargs)
        finally:
            self._functions.pop()
        for one in tensors_in(y):
            if type(one) is torch.Tensor and not one.is_meta and all(one is not other for other in found):
                setattr(one, _MADE_HERE, True)
        if first is not None:
            self._note_function(name, first, y)
        return y

    def _note_function(self, name: str, x: GlobalTensor, y: Any) -> None:
        """Note whether a function of x has run on one worker, or whether its result y is split over another grid."""
        row, fallbacks = self._row(current_path()), x._context.own(Fallbacks)
        for one in fallbacks.values():
            row.falls_back[one.function] += one.nbytes
        if fallbacks:
            fallbacks.clear()  # so that the next call from the same line counts, too
            return
        other = _first_global(y if isinstance(y, (tuple, list)) else [y])
        if name in row.moves and other is not None:
            grids = [_grid(one._layout) for one in (x, other)]
            if [n for n in grids[0] if n > 1] != [n for n in grids[1] if n > 1]:
                row.redistributes[name] = f"{_show(grids[0])} -> {_show(grids[1])}"

    def _note_call(self, call: Call) -> None:
        """Note the messages of a call of the communicator: in backward, for the module of the node that runs."""
        messages, nbytes = len(call.sends), sum(nbytes for _, nbytes in call.sends)
        if not messages:
            return
        node = current_autograd_node()
        if node is None:
            row = self._row(current_path())
            row.moves[self._functions[-1] if self._functions else "forward"] += nbytes
            row.forward = row.forward[0] + messages, row.forward[1] + nbytes
        else:
            place = bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark[0]) - 1
            row = self._row(self._marks[place][1])
            row.backward = row.backward[0] + messages, row.backward[1] + nbytes
        for worker, sent in call.sends:
            row.sends[worker] += sent

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        """The hook that packs what is saved for backward: it counts all memory once, but that of weights."""
        storage = (tensor._block if type(tensor) is GlobalTensor else tensor).untyped_storage()
        known = self._saved.get(storage._cdata)
        if storage._cdata not in self._weights and (known is None or known.expired()):
            self._row(current_path()).activations += storage.nbytes()
            self._saved[storage._cdata] = StorageWeakRef(storage)
        return tensor.detach()

    def _note_weights(self) -> None:
        seen: set[int] = set()
        for path, module in self._model.named_modules():
            for own in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                if id(own) not in seen:
                    seen.add(id(own))
                    self._row(path).weights += sum(one.nbytes for one in _local_parts(own))


class _CountSaved:
    """A hook that only counts what is saved for backward, so that nothing is taken for a checkpoint."""

    def __init__(self, counts: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.counts = counts  # which other hooks of ours call for the tensors that they keep in its place
        setattr(self, KEEPS_TENSORS, True)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.counts(tensor)


def _first_global(values: Sequence[Any]) -> GlobalTensor | None:
    return next((one for one in values if type(one) is GlobalTensor), None)


def _local_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What this worker stores of a parameter or buffer, as dense tensors: of a sharded one, its share."""
    return parts_of(tensor._block if type(tensor) is GlobalTensor else tensor)


def _stored(model: torch.nn.Module) -> list[torch.Tensor]:
    return [part for one in (*model.parameters(), *model.buffers()) for part in _local_parts(one)]


_MADE_HERE = "_made_in_rehearsal"


def _become_meta(table: torch.Tensor) -> None:
    """Make a tensor that is about to be written a meta tensor under all of its names, so that the write is not lost.

    A tensor stays as it is, and the write goes into a copy, if it was not made in the rehearsal, if it is a view of a
    tensor that has other names, or if an autograd node refers to it.
    """
    shared = table._is_view() and why_not_global(table)
    if table.is_meta or not hasattr(table, _MADE_HERE) or table.layout is not torch.strided or shared:
        return
    with suppress(RuntimeError), DisableTorchFunctionSubclass():
        swap_tensors(table, table.to("meta"))


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else without_memory(tensor)


def _dense_as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.layout is not torch.strided and type(tensor) is not GlobalTensor else _as_meta(tensor)


def _grid(layout: KnownLayout) -> tuple[int, ...]:
    return tuple(layout.partition.workers.shape)


def _show(grid: Sequence[int]) -> str:
    return "x".join(map(str, grid)) or "one worker"
