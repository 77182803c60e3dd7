"""``flex_attention``, ``create_mask`` and ``create_block_mask`` take global tensors, for which torch does not look.

torch compiles the function that ``flex_attention`` calls, and makes masks by ``vmap``; neither takes global tensors.
A program may have imported them by name before distdl, so they stay the same objects and get other code. So does the
function that orders the blocks of a mask, where workers that are threads take turns.
"""

# mypy: disable-error-code="name-defined"

from __future__ import annotations

import threading
from inspect import signature
from typing import Any

import torch
from torch.nn.attention import flex_attention as flex
from torch.overrides import handle_torch_function

from distdl.globals.extras.capturing import Captured, captures_split, mapped
from distdl.globals.extras.flex.attention import torchs_flex_attention
from distdl.globals.layouts.context import worlds
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.table import composite, copied, lend
from distdl.nn.compiling import leave_uncompiled


def _flex_attention(*args: Any, **kwargs: Any) -> Any:
    for one in (*args[:3], kwargs.get("query"), kwargs.get("key"), kwargs.get("value")):
        if type(one) is GlobalTensor or type(one) is Replica:
            return _of_split(*args, **kwargs)
    if torch.compiler.is_dynamo_compiling() or not worlds.count:
        return torchs_flex_attention(*args, **kwargs)
    try:
        return torchs_flex_attention(*args, **kwargs)
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


def _create_mask(*args: Any, **kwargs: Any) -> Any:
    if not worlds.count or torch.compiler.is_dynamo_compiling():
        return _torchs_create_mask(*args, **kwargs)
    captured = Captured("create_mask")
    of = composite(_torchs_create_mask, _vmap_for_bhqkv=lambda function, prefix: mapped(function, captured, prefix))
    return of(*args, **kwargs)


def _create_block_mask(*args: Any, **kwargs: Any) -> Any:
    if worlds.count and not torch.compiler.is_dynamo_compiling():
        try:
            named = _OF_BLOCK_MASK.bind(*args, **kwargs)
        except TypeError:
            return _torchs_create_block_mask(*args, **kwargs)  # raises torch's error
        if named.arguments.get("_compile") and captures_split(named.arguments["mask_mod"], *torch.zeros(4).long()):
            named.arguments["_compile"] = False  # global tensors cannot be traced
        args, kwargs = named.args, named.kwargs
    return _torchs_create_block_mask(*args, **kwargs)


def _dense_to_ordered(dense_mask: Any) -> Any:
    """torch's own; threads take turns, as torch notes in one dict of the process that it runs.

    For a global mask they do not: it sends messages, so that a thread whose turn it is would wait for the others.
    """
    if torch.compiler.is_dynamo_compiling() or type(dense_mask) is not torch.Tensor:
        return _torchs_dense_to_ordered(dense_mask)
    with _turn:
        return _torchs_dense_to_ordered(dense_mask)


_torchs_create_mask, _torchs_create_block_mask = copied(flex.create_mask), copied(flex.create_block_mask)
_turn = threading.Lock()
_torchs_dense_to_ordered = copied(flex._dense_to_ordered)
_OF_BLOCK_MASK = signature(flex.create_block_mask)


def install() -> None:
    """Let torch's functions look for global tensors."""
    # (the entries' code runs with the names of torch's module, which checkers do not see)
    lend(flex.flex_attention, _flex_attention, lambda *a, **k: _distdl_flex_attention(*a, **k))  # noqa: F821
    lend(flex.create_mask, _create_mask, lambda *a, **k: _distdl_create_mask(*a, **k))  # noqa: F821
    lend(flex.create_block_mask, _create_block_mask, lambda *a, **k: _distdl_create_block_mask(*a, **k))  # noqa: F821
    lend(flex._dense_to_ordered, _dense_to_ordered, lambda *a, **k: _distdl__dense_to_ordered(*a, **k))  # noqa: F821
