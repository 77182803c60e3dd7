"""Attention of global tensors: keys and values come to where queries are."""

from __future__ import annotations

from collections.abc import Hashable
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from distdl.geometry.boxes import Interval, Intervals, Shape
from distdl.globals.functions.products import batch_labels
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.alignment import part_of, sample, taken
from distdl.globals.rules.applying import autocast_dtype
from distdl.globals.rules.meta_checks import judged
from distdl.globals.rules.work import checked, work_on
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import plain_of
from distdl.globals.tensor.table import by_name, composite, handles
from distdl.tensors.connection import local, no_view, zeros_on
from distdl.tensors.constants import Constant


@handles("scaled_dot_product_attention", "functional")
@by_name
def attention(
    func: Any,
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
    """Split over batch, heads and query positions, as queries are; keys and their features are whole.

    Where the features of queries are split, queries are split further along another dim instead.
    """
    given = [query, key, value]
    if type(attn_mask).__name__ == "CausalBias":  # (of a module of torch that takes a second to import)
        if is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        attn_mask, is_causal = _triangle(attn_mask, query.device)
    options = (("is_causal", is_causal), ("scale", scale), ("enable_gqa", enable_gqa))
    operands = given if attn_mask is None else [*given, attn_mask]
    checked(_checking(options), operands, compares=not enable_gqa)
    is_void = enable_gqa and not key.shape[-3]  # (keys have no heads)
    if dropout_p > 0 and not is_void:
        return _with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
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
    if enable_gqa and not is_void:
        heads, count = work.mine(batch[-1]), query.shape[-3]
        k = shared_heads(k, heads, count // key.shape[-3], work.context)
        v = shared_heads(v, heads, count // value.shape[-3], work.context)
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


def shared_heads(part: torch.Tensor, heads: Interval, groups: int, context: Context) -> torch.Tensor:
    """Of keys or values, the head that each of these heads of the queries reads; so many of them read one."""
    if not part.numel():
        return part
    read = context.keep(("shared heads", heads, groups), lambda: Constant(torch.arange(*heads, device="cpu") // groups))
    return part.index_select(-3, read.on(part.device))


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
    """What torch does in Python, of which each function is one of global tensors.

    Where samples alone are split, each worker does all of it on its own: torch makes one dim of positions and samples
    before the last linear map, and samples, which do not follow each other there, would have to move.
    """
    found = _of_samples(func, args, kwargs)
    return _multi_head_attention(*args, **kwargs) if found is None else found


@handles("_nested_tensor_from_mask_left_aligned", "torch")
def is_left_aligned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``nn.TransformerEncoder`` may nest a tensor by its padding: no global one, so it computes as in training.

    torch's kernels for nested tensors take plain tensors alone, so nothing has to come together to tell.
    """
    return False


_SIGNATURE = signature(functional.multi_head_attention_forward)
_INPUTS = ("query", "key", "value")
_WEIGHTS = (
    "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v",
    "out_proj_weight", "out_proj_bias",
)  # fmt: skip


def _of_samples(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Attention of (positions, samples, features) of which samples alone are split, in one way; None for others.

    With dropout, too, it is for others: that draws alike over all partitions.
    """
    named = _SIGNATURE.bind(*args, **kwargs).arguments
    query, *_ = inputs = [named[name] for name in _INPUTS]
    if any(type(one) is not GlobalTensor or one.dim() != 3 for one in inputs):
        return None
    layout, context = query._layout, query._context
    workers, samples = layout.partition.workers, layout.intervals[1]
    for one in inputs:
        if one._layout.intervals[1] != samples or not np.array_equal(one._layout.partition.workers, workers):
            return None
    masks = {name: named[name] for name in ("attn_mask", "key_padding_mask") if named.get(name) is not None}
    whole = [named.get(name) for name in (*_WEIGHTS, "attn_mask")]
    static = any(named.get(name) is not None for name in ("static_k", "static_v"))
    draws = named.get("training", True) and named["dropout_p"] > 0
    if workers.shape != (1, workers.size, 1) or draws or static or any(type(one) is GlobalTensor for one in whole):
        return None
    if any(one.requires_grad for one in masks.values()) or autocast_dtype(query) is not None:
        return None
    judged(func, args, kwargs)

    def split(shape: Shape, along: Intervals) -> KnownLayout:
        """The layout of what has samples, or several entries of each, as its first dim."""
        whole = [((0, n),) for n in shape[1:]]
        made: KnownLayout = context.layout(workers.reshape(-1, *[1] * len(whole)), [along, *whole])
        return made

    heads = named["num_heads"]
    for name, mask in masks.items():
        if type(mask) is not GlobalTensor:
            sample(plain_of(mask), context)
        if name == "key_padding_mask":
            masks[name] = part_of(mask, split(tuple(mask.shape), samples), name)
        elif mask.dim() == 3:
            along = tuple((start * heads, stop * heads) for start, stop in samples)
            masks[name] = taken(mask, split(tuple(mask.shape), along))
    given = [name for name in _WEIGHTS if named.get(name) is not None]
    own = dict.fromkeys(("attn_mask", "key_padding_mask")) | {"is_causal": False}  # (for what needs no mask)
    weights = {name: entered(named[name], context) for name in given}
    blocks = {id(one): block_of(one) for one in inputs}  # (torch asks whether they are one tensor)
    if 0 in layout.local:  # (what is differentiated goes the same way there: with a sample of zeros)
        blocks = {id(one): zeros_on(block_of(one), (one.shape[0], 1, one.shape[2])) for one in inputs}
    else:
        own = masks
    y, attended = func(**{**named, **weights, **own, **{name: blocks[id(named[name])] for name in _INPUTS}})
    target = context.layout(workers, [layout.intervals[0], samples, ((0, y.shape[2]),)])
    y = no_view(y, *blocks.values()) if target.local == tuple(y.shape) else zeros_on(y, target.local)
    found = GlobalTensor._of(y, target)
    if attended is None:
        return found, None
    target = split(tuple(attended.shape), samples)
    attended = attended if target.local == tuple(attended.shape) else zeros_on(attended, target.local)
    return found, GlobalTensor._of(attended, target)
