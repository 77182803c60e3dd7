"""Linear map of a tensor whose features are split over workers, and what is sent to whom.

Each worker of P_w has the block W[o, i] of the matrix. Here P_w is 2 x 3 (out x in) on workers 0..5, x lies on workers
0, 1 and 2, y on workers 0 and 3::

    x[0] on worker 0    x[1] on worker 1    x[2] on worker 2
          |                   |                   |             spread: along out, 0 to 3, 1 to 4, 2 to 5
    W[0,0] x[0]   <---  W[0,1] x[1]   <---  W[0,2] x[2]         add: along in, 1 and 2 to 0, which has y[0]
    W[1,0] x[0]   <---  W[1,1] x[1]   <---  W[1,2] x[2]         and 4 and 5 to 3, which has y[1]

If the batch is split, W and b are copied along it, from its first place. Backward turns all arrows: the gradient of y
is copied along in, that of x adds up along out, those of W and b along the batch. What a partition does not split,
nobody sends. The movements are made in ``distdl.ops.contraction``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from distdl.geometry.boxes import balanced
from distdl.ops.contraction import Contraction, check_channels, gathers, own_channels
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
        x, weight, *biases = signatures
        *batch, out, inner = site.partition.workers.shape
        channel = len(x.layout.extents) - 1
        check_channels(site, x, channel, self.in_features)
        gathered = gathers(x, channel, inner)
        runs, reads = balanced(self.out_features, out), balanced(self.in_features, inner)
        own, inputs, biased = own_channels(site, len(batch), runs, reads)
        more, outer = [1] * (channel - len(batch)), x.layout.intervals[:channel]
        contraction = Contraction(
            site,
            work=site.partition.reshape(*batch, *more, out, inner),
            target=self.target.reshape(*batch, *more, -1),
            channel=channel,
            stored=weight.layout.partition,
            x=x,
            weight=weight,
            bias=biases[0] if biases else None,
            reads=[*outer, reads * out if gathered else reads],
            computes=[*outer, runs],
            gathers=gathered,
            parts=((own, inputs), (biased,)),
            autocast=self.autocast,
        )
        setup = contraction.setup(lambda *boxes: _multiply, ((1,) * (channel + 1), (1, 1), (1,)))
        return replace(setup, local=_Biased(setup.local)) if biases and not self.in_features else setup


@dataclass(frozen=True)
class _Biased:
    """The map of no features: each worker's part of the product is no more than zeros, and y is the bias."""

    product: Callable[..., torch.Tensor]

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = self.product(x, weight, bias)
        return y if bias is None or not bias.numel() else y + bias.to(y.dtype)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if bias is None or x.dim() < 3:
        return functional.linear(x, weight, bias)
    # torch returns a view of its rows here; what writes into a view in place records other nodes than elsewhere
    rows = functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
    y: torch.Tensor = torch.ops.aten._unsafe_view(rows, (*x.shape[:-1], rows.shape[-1]))
    return y
