"""``flex_attention``, ``create_mask`` and ``create_block_mask`` take global tensors, for which torch does not look.

torch compiles what ``flex_attention`` calls, and masks are made by ``vmap``: neither takes what is split. Each function
here is called in the place of torch's, which it gets in front of its arguments.
"""

from __future__ import annotations

import threading
from inspect import signature
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex
from torch.overrides import handle_torch_function

import distdl.globals.extras.flex.attention  # noqa: F401 (which enters the handler)
from distdl.globals.extras.capturing import Captured, captures_split, mapped
from distdl.globals.layouts.context import worlds
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.table import composite
from distdl.nn.compiling import leave_uncompiled


def flex_attention(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the handler of global tensors answer, if a query, key or value is one; else torch.

    Raises: RuntimeError if functions of plain tensors have captured what is split.
    """
    for one in (*args[:3], kwargs.get("query"), kwargs.get("key"), kwargs.get("value")):
        if type(one) is GlobalTensor or type(one) is Replica:
            return _of_split(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling() or not worlds.count:
        return original(*args, **kwargs)
    try:
        return original(*args, **kwargs)
    except Exception:
        if _captures_split(*args, **kwargs):
            raise RuntimeError(_PLAIN) from None
        raise


def _captures_split(
    query: Any = None,
    key: Any = None,
    value: Any = None,
    score_mod: Any = None,
    block_mask: Any = None,
    *_: Any,
    **__: Any,
) -> bool:
    places = torch.zeros(4, dtype=torch.int64).unbind()
    if score_mod is not None and captures_split(score_mod, torch.zeros(()), *places):
        return True
    return block_mask is not None and captures_split(block_mask.mask_mod, *places)


_PLAIN = (
    "flex_attention of plain tensors is torch's, which takes no functions of scores or masks that have captured global "
    "tensors or weights of a distributed model; distribute the query (distdl.distribute_tensor), or capture "
    "x.full_tensor()"
)


def _of_split(*args: Any, **kwargs: Any) -> Any:
    given = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
    return handle_torch_function(flex.flex_attention, given, *args, **kwargs)


leave_uncompiled(_of_split)


def create_mask(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Map a function of elements that may have captured what is split, which comes whole to every worker."""
    if not worlds.count or torch.compiler.is_dynamo_compiling():
        return original(*args, **kwargs)
    captured = Captured("create_mask")
    of = composite(original, _vmap_for_bhqkv=lambda function, prefix: mapped(function, captured, prefix))
    return of(*args, **kwargs)


def create_block_mask(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave a function uncompiled that has captured what is split."""
    if worlds.count and not torch.compiler.is_dynamo_compiling():
        try:
            named = signature(original).bind(*args, **kwargs)
        except TypeError:
            return original(*args, **kwargs)  # raises torch's error
        if named.arguments.get("_compile") and captures_split(named.arguments["mask_mod"], *torch.zeros(4).long()):
            named.arguments["_compile"] = False  # global tensors cannot be traced
        args, kwargs = named.args, named.kwargs
    return original(*args, **kwargs)


def dense_to_ordered(original: Any, dense_mask: Any) -> Any:
    """Sort the blocks of a mask, one thread at a time."""
    if torch.compiler.is_dynamo_compiling() or type(dense_mask) is not torch.Tensor:
        return original(dense_mask)  # a global mask sends messages, for which other threads wait
    with _turn:  # torch notes in one dict of the process that it runs
        return original(dense_mask)


_turn = threading.Lock()
