"""Which memory functions write in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.globals.nested import tensors_in
from distdl.globals.operands import block_of, own_of
from distdl.globals.tensor import GlobalTensor


def memory_of(x: torch.Tensor) -> int:
    """The address of the memory in which a tensor lies, or its block; 0 of one that has none, as a sparse one."""
    with torch._C.DisableTorchFunctionSubclass():
        plain = block_of(x) if type(x) is GlobalTensor else x
        return plain.untyped_storage()._cdata if torch._C._has_storage(plain) else 0


class Writes:
    """A context in which a function runs, and which knows afterwards what memory it has written.

    Torch counts the writes of a tensor, but not of one made in inference mode: for these, each operator's schema tells
    which of its arguments it writes. And it counts no writes of running statistics: their values are compared. Nor does
    it count those of map_ and apply_: what a function returns, whose name says that it writes, is taken for written.

    Args:
        function: of torch.
        inputs: plain tensors, of which it is asked.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        name = getattr(function, "__name__", "")
        self._named = name.endswith("_")
        uncounted = [one for one in inputs if one.dim() == 1 and not one.is_meta] if "batch_norm" in name else []
        self._values = {id(one): one.detach().clone() for one in uncounted}
        self._before = {id(one): one._version for one in inputs if not one.is_inference()}
        self._operators = _Operators() if len(self._before) < len({id(one) for one in inputs}) else None
        self._running = ExitStack()

    def __enter__(self) -> Writes:
        if self._operators is not None:
            self._running.enter_context(self._operators)
        return self

    def __exit__(self, *problem: Any) -> None:
        self._running.close()

    def returned(self, one: torch.Tensor) -> bool:
        """Whether one of the inputs, which the function has returned, has been written."""
        return self._named or self.into(one)

    def into(self, one: torch.Tensor) -> bool:
        """Whether one of the inputs has been written."""
        if id(one) in self._values and not torch.equal(one, self._values[id(one)]):
            return True
        if id(one) in self._before:
            return one._version != self._before[id(one)]
        return self._operators is not None and one.untyped_storage()._cdata in self._operators.written


class _Operators(TorchDispatchMode):
    """Takes note of the storages that operators write. (The inputs' own live on, so no other gets their address.)"""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # (in inference mode, operators come here that consist of others, which write)
            y = func.decompose(*args, **kwargs)
        if y is not NotImplemented:
            return y
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written = tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
                self.written.update(one.untyped_storage()._cdata for one in written if one.layout is torch.strided)
        return func(*args, **kwargs)


def watched(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], memories: Set[int]
) -> tuple[Any, bool]:
    """What a function gives, and whether it has written into tensors that lie in given memory."""
    given = [(one, memory_of(one)) for one in tensors_in((args, kwargs))]
    given = [(one, memory) for one, memory in given if memory and memory in memories]
    if not given:
        return func(*args, **kwargs), False
    blocks = [own_of(one) for one, _ in given]
    with Writes(func, blocks) as writes:
        y = func(*args, **kwargs)
    # (what is set as x.data lies elsewhere)
    return y, any(map(writes.into, blocks)) or any(memory_of(one) != memory for one, memory in given)
