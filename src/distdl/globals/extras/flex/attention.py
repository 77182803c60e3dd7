"""Attention with functions of scores and masks (``flex_attention``): keys and values come to where queries are.

torch's own function checks the arguments, and calls what stands here in the place of its operator. Each worker computes
its block of the scores as torch does without a kernel::

    scores = q @ k.T * scale,   scores' = score_mod(scores, b, h, q_idx, kv_idx) where mask_mod(b, h, q_idx, kv_idx)
    y = softmax(scores') @ v

in which b, h, q_idx and kv_idx are the places in the whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch.nn.attention import flex_attention as flex

from distdl.geometry.boxes import Interval, Shape
from distdl.globals.extras.capturing import Captured, mapped
from distdl.globals.functions.attention import shared_heads
from distdl.globals.functions.number_arguments import with_numbers_at
from distdl.globals.layouts.context import Context
from distdl.globals.rules.applying import autocast_dtype, cast_to
from distdl.globals.rules.work import Work, checked, work_on
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.tensor.table import REPLICATED, TABLE, composite, copied
from distdl.globals.views.strides import strides_if
from distdl.tensors.connection import local
from distdl.tensors.dtypes import without_autocast
from distdl.tensors.modes import uncounted

_NAME = "flex_attention"
_RESULT = ("b", "h", "l", "f")
_LABELS = ("b", "h", "l", "e"), ("b", "h", "s", "e"), ("b", "h", "s", "f")
_SHARED = ("b", "h", "l", "e"), ("b", "g", "s", "e"), ("b", "g", "s", "f")  # (by several heads of the queries)


def flex_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split over batch, heads and query positions, as queries are; keys and their features are whole.

    What functions of scores and of masks have captured comes whole to every worker (see ``extras.capturing``).
    """
    if tensors_in((args, kwargs))[0].is_meta:  # (in a rehearsal; masks are those of the devices)

        def imagined(value: Any) -> Any:
            return value.to("meta") if isinstance(value, flex.BlockMask) else value

        args, kwargs = tuple(map(imagined, args)), {name: imagined(value) for name, value in kwargs.items()}
    return _checked(*args, **kwargs)


TABLE[flex.flex_attention] = with_numbers_at(flex_attention, flex.flex_attention)
REPLICATED[flex.flex_attention] = flex_attention


def _attend(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable[..., Any],
    block_mask: tuple[Any, ...],
    scale: float,
    options: dict[str, Any],
) -> tuple[Any, Any, Any]:
    """What torch's operator gives: the result, and of each query the log of the sum and the maximum, over log(2).

    The last two are None if nobody asks for them.
    """
    cast = autocast_dtype(query)
    if cast is not None:
        query, key, value = (cast_to(one, cast) for one in (query, key, value))
    groups = query.size(1) // key.size(1)
    queries, keys = query.size(0), key.size(0)
    if not (queries == keys or (queries > 1 and keys == 1)):
        raise RuntimeError(f"Bq and Bkv must broadcast. Got Bq={queries} and Bkv={keys}")
    if not key.size(2):  # (torch's error)
        torch.empty(1, 1, 1, 0, device="cpu").max(-1)
    placed = _placed(query, key, value, groups)
    q, k, v = placed.parts
    if groups > 1:
        k, v = (shared_heads(one, placed.box[1], groups, placed.context) for one in (k, v))
    order = _order(query.stride())

    def weigh(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch._safe_softmax(scores, dim=-1).to(query.dtype) @ v.to(query.dtype)
        return y.permute(order).contiguous().permute([order.index(dim) for dim in range(4)])

    shape, least = placed.shape, (1,) * 4
    rows: list[torch.Tensor | None] = [None, None]
    with nullcontext() if cast is None else without_autocast(q.device):
        scoring = _Scoring(placed, score_mod, block_mask[-1], scale)
        scores = local(scoring, (*shape[:3], key.size(2)), (q, least), (k, least))
        scoring.check(scores, q, k)
        y = local(weigh, shape, (scores, least), (v, least))
        for place, (name, function) in enumerate((("OUTPUT_LOGSUMEXP", _logsumexp), ("OUTPUT_MAX", _largest))):
            if options[name]:
                rows[place] = local(function, shape[:3], (scores, least))
    lse, largest = (None if one is None else placed.finish(one) for one in rows)
    return placed.finish(y, order), lse, largest


class _Placed(NamedTuple):
    """What a worker computes, and of what.

    Attributes:
        parts: of queries, keys and values.
        box: its intervals of batch, heads and queries.
        shape: of its part of the result.
        work: how the result is split; None if all workers have all of it.
    """

    context: Context
    parts: Sequence[torch.Tensor]
    box: Sequence[Interval]
    shape: Shape
    work: Work | None

    def finish(self, y: torch.Tensor, order: Sequence[int] = ()) -> torch.Tensor:
        """What the blocks of all workers are together; with fewer dims, numbers of each query.

        Args:
            order: of its dims in memory, the slowest first.
        """
        if self.work is None:
            return Replica._of(y, self.context)
        layout = self.work.result
        if y.dim() < len(layout.rulers):
            layout = self.context.layout(layout.partition.workers[..., 0], layout.intervals[: y.dim()])
        made = GlobalTensor._of(y, layout)
        strides = _strides(layout.extents, order) if order else ()
        if strides:
            made._strides = strides
        return made


def _placed(query: Any, key: Any, value: Any, groups: int) -> _Placed:
    given = (query, key, value)
    lead = next((place for place, one in enumerate(given) if type(one) is GlobalTensor), None)
    if lead is None:  # (weights alone, and what follows from them: each worker computes all of it)
        context = next(one._context for one in given if type(one) is Replica)
        box = [(0, n) for n in query.shape[:3]]
        return _Placed(context, tuple(map(plain_of, given)), box, (*query.shape[:3], value.shape[3]), None)
    checked(_shapes_fit, given)
    work = work_on(given, _SHARED if groups > 1 else _LABELS, _RESULT, adds=False, lead=lead, whole=("f",))
    box = [work.mine(label) for label in _RESULT[:3]]
    return _Placed(work.context, work.parts(given, _NAME), box, work.partial, work)


class _Scoring:
    """The scores of a worker's queries and keys, changed by functions of their places in the whole tensor."""

    def __init__(self, placed: _Placed, score_mod: Any, mask_mod: Any, scale: float) -> None:
        self._placed, self._scale = placed, scale
        self._score_mod, self._mask_mod = score_mod, mask_mod
        imagined = placed.parts[0].is_meta
        self._captured = Captured(_NAME, placed.context, curved=True, imagined=imagined)
        self._captured_by_mask = Captured(_NAME, placed.context, imagined=imagined)

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        working = torch.float64 if q.dtype is torch.float64 else torch.float32
        scores = q.to(working) @ k.to(working).transpose(-2, -1)
        scores = (scores * self._scale).to(working)
        if self._score_mod is _IDENTITY and self._mask_mod is flex.noop_mask:
            return scores
        starts = [start for start, _ in self._placed.box] if q is self._placed.parts[0] else (0, 0, 0)
        places = [
            torch.arange(start, start + n, device=scores.device)
            for start, n in zip((*starts, 0), scores.shape, strict=True)
        ]
        changed = mapped(self._score_mod, self._captured, (0,))(scores, *places)
        shown = mapped(self._mask_mod, self._captured_by_mask)(*places)
        lowest = torch.tensor(-torch.inf, dtype=working, device=scores.device)
        return torch.where(shown, changed, lowest)

    def check(self, scores: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Raises: RuntimeError, on every worker, if the gradient of something captured would not be added up."""
        self._captured.check(scores, *inputs)


_IDENTITY: Any = flex._identity


def _logsumexp(scores: torch.Tensor) -> torch.Tensor:
    nowhere = torch.all(scores == -torch.inf, dim=-1)
    return torch.where(nowhere, -torch.inf, scores.logsumexp(dim=-1)) / math.log(2)


def _largest(scores: torch.Tensor) -> torch.Tensor:
    return torch.max(scores, dim=-1)[0] / math.log(2)


def _shapes_fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Compute as torch does. Raises what it raises."""
    key, value = (one.repeat_interleave(query.size(1) // key.size(1), 1) for one in (key, value))
    torch._safe_softmax(query @ key.transpose(-2, -1), -1) @ value.expand(query.size(0), *value.shape[1:])


def _order(strides: Sequence[int]) -> list[int]:
    """The order of dims in the memory of the result, the slowest first: that of queries, with features last."""
    order = sorted(range(4), key=lambda dim: (-strides[dim], dim))
    return [dim for dim in order if dim != 3] + [3]


def _strides(shape: Shape, order: Sequence[int]) -> Shape:
    """Those of a tensor whose dims lie in this order; none if it is contiguous."""
    with uncounted():
        whole = torch.empty([shape[dim] for dim in order], device="meta")
        return strides_if(whole.permute([order.index(dim) for dim in range(len(shape))]))


def _options(
    query: Any, key: Any, value: Any, return_lse: bool, kernel_options: Any, return_aux: Any = None
) -> dict[str, Any]:
    """torch's options, in which nothing is computed that nobody asks for."""
    found: dict[str, Any] = _torchs_options(query, key, value, return_lse, kernel_options, return_aux)
    found["OUTPUT_LOGSUMEXP"] = return_lse or (return_aux is not None and return_aux.lse)
    return found


_torchs_options: Any = flex._apply_kernel_options


torchs_flex_attention = copied(flex.flex_attention)
_checked = composite(
    torchs_flex_attention,
    flex_attention_hop=_attend,
    _apply_kernel_options=_options,
    _validate_device=lambda *_: None,  # (which refuses gradients on CPUs)
    _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,  # (it would compile what it calls)
)
