"""Connection: how the autograd graph of a worker stays connected where it has nothing to compute.

Every member of a movement takes part in its backward. So what a worker returns depends on the same arguments through
the same operators on every worker, also where a block is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from distdl.environment.types import Count
from distdl.tensors.derivatives import is_checkpointed, is_differentiated_forward
from distdl.tensors.function import Function


def zeros_on(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of some shape that depend on a tensor in the autograd graph, whatever its own shape."""
    zeros = tensor.new_zeros(tuple(shape))
    if not (tensor.requires_grad or is_differentiated_forward()):
        # some dtypes cannot be added, so zeros that need no graph are returned as they are
        return zeros
    # not by torch.cat, whose derivative cuts the graph at tensors of zero volume
    return zeros + tensor.reshape(-1)[:0].sum(dtype=tensor.dtype)


def always_curved(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """y, whose derivatives of any order depend on x in the autograd graph, whatever numbers x has, and how many.

    The derivatives of products depend on x only where no number is 0, or where there are several.
    """
    return y + x.reshape(-1)[:0].exp().sum(dtype=y.dtype) if x.requires_grad else y


def no_view(y: torch.Tensor, *inputs: torch.Tensor | None) -> torch.Tensor:
    """y, or if it is a view, a tensor by itself with its values.

    A view of zero volume that is written in place loses its graph. So behind an activation in place, that worker would
    take no part in what the others differentiate.

    Args:
        inputs: what y was computed from. If it shares memory with one of them, it is copied.
    """
    if not y._is_view():
        return y
    storage = y.untyped_storage()._cdata  # meta tensors have a storage, but no address
    if not y.numel() or any(x is not None and x.untyped_storage()._cdata == storage for x in inputs):
        return y.clone()
    own: torch.Tensor = _Whole.apply(y)
    return own


def replayed(y: torch.Tensor, above: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor of zero volume; if it is a view, one that stays connected where it, or what it is a view of, is written.

    Once one of them is written in place, torch makes the views of the same tensor anew in the graph: by as_strided,
    whose derivative cuts the graph at zero volume, or by the functions that have made them, if it took note of these.

    Args:
        above: of what y was taken, which may be a view, too: who differentiates by it, or hooks it, means its own node.
            If not given, a view that comes from here stays as it is.
    """
    if not y._is_view() or (above is None and _REPLAYED in y.__dict__):
        return y
    if not is_ordinary_view(y):
        return y  # torch refuses to write to other views in place
    base: torch.Tensor = y._base  # type: ignore[assignment]  # a view has a base
    if base.dtype.to_real() is not y.dtype.to_real():
        return y  # a view of the bits as another dtype has no derivative
    if above is None or above._base is not base:
        above = base
    noted = torch._C._is_view_replay_enabled()
    torch._C._set_view_replay_enabled(True)
    try:
        with torch.enable_grad():
            made = (above if above.dim() else above.view(1))[:0] if above.numel() else above
            if made.is_complex() and not y.is_complex():
                made = made.real
            elif y.is_complex() and not made.is_complex():
                made = torch.view_as_complex(made.view(0, 2))
            made = made.view(y.shape)
            made = made if made.is_conj() is y.is_conj() else made.conj()
            made = made if made.is_neg() is y.is_neg() else torch._neg_view(made)
    finally:
        torch._C._set_view_replay_enabled(noted)
    made.__dict__[_REPLAYED] = True
    return made


def is_ordinary_view(y: torch.Tensor) -> bool:
    """Whether torch lets a view be written in place: it was made with gradients, by a function that makes one view."""
    return torch._C._autograd._get_creation_meta(y) == _ORDINARY


_ORDINARY = torch._C._autograd.CreationMeta.DEFAULT
_REPLAYED = "_is_replayed"


class _Whole(Function):
    """A view as a tensor by itself, in the same memory: its graph does not change where it is written in place."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        # y and the result share the count of writes, so a derivative that needs old values raises an error
        return y.detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy

    @staticmethod
    def jvp(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.view_as(dy)


def outside(x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """What a worker that has no part in a layer returns: a clone of x that depends on the layer's other tensors, too.

    Inside an activation checkpoint it saves something where the members do (see :func:`saving`).
    """
    y = x.clone()
    for other in others:
        y = y + zeros_on(other, ())
    return saving(_Block.apply(y) if y.requires_grad else y)


class _Block(Function):
    """The same, as a block that a layer gives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.clone()

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.clone()


def saving(y: torch.Tensor) -> torch.Tensor:
    """What a worker has in the place of a result for which others save tensors in an activation checkpoint.

    So it recomputes as much as they do. Otherwise it would stop before what lies in front of this result, an inner
    checkpoint or a movement that has no gradient, and the others would wait for it.
    """
    if not (y.requires_grad and is_checkpointed()):
        return y
    recorded: torch.Tensor = _Saving.apply(y)
    return recorded


class _Saving(Function):
    """A copy, which saves a tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(0))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors  # this is where a checkpoint recomputes its forward
        return dy.clone()

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.clone()


def tie(x: torch.Tensor, absent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and an empty tensor in the place of a weight that this worker does not have, whose gradients belong together.

    The gradients of weights are summed on every worker, and once more where they are themselves differentiated. Nobody
    can ask for the gradient of a weight that is not there. So if the sum has run, which the gradient of the empty
    tensor tells, the gradient of x depends on it. If nobody has asked for it, it does not run because of x.

    Args:
        absent: an empty tensor of the dtype and on the device of the weight. It requires no gradient.
    """
    leaf = absent.detach().requires_grad_()
    tied: torch.Tensor = _Tied.apply(x, _Absent(leaf))
    return tied, leaf


class _Absent(NamedTuple):
    weight: torch.Tensor


class _Tied(Function):
    """x itself. This backward comes after that of the sum, for it is that of an older node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, absent: _Absent) -> torch.Tensor:
        ctx.absent = absent
        alias: torch.Tensor = torch.ops.aten.alias(x)  # view_as changes strides of extent 1, and then torch errs
        return alias

    @staticmethod
    def backward(ctx: Any, dx: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed, ctx.absent.weight.grad = ctx.absent.weight.grad, None
        if summed is None or not torch.is_grad_enabled():
            return dx, None
        return dx + summed.sum(dtype=dx.dtype), None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, _: None) -> torch.Tensor:
        return dx.view_as(dx)


def refuses(operator: Callable[[torch.Tensor], Any], block: torch.Tensor, least: Sequence[Count]) -> None:
    """Raise what torch raises for blocks of this dtype, also where this one has no cells.

    Many of torch's kernels return before they look at the dtype, if there is nothing to compute. Then a worker whose
    block is empty would go on, and wait for those that have raised.

    Args:
        least: the smallest shape of one dim or more that the operator accepts. It is tried on zeros.
    """
    if not block.numel() and not block.is_meta:
        with torch.no_grad():
            operator(block.new_zeros(tuple(least)))


def local(
    operator: Callable[..., torch.Tensor],
    shape: Sequence[Count],
    *operands: tuple[torch.Tensor | None, Sequence[Count]],
) -> torch.Tensor:
    """Apply a torch operator to this worker's blocks, also where there is nothing to compute.

    Where an operand or the result has no volume, the operator runs on the smallest operands that it accepts, made of
    zeros, and the result is zeros. So the result depends on the same arguments through the same operator on every
    worker, and whatever is differentiated, and however often, all workers go through the same exchanges. The result is
    no view (see :func:`no_view`).

    Args:
        operator: takes the operands' tensors.
        shape: of the result on this worker, in elements.
        operands: each a tensor (None is passed on) and the smallest shape that the operator accepts.
    """
    if 0 not in shape and all(tensor is None or tensor.numel() for tensor, _ in operands):
        tensors = [tensor for tensor, _ in operands]
        return no_view(operator(*tensors), *tensors)
    smallest = (None if tensor is None else zeros_on(tensor, least) for tensor, least in operands)
    return zeros_on(operator(*smallest), shape)
