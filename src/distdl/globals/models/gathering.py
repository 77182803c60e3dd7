"""How parameters come together that are stored in shares: as messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import prod
from typing import Any, NamedTuple

import torch

from distdl.exchange import Operator
from distdl.geometry.boxes import Shape, shape, slices
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.views.aliasing import data_given, writes_of
from distdl.tensors.derivatives import NONE, is_checkpointed
from distdl.tensors.function import Function
from distdl.tensors.modes import unobserved


class _Piece(NamedTuple):
    """What one worker has of one tensor, and where it stands in what all of them send."""

    tensor: int
    box: tuple[slice, ...]
    shape: Shape
    start: int
    stop: int


class Gathering:
    """How parameters come together on every worker, as one message.

    Behind a worker's shares stands one more number for each tensor: on the way back, how many workers have a gradient
    of it, so that one that nobody has stays none.
    """

    def __init__(self, layouts: Sequence[KnownLayout], dtype: torch.dtype) -> None:
        self.layouts, self.dtype = tuple(layouts), dtype
        context = layouts[0].context
        self._pieces: list[_Piece] = []
        self._counts: list[slice] = []  # for each worker, where those numbers stand
        intervals = []
        stop = 0
        for worker in context.everyone:
            first = stop
            for tensor, layout in enumerate(layouts):
                if worker in layout.partition:
                    box = layout[worker]
                    start, stop = stop, stop + prod(shape(box))
                    self._pieces.append(_Piece(tensor, slices(box), shape(box), start, stop))
            self._counts.append(slice(stop, stop + len(layouts)))
            stop += len(layouts)
            intervals.append((first, stop))
        self._own = context.layout(context.world.workers, [intervals])
        self._whole = context.everywhere((stop,))
        self.context = context
        self.operator: Operator = context.moving(self._own, self._whole, dtype, NONE, "weights")

    @classmethod
    def of(cls, parameters: Sequence[GlobalTensor]) -> Gathering:
        layouts, dtype = tuple(one._layout for one in parameters), parameters[0].dtype
        return layouts[0].context.keep((cls, layouts, dtype), lambda: cls(layouts, dtype))

    def gather(self, blocks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The whole tensors. In inference mode, too, torch is to count what a forward writes into them.

        (And what has come along in one may be needed outside of it.)
        """
        with unobserved(), torch.inference_mode(False), torch.no_grad():
            counts = blocks[0].new_zeros(len(blocks))
            found = self.operator.execute(torch.cat([*(block.reshape(-1) for block in blocks), counts]))
            wholes = tuple(found.new_empty(layout.extents) for layout in self.layouts)
            into = [wholes[one.tensor][one.box] for one in self._pieces]
            torch._foreach_copy_(into, [found[one.start : one.stop].view(one.shape) for one in self._pieces])
            return wholes

    def scatter(self, parts: Sequence[torch.Tensor | None], device: torch.device) -> tuple[torch.Tensor | None, ...]:
        """This worker's shares of the sums over all workers; none where nobody has a part."""
        missing = [place for place, part in enumerate(parts) if part is None]
        flat = torch.zeros(self._whole.extents, dtype=self.dtype, device=device)
        there = [(one, part) for one in self._pieces if (part := parts[one.tensor]) is not None]
        into = [flat[one.start : one.stop].view(one.shape) for one, _ in there]
        if into:
            torch._foreach_copy_(into, [part[one.box] for one, part in there])
        for counts in self._counts:
            flat[counts].fill_(1)
            for place in missing:
                flat[counts][place].zero_()
        own = self.operator.T.execute(flat)
        *shares, owners = own.split([*(prod(layout.local) for layout in self.layouts), len(parts)])
        # (what this worker has a part of, somebody has; to read it would wait for a device. On the device "meta" nobody
        # knows which ones nobody has)
        holders: list[float] = owners.real.tolist() if missing and not owners.is_meta else [1.0] * len(parts)
        return tuple(
            share.data.reshape(layout.local) if n else None  # (so that torch counts what is written into each apart)
            for share, layout, n in zip(shares, self.layouts, holders, strict=True)
        )


class Gather(Function):
    """From shares to the whole tensors on every worker."""

    enters = True

    @staticmethod
    def forward(
        ctx: Any,
        gathering: Gathering,
        wholes: tuple[torch.Tensor, ...] | None,
        release: Callable[[], None] | None,
        *blocks: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """
        Args:
            wholes: the whole tensors, if they have come together already.
            release: what a backward calls that needs them no more.
        """
        ctx.gathering, ctx.release, ctx.device = gathering, release, blocks[0].device
        ctx.began = gathering.operator.history if wholes is None else gathering.operator.pass_by()
        ctx.set_materialize_grads(False)
        ctx.checkpointed = is_checkpointed()
        if ctx.checkpointed:  # so that checkpointing recomputes this node, on every worker alike
            ctx.save_for_backward(_NOTHING)  # (else not: the backwards of several graphs may go through here)
        return gathering.gather(blocks) if wholes is None else wholes

    @staticmethod
    def backward(ctx: Any, *parts: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.checkpointed and ctx.saved_tensors
        ctx.gathering.operator.derive(ctx.began)
        if torch.is_grad_enabled():
            return None, None, None, *_Scatter.apply(ctx.gathering, ctx.device, *parts)
        if ctx.release is not None:
            ctx.release()
        return None, None, None, *ctx.gathering.scatter(parts, ctx.device)


class _Scatter(Function):
    """The adjoint: from each worker's part of a gradient to shares of the sum."""

    @staticmethod
    def forward(
        ctx: Any, gathering: Gathering, device: torch.device, *parts: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.gathering, ctx.device, ctx.given = gathering, device, [part is not None for part in parts]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_NOTHING)
        return tuple(None if one is None else one.clone() for one in gathering.scatter(parts, device))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        gathering: Gathering = ctx.gathering
        blocks = [
            torch.zeros(layout.local, dtype=gathering.dtype, device=ctx.device) if one is None else one
            for one, layout in zip(cotangents, gathering.layouts, strict=True)
        ]
        found = Gather.apply(gathering, None, None, *blocks)
        return None, None, *(one if given else None for one, given in zip(found, ctx.given, strict=True))


_NOTHING = torch.empty(0, device="cpu")


_ALONG = 1 << 19
"""Bytes of weights that come along with others, at most, before they are needed."""


def that_come_along(steps: Iterable[Any]) -> list[Any]:
    """The first step, and those behind it whose weights come in the same message: few bytes of one dtype and device.

    Args:
        steps: in the order in which they are needed. The ``parameters`` of each are of one dtype and device.
    """
    found: list[Any] = []
    size = 0
    for step in steps:
        if found:
            size += sum(one.numel() * one.element_size() for one in step.parameters)
            first, one = found[0].parameters[0], step.parameters[0]
            if size > _ALONG or (one.dtype, one.device) != (first.dtype, first.device):
                break
        found.append(step)
    return found


def state_of(parameter: GlobalTensor) -> tuple[int, ...]:
    """What tells whether a share has been written, or given other data; the same on every worker."""
    memory = parameter.__dict__.get("_memory")  # (that its ``data`` has, too, whose writes torch counts apart)
    return writes_of(parameter._block), data_given(parameter), 0 if memory is None else memory.writes


def gather_each(steps: Sequence[Any]) -> list[tuple[torch.Tensor, ...]]:
    """Bring together the whole weights of several steps, by one message."""
    parameters = [one for step in steps for one in step.parameters]
    with torch.no_grad():
        wholes = iter(Gathering.of(parameters).gather([one._block for one in parameters]))
    return [tuple(islice(wholes, len(step.parameters))) for step in steps]
