"""Attention of global tensors: keys and values come to where queries are."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.nn import functional

from distdl.geometry.boxes import Interval
from distdl.globals.functions.products import batch_labels
from distdl.globals.functions.work import Work, checked, work_on
from distdl.globals.table import composite, handles
from distdl.globals.tensor import GlobalTensor
from distdl.tensors.connection import local


@handles("scaled_dot_product_attention", "functional")
def attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split over batch, heads and query positions, as queries are; keys and their features are whole.

    Where the features of queries are split, queries are split further along another dim instead.
    """

    def run(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        given = [query, key, value]
        if type(attn_mask).__name__ == "CausalBias":  # (of a module of torch that takes a second to import)
            if is_causal:
                raise ValueError("CausalBias should not be used with causal=True")
            attn_mask, is_causal = _triangle(attn_mask, query.device)
        options = (("is_causal", is_causal), ("scale", scale), ("enable_gqa", enable_gqa))
        checked(_checking(options), [*given, attn_mask] if attn_mask is not None else given)
        if dropout_p > 0:
            return _with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        operands = given if attn_mask is None else [*given, attn_mask]
        batch = max((batch_labels(one, 2) for one in operands), key=len)
        theirs = _batches(key, enable_gqa), _batches(value, enable_gqa)
        labels = [
            (*batch_labels(query, 2), "l", "e"), (*theirs[0], "s", "e"), (*theirs[1], "s", "f"),
            *([_of_mask(attn_mask)] if attn_mask is not None else []),
        ]  # fmt: skip
        lead = next((at for at, one in enumerate(operands) if type(one) is GlobalTensor and one.dim()), 0)
        work = work_on(operands, labels, (*batch, "l", "f"), adds=False, lead=lead, whole=("f",))
        q, k, v, *masks = work.parts(operands, "scaled_dot_product_attention")
        work.result_dtype(_checking(options), operands, "scaled_dot_product_attention")  # (for torch's error)
        if enable_gqa:
            at = work.context.keep(("groups", work, query.shape[-3], key.shape[-3]), lambda: _groups(work, query, key))
            k, v = (one.index_select(-3, at.to(one.device)) if one.numel() else one for one in (k, v))
        rows = work.mine("l")
        split = is_causal and rows != (0, query.shape[-2])
        if split:
            masks = [_causal(rows, key.shape[-2], q.device)]

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> torch.Tensor:
            y: torch.Tensor = functional.scaled_dot_product_attention(
                q, k, v, mask, is_causal=is_causal and not split, scale=scale
            )
            return y

        y = local(attend, work.partial, *((one, (1,) * one.dim()) for one in (q, k, v, *masks)))
        return work.finish(y, "scaled_dot_product_attention")

    return run(*args, **kwargs)


def _checking(options: tuple[tuple[str, Any], ...]) -> Any:
    found = _CHECKS.get(options)
    if found is None:
        found = _CHECKS[options] = lambda *whole: functional.scaled_dot_product_attention(*whole, **dict(options))
    return found


_CHECKS: dict[Any, Any] = {}


def _batches(x: Any, grouped: bool) -> tuple[Hashable, ...]:
    """Labels of the dims of keys or values in front of positions; heads of their own where queries share them."""
    found = batch_labels(x, 2)
    return (*found[:-1], "g") if grouped and found else found


def _of_mask(mask: Any) -> tuple[Hashable, ...]:
    return (*batch_labels(mask, 2), "l", "s")[-mask.dim() :] if mask.dim() else ()


def _groups(work: Work, query: Any, key: Any) -> torch.Tensor:
    """Which head of the keys each of this worker's heads of the queries reads."""
    start, stop = work.mine(batch_labels(query, 2)[-1])
    heads: torch.Tensor = torch.arange(start, stop) // (query.shape[-3] // key.shape[-3])
    return heads


def _causal(rows: Interval, keys: int, device: torch.device) -> torch.Tensor:
    """Which keys the queries of a block may read: those up to their own position."""
    read: torch.Tensor = torch.arange(*rows, device=device)[:, None] >= torch.arange(keys, device=device)
    return read


def _triangle(bias: Any, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """A mask and whether attention is causal, of a triangle that torch does not write out."""
    queries, keys = bias.seq_len_q, bias.seq_len_kv
    if bias.variant.name == "UPPER_LEFT" or queries == keys:
        return None, True
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries), False


def _with_dropout(
    query: Any, key: Any, value: Any, mask: Any, p: float, is_causal: bool, scale: float | None, grouped: bool
) -> Any:
    """Step by step, with the dropout of global tensors, which draws alike over all partitions."""
    if grouped:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        mask = _causal((0, query.shape[-2]), key.shape[-2], scores.device)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -torch.inf) if mask.dtype == torch.bool else scores + mask
    nowhere = (scores == -torch.inf).all(-1, keepdim=True)  # (queries that read no key have zeros, as in torch)
    weights = scores.masked_fill(nowhere, 0).softmax(-1).masked_fill(nowhere, 0)
    return functional.dropout(weights, p) @ value


_multi_head_attention = composite(functional.multi_head_attention_forward)


@handles("multi_head_attention_forward", "functional")
def multi_head_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What torch does in Python, of which each function is one of global tensors."""
    return _multi_head_attention(*args, **kwargs)
