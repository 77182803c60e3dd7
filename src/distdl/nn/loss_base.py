"""What the distributed losses have in common: each worker sums its elements, and rank 0 divides the sum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import torch

from distdl.agreement import Agreement
from distdl.agreement.header import Headers
from distdl.exchange.route import Route, move
from distdl.geometry.boxes import Box, Shape
from distdl.nn.module import Module, Option, stay, zeros_on
from distdl.partition import Partition
from distdl.partition.layout import Layout, Lookup
from distdl.plan.planners import broadcast
from distdl.tensors.connection import outside
from distdl.tensors.dtypes import HALVES, carries_gradients
from distdl.transport.label import Label

ABSENT = torch.empty(0, 0)  # stands in an agreement for a weight that is None; no weight that fits has this shape
_WEIGHT, _POS_WEIGHT = 2, 3  # which of the tensors they are that are agreed on


@dataclass(frozen=True)
class Decided:
    """What follows from the headers.

    Attributes:
        add: the sum over P_x, on its rank 0.
        dtypes: of input, target, weight and pos_weight.
        divisor: what the sum is divided by.
        box: this worker's part of the global input, in cells; None where nobody asks for it.
    """

    add: Route
    dtypes: tuple[torch.dtype, ...]
    divisor: float
    box: Box | None


class DistributedLossBase(Module):
    r"""A loss of an input and a target that are cut up alike over ``P_x``.

    Forward: :math:`\ell = c^{-1} \sum_s f(x_s, t_s)` on the worker of rank 0 in P_x: each worker sums its elements, a
    sum-reduce adds them up, and the sum is divided once, by 1 (``sum``), the global number of elements (``mean``) or
    the global batch (``batchmean``). All other workers, those outside P_x too, return a 0-d tensor of value 0.
    Adjoint: a broadcast of the gradient from rank 0. Every worker calls ``backward()``; what the others pass has no
        effect.

    Args:
        P_x: the partition.
        reduction: ``none`` (each worker returns the loss of its own elements), ``mean`` or ``sum``.
        weight: a factor for each element, this worker's block (or what broadcasts to it); None for 1.
        pos_weight: a factor for positive targets, the same global tensor on every worker; None for 1.
        options: what torch's function takes besides; they become attributes.
    Shapes: input and target local, equal on each worker, in elements.
    Raises: ValueError, on every worker, for another reduction; in forward, on every member, if input and target differ
        in shape on some worker, or dtypes between workers, or if a weight does not fit, or only some workers have one.
    """

    P_x = Option[Partition]()
    reduction = Option[str]()
    _valid_reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum")
    _operator: ClassVar[Callable[..., torch.Tensor]]
    weight: torch.Tensor | None
    pos_weight: torch.Tensor | None

    def __init__(
        self,
        P_x: Partition,
        reduction: str = "mean",
        weight: torch.Tensor | None = None,
        pos_weight: torch.Tensor | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_reduction(type(self).__name__, reduction, self._valid_reductions)
        self.P_x = P_x
        self.reduction = reduction
        for option, value in options.items():
            setattr(self, option, value)
        self._options = tuple(options)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)
        self._root = P_x.create_partition_inclusive([0])
        self.label = Label(f"{type(self).__name__} (P_x: {P_x}; {reduction})")
        weights = (weight is not None, None if pos_weight is None else tuple(pos_weight.shape))
        self._agreement = Agreement.among(P_x, self.label, (P_x.workers.shape, options, weights), self._derive)

    def elements(self, x: torch.Tensor, target: torch.Tensor, reduction: str, decided: Decided | None) -> torch.Tensor:
        """torch's loss of local tensors, with torch's reduction ``none`` or ``sum``.

        Args:
            decided: None if nothing had to be agreed on.
        """
        keywords = {option: getattr(self, option) for option in self._options}
        for name, place in (("weight", _WEIGHT), ("pos_weight", _POS_WEIGHT)):
            tensor = getattr(self, name)
            if tensor is not None:
                keywords[name] = tensor if decided is None else tensor.to(decided.dtypes[place])
        if decided is not None and decided.box is not None and self.pos_weight is not None:
            keywords["pos_weight"] = _cut(keywords["pos_weight"], decided.box)
        return type(self)._operator(x, target, reduction=reduction, **keywords)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.P_x.comm.rank not in self.P_x:
            return loss_outside(x, target, self.reduction)
        if self.reduction == "none" and self.pos_weight is None:
            return self.elements(x, target, "none", None)
        weights = (ABSENT if one is None else one for one in (self.weight, self.pos_weight))
        decision = self._agreement.reach((x, target, *weights), (int(self.is_out_of_range(x, target)),))
        go, carried = decision.outcome, reduce(or_, decision.carried)
        x, target = stay(x.to(go.dtypes[0]), carried), target.to(go.dtypes[1])
        if self.reduction == "none":
            return self.elements(x, target, "none", go)
        half = x.dtype in HALVES  # whose sums overflow, or stop growing, long before the mean does
        total = self.elements(x, target, "none" if half else "sum", go)
        dtype = total.dtype
        total = total.sum(dtype=torch.promote_types(dtype, torch.float32)) if half else total
        total = move(go.add, total, total.dtype, (0,), carried)
        return differentiable((total / go.divisor).to(dtype) if total.numel() else total.sum().to(dtype))

    def _derive(self, headers: Headers) -> Decided:
        name, P_x = type(self).__name__, self.P_x
        headers.check_alike(P_x, name, "input", "target")
        shapes = headers.shapes(P_x, name)
        self._check_weight(headers)
        box = None
        if self.reduction == "batchmean" or headers.shape(P_x.comm.rank, _POS_WEIGHT) != ABSENT.shape:
            owned = Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim))
            box = owned[P_x.comm.rank]
            self._check_pos_weight(headers, owned.extents)
        dtypes = tuple(headers.dtype(P_x, name, tensor) for tensor in range(4))
        self._check_values(headers, torch.promote_types(*dtypes[:2]))
        divisor = 1.0
        if self.reduction == "mean":
            divisor = float(shapes.prod(axis=-1).sum())
        elif self.reduction == "batchmean":
            divisor = float(owned.extents[0])
        return Decided(sum_to_root(headers, self._root, P_x, (), self.label), dtypes, divisor, box)

    def is_out_of_range(self, x: Any, target: Any) -> bool:
        """Whether torch's loss takes other values only than these. It is asked before the members agree, of anything
        that a caller may pass.
        """
        return False

    def _check_values(self, headers: Headers, result: torch.dtype) -> None:
        name = type(self).__name__
        for worker, out in zip(self.P_x.workers.flat, headers.extras(self.P_x)[..., 0].flat, strict=True):
            if out:
                raise ValueError(f"{name} needs input and target from 0 to 1; on worker {worker} they are not")
        if self.reduction not in ("none", "sum") and not carries_gradients(result):
            raise ValueError(f"{name} needs floating-point numbers for the reduction {self.reduction}; got {result}")

    def _check_weight(self, headers: Headers) -> None:
        name, workers = type(self).__name__, self.P_x.workers.ravel().tolist()
        for kind, place in (("weight", _WEIGHT), ("pos_weight", _POS_WEIGHT)):
            check_given(name, kind, {worker: headers.shape(worker, place) != ABSENT.shape for worker in workers})
        for worker in workers:
            weight, x = headers.shape(worker, _WEIGHT), headers.shape(worker)
            if weight != ABSENT.shape and not _broadcasts(weight, x):
                raise ValueError(
                    f"{name} needs a weight that broadcasts to the input's block; on worker {worker} "
                    f"they have {list(weight)} and {list(x)}"
                )

    def _check_pos_weight(self, headers: Headers, extents: Shape) -> None:
        for worker in self.P_x.workers.ravel().tolist():
            shape, first = headers.shape(worker, _POS_WEIGHT), headers.shape(int(self.P_x.workers.flat[0]), _POS_WEIGHT)
            if shape != first:
                raise ValueError(
                    f"{type(self).__name__} needs the same pos_weight on all workers; worker "
                    f"{self.P_x.workers.flat[0]} has one of shape {list(first)} and worker {worker} {list(shape)}"
                )
            if shape != ABSENT.shape and not _broadcasts(shape, extents):
                raise ValueError(
                    f"{type(self).__name__} needs a pos_weight that broadcasts to the global input; they have "
                    f"{list(shape)} and {list(extents)}"
                )

    def extra_repr(self) -> str:
        options = [f"{option}={getattr(self, option)}" for option in self._options]
        return "; ".join([f"P_x: {self.P_x}", ", ".join([f"reduction={self.reduction}", *options, *described(self)])])


def described(loss: torch.nn.Module) -> list[str]:
    """The weights of a loss, for its ``repr``."""
    return [f"{name}: {list(one.shape)}" for name, one in loss.named_buffers()]


def check_given(name: str, kind: str, given: dict[int, bool]) -> None:
    """Raises: ValueError if some workers have a weight of this kind and others have none."""
    if len(set(given.values())) > 1:
        with_one, without = ([worker for worker in given if given[worker] is has] for has in (True, False))
        raise ValueError(
            f"{name} needs a {kind} on all workers or on none; worker {with_one[0]} has one and worker {without[0]} "
            "has none"
        )


def check_reduction(name: str, reduction: str, valid: tuple[str, ...]) -> None:
    """Raises: ValueError for a reduction that the loss of this name does not have."""
    if reduction not in valid:
        raise ValueError(f"{name} has the reductions {', '.join(valid)}; got {reduction!r}")


def loss_outside(x: torch.Tensor, target: Any, reduction: str) -> torch.Tensor:
    """What a worker outside P_x returns: its (empty) input, or 0. It hangs on the target, too."""
    y = x if reduction == "none" else x.sum()
    if isinstance(target, torch.Tensor) and target.requires_grad:
        y = y + zeros_on(target, ()).to(y.dtype)
    y = outside(y)
    return y if reduction == "none" else differentiable(y)


def sum_to_root(headers: Headers, root: Partition, P: Partition, shape: Shape, name: Label) -> Route:
    """The sum of tensors of one shape over the workers of P, on the root."""
    shapes = Lookup(headers.members, lambda worker: shape)
    return Route(broadcast(root, P, shapes, P.comm.rank).T, P.comm, headers.members, name)


def differentiable(loss: torch.Tensor) -> torch.Tensor:
    """The loss, such that ``backward()`` may be called on it even if nothing that it depends on requires a gradient."""
    if torch.is_grad_enabled() and not loss.requires_grad and (loss.is_floating_point() or loss.is_complex()):
        return loss + torch.empty(0, dtype=loss.dtype, device=loss.device, requires_grad=True).sum()
    return loss


def _broadcasts(shape: Shape, to: Shape) -> bool:
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(one in (1, other) for one, other in aligned)


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor that belongs to a box of what it broadcasts to."""
    intervals = box[len(box) - tensor.dim() :]
    return tensor[
        tuple(slice(*along) if n > 1 else slice(None) for n, along in zip(tensor.shape, intervals, strict=True))
    ]


class ZeroVolumeCorrectorFunction(torch.autograd.Function):
    r"""Make a number of a loss of zero volume, such that ``backward()`` may be called on it on every worker.

    Forward: a tensor with elements is copied; one without becomes a 0-d tensor of value 0. Adjoint: the gradient is
    copied; where there were no elements it becomes zeros of zero volume, in the shape of the input.

    A published name, for losses of one's own: the losses here have it built in. Called by ``apply(loss)``.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape = x.shape
        return x.clone() if x.numel() else x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.clone() if 0 not in ctx.shape else zeros_on(dy, ctx.shape)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
        return tangent.clone() if 0 not in ctx.shape else tangent.new_zeros(())
