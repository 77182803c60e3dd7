"""The type of a block, ``x.to_local()``, inside of the forward of a distributed model.

In a forward, a plain tensor is the same on every worker, and so is a weight. A block is not, so it has a type of its
own. A block beside a weight or a global tensor is an error: nobody could tell how the gradient of the result adds up.
In ``distdl.local_map``, which says how, and outside of a forward, blocks are plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.tensor.running import tells_blocks
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import METHODS
from distdl.tensors.private_torch import DisableTorchFunctionSubclass, storage_use_count


class Block(torch.Tensor):
    """A worker's block of a global tensor, or what is computed from blocks."""

    # the same memory and graph as a plain tensor
    _plain: torch.Tensor

    @staticmethod
    def _of(plain: torch.Tensor) -> Block:
        made = plain.as_subclass(Block)
        made._plain = plain
        return made

    def __getattr__(self, name: str) -> Any:
        """``_plain`` of a tensor that :func:`mark` has made a block: made at each call, to keep no base alive."""
        if name != "_plain":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return raw_of(self)

    @staticmethod
    def _call_module(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module of ``distdl.nn`` gives for blocks: blocks."""
        return METHODS["call_module_with_blocks"](module, call, args, kwargs)


Block.__module__ = "torch"  # opt_einsum and others choose by the first name of the class's module


def raw_of(value: torch.Tensor) -> torch.Tensor:
    """A tensor of one of our types as a plain tensor, with the same memory and the same graph."""
    with DisableTorchFunctionSubclass():
        return value.as_subclass(torch.Tensor)


def unblocked(value: Any) -> Any:
    """The plain tensor of a block. Other values are returned as they are."""
    return value._plain if type(value) is Block else value


def as_block(value: torch.Tensor) -> torch.Tensor:
    """A plain tensor as a block, where blocks have a type of their own. Other tensors are returned as they are."""
    return Block._of(value) if type(value) is torch.Tensor and tells_blocks() else value


def as_blocks(y: Any) -> Any:
    """A structure with each plain tensor in it as a block, where blocks have a type of their own."""
    return map_tensors(y, as_block) if tells_blocks() else y


def mark(target: torch.Tensor, kind: Any, **attributes: Any) -> None:
    """Give a plain tensor the type of a block or a replica that was written into it; if it is a view, its base, too.

    Args:
        attributes: what the tensors get beside the type.
    Raises: RuntimeError if other tensors share its memory, as these would keep their type.
    """
    base = target._base
    named = [target] if base is None else [target, base]
    # the storage object that we ask counts as one reference more
    if storage_use_count(target.untyped_storage()._cdata) > 1 + len(named):
        raise RuntimeError(
            "a weight, or a block, was written in place into a plain tensor of which there are other views, and these "
            "would not follow from it; take views after the write, or compute out of place, as by torch.stack"
        )
    for one in named:
        relabel(one, kind, **attributes)


def relabel(target: torch.Tensor, kind: Any, **attributes: Any) -> None:
    """Give a plain tensor another type and these attributes. Tensors of other types stay what they are."""
    if type(target) is torch.Tensor:
        target.__class__ = kind
        target.__dict__.update(attributes)
