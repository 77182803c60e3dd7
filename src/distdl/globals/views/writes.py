"""Find out what a function that is not known has written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of, own_of
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.views.aliasing import count_of_writes
from distdl.tensors.private_torch import DisableTorchFunctionSubclass, has_storage


def storage_of(x: torch.Tensor) -> int:
    """Return the address of the storage of a tensor, or of its block; 0 for one without storage, as a sparse one."""
    with DisableTorchFunctionSubclass():
        plain = block_of(x) if type(x) is GlobalTensor else x
        return plain.untyped_storage()._cdata if has_storage(plain) else 0


class Writes:
    """Tells which inputs a function has written. It is made before the function runs, and asked after.

    Torch counts most writes of a tensor. It does not count those of running statistics, and none of a tensor made in
    inference mode: there, values are compared. Nor does it count those of ``map_`` and ``apply_``: if the name of a
    function says that it writes, the input that it returns is taken for written.

    Args:
        function: a function of torch.
        inputs: the plain tensors that may be asked about.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        name = getattr(function, "__name__", "")
        self._named = name.endswith("_")
        self._before = {id(one): count_of_writes(one) for one in inputs}
        uncounted = [one for one in inputs if one.is_inference() or (one.dim() == 1 and "batch_norm" in name)]
        compared = [one for one in uncounted if one.layout is torch.strided and not one.is_meta]
        self._values = {id(one): one.detach().clone() for one in compared}

    def returned(self, one: torch.Tensor) -> bool:
        """Whether the function has written this input, which it has returned."""
        return self._named or self.into(one)

    def into(self, one: torch.Tensor) -> bool:
        """Whether the function has written this input."""
        if count_of_writes(one) != self._before[id(one)]:
            return True
        before = self._values.get(id(one))
        return before is not None and not (one.shape == before.shape and torch.allclose(one, before, 0, 0, True))


def call_watched(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], memories: Set[int]
) -> tuple[Any, bool]:
    """Call a function. Returns its result, and whether it has written into storages of the given addresses.

    An argument that lay there, and that it has moved elsewhere by ``x.data = ...``, counts as written.
    """
    given = [(one, storage_of(one)) for one in tensors_in((args, kwargs))]
    given = [(one, memory) for one, memory in given if memory and memory in memories]
    if not given:
        return func(*args, **kwargs), False
    blocks = [own_of(one) for one, _ in given]
    writes = Writes(func, blocks)
    y = func(*args, **kwargs)
    return y, any(map(writes.into, blocks)) or any(storage_of(one) != memory for one, memory in given)
