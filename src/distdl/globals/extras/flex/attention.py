"""Attention with functions of scores and masks (``flex_attention``): keys and values come to where queries are.

torch's own function checks the arguments, and calls :func:`_attend` in place of its operator. Each worker computes its
block of the scores as torch does without a kernel::

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
from distdl.globals.rules.work import Work, check_shapes, work_on
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.tensor.table import REPLICATED, TABLE, composite, copied
from distdl.globals.views.strides import strides_if
from distdl.tensors.connection import local
from distdl.tensors.dtypes import without_autocast
from distdl.tensors.modes import uncounted
from distdl.tensors.private_flex import apply_kernel_options, safe_softmax, unchanged_scores

_NAME = "flex_attention"
_RESULT = ("b", "h", "l", "f")
_LABELS = ("b", "h", "l", "e"), ("b", "h", "s", "e"), ("b", "h", "s", "f")
_SHARED = ("b", "h", "l", "e"), ("b", "g", "s", "e"), ("b", "g", "s", "f")  # several heads of queries share a key


def flex_attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of ``flex_attention``: the result is split over batch, heads and query positions, as queries are.

    Keys and values are gathered along positions and features. Tensors that functions of scores and masks have captured
    are gathered on every worker (see ``extras.capturing``). In a rehearsal, block masks become meta tensors.
    """
    if tensors_in((args, kwargs))[0].is_meta:

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
    """Stands for torch's operator, and takes what that takes.

    Returns: the result; and of the scores of each query the logarithm of the sum of exponentials, and the maximum, both
        divided by log(2). The last two are None unless the options ask for them.
    Raises: RuntimeError for batches that do not broadcast or no keys, as torch does.
    """
    cast = autocast_dtype(query)
    if cast is not None:
        query, key, value = (cast_to(one, cast) for one in (query, key, value))
    groups = query.size(1) // key.size(1)
    queries, keys = query.size(0), key.size(0)
    if not (queries == keys or (queries > 1 and keys == 1)):
        raise RuntimeError(f"Bq and Bkv must broadcast. Got Bq={queries} and Bkv={keys}")
    if not key.size(2):
        torch.empty(1, 1, 1, 0, device="cpu").max(-1)  # raises torch's error
    placed = _placed(query, key, value, groups)
    q, k, v = placed.parts
    if groups > 1:
        k, v = (shared_heads(one, placed.box[1], groups, placed.context) for one in (k, v))
    order = _order(query.stride())

    def weigh(scores: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = safe_softmax(scores, dim=-1).to(query.dtype) @ v.to(query.dtype)
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
    """What this worker computes.

    Attributes:
        parts: the queries, keys and values that it needs.
        box: its intervals of batch, heads and queries.
        shape: of its block of the result.
        work: how the result is split; None if every worker has all of it.
    """

    context: Context
    parts: Sequence[torch.Tensor]
    box: Sequence[Interval]
    shape: Shape
    work: Work | None

    def finish(self, y: torch.Tensor, order: Sequence[int] = ()) -> torch.Tensor:
        """The global tensor of which every worker has such a block, or a replica if every worker has all of it.

        Args:
            y: this worker's block: of the result, or of numbers for each query.
            order: of the dims in memory, the slowest first; by default contiguous.
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
    """Bring queries, keys and values to the workers that need them.

    Args:
        groups: how many heads of queries share a head of keys.
    Raises: what torch raises for shapes that do not fit.
    """
    given = (query, key, value)
    lead = next((place for place, one in enumerate(given) if type(one) is GlobalTensor), None)
    if lead is None:  # all three are replicas, so each worker computes all of the result
        context = next(one._context for one in given if type(one) is Replica)
        box = [(0, n) for n in query.shape[:3]]
        return _Placed(context, tuple(map(plain_of, given)), box, (*query.shape[:3], value.shape[3]), None)
    check_shapes(_check_shapes, given)
    work = work_on(given, _SHARED if groups > 1 else _LABELS, _RESULT, adds=False, lead=lead, whole=("f",))
    box = [work.mine(label) for label in _RESULT[:3]]
    return _Placed(work.context, work.parts(given, _NAME), box, work.partial, work)


class _Scoring:
    """Computes the scores of a worker's queries and keys, and applies ``score_mod`` and ``mask_mod`` to them."""

    def __init__(self, placed: _Placed, score_mod: Any, mask_mod: Any, scale: float) -> None:
        self._placed, self._scale = placed, scale
        self._score_mod, self._mask_mod = score_mod, mask_mod
        imagined = placed.parts[0].is_meta
        self._captured = Captured(_NAME, placed.context, trained=True, imagined=imagined)
        self._captured_by_mask = Captured(_NAME, placed.context, imagined=imagined)

    def __call__(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        working = torch.float64 if q.dtype is torch.float64 else torch.float32
        scores = q.to(working) @ k.to(working).transpose(-2, -1)
        scores = (scores * self._scale).to(working)
        if self._score_mod is unchanged_scores and self._mask_mod is flex.noop_mask:
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
        """Raises: RuntimeError, on every worker, if the gradient of a captured tensor would not be added up."""
        self._captured.check(scores, *inputs)


def _logsumexp(scores: torch.Tensor) -> torch.Tensor:
    nowhere = torch.all(scores == -torch.inf, dim=-1)
    return torch.where(nowhere, -torch.inf, scores.logsumexp(dim=-1)) / math.log(2)


def _largest(scores: torch.Tensor) -> torch.Tensor:
    return torch.max(scores, dim=-1)[0] / math.log(2)


def _check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Compute attention on meta tensors. Raises: what torch raises for shapes that do not fit."""
    key, value = (one.repeat_interleave(query.size(1) // key.size(1), 1) for one in (key, value))
    safe_softmax(query @ key.transpose(-2, -1), -1) @ value.expand(query.size(0), *value.shape[1:])


def _order(strides: Sequence[int]) -> list[int]:
    """The order of dims in the result's memory, the slowest first, given the queries' strides: features are last."""
    order = sorted(range(4), key=lambda dim: (-strides[dim], dim))
    return [dim for dim in order if dim != 3] + [3]


def _strides(shape: Shape, order: Sequence[int]) -> Shape:
    """The strides of a tensor whose dims lie in this order in memory, the slowest first; ``()`` means contiguous."""
    with uncounted():
        whole = torch.empty([shape[dim] for dim in order], device="meta")
        return strides_if(whole.permute([order.index(dim) for dim in range(len(shape))]))


def _options(
    query: Any, key: Any, value: Any, return_lse: bool, kernel_options: Any, return_aux: Any = None
) -> dict[str, Any]:
    """torch's options of a kernel; they ask for the logarithm of the sum only if the caller does."""
    found: dict[str, Any] = apply_kernel_options(query, key, value, return_lse, kernel_options, return_aux)
    found["OUTPUT_LOGSUMEXP"] = return_lse or (return_aux is not None and return_aux.lse)
    return found


torchs_flex_attention = copied(flex.flex_attention)
_checked = composite(
    torchs_flex_attention,
    flex_attention_hop=_attend,
    _apply_kernel_options=_options,
    _validate_device=lambda *_: None,  # torch's refuses gradients on CPUs
    _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG=True,  # without it, torch compiles the function that it calls
)
