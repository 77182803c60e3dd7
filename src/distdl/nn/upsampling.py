"""The distributed interpolation layer."""

from __future__ import annotations

from operator import index
from typing import Any

import torch

from distdl.agreement import Agreement
from distdl.agreement.header import Headers
from distdl.exchange.route import Route, move
from distdl.geometry.boxes import Shape, balanced
from distdl.geometry.windows import reading
from distdl.nn.module import Module, Option, check_buffer_manager, stay
from distdl.nn.resampling import Mode, Resampler
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan.planners import copy
from distdl.tensors.connection import outside
from distdl.transport.label import Label


class DistributedUpsample(Module):
    r"""Interpolate space to another size, each worker completing its block by the cells around it.

    Forward: :math:`y_o = \sum_k w_{ok} \, x_{i(o, k)}`, dim by dim, with torch's indices and weights for the whole
    tensor. Adjoint: the transpose, gradients of cells that several workers read adding up on the workers that own them.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        buffer_manager: checked for its type; not used.
        size: the whole global shape of y, batch and channels included.
        scale_factor: one positive number, or one for each dim of space. It stands in the formula for the indices, as in
            ``torch.nn.functional.interpolate``; y has ``int(extent * factor)`` cells. Exactly one of both is given.
        mode: nearest or nearest-exact, linear (any dims of space), or torch's names bilinear, trilinear, bicubic.
        align_corners: whether the first and the last cells lie on each other, and not their outer edges.
    Shapes: x local ``(batch, channels, space...)``, 1 to 3 dims of space, in elements, any split that is a grid. y is
        split as evenly as possible in space, longer blocks first, else as x is. Workers outside P_x return a clone of
        their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        another rank, batch or number of channels, or of a dtype that torch does not interpolate, and for a result
        without cells.
    """

    P_x = Option[Partition]()
    size = Option[Shape | None]()
    scale_factor = Option[tuple[float, ...] | None]()
    mode = Option[str]()
    align_corners = Option[bool]()

    def __init__(
        self,
        P_x: Partition,
        buffer_manager: Any = None,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "linear",
        align_corners: bool | None = False,
    ) -> None:
        super().__init__()
        check_buffer_manager(buffer_manager)
        name = type(self).__name__
        if (size is None) == (scale_factor is None):
            raise ValueError(f"{name} needs exactly one of size and scale_factor; got {size} and {scale_factor}")
        self.P_x = P_x
        self._mode = Mode.of(name, P_x.workers.ndim - 2, mode, align_corners, scale_factor)
        self.size = None if size is None else _shape(name, size, P_x)
        self.scale_factor, self.mode, self.align_corners = self._mode.factors, mode, self._mode.align_corners
        self.label = Label(f"{name} (P_x: {P_x}; {mode} to {size if scale_factor is None else scale_factor})")
        self._agreement = Agreement.among(P_x, self.label, (self._mode, self.size, P_x.workers.shape), self._derive)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.P_x.comm.rank not in self.P_x:
            return outside(x)
        decision = self._agreement.reach((x,))
        route, dtype, resampler = decision.outcome
        carried = decision.carried[0]
        x = stay(x.to(dtype), carried) if route is None else move(route, x, dtype, (0,), carried)
        return resampler(x)

    def _derive(self, headers: Headers) -> tuple[Route | None, torch.dtype, Resampler]:
        name, P_x, me = type(self).__name__, self.P_x, self.P_x.comm.rank
        owned = Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim))
        dtype = headers.dtype(P_x, name)
        self._mode.check_dtype(name, dtype)
        results = self._results(owned.extents)
        along = self._mode.along(owned.extents, results, dtype)
        outputs = [balanced(n, places) for n, places in zip(results[2:], P_x.workers.shape[2:], strict=True)]
        inputs = [reading(runs, one.ends) for runs, one in zip(outputs, along[2:], strict=True)]
        needed = Layout.of(P_x, [*owned.intervals[:2], *inputs])
        computed = Layout.of(P_x, [*owned.intervals[:2], *outputs])
        still = needed.intervals == owned.intervals
        route = None if still else Route(copy(owned, needed, me), P_x.comm, headers.members, self.label)
        return route, dtype, Resampler(along, needed[me], computed[me])

    def _results(self, extents: Shape) -> Shape:
        """The global shape of y.

        Raises: ValueError, a function of the global shape of x only, if that does not fit or there is no cell.
        """
        name, factors = type(self).__name__, self._mode.factors
        if self.size is not None and self.size[:2] != extents[:2]:
            raise ValueError(
                f"{name} needs a size with the batch and channels of x; got the size {list(self.size)} and a global "
                f"x of shape {list(extents)}"
            )
        results = self.size or (*extents[:2], *(int(n * f) for n, f in zip(extents[2:], factors or (), strict=True)))
        if 0 in (*extents[2:], *results[2:]):
            raise ValueError(
                f"{name} needs at least one cell in each dim of space of x and y; got a global x of shape "
                f"{list(extents)} and a y of shape {list(results)}"
            )
        return results


def _shape(name: str, size: Any, P_x: Partition) -> Shape:
    try:
        extents = tuple(index(extent) for extent in size)
    except TypeError:
        extents = ()
    if len(extents) != P_x.workers.ndim or min(extents) < 0:
        raise ValueError(
            f"{name} needs size to be the whole global shape of y, {P_x.workers.ndim} whole numbers; got {size!r}"
        )
    return extents
