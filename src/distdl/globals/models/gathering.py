"""Gathering sharded parameters: the shares of all workers travel as one message, and gradients travel back as one."""

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
from distdl.globals.views.aliasing import count_of_writes, times_data_set
from distdl.tensors.derivatives import NONE, is_checkpointed
from distdl.tensors.function import Function
from distdl.tensors.modes import unobserved


class _Piece(NamedTuple):
    """One worker's share of one tensor, and the interval of the message in which it stands."""

    tensor: int
    box: tuple[slice, ...]
    shape: Shape
    start: int
    stop: int


class Gathering:
    """Gathers the same parameters on every worker, as one message, and reduce-scatters their gradients.

    Behind a worker's shares, the message has one more number for each tensor. On the way back it counts the workers
    that have a gradient of it, so that a gradient that nobody has stays None.
    """

    def __init__(self, layouts: Sequence[KnownLayout], dtype: torch.dtype) -> None:
        self.layouts, self.dtype = tuple(layouts), dtype
        context = layouts[0].context
        self._pieces: list[_Piece] = []
        self._counts: list[slice] = []  # where those numbers stand, for each worker
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
        owned = context.layout(context.world.workers, [intervals])
        self._everywhere = context.everywhere((stop,))
        self.operator: Operator = context.moving(owned, self._everywhere, dtype, NONE, "weights")

    @classmethod
    def of(cls, parameters: Sequence[GlobalTensor]) -> Gathering:
        """The gathering of these parameters, which are of one dtype. It is made once for equal layouts."""
        layouts, dtype = tuple(one._layout for one in parameters), parameters[0].dtype
        return layouts[0].context.keep((cls, layouts, dtype), lambda: cls(layouts, dtype))

    def gather(self, blocks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The whole tensors, given this worker's blocks of them. Collective.

        They are made outside of inference mode, where torch counts what a forward writes into them. What was
        prefetched inside of it may be needed outside, too.
        """
        with unobserved(), torch.inference_mode(False), torch.no_grad():
            counts = blocks[0].new_zeros(len(blocks))
            found = self.operator.execute(torch.cat([*(block.reshape(-1) for block in blocks), counts]))
            gathered = tuple(found.new_empty(layout.extents) for layout in self.layouts)
            into = [gathered[one.tensor][one.box] for one in self._pieces]
            torch._foreach_copy_(into, [found[one.start : one.stop].view(one.shape) for one in self._pieces])
            return gathered

    def reduce_scatter(
        self, partials: Sequence[torch.Tensor | None], device: torch.device
    ) -> tuple[torch.Tensor | None, ...]:
        """This worker's shares of the sums of partial gradients over all workers. Collective.

        Args:
            partials: this worker's partial gradients of the whole tensors; None where it has none.
        Returns: None for a tensor of which no worker has a partial gradient.
        """
        missing = [place for place, one in enumerate(partials) if one is None]
        flat = torch.zeros(self._everywhere.extents, dtype=self.dtype, device=device)
        pieces = [(piece, one) for piece in self._pieces if (one := partials[piece.tensor]) is not None]
        into = [flat[piece.start : piece.stop].view(piece.shape) for piece, _ in pieces]
        if into:
            torch._foreach_copy_(into, [one[piece.box] for piece, one in pieces])
        for counts in self._counts:
            flat[counts].fill_(1)
            for place in missing:
                flat[counts][place].zero_()
        local = self.operator.T.execute(flat)
        *shares, owners = local.split([*(prod(layout.local) for layout in self.layouts), len(partials)])
        # to read the counts waits for the device, so they are read only where this worker misses a gradient; on the
        # device "meta" they have no values
        holders: list[float] = owners.real.tolist() if missing and not owners.is_meta else [1.0] * len(partials)
        # by ``data``, as torch would count writes into one of the shares as writes into all of them
        return tuple(
            share.data.reshape(layout.local) if n else None
            for share, layout, n in zip(shares, self.layouts, holders, strict=True)
        )


class Gather(Function):
    """Gathering as an autograd function: from shares to whole tensors on every worker. Its adjoint: reduce-scatter."""

    enters = True

    @staticmethod
    def forward(
        ctx: Any,
        gathering: Gathering,
        gathered: tuple[torch.Tensor, ...] | None,
        release: Callable[[], None] | None,
        *blocks: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Takes the whole tensors, too, if they have been gathered already; backward calls ``release``."""
        ctx.gathering, ctx.release, ctx.device = gathering, release, blocks[0].device
        ctx.began = gathering.operator.history if gathered is None else gathering.operator.pass_by()
        ctx.set_materialize_grads(False)
        # In a checkpoint something is saved, so that every worker recomputes this node. Elsewhere nothing is, as the
        # backwards of several graphs may go through here.
        ctx.checkpointed = is_checkpointed()
        if ctx.checkpointed:
            ctx.save_for_backward(_NOTHING)
        return gathering.gather(blocks) if gathered is None else gathered

    @staticmethod
    def backward(ctx: Any, *partials: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.checkpointed and ctx.saved_tensors
        ctx.gathering.operator.derive(ctx.began)
        if torch.is_grad_enabled():
            return None, None, None, *_ReduceScatter.apply(ctx.gathering, ctx.device, *partials)
        if ctx.release is not None:
            ctx.release()
        return None, None, None, *ctx.gathering.reduce_scatter(partials, ctx.device)


class _ReduceScatter(Function):
    """The adjoint, as an autograd function: from partial gradients to this worker's shares of their sums."""

    @staticmethod
    def forward(
        ctx: Any, gathering: Gathering, device: torch.device, *partials: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.gathering, ctx.device, ctx.given = gathering, device, [one is not None for one in partials]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_NOTHING)
        return tuple(None if one is None else one.clone() for one in gathering.reduce_scatter(partials, device))

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

PREFETCHED = 1 << 19
"""The most bytes of weights that are prefetched beside the weights that are needed now."""


def fit_one_message(steps: Iterable[Any]) -> list[Any]:
    """The first step, and those behind it that travel in its message: few bytes, of the same dtype and device.

    Args:
        steps: in the order in which they are needed. The ``parameters`` of each are of one dtype and device.
    """
    found: list[Any] = []
    size = 0
    for step in steps:
        if found:
            size += sum(one.numel() * one.element_size() for one in step.parameters)
            first, one = found[0].parameters[0], step.parameters[0]
            if size > PREFETCHED or (one.dtype, one.device) != (first.dtype, first.device):
                break
        found.append(step)
    return found


def gather_steps(steps: Sequence[Any]) -> list[tuple[torch.Tensor, ...]]:
    """The whole weights of each of several steps, gathered by one message. Collective."""
    parameters = [one for step in steps for one in step.parameters]
    with torch.no_grad():
        gathered = iter(Gathering.of(parameters).gather([one._block for one in parameters]))
    return [tuple(islice(gathered, len(step.parameters))) for step in steps]


def share_version(parameter: GlobalTensor) -> tuple[int, ...]:
    """Numbers that change when a share is written or gets other data; the same on every worker.

    Writes into the parameter's ``data`` count, too: torch counts them apart, but both are in one memory.
    """
    memory = parameter.__dict__.get("_memory")
    return count_of_writes(parameter._block), times_data_set(parameter), 0 if memory is None else memory.writes
