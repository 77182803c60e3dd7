"""The autograd Functions that move data.

Every member of a movement records the same node, so that each also takes part in its backward: a worker whose own
tensor needs no gradient is tied in through an *anchor*, a tensor of zero volume that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import islice
from math import prod
from operator import or_
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from distdl.header import Carried
from distdl.route import Load, Route, execute_together

Tensors = torch.Tensor | tuple[torch.Tensor, ...]
Counts = Sequence[int | None]  # how many tensors belong together; None stands for one by itself


def move(route: Route, x: torch.Tensor, dtype: torch.dtype, blank: tuple[int, ...], carried: Carried) -> torch.Tensor:
    """Execute a plan on this worker's tensor, and record it for differentiation if the members agreed to.

    Args:
        x: the local tensor; where the plan has no input for this worker, any tensor of zero volume.
        dtype, blank, carried: see :class:`Load`.
    Returns: a new tensor, in the shape of ``plan.outputs``; connected to x wherever a gradient is recorded.
    """
    return _move(route.load(dtype, blank, carried), x)


def _move(load: Load, x: torch.Tensor) -> torch.Tensor:
    if not load.recorded:
        return load.execute(x.detach())
    carried = load.carried
    bare = (carried.gradient and not x.requires_grad) or (carried.tangent and not Carried.by(x, False).tangent)
    y: torch.Tensor = Apply.apply(load, _anchor(x, carried) if bare else None, x)  # type: ignore[no-untyped-call]
    return y


def move_together(loads: Sequence[Load], xs: Sequence[Tensors]) -> list[Tensors]:
    """Move several tensors at once, both ways: their messages are under way at the same time.

    Every member passes loads of the same routes in the same order. Routes may differ in their members. Where a load has
    parts, its x and its y are several tensors, which move as one vector.
    """
    if len(loads) == 1 and isinstance(xs[0], torch.Tensor):
        return [_move(loads[0], xs[0])]
    flat = [x for one in xs for x in ((one,) if isinstance(one, torch.Tensor) else one)]
    given = [None if isinstance(one, torch.Tensor) else len(one) for one in xs]
    noted = [load.carried for load in loads if load.recorded]
    if not noted:
        ys = _execute(loads, _grouped([x.detach() for x in flat], given))
    else:
        carried = reduce(or_, noted)
        bare = (carried.gradient and not any(x.requires_grad for x in flat)) or (
            carried.tangent and not any(Carried.by(x, False).tangent for x in flat)
        )
        anchor = _anchor(flat[0], carried) if bare else None
        ys = ApplyTogether.apply(loads, given, anchor, *flat)  # type: ignore[no-untyped-call]
    return _grouped(ys, _results(loads))


def _anchor(beside: torch.Tensor, carried: Carried) -> torch.Tensor:
    anchor = torch.empty(0, device=beside.device, requires_grad=carried.gradient)
    return forward_ad.make_dual(anchor, torch.empty(0, device=beside.device)) if carried.tangent else anchor


class Apply(torch.autograd.Function):
    """``y = plan x``. Its backward is ``plan.T``, its tangent map the plan itself."""

    @staticmethod
    def forward(ctx: Any, load: Load, anchor: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        ctx.load, ctx.source = load, Source(x.shape, x.dtype, x.device)
        ctx.save_for_backward(_NOTHING)  # so that checkpointing recomputes this node, on every member alike
        ctx.set_materialize_grads(False)
        return load.execute(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # before any message: this is where a checkpoint computes its forward again
        source, dx = ctx.source, None
        if ctx.load.carried.gradient:
            dx = _as(source, _move(_adjoint(ctx.load, source), _or_zeros(dy, ctx.load, source.device)))
        return None, _anchored(ctx.needs_input_grad[1], source.device), dx

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> torch.Tensor:
        return _move(_tangent_map(ctx.load), _tangent(tangents[2], ctx.source))


class ApplyTogether(torch.autograd.Function):
    """The same for several tensors that move at the same time. Those of which nothing is recorded move, too."""

    @staticmethod
    def forward(
        ctx: Any, loads: Sequence[Load], given: Counts, anchor: torch.Tensor | None, *xs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.loads, ctx.given, ctx.sources = loads, given, [Source(x.shape, x.dtype, x.device) for x in xs]
        ctx.save_for_backward(_NOTHING)
        ctx.set_materialize_grads(False)
        ys = _execute(loads, _grouped(xs, given))
        if not all(load.recorded for load in loads):
            grouped = zip(loads, _grouped(ys, _results(loads)), strict=True)
            ctx.mark_non_differentiable(*(y for load, one in grouped if not load.recorded for y in _listed(one)))
        return ys

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        sources = _grouped(ctx.sources, ctx.given)
        wanted = [load.recorded and load.carried.gradient for load in ctx.loads]
        loads, cotangents = [], []
        for load, source, dy, asked in zip(ctx.loads, sources, _grouped(dys, _results(ctx.loads)), wanted, strict=True):
            if asked:
                loads.append(_adjoint(load, source))
                cotangents.append(_or_zeros(dy, load, ctx.sources[0].device))
        found = iter(move_together(loads, cotangents))
        dxs: list[torch.Tensor | None] = []
        for source, asked in zip(sources, wanted, strict=True):
            own = _listed(source)
            dxs += map(_as, own, _listed(next(found))) if asked else [None] * len(own)
        return None, None, _anchored(ctx.needs_input_grad[2], ctx.sources[0].device), *dxs

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [_tangent(tangent, source) for tangent, source in zip(tangents[3:], ctx.sources, strict=True)]
        pairs = zip(ctx.loads, _grouped(given, ctx.given), strict=True)
        loads, xs = zip(*[(_tangent_map(load), x) for load, x in pairs if load.recorded], strict=True)
        found = iter(move_together(loads, xs))
        ys: list[torch.Tensor | None] = []
        for load, results in zip(ctx.loads, _results(ctx.loads), strict=True):
            ys += _listed(next(found)) if load.recorded else [None] * (results or 1)
        return tuple(ys)


def _grouped(flat: Sequence[Any], counts: Counts) -> list[Any]:
    """The same, with as many at a time in a tuple as counted; one by itself where the count is None."""
    rest = iter(flat)
    return [next(rest) if count is None else tuple(islice(rest, count)) for count in counts]


def _listed(one: Any) -> Sequence[Any]:
    return one if type(one) is tuple else (one,)


def _results(loads: Sequence[Load]) -> Counts:
    return [None if load.parts is None else len(load.parts) for load in loads]


def _execute(loads: Sequence[Load], xs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    vectors = [x if load.parts is None else _joined(x) for load, x in zip(loads, xs, strict=True)]
    ys = execute_together(loads, vectors)
    return tuple(y for load, whole in zip(loads, ys, strict=True) for y in load.cut(whole))


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    full = [tensor.reshape(-1) for tensor in tensors if tensor.numel()]
    return torch.cat(full) if len(full) > 1 else full[0] if full else tensors[0].reshape(-1)


class Source(NamedTuple):
    """What is to be known of a tensor that has moved, for its gradient."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _adjoint(load: Load, source: Any) -> Load:
    """How the gradient of what has moved moves back to one or several sources."""
    mode, forward_mode = torch.is_grad_enabled(), _differentiates_forward()
    carried = Carried(mode, forward_mode, mode and forward_mode) if mode or forward_mode else _NOTHING_CARRIED
    if load.parts is None:
        return load.route.T.load(load.dtype, source.shape, carried)
    parts = tuple(one.shape for one in source)
    return load.route.T.load(load.dtype, (sum(map(prod, parts)),), carried, parts)


def _as(source: Source, dx: torch.Tensor) -> torch.Tensor:
    """A gradient in the dtype of its source."""
    return dx if dx.dtype is source.dtype else dx.to(source.dtype)


def _anchored(needed: bool, device: torch.device) -> torch.Tensor | None:
    """The gradient of the anchor."""
    return torch.zeros(0, device=device) if needed else None


def _tangent_map(load: Load) -> Load:
    return load.route.load(load.dtype, load.blank, Carried(load.carried.tangent_gradient), load.parts)


def _tangent(given: torch.Tensor | None, source: Source) -> torch.Tensor:
    return torch.zeros(source.shape, dtype=source.dtype, device=source.device) if given is None else given


def _or_zeros(dy: Any, load: Load, device: torch.device) -> Any:
    """The gradient of a result; zeros if nothing depends on it on this worker, for the others may wait for it."""
    if load.parts is not None:
        pairs = zip(dy, load.parts, strict=True)
        return tuple(torch.zeros(part, dtype=load.dtype, device=device) if d is None else d for d, part in pairs)
    if dy is not None:
        return dy
    extents = load.route.extents
    return torch.zeros(load.blank if extents is None else extents, dtype=load.dtype, device=device)


_NOTHING = torch.empty(0)
_NOTHING_CARRIED = Carried(False)


def _differentiates_forward() -> bool:
    # whether a level of forward-mode differentiation is open: unlike a tangent, that is the same on every worker
    return forward_ad._current_level >= 0
