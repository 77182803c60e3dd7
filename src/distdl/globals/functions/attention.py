"""Attention of global tensors: a worker has some queries, and gets all the keys and values that these read."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache, partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from distdl.geometry.boxes import Interval, Shape
from distdl.globals.functions.products import batch_labels
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.alignment import keep_sample, local_block
from distdl.globals.rules.applying import autocast_dtype
from distdl.globals.rules.meta_checks import check_once
from distdl.globals.rules.work import Work, check_shapes, work_on
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
    """Compute attention, split over batch, heads and query positions as the queries are.

    A worker gets all positions and features of the keys and values of its heads. Where the features of the queries are
    split, the queries are split further along another dim instead.
    """
    if type(attn_mask).__name__ == "CausalBias":  # importing its class takes a second
        if is_causal:
            raise ValueError("CausalBias should not be used with causal=True")
        attn_mask, is_causal = _mask_of_bias(attn_mask, query.device)
    whole = _with_options(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    operands = [query, key, value, *([] if attn_mask is None else [attn_mask])]
    check_shapes(whole, operands, compares=not enable_gqa)
    no_heads = enable_gqa and not key.shape[-3]
    if dropout_p > 0 and not no_heads:
        return _attend_with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    work = _work_of(operands, enable_gqa)
    q, k, v, *masks = work.parts(operands, func.__name__)
    work.result_dtype(whole, operands, func.__name__)  # raises for dtypes that torch refuses
    if enable_gqa and not no_heads:
        heads, count = work.mine(work.out[-3]), query.shape[-3]
        k = shared_heads(k, heads, count // key.shape[-3], work.context)
        v = shared_heads(v, heads, count // value.shape[-3], work.context)
    rows = work.mine("l")
    split = is_causal and rows != (0, query.shape[-2])
    if split:
        masks = [_causal(rows, key.shape[-2], q.device)]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None) -> Any:
        return func(q, k, v, mask, is_causal=is_causal and not split, scale=scale)

    y = local(attend, work.partial, *((one, (1,) * one.dim()) for one in (q, k, v, *masks)))
    return work.finish(y, func.__name__)


@cache
def _with_options(**options: Any) -> Any:
    """torch's attention with these options: the same object for the same options, as caches of checks need it."""
    return partial(functional.scaled_dot_product_attention, **options)


def _work_of(operands: Sequence[Any], grouped: bool) -> Work:
    """How the workers share attention of queries, keys, values and maybe a mask.

    Args:
        grouped: whether several heads of the queries share one head of the keys and values.
    """
    query, key, value, *masks = operands
    batch = max((batch_labels(one, 2) for one in operands), key=len)
    labels = [
        (*batch_labels(query, 2), "l", "e"),
        (*_batch_of_keys(key, grouped), "s", "e"), (*_batch_of_keys(value, grouped), "s", "f"),
        *((*batch_labels(mask, 2), "l", "s")[-mask.dim() :] if mask.dim() else () for mask in masks),
    ]  # fmt: skip
    lead = next((at for at, one in enumerate(operands) if type(one) is GlobalTensor and one.dim()), 0)
    return work_on(operands, labels, (*batch, "l", "f"), adds=False, lead=lead, whole=("f",))


def _batch_of_keys(x: Any, grouped: bool) -> tuple[Hashable, ...]:
    """Labels of the batch and head dims of keys or values. Shared heads have a label of their own."""
    found = batch_labels(x, 2)
    return (*found[:-1], "g") if grouped and found else found


def shared_heads(block: torch.Tensor, heads: Interval, sharing: int, context: Context) -> torch.Tensor:
    """For each head of the queries on this worker, the head of the keys or values that it reads.

    Args:
        block: all heads of the keys or values, each of which so many heads of the queries share.
    """
    if not block.numel():
        return block
    read = context.keep(
        ("shared heads", heads, sharing), lambda: Constant(torch.arange(*heads, device="cpu") // sharing)
    )
    return block.index_select(-3, read.on(block.device))


def _causal(rows: Interval, keys: int, device: torch.device) -> torch.Tensor:
    """The mask of causal attention for a block of queries: each may read the keys up to its own position."""
    read: torch.Tensor = torch.arange(*rows, device=device)[:, None] >= torch.arange(keys, device=device)
    return read


def _mask_of_bias(bias: Any, device: torch.device) -> tuple[torch.Tensor | None, bool]:
    """``attn_mask`` and ``is_causal`` that mean the same as one of torch's causal biases."""
    queries, keys = bias.seq_len_q, bias.seq_len_kv
    if bias.variant.name == "UPPER_LEFT" or queries == keys:
        return None, True
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries), False


def _attend_with_dropout(
    query: Any, key: Any, value: Any, mask: Any, p: float, is_causal: bool, scale: float | None, grouped: bool
) -> Any:
    """Attention step by step, with the dropout of global tensors: it draws the same numbers over every partition."""
    if grouped:
        key, value = (one.repeat_interleave(query.shape[-3] // one.shape[-3], -3) for one in (key, value))
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        mask = _causal((0, query.shape[-2]), key.shape[-2], scores.device)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), -torch.inf) if mask.dtype == torch.bool else scores + mask
    masked = (scores == -torch.inf).all(-1, keepdim=True)  # torch gives zeros to a query that may read no key
    weights = scores.masked_fill(masked, 0).softmax(-1).masked_fill(masked, 0)
    return functional.dropout(weights, p) @ value


_multi_head_attention = composite(functional.multi_head_attention_forward)


@handles("multi_head_attention_forward", "functional")
def multi_head_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run torch's Python code, in which each function has a handler.

    If the inputs are split over samples alone, each worker runs torch's function on its own samples instead. torch
    merges positions and samples into one dim before the last linear map. There the samples of a worker are not
    consecutive, so they would have to move.
    """
    named = _SIGNATURE.bind(*args, **kwargs).arguments
    if not _is_split_over_samples(named):
        return _multi_head_attention(*args, **kwargs)
    check_once(func, args, kwargs)
    return _attend_samples(func, named)


@handles("_nested_tensor_from_mask_left_aligned", "torch")
def is_left_aligned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Tell ``nn.TransformerEncoder`` not to nest a global tensor by its padding: it then computes as in training.

    torch's kernels for nested tensors take plain tensors only, so the answer needs no message.
    """
    return False


_SIGNATURE = signature(functional.multi_head_attention_forward)
_INPUTS = ("query", "key", "value")
_MASKS = ("attn_mask", "key_padding_mask")
_WEIGHTS = (
    "in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight", "bias_k", "bias_v",
    "out_proj_weight", "out_proj_bias",
)  # fmt: skip


def _is_split_over_samples(named: dict[str, Any]) -> bool:
    """Whether each worker can run multi-head attention on its own samples, without messages.

    So query, key and value are (positions, samples, features), and their samples are split alike over the same workers,
    nothing else is split, and no weight is global. Not with dropout, which draws the same numbers over every partition;
    nor with a mask that has a gradient, nor under autocast.
    """
    query, *_ = inputs = [named[name] for name in _INPUTS]
    if any(type(one) is not GlobalTensor or one.dim() != 3 for one in inputs):
        return False
    workers, samples = query._layout.partition.workers, query._layout.intervals[1]
    for one in inputs:
        if one._layout.intervals[1] != samples or not np.array_equal(one._layout.partition.workers, workers):
            return False
    draws = named.get("training", True) and named["dropout_p"] > 0
    static = any(named.get(name) is not None for name in ("static_k", "static_v"))
    is_global = any(type(named.get(name)) is GlobalTensor for name in (*_WEIGHTS, "attn_mask"))
    if workers.shape != (1, workers.size, 1) or draws or static or is_global:
        return False
    differentiated = any(named.get(name) is not None and named[name].requires_grad for name in _MASKS)
    return not differentiated and autocast_dtype(query) is None


def _attend_samples(func: Any, named: dict[str, Any]) -> tuple[GlobalTensor, GlobalTensor | None]:
    """Multi-head attention on the samples of each worker: the result, and the weights or None.

    Args:
        named: arguments of which :func:`_is_split_over_samples` is true.
    """
    query = named["query"]
    layout, context = query._layout, query._context
    own: dict[str, Any] = _local_masks(named, layout)
    weights = {name: entered(named[name], context) for name in _WEIGHTS if named.get(name) is not None}
    inputs = [named[name] for name in _INPUTS]
    blocks = {id(one): block_of(one) for one in inputs}  # one block for one tensor, because torch compares them by `is`
    if 0 in layout.local:
        # a worker without cells computes with a sample of zeros, so its graph has the same nodes as elsewhere
        blocks = {id(one): zeros_on(block_of(one), (one.shape[0], 1, one.shape[2])) for one in inputs}
        own = {"attn_mask": None, "key_padding_mask": None, "is_causal": False}
    own |= {name: blocks[id(named[name])] for name in _INPUTS}
    y, attended = func(**{**named, **weights, **own})
    target = context.layout(layout.partition.workers, [layout.intervals[0], layout.intervals[1], ((0, y.shape[2]),)])
    y = no_view(y, *blocks.values()) if target.local == tuple(y.shape) else zeros_on(y, target.local)
    if attended is None:
        return GlobalTensor._of(y, target), None
    first = _samples_first(layout, tuple(attended.shape))
    attended = attended if first.local == tuple(attended.shape) else zeros_on(attended, first.local)
    return GlobalTensor._of(y, target), GlobalTensor._of(attended, first)


def _local_masks(named: dict[str, Any], layout: KnownLayout) -> dict[str, torch.Tensor]:
    """This worker's block of each mask, by its name, for inputs of a layout. A mask without samples stays whole."""
    masks = {name: named[name] for name in _MASKS if named.get(name) is not None}
    for name, mask in masks.items():
        if type(mask) is not GlobalTensor:
            keep_sample(plain_of(mask), layout.context)
        if name == "key_padding_mask" or mask.dim() == 3:
            entries = 1 if name == "key_padding_mask" else named["num_heads"]
            masks[name] = local_block(mask, _samples_first(layout, tuple(mask.shape), entries), name)
    return masks


def _samples_first(layout: KnownLayout, shape: Shape, entries: int = 1) -> KnownLayout:
    """The layout of a tensor whose first dim is the samples of an input (positions, samples, features) of a layout.

    Args:
        entries: how many cells of the first dim each sample has.
    """
    along = tuple((start * entries, stop * entries) for start, stop in layout.intervals[1])
    workers = layout.partition.workers.reshape(-1, *[1] * (len(shape) - 1))
    return layout.context.layout(workers, [along, *(((0, n),) for n in shape[1:])])
