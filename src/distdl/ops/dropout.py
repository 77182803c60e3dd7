"""Dropout: a product with a random mask that does not depend on the partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from distdl.exchange import Together
from distdl.ops.setup import Setup, Site, same
from distdl.partition import Signature
from distdl.tensors.dtypes import carries_gradients
from distdl.tensors.repeats import CallCount, checked
from distdl.tensors.uniform import Key, uniform_block


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
        factor, kept = 1 / (1 - self.p) if self.p < 1 else 0.0, self._kept()

        def drop(x: torch.Tensor, calls: CallCount) -> torch.Tensor:
            number = calls.next()
            x = checked(x if x.numel() else x.to(dtype), number)
            mask = uniform_block((*self.key, number), box, extents, kept, torch.bool, x.device)
            return x * mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim())) * factor

        return Setup(Together(), drop, same, (x.layout,))  # (what a checkpoint needs is recorded with the number)

    def _kept(self) -> Callable[[torch.Tensor], torch.Tensor]:
        p = self.p
        return lambda u: u >= p
