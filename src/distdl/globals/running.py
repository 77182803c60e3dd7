"""What runs on this worker: the forward of a distributed model, or a user's function on blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distdl.tensors.function import any_given


class _Here(threading.local):
    noted = False  # whether there has been a block of a user's, on any worker of this process

    def __init__(self) -> None:
        self.models = 0  # how many run, one in another
        self.on_blocks = 0  # how many such functions do
        self.blocks = WeakIdKeyDictionary()  # asked for by a user; and whether others than worker 0 have some
        self.asked = False  # whether for one in the latest forward


_here = _Here()
_BLOCK = "distdl: gives what may be a block"
_ASKED = "distdl: gives a block that was asked for"
_OF_SPLIT = "distdl: follows from a block without gradients, too"


@contextmanager
def running() -> Iterator[bool]:
    """While the forward of a distributed model runs; gives whether it is the outermost."""
    if not _here.models:
        _here.asked = False
    _here.models += 1
    try:
        yield _here.models == 1
    finally:
        _here.models -= 1


def is_running() -> bool:
    """Whether the forward of a distributed model runs."""
    return _here.models > 0


@contextmanager
def on_blocks() -> Iterator[None]:
    """While a function of a user's runs on blocks: what it computes may be a block, also what follows from weights."""
    _here.on_blocks += 1
    try:
        yield
    finally:
        _here.on_blocks -= 1


def is_on_blocks() -> bool:
    """Whether one does."""
    return _here.on_blocks > 0


def note_block(block: torch.Tensor, split: bool) -> None:
    """Take note of a block that code of a user's gets.

    Args:
        split: whether others than worker 0 have blocks with cells.
    """
    _here.asked = True
    note_given(block, split)
    note_asked(block)


def note_given(block: torch.Tensor, split: bool = False) -> None:
    """Take note of a block that a function on blocks gets, or of a leaf in its place: a backward runs outside."""
    _Here.noted = True
    _here.blocks[block] = split
    note_graph(block)


def note_asked(block: torch.Tensor) -> None:
    """Let the autograd graph know that it has given a block for which a user has asked."""
    note_graph(block)
    node: Any = block.grad_fn
    if node is not None:
        node.metadata[_ASKED] = True


def note_made_of(y: torch.Tensor, blocks: Iterable[torch.Tensor]) -> None:
    """Let the autograd graph know of what it gives that it was made of blocks, also of such without gradients."""
    note_graph(y)
    node: Any = y.grad_fn
    if node is not None and any(not one.requires_grad and _here.blocks.get(one) for one in blocks):
        node.metadata[_OF_SPLIT] = True


def is_of_split(node: Any) -> bool:
    """Whether a node gives what was made of a block without gradients, of which others than worker 0 have some, too."""
    return _OF_SPLIT in node.metadata


def note_graph(block: torch.Tensor) -> None:
    """Let the autograd graph know that it has given a block."""
    if block.grad_fn is not None:
        note_node(block.grad_fn, True)


def note_node(node: Any, gives_block: bool) -> None:
    """Let a node of the autograd graph know whether it has given a block, or what follows from one."""
    _Here.noted = _Here.noted or gives_block
    node.metadata[_BLOCK] = gives_block


def any_noted() -> bool:
    """Whether any worker of this process has taken note of a block, or has called a layer, which may have given one."""
    return _Here.noted or any_given()


def gives_asked(node: Any) -> bool:
    """Whether a node of the autograd graph has given a block of a global tensor, for which a user has asked."""
    return _ASKED in node.metadata


def is_noted(node: Any) -> bool | None:
    """Whether a node of the autograd graph has given such a block, or is a leaf's that is one; None if unknown."""
    if type(node).__name__ == "AccumulateGrad":
        return is_asked_for(node.variable)
    noted: bool | None = node.metadata.get(_BLOCK)
    return noted


def is_asked_for(value: torch.Tensor) -> bool:
    """Whether a tensor is a block that a user has asked for, in whichever forward."""
    return value in _here.blocks


def was_asked_for(value: torch.Tensor) -> bool:
    """Whether a tensor is a block that the latest forward has asked for."""
    return _here.asked and value in _here.blocks


def may_be_block(value: object) -> bool:
    """Whether a value may be a block, so not the same on every worker: one that was asked for, or follows from one.

    What follows from one without gradients does not say so, so in a forward that asks for blocks any plain tensor may.
    """
    return type(value) is torch.Tensor and (_here.asked or is_asked_for(value))
