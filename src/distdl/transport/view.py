"""View: a strided region of the memory of a tensor that will come, described once and found again by address."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from distdl.environment.arguments import checks_fields
from distdl.environment.types import Count

Index = tuple[slice, ...]


@checks_fields
class View(NamedTuple):
    """A region of one of several tensors, which are there only when an exchange begins.

    Short copies and back-ends that read memory by address find the region at ``tensors[tensor].data_ptr() + offset``.
    That is safe for as long as those tensors live, have the layout for which the view was made, and nobody else writes
    to them. All of this holds from the start of an exchange to the end of its wait: a transfer is looked up by the
    layout of its tensor, whoever waits keeps the tensors, and a transfer writes to memory that it has just allocated.

    Attributes:
        tensor: which of the tensors.
        offset: bytes from the first element of that tensor to the first of the region.
        shape, strides: of the region, in elements.
        dtype: of its elements.
        whole: whether the region is all of the tensor.
    """

    tensor: Count
    offset: int
    shape: tuple[Count, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    whole: bool

    def _check(self) -> None:
        if len(self.shape) != len(self.strides):
            raise ValueError(f"a View needs a stride for each dim; got shape {self.shape} and strides {self.strides}")

    @classmethod
    def of(cls, tensor: int, laid: torch.Tensor, index: Index = ()) -> View:
        """The region at an index (none stands for all) of a tensor that will be laid out as the given one is."""
        part = laid[index] if index else laid
        offset = (int(part.storage_offset()) - int(laid.storage_offset())) * laid.element_size()
        return cls._make((tensor, offset, tuple(part.shape), part.stride(), laid.dtype, not index))

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one behind the other, in their order."""
        dims = [(n, by) for n, by in zip(self.shape, self.strides, strict=True) if n > 1]
        return all(by == prod(n for n, _ in dims[d + 1 :]) for d, (_, by) in enumerate(dims))

    def take(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The region as a tensor, now that the tensors are there."""
        tensor = tensors[self.tensor]
        if self.whole:
            return tensor
        return tensor.as_strided(self.shape, self.strides, tensor.storage_offset() + self.offset // self.dtype.itemsize)


Message = tuple[int, torch.Tensor]
Addressed = tuple[int, View]
