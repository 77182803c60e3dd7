"""Where plain tensors come from, by the autograd graph: those whose type does not say so.

What is computed from a worker's own copy of a parameter is a copy, too, and says so by its type. Two kinds do not: a
view that was taken of a plain tensor before a copy was written into this, and what an autograd function of a user's has
made of values alone.
"""

from __future__ import annotations

from typing import Any

import torch

from distdl.tensors.function import Function

_KEY = "distdl: follows from"


def entered_into(tensor: torch.Tensor) -> Any:
    """The context into which what a plain tensor has been computed from has entered; None for one that has not.

    Raises: RuntimeError if some of it has, and some has not: of the gradient of the one each worker has a part, and of
        that of the other all.
    """
    node = tensor.grad_fn
    if node is None:
        return None
    found = _sources(node)
    if len(found) > 1:
        raise RuntimeError(
            "a plain tensor follows both from a parameter of the model and from a tensor that has not entered the "
            "model, and its type does not say so: it was computed from a view that had been taken before the parameter "
            "was written into the same memory, or by an autograd function that computes on values alone. Take views "
            "after the write, and give other tensors to the model beside its input"
        )
    return next(iter(found), None)


def _sources(node: Any) -> frozenset[Any]:
    """What a node follows from: contexts, and None for what has not entered.

    It is noted, so that each node of a long history is looked at once: what a node follows from that follows from one
    source, follows from this, too.
    """
    found: set[Any] = set()
    seen, rest = {node}, [node]
    while rest:
        one: Any = rest.pop()
        noted: frozenset[Any] | None = one.metadata.get(_KEY)
        kind: Any = getattr(type(one), "_forward_cls", None)  # (of an autograd function in Python)
        if noted is not None:
            found |= noted
        elif isinstance(kind, type) and issubclass(kind, Function):
            found.add(kind.entered_into(one))
        elif one.next_functions:
            new = {before for before, _ in one.next_functions if before is not None} - seen
            seen |= new
            rest.extend(new)
        else:
            found.add(None)  # (a leaf)
    result = frozenset(found)
    for one in seen if len(result) == 1 else {node}:
        one.metadata[_KEY] = result
    return result
