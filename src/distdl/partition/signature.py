"""Signature: what all members know of a tensor once they have agreed on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distdl.environment.arguments import check_fields
from distdl.geometry.boxes import Shape
from distdl.partition.layout import Layout
from distdl.tensors.derivatives import Derivatives


@dataclass(frozen=True)
class Signature:
    """What is known of a tensor that is split over workers, the same on every member but for ``local``.

    Attributes:
        layout: which box of the global tensor each worker has.
        dtype: of its elements.
        derivatives: what it carries on any member.
        local: shape of this worker's tensor, in elements; where it has none, of the one of zero volume that stands in.
    """

    layout: Layout
    dtype: torch.dtype
    derivatives: Derivatives
    local: Shape

    def __post_init__(self) -> None:
        check_fields(self)
