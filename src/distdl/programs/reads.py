"""Values that Python reads without an operator of torch: ``tolist``, ``numpy``, an address."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distdl.tensors.recorders import here

_READ = frozenset(
    [
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__dlpack__,
        torch.Tensor.data_ptr,
    ]
)


class Reads(TorchFunctionMode):
    """Tells of them while it is on.

    Args:
        tell: is called with the name of what reads, and with the tensor.
    """

    def __init__(self, tell: Callable[[str, Any], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READ and here.recorder is not None:
            self._tell(func.__name__, args[0])
        return func(*args, **(kwargs or {}))
