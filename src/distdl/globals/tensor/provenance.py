"""Where plain tensors come from: their autograd graph tells where their type does not.

What is computed from a weight, or in a forward from a block, usually has a type of ours. Code that we do not see (an
extension in C++, a reference to an autograd function's ``apply`` that is older than the import of distdl) gives plain
tensors instead. Their gradient would be added up over the workers twice, and nobody would notice. So where a plain
tensor meets a global one (it enters), its graph is searched for functions of this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from distdl.globals.layouts.context import Context
from distdl.nn.module import COPIES
from distdl.tensors.function import Function

_SEEN = "distdl: may enter"
_LOCAL = "distdl: a block of a global tensor"
OLD_REFERENCE = (
    "the autograd function {0} was applied to weights of a distributed model by a reference to {0}.apply that is older "
    "than the import of distdl; its backward would get a worker's part of the gradient. Import distdl before the "
    "module that takes this reference"
)
_HIDDEN = (
    "a plain tensor that stands beside a global one follows from a weight, or from another plain tensor beside a "
    "global one, and its type does not say so: {} has computed it by code that asks no subclass of tensors, or it was "
    "kept from a function on blocks. Its gradient would be added up over the workers twice. Import distdl before "
    "modules that keep a reference to the apply of an autograd function, which else is older than distdl's; and give "
    "functions what they need as arguments"
)
_COPIES = (
    "a plain tensor that stands beside a global one follows from what Broadcast, AllGather or AllSumReduce gives, or "
    "was kept from a function of flex_attention; its gradient would be added up over the workers twice. Call the "
    "primitive in distdl.local_map, or compute the same from the global tensor, as by x.sum()"
)

_OF_BLOCK = (
    "an argument of distdl.local_map follows from a block of this worker, as x.to_local() gives it, and its gradient "
    "would be added up over the workers. Give the global tensor x itself, or make the block global by "
    "GlobalTensor.from_local(block, P)"
)


def note_local(block: torch.Tensor) -> None:
    """Mark the graph of a block that a user gets. What is computed from it differs between workers."""
    node: Any = block.grad_fn
    if node is not None:
        node.metadata[_LOCAL] = True
    elif block.requires_grad:
        block.__dict__[_LOCAL] = True


def check_no_block(tensor: torch.Tensor) -> None:
    """Check that an argument of local_map does not follow from a block, whose gradient each worker has for itself.

    Raises: RuntimeError if it does.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return
    nodes = list(_nodes_before(tensor))
    leaves = [tensor, *(one.variable for one in nodes if hasattr(one, "variable"))]
    if any(_LOCAL in one.metadata for one in nodes) or any(_LOCAL in one.__dict__ for one in leaves):
        raise RuntimeError(_OF_BLOCK)


def check_origin(tensor: torch.Tensor, context: Context) -> None:
    """Check that no tensor in the graph of one that enters has entered before, as gradients are added up once.

    Raises: RuntimeError if one has.
    """
    if has_entered(tensor, context):
        raise RuntimeError(_HIDDEN.format("an extension"))


def has_entered(tensor: torch.Tensor, context: Context) -> bool:
    """Whether a plain tensor was computed from tensors that have entered, and from nothing else with a gradient.

    So is the sparse tensor of ``torch.sparse_coo_tensor(ends, weight)``. Nodes that were searched in vain are marked,
    so each node of a long graph is searched once.

    Raises: RuntimeError if its gradient would be wrong: if it follows from a primitive that gives copies, or from
        weights by a user's autograd function, or from weights and from a tensor that has not entered.
    """
    if not (tensor.requires_grad and torch.is_grad_enabled()) or len(context.everyone) == 1:
        return False
    passed, name, entered, others = [], "", False, False
    for one in _nodes_before(tensor, _SEEN):
        passed.append(one)
        kind: Any = getattr(type(one), "_forward_cls", None)
        if COPIES in one.metadata:
            raise RuntimeError(_COPIES)
        if _is_ours(one):
            entered, others = entered or kind.enters, others or not kind.enters
        elif _SEEN in one.metadata or not one.next_functions:
            others = True
        elif kind is not None:
            name = f"the autograd function {kind.__name__}"
    if entered and (name or others):
        raise RuntimeError(_HIDDEN.format(name or "an extension"))
    if not entered:
        for one in passed:
            one.metadata[_SEEN] = True
    return entered


def ours_before(tensor: torch.Tensor) -> set[type]:
    """The autograd functions of this package that are met first on the ways back through a plain tensor's graph."""
    return {type(one)._forward_cls for one in _nodes_before(tensor) if _is_ours(one)}


def _nodes_before(tensor: torch.Tensor, end: str = "") -> Iterator[Any]:
    """The nodes of a tensor's graph. The search ends at nodes of this package, and where metadata have the key."""
    rest: list[Any] = [] if tensor.grad_fn is None else [tensor.grad_fn]
    seen = set(rest)
    while rest:
        one: Any = rest.pop()
        yield one
        if not _is_ours(one) and end not in one.metadata:
            new = {before for before, _ in one.next_functions if before is not None} - seen
            seen |= new
            rest.extend(new)


def _is_ours(node: Any) -> bool:
    """Whether a node is one of an autograd function of this package."""
    kind = getattr(type(node), "_forward_cls", None)
    return isinstance(kind, type) and issubclass(kind, Function)
