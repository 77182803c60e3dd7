"""Dropout: a product with a random mask that does not depend on the partition."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distdl.exchange import Together
from distdl.ops.setup import Setup, Site, same
from distdl.partition import Signature
from distdl.tensors.dtypes import carries_gradients
from distdl.tensors.repeats import CallCount, repeatable
from distdl.tensors.uniform import Key, mask_block


@dataclass(frozen=True)
class Dropout:
    r"""Set random parts of a tensor to zero.

    Forward: :math:`y_c = x_c m_c / (1 - p)`; :math:`m_c` is 0 with probability p, else 1. It follows from the key, the
    number of the call and the global index c. Each worker makes the mask of its own block; nothing moves.
    Adjoint: the same product.

    Its local step takes the block and the count of calls.

    Attributes:
        p: probability of a zero.
        leading: how many dims the mask has, beginning with the first; None for all.
        key: other keys give other masks.
    """

    p: float
    leading: int | None = None
    key: Key = ()

    def check(self, name: str) -> None:
        """Check the options.

        Raises: ValueError that names the layer.
        """
        if not 0 <= self.p <= 1:
            raise ValueError(f"{name} needs p from 0 to 1; got {self.p}")

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        (x,) = signatures
        dtype = x.dtype
        if not carries_gradients(dtype):
            raise ValueError(f"{site.label} needs a tensor of floating-point or complex numbers; got {dtype}")
        box, extents = x.layout.box_of(site.me)[: self.leading], x.layout.extents[: self.leading]
        factor = 1 / (1 - self.p) if self.p < 1 else 0.0

        def drop(x: torch.Tensor, calls: CallCount) -> torch.Tensor:
            number = calls.next()
            x = repeatable(x if x.numel() else x.to(dtype))
            kept = mask_block((*self.key, number), box, extents, self.p, x.device)
            return masked(x, kept.reshape(*kept.shape, *[1] * (x.dim() - kept.dim())), factor)

        return Setup(Together(), drop, same, (x.layout,))  # `repeatable` records what a checkpoint needs


def masked(x: torch.Tensor, kept: torch.Tensor, factor: float) -> torch.Tensor:
    """x where it is kept, times a factor, and else x times 0. What is saved is one byte for each element.

    Args:
        kept: of dtype bool.
    """
    return (x * kept.view(torch.uint8)).mul_(factor)  # bytes take torch half of the time of bools
