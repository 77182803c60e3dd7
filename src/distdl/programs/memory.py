"""Which value of a step a tensor is: the one that lies in the same memory in the same way.

Autograd gives tensors other objects: it detaches, saves, and makes views anew. But a tensor that lies where another one
lies, with the same shape and strides, holds the same numbers, whatever writes into either. So it is the same value.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from distdl.programs.calls import Lies, Value

_NO_DISPATCH = torch.Tensor.__torch_dispatch__  # classes with one of their own may have no memory there


def place_of(tensor: torch.Tensor) -> tuple[int, Hashable]:
    """The number of a tensor's memory, 0 if it is none of torch's, and how the tensor lies there."""
    storage = storage_of(tensor)
    if not storage:
        return 0, id(tensor)
    how = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return storage, how


def storage_of(tensor: torch.Tensor) -> int:
    """The number of a tensor's memory; 0 if it is none of torch's."""
    if tensor.layout is not torch.strided or tensor.is_mkldnn:
        return 0
    number: int = tensor.untyped_storage()._cdata
    return number


class Memory:
    """The values of a step by where they lie.

    Attributes:
        lies: how each value lies, but for tensors of classes with operators of their own.
    """

    def __init__(self) -> None:
        self.lies: dict[Value, Lies] = {}
        self._values: dict[tuple[int, Hashable], Value] = {}
        self._latest: dict[int, tuple[Value, torch.dtype]] = {}
        self._kept: dict[Any, Any] = {}  # so that no other memory, or object, gets the number of one that has gone

    def value(self, tensor: torch.Tensor) -> Value | None:
        """The value that a tensor is; None if it is none yet."""
        return self._values.get(place_of(tensor))

    def beside(self, tensor: torch.Tensor) -> Value | None:
        """Another value in the same memory, of the same dtype."""
        value, dtype = self._latest.get(place_of(tensor)[0], (None, None))
        return value if dtype is tensor.dtype else None

    def shares(self, tensor: torch.Tensor) -> bool:
        """Whether there is any value in the memory of a tensor."""
        return place_of(tensor)[0] in self._latest

    def bind(self, tensor: torch.Tensor, value: Value) -> None:
        """Note that a tensor is a value."""
        place = place_of(tensor)
        self._values[place] = value
        if not place[0]:
            self._kept[place] = tensor
            return
        if type(tensor).__torch_dispatch__ is _NO_DISPATCH:
            offset, shape = int(tensor.storage_offset()), tuple(tensor.shape)
            self.lies[value] = Lies(place[0], offset, shape, tensor.stride(), tensor.dtype, tensor.device)
        self._latest[place[0]] = value, tensor.dtype
        if place[0] not in self._kept:
            self._kept[place[0]] = StorageWeakRef(tensor.untyped_storage())
