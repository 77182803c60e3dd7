"""Interpolation of a tensor that is split over workers: each completes its block by the cells around it.

x, 4 cells     |  0   1  |  2   3  |
                   copy                      the cells that the outputs of a worker read
window         ( 0   1   2 ) ( 1   2   3 )
                   weighted sums, dim by dim
y, 8 cells     | 0 1 2 3 | 4 5 6 7 |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distdl.exchange import Together
from distdl.geometry.boxes import Shape, balanced
from distdl.geometry.windows import reading
from distdl.ops.resampling import Mode, Resampler
from distdl.ops.setup import Setup, Site, same
from distdl.partition import Layout, Signature
from distdl.plan.planning import copy


@dataclass(frozen=True)
class Interpolation:
    r"""Interpolate space to another size.

    Forward: :math:`y_o = \sum_k w_{ok} \, x_{i(o, k)}`, dim by dim, with torch's indices and weights for the whole
    tensor. Adjoint: the transpose, gradients of cells that several workers read adding up on the workers that own them.

    Attributes:
        mode: the options, with the factors if they are given.
        size: the whole global shape of y; None where there are factors.
    """

    mode: Mode
    size: Shape | None = None

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        (x,) = signatures
        owned, P, me, name = x.layout, x.layout.partition, site.me, site.label.kind
        self.mode.check_dtype(name, x.dtype)
        results = self._results(name, owned.extents)
        along = self.mode.along(owned.extents, results, x.dtype)
        outputs = [balanced(n, places) for n, places in zip(results[2:], P.workers.shape[2:], strict=True)]
        inputs = [reading(spans, one.ends) for spans, one in zip(outputs, along[2:], strict=True)]
        needed = Layout.along(P, [*owned.intervals[:2], *inputs])
        computed = Layout.along(P, [*owned.intervals[:2], *outputs])
        if needed.intervals == owned.intervals:
            fetch = site.identity(x.dtype, x.derivatives, x.local)
        else:
            fetch = site.operator(copy(owned, needed, me), x.dtype, x.derivatives, [x.local], keeps_format=True)
        resampler = Resampler(along, needed.box_of(me), computed.box_of(me))

        def interpolate(block: torch.Tensor) -> torch.Tensor:
            return resampler(block.to(x.dtype))

        return Setup(Together(fetch), interpolate, same, (computed,))

    def _results(self, name: str, extents: Shape) -> Shape:
        """The global shape of y.

        Raises: ValueError if that does not fit the global shape of x, or there is no cell.
        """
        if self.size is not None and self.size[:2] != extents[:2]:
            raise ValueError(
                f"{name} needs a size with the batch and channels of x; got the size {list(self.size)} and a global "
                f"x of shape {list(extents)}"
            )
        factors = self.mode.factors or ()
        results = self.size or (*extents[:2], *(int(n * f) for n, f in zip(extents[2:], factors, strict=True)))
        if 0 in (*extents[2:], *results[2:]):
            raise ValueError(
                f"{name} needs at least one cell in each dim of space of x and y; got a global x of shape "
                f"{list(extents)} and a y of shape {list(results)}"
            )
        return results
