"""Which memory functions write in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of, own_of
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.views.aliasing import writes_of


def memory_of(x: torch.Tensor) -> int:
    """The address of the memory in which a tensor lies, or its block; 0 of one that has none, as a sparse one."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = block_of(x) if type(x) is GlobalTensor else x
        return plain.untyped_storage()._cdata if torch._C._has_storage(plain) else 0


class Writes:
    """What memory a function has written that runs after this has been made.

    Torch counts the writes of a tensor, but not those of running statistics, and none of a tensor made in inference
    mode: there, values are compared. Nor does it count those of map_ and apply_: what a function returns, whose name
    says that it writes, is taken for written.

    Args:
        function: of torch.
        inputs: plain tensors, of which it is asked.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        name = getattr(function, "__name__", "")
        self._named = name.endswith("_")
        self._before = {id(one): writes_of(one) for one in inputs}
        uncounted = [one for one in inputs if one.is_inference() or (one.dim() == 1 and "batch_norm" in name)]
        compared = [one for one in uncounted if one.layout is torch.strided and not one.is_meta]
        self._values = {id(one): one.detach().clone() for one in compared}

    def returned(self, one: torch.Tensor) -> bool:
        """Whether one of the inputs, which the function has returned, has been written."""
        return self._named or self.into(one)

    def into(self, one: torch.Tensor) -> bool:
        """Whether one of the inputs has been written."""
        if writes_of(one) != self._before[id(one)]:
            return True
        before = self._values.get(id(one))
        return before is not None and not (one.shape == before.shape and torch.allclose(one, before, 0, 0, True))


def watched(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], memories: Set[int]
) -> tuple[Any, bool]:
    """What a function gives, and whether it has written into tensors that lie in given memory."""
    given = [(one, memory_of(one)) for one in tensors_in((args, kwargs))]
    given = [(one, memory) for one, memory in given if memory and memory in memories]
    if not given:
        return func(*args, **kwargs), False
    blocks = [own_of(one) for one, _ in given]
    writes = Writes(func, blocks)
    y = func(*args, **kwargs)
    # (what is set as x.data lies elsewhere)
    return y, any(map(writes.into, blocks)) or any(memory_of(one) != memory for one, memory in given)
