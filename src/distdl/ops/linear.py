"""Linear map of a tensor whose features are split over workers.

x is copied to the workers that have its columns of W, each multiplies, and the partial results add up along the rows.
Here W is split over 2 x 2 workers, x over the first row of them, y over the first column (see
``distdl.ops.contraction``)::

         x0        x1         on P_x: 1 x 2
          |         |         spread: x0 to the workers of the first column, x1 to those of the second
        W00 x0 -> W01 x1      each worker of P_w multiplies
        W10 x0 -> W11 x1
          |
    y0, y1                    add: along each row, onto P_y: 1 x 2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from distdl.geometry.boxes import balanced
from distdl.ops.contraction import Contraction, check_channels
from distdl.ops.setup import Setup, Site
from distdl.partition import Partition, Signature


@dataclass(frozen=True)
class Linear:
    r"""An affine map: :math:`y_o = \sum_i W_{oi} x_i + b_o`, in blocks.

    Its inputs are x ``(batch..., in)``, W ``(out, in)`` and, if there is one, b ``(out,)``. The partition of the site
    has the axes batch..., out, in. x may have more dims: they stand behind those of the batch, and are not split.

    Attributes:
        target: the partition of y: batch..., out.
        in_features, out_features: global numbers of features.
        autocast: the dtype in which torch computes, if its autocast is on.
    """

    target: Partition
    in_features: int
    out_features: int
    autocast: torch.dtype | None = None

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        (x, weight), bias = signatures[:2], signatures[2] if len(signatures) > 2 else None
        *batch, out, inner = site.partition.workers.shape
        channel = len(x.layout.extents) - 1
        check_channels(site, x, channel, self.in_features)
        more, outer = [1] * (channel - len(batch)), x.layout.intervals[:channel]
        contraction = Contraction(
            site,
            work=site.partition.reshape(*batch, *more, out, inner),
            target=self.target.reshape(*batch, *more, -1),
            channel=channel,
            stored=weight.layout.partition,
            x=x,
            weight=weight,
            bias=bias,
            reads=[*outer, balanced(self.in_features, inner)],
            computes=[*outer, balanced(self.out_features, out)],
            autocast=self.autocast,
        )
        return contraction.setup(lambda *boxes: _multiply, ((1,) * (channel + 1), (1, 1), (1,)))


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None or x.dim() < 3:
        return functional.linear(x, weight, bias)
    # torch returns a view of its rows here; what writes into a view in place records other nodes than elsewhere
    rows = functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    y: torch.Tensor = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[-1]))
    return y
