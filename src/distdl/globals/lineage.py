"""Where plain tensors come from, by the autograd graph: those whose type does not say so.

What is computed from a worker's own copy of a parameter is a copy, too, and says so by its type. A view that was taken
of a plain tensor before a copy was written into this does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from distdl.globals.context import Context
from distdl.globals.running import (
    any_noted,
    gives_asked,
    is_asked_for,
    is_noted,
    is_of_split,
    is_on_blocks,
    note_node,
    was_asked_for,
)
from distdl.tensors.function import Function, Given, given_by

_KEY = "distdl: follows from"
_PART = "what may be a copy that stands for a part of a sum"
_OF_GIVEN: dict[Given, frozenset[Any]] = {
    Given.BLOCKS: frozenset((None,)), Given.PARTS: frozenset((_PART,)), Given.ALONE: frozenset(),
}  # fmt: skip
OLD_REFERENCE = (
    "the autograd function {0} was applied to weights of a distributed model by a reference to {0}.apply that is older "
    "than the import of distdl, or to a view of them that was taken before they were written there, or to what a "
    "primitive of distdl.nn gives; its backward would get a worker's part of the gradient. Import distdl before the "
    "module that takes this reference, take views after the write, and apply functions to what primitives give in "
    "distdl.local_map"
)
"""Said of a function that has not been given variables (see :func:`distdl.globals.parts.apply_to_variables`)."""


def entered_into(tensor: torch.Tensor, strict: bool = False) -> Any:
    """The context into which what a plain tensor has been computed from has entered; None for one that has not.

    Of what primitives give that may be copies that stand for parts of a sum, each worker has its own gradient, as if it
    had entered. Blocks have not entered: of a loss that each worker computes of its own, all count.

    Args:
        strict: whether an autograd function of a user's that has computed it from what has entered is an error.
    Raises: RuntimeError if some of it has, and some has not: of the gradient of the one each worker has a part, and of
        that of the other all.
    """
    node = tensor.grad_fn
    if node is None:
        return None
    found = _sources(node, strict)
    if None not in found and len(found) > 1:
        found -= {_PART}
    if len(found) > 1 and is_on_blocks():
        return next(one for one in found if one is not None)  # (a block)
    if len(found) > 1:
        raise RuntimeError(
            "a plain tensor follows both from a parameter of the model and from a tensor that has not entered the "
            "model, and its type does not say so; or from what a primitive of distdl.nn gives and from another one. "
            "Let each meet a global tensor by itself, as in x * a * b for x * (a * b). Take views of a parameter after "
            "it has been written, and give other tensors to the model beside its input"
        )
    return next(iter(found), None)


def is_part(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor follows from what may be copies that stand for parts of a sum."""
    return tensor.grad_fn is not None and _PART in _sources(tensor.grad_fn, False)


def note_entered(tensor: torch.Tensor, context: Any) -> None:
    """Note that a plain tensor, whole on each worker, has a gradient that adds up over all workers of a context."""
    node: Any = tensor.grad_fn
    if node is not None:
        node.metadata[_KEY] = frozenset((context,))


def may_differ(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor may be another one on each worker.

    In a function on blocks each may. Elsewhere, blocks that a user has asked for do, and what follows from them. (What
    follows from one without gradients does not say so.)
    """
    return is_on_blocks() or is_of_block(tensor)


def is_of_block(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor is a block, or follows from one: the same also in a function on blocks."""
    if not any_noted():  # (as in programs of plain tensors, whose checkpoints ask, too)
        return False
    if not tensor.requires_grad:
        return was_asked_for(tensor)
    if tensor.is_leaf and (torch.is_inference_mode_enabled() or tensor.is_inference()):
        return is_asked_for(tensor)
    if tensor.is_leaf and tensor._base is not None and tensor._base.requires_grad:
        return is_of_block(tensor._base)  # (a view that was made without gradients has no node of its own)
    # (of a leaf, the node knows the tensor itself, where hooks of saved tensors or a checkpoint give another one)
    node: Any = tensor.grad_fn or get_gradient_edge(tensor).node
    # depth first, and noted on the way: each node of a long history is looked at once
    path: list[tuple[Any, Iterator[Any]]] = [(None, iter((node,)))]
    while path:
        after, rest = path[-1]
        one = next(rest, None)
        if one is None:  # (what it follows from are no blocks)
            path.pop()
            if after is not None:
                note_node(after, False)
            continue
        noted = given_by(one) is not None or is_noted(one)
        if noted:
            for each, _ in path[1:]:
                note_node(each, True)
            return True
        # (ours may be that of full_tensor; and a node that follows from nothing may be asked for as a block later on)
        if noted is None and one.next_functions and not _is_ours(one):
            path.append((one, (before for before, _ in one.next_functions if before is not None)))
    return False


def _is_ours(node: Any) -> bool:
    kind = getattr(type(node), "_forward_cls", None)  # (of an autograd function in Python)
    return isinstance(kind, type) and issubclass(kind, Function)


def ours_before(tensor: torch.Tensor) -> set[type]:
    """The autograd functions of this package from which a plain tensor follows by functions of torch alone."""
    found: set[type] = set()
    seen, rest = {tensor.grad_fn}, [tensor.grad_fn] if tensor.grad_fn is not None else []
    while rest:
        one: Any = rest.pop()
        if _is_ours(one):
            found.add(type(one)._forward_cls)
            continue
        new = {before for before, _ in one.next_functions if before is not None} - seen
        seen |= new
        rest.extend(new)
    return found


def _sources(node: Any, strict: bool) -> frozenset[Any]:
    """What a node follows from: contexts, parts of sums, and None for what has not entered.

    What worker 0 alone has is none of them: whether the gradients of all workers count or that of worker 0, its own are
    the same, so it may meet what has entered, and what has not.

    It is noted, so that each node of a long history is looked at once: what a node follows from that follows from one
    source, follows from this, too.
    """
    found: set[Any] = set()
    functions: list[str] = []
    alone = False
    seen, rest = {node}, [node]
    while rest:
        one: Any = rest.pop()
        noted: frozenset[Any] | None = one.metadata.get(_KEY)
        kind: Any = getattr(type(one), "_forward_cls", None)
        if noted is not None:
            alone = alone or not noted
            found |= noted
        elif gives_asked(one):
            found.add(None)  # (of a block of a global tensor, whatever has moved it)
        elif (given := given_by(one)) is not None:
            alone = alone or given is Given.ALONE
            found |= _OF_GIVEN[given]
        elif _is_ours(one):
            comm = kind.entered_into(one)
            found.add(None if comm is None else Context.of(comm))
        elif one.next_functions:
            if is_of_split(one):
                found.add(None)
            if kind is not None:
                functions.append(type(one).__name__.removesuffix("Backward"))
            new = {before for before, _ in one.next_functions if before is not None} - seen
            seen |= new
            rest.extend(new)
        else:
            found.add(None)  # (a leaf)
    result = frozenset(found)
    if strict and functions and not result <= {None}:
        raise RuntimeError(OLD_REFERENCE.format(functions[0]))
    for one in seen if len(result) == 1 and not alone else {node}:
        one.metadata[_KEY] = result
    return result
