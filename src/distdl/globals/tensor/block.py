"""The type of a block, ``x.to_local()``, inside of the forward of a distributed model.

In a forward, a plain tensor is the same on every worker, and so is a weight. A block is not, so it has a type of its
own. A block beside a weight or a global tensor is an error: nobody could tell how the gradient of the result adds up.
In ``distdl.local_map``, which says how, and outside of a forward, blocks are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from distdl.globals.tensor.running import on_blocks, tells_blocks
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import name_of, writes
from distdl.nn import module as nn_module
from distdl.nn.compiling import leave_uncompiled

WHOLE: dict[type, str] = {}
"""The types that must not stand beside a block, and what a message calls them. Each is entered as it is declared."""


class Block(torch.Tensor):
    """A worker's block of a global tensor, or what is computed from blocks."""

    _plain: torch.Tensor

    @staticmethod
    def _of(plain: torch.Tensor) -> Block:
        made = plain.as_subclass(Block)
        made._plain = plain
        return made

    def __getattr__(self, name: str) -> Any:
        """``_plain`` of what :func:`mark` has made a block: made anew, as a kept one would keep the base alive."""
        if name != "_plain":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return raw_of(self)

    @staticmethod
    def _call_module(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module of ``distdl.nn`` gives for blocks: blocks."""
        check_unmixed(type(module).__name__, map(type, (*args, *kwargs.values())))
        return in_forward(call, tuple(map(unblocked, args)), {name: unblocked(one) for name, one in kwargs.items()})

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if tells_blocks():
            check_unmixed(name_of(func), types)
            if torch._C._are_functorch_transforms_active():
                raise RuntimeError(TRANSFORMED)
        blocks: dict[int, Block] = {}

        def plain(one: torch.Tensor) -> torch.Tensor:
            if type(one) is not Block:
                return one
            own = one._plain
            blocks[id(own)] = one
            return own

        given, named = map_tensors((args, kwargs), plain)
        y = func(*given, **named)
        if not tells_blocks():
            return y
        for target in tensors_in(args[:1]) if writes(func, kwargs) else ():
            if type(target) is torch.Tensor:
                mark(target, Block)

        def block(one: torch.Tensor) -> torch.Tensor:
            return blocks[id(one)] if id(one) in blocks else as_block(one)  # (written in place: the same object)

        return map_tensors(y, block)


leave_uncompiled(Block.__dict__["__torch_function__"].__func__)
Block.__module__ = "torch"  # opt_einsum and others choose by the first name of the class's module


TRANSFORMED = (
    "torch.vmap and the transforms of torch.func do not take a block, as x.to_local() gives it, inside of a "
    "distributed forward; call them in distdl.local_map, or with the global tensor"
)


def check_unmixed(name: str, types: Iterable[type]) -> None:
    """Check that a function is not given blocks beside global tensors or weights.

    Raises: RuntimeError.
    """
    found = set(types)
    beside = found & WHOLE.keys()
    if Block not in found or not beside or not tells_blocks():
        return
    others = " and ".join(sorted(WHOLE[one] for one in beside))
    raise RuntimeError(
        f"{name} got a block of this worker, as x.to_local() gives it, beside {others}; inside of a distributed "
        "forward, nobody could tell whose gradient the result has. Call it by distdl.local_map(function)(x, ...), "
        "which takes the global tensor x itself, and runs the function on blocks; or make the block global, by "
        "GlobalTensor.from_local(block, P)"
    )


def raw_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor of a class of ours as a plain tensor, with the same memory and the same graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def unblocked(value: Any) -> Any:
    """The plain tensor that a block is; others as they are."""
    return value._plain if type(value) is Block else value


def as_block(value: torch.Tensor) -> torch.Tensor:
    """A worker's plain tensor as a block, where blocks have a type of their own; others as they are."""
    return Block._of(value) if type(value) is torch.Tensor and tells_blocks() else value


def as_blocks(y: Any) -> Any:
    """The same for all tensors in a structure."""
    return map_tensors(y, as_block) if tells_blocks() else y


def mark(target: torch.Tensor, kind: Any, **attributes: Any) -> None:
    """Give a plain tensor the type of what was written into it. If it is a view, its base gets the type, too.

    Raises: RuntimeError if other tensors share its memory, as these would keep their type.
    """
    base = target._base
    named = [target] if base is None else [target, base]
    # (the storage that we ask has a reference of its own)
    if torch._C._storage_Use_Count(target.untyped_storage()._cdata) > 1 + len(named):
        raise RuntimeError(
            "a weight, or a block, was written in place into a plain tensor of which there are other views, and these "
            "would not follow from it; take views after the write, or compute out of place, as by torch.stack"
        )
    for one in named:
        relabel(one, kind, **attributes)


def relabel(target: torch.Tensor, kind: Any, **attributes: Any) -> None:
    """Give a plain tensor another type; others stay what they are."""
    if type(target) is torch.Tensor:
        target.__class__ = kind
        target.__dict__.update(attributes)


def in_forward(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module of ``distdl.nn`` gives for plain tensors: inside of a distributed forward, blocks."""
    if not tells_blocks():
        return call(*args, **kwargs)
    with on_blocks():
        y = call(*args, **kwargs)
    return as_blocks(y)


nn_module.call_in_forward = in_forward
