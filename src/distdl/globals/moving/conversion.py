"""Plain tensors become global (``distribute_tensor``, ``from_local``), global ones plain, or of another layout."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from distdl.environment.types import judge
from distdl.geometry.boxes import Shape, slices
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.alignment import block_in, redistribute_block
from distdl.globals.moving.idle import warn_of_idle
from distdl.globals.tensor import observers
from distdl.globals.tensor.block import Block, as_block, unblocked
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.provenance import ours_before
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.table import METHODS
from distdl.partition import CartesianPartition, Layout, Partition, dims
from distdl.partition.arguments import Split, check_split
from distdl.partition.sharing import broadcast_value, gather_values
from distdl.tensors.connection import zeros_on
from distdl.tensors.derivatives import has_tangent
from distdl.tensors.draws import Draws, seed
from distdl.tensors.dtypes import DTYPES, dtype_code
from distdl.tensors.function import Function
from distdl.workers.worlds import split_of

_AXES, _WHOLE = judge(Sequence[int | None]), judge(int)


NO_TANGENTS = (
    "global tensors have no forward-mode derivatives; torch.func.jvp(function, (x,), (tangent,)) computes the same of "
    "global tensors, by two backwards"
)


class _Header(NamedTuple):
    """What a worker reports of a plain tensor that is to become global, or become a block of a global tensor.

    Attributes:
        code: the code of the dtype.
        device: the type of the device, as "cuda".
        gradient: whether the tensor requires a gradient.
        seed: torch's seed on the worker.
        follows: whether the tensor was computed from a global tensor or a weight, so all workers go on in its backward.
    """

    extents: Shape
    code: int
    device: str
    gradient: bool
    seed: int
    follows: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.code]

    def device_beside(self, x: Any) -> torch.device:
        """Return this worker's device of that type: the device of x, its own argument, or else the current one."""
        own = x.device if isinstance(x, torch.Tensor) else None
        return own if own is not None and own.type == self.device else torch.device(self.device)


def _header(x: Any) -> _Header | str:
    """Return the header of a plain tensor; for a value that cannot become global, what it is, for an error."""
    if type(x) is GlobalTensor or not isinstance(x, torch.Tensor):
        return type(x).__name__
    if has_tangent(x):
        return f"{type(x).__name__} with a tangent ({NO_TANGENTS})"
    if x.layout is not torch.strided or x.is_nested:
        return f"{type(x).__name__} that is {'nested' if x.is_nested else x.layout}"
    if x.dtype not in DTYPES:
        return f"{type(x).__name__} of {x.dtype}, which distdl does not move"
    gradient = x.requires_grad and torch.is_grad_enabled()
    return _Header(tuple(x.shape), dtype_code(x.dtype), x.device.type, gradient, seed())


def _source_header(context: Context, x: Any, src: int) -> _Header | str:
    """Return the header of a tensor that this worker is to distribute, or what it is if that cannot be."""
    mine = _header(unblocked(x))
    if not isinstance(mine, _Header) or not mine.gradient or len(context.everyone) == 1:
        return mine
    before = ours_before(plain_of(x))
    if _Whole in before:  # only this worker would get the gradient of a tensor that every worker has
        return (
            f"{type(x).__name__} that follows from full_tensor() of every worker; full_tensor(on={src}) gives one to "
            "that worker alone, and redistribute splits a global tensor over other workers"
        )
    return mine._replace(follows=type(x) in (Replica, Block) or bool(before))


def _headers(told: Sequence[Any], P: Partition) -> dict[int, _Header]:
    """Return the header of the block of each worker of a partition, from what all workers have told.

    Raises: ValueError if one of them has no block, or if the blocks differ in dtype, in the type of their device or in
        their number of dims.
    """
    headers: dict[int, _Header] = {}
    for worker in P.workers.ravel().tolist():
        if isinstance(told[worker], str):
            raise ValueError(
                f"GlobalTensor.from_local needs a plain tensor on every worker of {P}; on worker {worker} it is a "
                f"{told[worker]}"
            )
        headers[worker] = _Header(*told[worker])
    kinds = {(len(one.extents), one.code, one.device) for one in headers.values()}
    if len(kinds) > 1 or min(kinds)[0] < P.workers.ndim:
        listed = "; ".join(
            f"worker {worker}: {dims(one.extents)} {one.dtype} ({one.device})" for worker, one in headers.items()
        )
        raise ValueError(
            "GlobalTensor.from_local needs blocks of one dtype, on one type of device, and of one number of dims, at "
            f"least as many as the partition {P} has axes; got {listed}"
        )
    return headers


def distribute_tensor(
    x: torch.Tensor | None, P: Split, src: int = 0, axes: Sequence[int | None] | None = None
) -> GlobalTensor:
    """Split a tensor that one worker has over a partition, as evenly as possible. Collective; differentiable.

    Args:
        x: on worker ``src``, the whole tensor, of any dtype. The other workers may pass None: they read no values. If x
            was computed from ``y.full_tensor(on=src)``, they pass the result of the same computation, of any shape, so
            that all workers take part in its backward. The same holds, inside of a distributed forward, for a tensor
            that was computed from blocks or weights.
        P: one axis for each dim of x; dims behind its last axis are not split. Workers of its world that are not in it
            hold no cells. A shape, as ``(1, 1, 2, 2)``, means ``distdl.world().reshape(1, 1, 2, 2)``.
        src: the worker that has the tensor, as numbered in the world.
        axes: for each dim of x, the axis of P along which it is split; None for a dim that is not split. Along the axes
            of P that are not named, x lies at place 0. So the labels of an image of batch, channel, height and width
            lie with it under ``axes=(0, 2, 3)``.
    Returns: the global tensor. It requires a gradient if x does. Where some workers get no cell though x has enough for
        all, worker 0 warns once.
    Raises: ValueError, the same on every worker, if x is no tensor, has a forward-mode tangent, was computed with a
        gradient from ``y.full_tensor()`` of every worker, has fewer dims than P has axes, or another number of dims
        than ``axes`` names.
    Source: the name is that of ``torch.distributed.tensor.distribute_tensor``.
    """
    P = split_of(P, "distribute_tensor")
    context = Context.of(P.comm)
    src = _worker(context, "distribute_tensor needs src", src)
    if type(x) is GlobalTensor:
        return redistribute(x, P, axes)
    mine = _source_header(context, x, src) if context.me == src else None
    _begin(context, "distribute_tensor")
    call, shown = _call("distribute_tensor", P, axes)
    told = broadcast_value(context.comm, context.everyone, call, src, mine, shown)
    if isinstance(told, str):
        raise ValueError(f"distribute_tensor needs a tensor on worker {src}; it has a value of type {told}")
    header = _Header(*told)
    context.own(Draws).seed = header.seed
    needed = _split(context, P, header.extents, "distribute_tensor", axes)
    warn_of_idle("distribute_tensor", needed, axes)
    owned = context.whole(header.extents, src)
    if context.me == src:
        assert isinstance(x, torch.Tensor)
        block = plain_of(x)
        block = block.clone() if owned is needed else block  # a tensor that moves shares no memory with x, either
    elif header.follows and _takes_part(x):
        block = zeros_on(plain_of(x).to(header.device_beside(x), header.dtype), owned.local)
    else:
        device = header.device_beside(x)
        block = torch.zeros(owned.local, dtype=header.dtype, device=device, requires_grad=header.gradient)
    return redistribute(GlobalTensor._of(block, owned), needed)


def _takes_part(x: Any) -> bool:
    """Whether the tensor of a worker that is not ``src`` connects it to a backward that other workers go through.

    That is so if the tensor was computed from a weight or a block inside of a forward, or from a movement of ours like
    ``full_tensor(on=src)``. The worker's own leaves do not count. Nor does ``full_tensor()`` of every worker, whose
    backward needs the whole gradient, which this worker has not.
    """
    if not isinstance(x, torch.Tensor) or not x.requires_grad or type(x) is GlobalTensor:
        return False
    if type(x) in (Replica, Block):
        return True
    return x.layout is torch.strided and not x.is_nested and bool(ours_before(x) - {_Whole})


def from_local(block: torch.Tensor, P: Split, axes: Sequence[int | None] | None = None) -> GlobalTensor:
    """See :meth:`GlobalTensor.from_local`."""
    P = split_of(P, "GlobalTensor.from_local")
    context = Context.of(P.comm)
    _begin(context, "GlobalTensor.from_local")
    block = plain_of(block)
    call, shown = _call("GlobalTensor.from_local", P, axes)
    told = gather_values(context.comm, context.everyone, call, _header(block), shown)
    if axes is not None:
        P = _along(context, P, axes, "GlobalTensor.from_local")
    headers = _headers(told, P)
    first = headers[int(P.workers.flat[0])]
    context.own(Draws).seed = first.seed
    if axes is not None and len(axes) != len(first.extents):
        raise ValueError(
            f"GlobalTensor.from_local needs axes= to name an axis, or None, for each dim of the blocks; these have "
            f"{len(first.extents)} dims, and the axes are {tuple(axes)}"
        )
    layout = context.tiled(P.workers, {worker: one.extents for worker, one in headers.items()}, "the tensor")
    wants = any(one.gradient for one in headers.values())
    if layout.active and wants and not headers[context.me].gradient:
        block = block.detach().requires_grad_()  # as that of another worker does
    if not layout.active:
        device = first.device_beside(block)
        if isinstance(block, torch.Tensor) and block.requires_grad and wants:  # its graph takes part in backward
            block = zeros_on(block.to(device, first.dtype), layout.local)
        else:
            block = torch.zeros(layout.local, dtype=first.dtype, device=device, requires_grad=wants)
    return GlobalTensor._of(block, layout)


def full_tensor(x: GlobalTensor, on: int | None = None) -> torch.Tensor:
    """See :meth:`GlobalTensor.full_tensor`."""
    context = x._context
    if on is not None:
        on = _worker(context, "full_tensor needs on", on)

    with observers.moving("full_tensor", x, on):
        y: torch.Tensor
        if on is None:
            y = _Whole.apply(block_of(x), x._layout)
            return y
        needed = context.whole(x.shape, on)
        y = _Alone.apply(block_of(x)) if needed is x._layout else block_in(x, needed, f"full_tensor on worker {on}")
        return as_block(y)  # not the same on every worker: the others hold no cells


def redistribute(x: GlobalTensor, to: Split | Layout, axes: Sequence[int | None] | None = None) -> GlobalTensor:
    """See :meth:`GlobalTensor.redistribute`."""
    context = x._context
    if not isinstance(to, (Partition, Layout)):
        check_split("redistribute", "its target", to, Split | Layout)
    if context.stands_for_torch:
        return x
    if isinstance(to, Layout):
        if axes is not None:
            raise ValueError("redistribute needs axes only beside a partition; a layout says itself how dims are split")
        needed = context.tiling(to, "redistribute")
        if needed.extents != x._layout.extents:
            raise ValueError(
                f"redistribute needs a layout of the tensor's shape {dims(x.shape)}; got one of {dims(needed.extents)}"
            )
    else:
        to = to if isinstance(to, Partition) else context.world.reshape(tuple(to))
        if not context.has(to):
            raise ValueError(f"redistribute needs a partition of the tensor's world; got {to} of another")
        needed = _split(context, to, x.shape, "redistribute", axes)
    with observers.moving("redistribute", x, needed):
        if needed is x._layout:
            return x
        return GlobalTensor._of(block_in(x, needed, f"redistribute to {needed.partition}"), needed)


def _split(
    context: Context, P: Partition, extents: Sequence[int], what: str, axes: Sequence[int | None] | None
) -> KnownLayout:
    """Return the layout that splits extents evenly over a partition; raise if ``axes`` or P does not fit them."""
    if axes is not None:
        P = _along(context, P, axes, what)
        if len(axes) != len(extents):
            raise ValueError(
                f"{what} needs axes= to name an axis for each dim of the tensor; that is {dims(extents)} and the axes "
                f"are {tuple(axes)}"
            )
    if P.workers.ndim > len(extents):
        raise ValueError(
            f"{what} needs a partition with at most as many axes as the tensor has dims; the tensor is "
            f"{dims(extents) or '0-d'} and the partition {P}. Say with axes= along which axis of the partition each "
            "dim is split"
        )
    return context.balanced(P.workers, extents)


def _along(context: Context, P: Partition, axes: Sequence[int | None], what: str) -> Partition:
    """Return the part of P that holds a tensor split along ``axes``: the workers at place 0 of the other axes of P."""
    if not _AXES(axes):
        raise TypeError(
            f"{what} needs axes= to be a sequence, for each dim an axis of the partition or None; got {axes!r}"
        )
    named = [axis for axis in axes if axis is not None]
    count = P.workers.ndim
    if any(not -count <= axis < count for axis in named) or len({axis % count for axis in named}) < len(named):
        raise ValueError(f"{what} needs axes= to name different axes of partition {P}; got {tuple(axes)}")
    named = [axis % count for axis in named]
    workers = np.asarray(P.workers[tuple(slice(None) if axis in named else 0 for axis in range(count))])
    workers = workers.transpose([sorted(named).index(axis) for axis in named])
    shape = iter(workers.shape)
    return CartesianPartition(context.comm, workers.reshape([1 if axis is None else next(shape) for axis in axes]))


def _call(what: str, P: Partition, axes: Any) -> tuple[str, str]:
    """Return the text of a call that workers compare before they tell each other of tensors, and its text in errors."""
    shown = f"{what} over {P}"
    if axes is not None:
        shown += f" with axes={tuple(axes) if _AXES(axes) else axes!r}"
    return f"{shown} {crc32(P.workers.tobytes())}", shown  # the text of a large partition names only some workers


def _begin(context: Context, what: str) -> None:
    """Tell the communicator, for errors and the watch, which collective function begins."""
    context.comm.where = what
    if context.comm.watch is not None:
        context.comm.watch(what, context.everyone)


def _worker(context: Context, needs: str, worker: Any) -> int:
    """Return a worker's number as an int. Raises TypeError if it is no integer, or ValueError if no worker has it."""
    last = len(context.everyone) - 1
    if isinstance(worker, bool) or not _WHOLE(worker):
        raise TypeError(f"{needs} to be a worker's number, from 0 to {last}; got {worker!r}")
    if not 0 <= worker <= last:
        raise ValueError(f"{needs} to be a worker's number, from 0 to {last}; got {worker}")
    return index(worker)


def gather_blocks(block: torch.Tensor, layout: KnownLayout, name: str) -> torch.Tensor:
    """Gather the whole tensor of blocks on every worker, in memory of its own."""
    extents: Shape = layout.extents or (1,)
    owned = layout if layout.rulers else layout.lifted(1)
    y = redistribute_block(block.reshape(owned.local), owned, layout.context.everywhere(extents), name)
    y = y.reshape(layout.extents)
    return y.clone() if y is block or y._is_view() else y


class _Whole(Function):
    """Gather blocks on every worker. The gradient is the same on all of them, so each slices its block out of it."""

    @staticmethod
    def forward(ctx: Any, block: torch.Tensor, layout: KnownLayout) -> torch.Tensor:
        ctx.layout = layout
        ctx.save_for_backward(torch.empty(0))
        return gather_blocks(block, layout, "full_tensor")

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        _ = ctx.saved_tensors
        dx: torch.Tensor = _Cut.apply(dy, ctx.layout)
        return dx, None


class _Alone(Function):
    """Copy a block that is the whole tensor; :func:`ours_before` finds this node in the graph of the result."""

    @staticmethod
    def forward(ctx: Any, block: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(0))
        return block.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        return dy.clone()


class _Cut(Function):
    """Slice a tensor that every worker has to this worker's block: the adjoint of :class:`_Whole`."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, layout: KnownLayout) -> torch.Tensor:
        ctx.layout = layout
        if not layout.rulers:
            return y.clone() if layout.active else y.new_zeros(layout.local)
        return y[slices(layout.box)].clone()

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        dy: torch.Tensor = _Whole.apply(dx, ctx.layout)
        return dy, None


METHODS.update(from_local=from_local, full_tensor=full_tensor, redistribute=redistribute)
