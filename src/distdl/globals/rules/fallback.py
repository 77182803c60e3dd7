"""The fallback for functions without a handler: one worker runs them, on gathered tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.alignment import block_in, redistribute_block
from distdl.globals.moving.conversion import gather_blocks
from distdl.globals.moving.writes_into_plain import write_into_plain
from distdl.globals.rules.fallback_results import Described, Outcome, observed
from distdl.globals.rules.single_worker import Apart, failure_of, raise_failure
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.graph_state import is_leaf
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import TABLE, name_of, writes
from distdl.globals.views.aliasing import check_no_overlap, note_copied, note_new_memory, note_written
from distdl.partition.groups import IntArray
from distdl.partition.sharing import broadcast_value
from distdl.tensors.dtypes import DTYPES
from distdl.tensors.memory import without_memory
from distdl.tensors.private_torch import disable_current_modes
from distdl.transport.callsite import current_place, users_call


class Fallback(NamedTuple):
    """A call that ran on one worker.

    Attributes:
        function: the name of the function of torch.
        path: the path of the module that called it; empty outside of a distributed model.
        nbytes: the size of the gathered tensors, in bytes.
    """

    function: str
    path: str
    nbytes: int


class Fallbacks(dict[Any, Fallback]):
    """What has run on one worker of a world for want of an op, by call site; and the call sites that were warned of."""

    def __init__(self) -> None:
        super().__init__()
        self.warned: set[Any] = set()


def fall_back(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Gather the tensors on one worker, call torch's function there, and split its results.

    Raises: NotImplementedError under ``fallback="error"``; and on every worker the error that torch raises on that one.
    """
    if args and isinstance(args[0], torch.Tensor) and type(args[0]) is not GlobalTensor and writes(func, kwargs):
        return write_into_plain(func, args, kwargs, args[0], (args, kwargs))
    found = [one for one in tensors_in((args, kwargs)) if type(one) is GlobalTensor]
    first = found[0]
    context, worker, name = first._context, int(first._layout.partition.workers.flat[0]), name_of(func)
    _announce(context, name, found)
    apart = Apart(context, worker, name)
    in_place = writes(func, kwargs)
    gathered = {id(one): apart.takes(_gathered(one, worker, name, in_place), is_leaf(one)) for one in found}

    beside: list[torch.Tensor] = []  # the replicated tensors among the arguments

    def plain(one: torch.Tensor) -> Any:
        if type(one) is GlobalTensor:
            return gathered[id(one)]
        beside.append(plain_of(one))
        return apart.takes(entered(one, context)) if type(one) is Replica or one.requires_grad else one

    given, named = map_tensors((args, kwargs), plain)
    inputs = [gathered[id(one)] for one in found]
    values, outcome = _run(apart, func, given, named, found, inputs, beside)
    for place in outcome.beside:
        _share(beside[place], context, worker, name)
    tensors = [Described(*one) for one in outcome.tensors]
    if context.me != worker:
        held = [(context.whole(one.shape, worker).local, DTYPES[one.dtype]) for one in tensors]
        values = [torch.zeros(local, dtype=dtype, device=inputs[0].device) for local, dtype in held]
    curved = [place for place, one in enumerate(tensors) if one.gradient]
    for place, value in zip(curved, apart.gives([values[place] for place in curved]), strict=True):
        values[place] = value
    spread = [_spread(one, value, worker, found, name) for one, value in zip(tensors, values, strict=True)]
    return outcome.filled(spread)


def _run(
    apart: Apart, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], found: Sequence[GlobalTensor],
    inputs: Sequence[torch.Tensor], beside: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], Outcome]:  # fmt: skip
    """Run the function on its worker, and tell the others: the outcome, or the error, which every worker raises.

    Returns: the result tensors, on that worker only, and the outcome.
    """
    context, worker = apart.context, apart.worker
    failure, told = None, None
    values: list[torch.Tensor] = []
    if context.me == worker:
        try:
            with apart.runs():
                values, told = observed(func, args, kwargs, inputs, beside)
        except Exception as problem:
            failure = failure_of(problem)
    if not context.comm.imagined:
        call = f"{apart.name} of a global tensor"
        failure, told = broadcast_value(context.comm, context.everyone, call, worker, (failure, told))
    elif context.me != worker:
        told = _imagine(func, args, kwargs, inputs, found)
    raise_failure(failure, apart.name, worker)
    assert told is not None
    return values, Outcome(*told)


def _gathered(x: GlobalTensor, worker: int, name: str, in_place: bool) -> torch.Tensor:
    """Gather x on one worker, contiguous and alone in memory, as a copy of a block that is to be written in place."""
    y = block_in(x, x._context.whole(x.shape, worker), name)
    lies_so = y.is_contiguous() and y.untyped_storage().nbytes() == y.numel() * y.itemsize
    return y if lies_so and not (y is x._block and in_place) else y.clone(memory_format=torch.contiguous_format)


def _share(plain: torch.Tensor, context: Context, worker: int, name: str) -> None:
    """Copy a replicated tensor that one worker has written to all workers."""
    owned = context.whole(tuple(plain.shape), worker)
    block = plain.detach() if context.me == worker else torch.zeros(owned.local, dtype=plain.dtype, device=plain.device)
    whole = gather_blocks(block, owned, name)
    if context.me != worker:
        with torch.no_grad():
            plain.copy_(whole)


def _imagine(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: Sequence[torch.Tensor],
    found: Sequence[GlobalTensor],
) -> Outcome:  # fmt: skip
    """Return the outcome that the worker of the function would tell, in a rehearsal, by a call with meta tensors."""

    def imagined(one: torch.Tensor) -> torch.Tensor:
        return whole.get(id(one), one if one.layout is torch.strided else without_memory(one))

    with disable_current_modes():
        whole = {
            id(one): torch.empty(x.shape, dtype=x.dtype, device="meta").requires_grad_(x.requires_grad).clone()
            for one, x in zip(inputs, found, strict=True)
        }
        given, named = map_tensors((args, kwargs), imagined)
        return observed(func, given, named, [whole[id(one)] for one in inputs])[1]


def _spread(
    described: Described, value: torch.Tensor, worker: int, found: list[GlobalTensor], name: str
) -> GlobalTensor:
    """Split a result that one worker has over the workers of the first argument; write it into x if it was written."""
    extents, context = described.shape, found[0]._context
    x = found[described.same] if described.same >= 0 else None
    if x is not None and not described.written:
        return x
    owned, resized = context.whole(extents, worker), x is None or x.shape != extents
    split = split_like(context, extents, found[0]._layout.partition.workers) if x is None or resized else x._layout
    target = split if owned.rulers else owned
    block = redistribute_block(value, owned, target, name)
    if x is None:
        if described.view >= 0:  # on one worker, the result may still lie in the memory of a block
            block = block.clone()
        y = GlobalTensor._of(block, target)
        if described.strides:
            y._strides = described.strides
        if described.view >= 0:
            note_copied(found[described.view], y, placed=False)
        return y
    if resized:
        if not x.is_contiguous():
            raise RuntimeError(
                f"{name} resizes a global tensor in the order of its memory, which is not that of its dims; call "
                ".contiguous() first"
            )
        x._block, x._layout, x._strides = block, target, ()
        note_new_memory(x)
    elif block is not x._block:
        check_no_overlap(x, name)
        # torch writes into a leaf only without gradients
        with torch.set_grad_enabled(torch.is_grad_enabled() and not (x._block.requires_grad and is_leaf(x))):
            x._block.copy_(block)
    note_written(x, name)
    return x


def split_like(context: Context, extents: Shape, workers: IntArray) -> KnownLayout:
    """Return the even split of a new tensor over an array of workers: as its axes go, or else along the longest dim."""
    if workers.ndim == len(extents):
        return context.balanced(workers, extents)
    if not extents:
        return context.whole(extents, int(workers.flat[0]))
    longest = extents.index(max(extents))
    return context.balanced(workers.reshape([-1 if dim == longest else 1 for dim in range(len(extents))]), extents)


def _announce(context: Context, name: str, found: list[GlobalTensor]) -> None:
    """Note a fallback; warn of it once for each line of code, or raise NotImplementedError, as ``fallback=`` says."""
    path, mode = current_place()
    nbytes = sum(prod(one.shape) * one.dtype.itemsize for one in found)
    where = f"{path}: " if path else ""
    if mode == "error":
        raise NotImplementedError(
            f"{where}{name} has no op for global tensors, and fallback='error' forbids to bring {nbytes} bytes "
            "together on one worker; give it a handler by distdl.register, or use distdl.local_map"
        )
    frame, level = users_call()
    site = (name, path, frame.f_code.co_filename, frame.f_lineno)
    fallbacks = context.own(Fallbacks)
    fallbacks.setdefault(site, Fallback(name, path, nbytes))
    if mode == "warn" and site not in fallbacks.warned:
        fallbacks.warned.add(site)
        warnings.warn(
            f"{where}{name} has no op for global tensors: {nbytes} bytes come together on one worker, which computes "
            f"it alone (called at {frame.f_code.co_filename}:{frame.f_lineno})",
            stacklevel=level,
        )


TABLE[None] = fall_back
