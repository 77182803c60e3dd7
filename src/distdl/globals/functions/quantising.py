"""Rounding to the steps of numbers of few bits, as training for a quantised model does: each element by itself."""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.operands import block_of, whole
from distdl.globals.replicas import plain_of
from distdl.globals.table import by_name, handles
from distdl.globals.tensor import GlobalTensor


@handles("fake_quantize_per_tensor_affine", "torch")
@by_name
def per_tensor(func: Any, input: Any, scale: Any, zero_point: Any, quant_min: int, quant_max: int) -> Any:
    """With one step, a number or a tensor, for all elements."""
    if type(input) is not GlobalTensor:
        return NotImplemented
    block = block_of(input)
    rest = whole(scale), whole(zero_point), quant_min, quant_max
    return GlobalTensor._of(func(block, *rest) if not block.is_meta else block.clone(), input._layout)


@handles("fake_quantize_per_channel_affine", "torch")
@by_name
def per_channel(func: Any, input: Any, scale: Any, zero_point: Any, axis: int, quant_min: int, quant_max: int) -> Any:
    """With a step for each channel."""
    if type(input) is not GlobalTensor or not 0 <= axis < input.dim() or not input.numel():
        return NotImplemented
    scale, zero_point = whole(scale), whole(zero_point)
    sizes = input.shape[axis : axis + 1]
    if scale.shape != sizes or zero_point.shape != sizes or not _between(zero_point, quant_min, quant_max):
        return NotImplemented  # (for torch's error, on every worker)
    block = block_of(input)
    if block.is_meta:  # (for which torch has no kernel)
        y = block.clone()
    elif block.numel():
        start, stop = input._layout.box[axis]
        y = func(block, scale[start:stop], zero_point[start:stop], axis, quant_min, quant_max)
    else:
        y = torch.fake_quantize_per_tensor_affine(block, 1.0, quant_min, quant_min, quant_max)
    return GlobalTensor._of(y, input._layout)


@handles("fused_moving_avg_obs_fake_quant", "torch")
@by_name
def observed(
    func: Any,
    input: Any, observer_on: Any, fake_quant_on: Any, running_min: Any, running_max: Any, scale: Any,
    zero_point: Any, averaging_const: float, quant_min: int, quant_max: int, ch_axis: int,
    per_row_fake_quant: bool = False, symmetric_quant: bool = False,
) -> Any:  # fmt: skip
    """The same, with steps that follow the least and the greatest element seen so far, as averages that move."""
    kept = running_min, running_max, scale, zero_point
    if type(input) is not GlobalTensor or GlobalTensor in map(type, kept) or not input.numel():
        return NotImplemented
    if per_row_fake_quant and ch_axis != 0:
        return NotImplemented  # (for torch's error)
    if _is_on(observer_on):  # (torch looks for extremes alone, so these stand for the whole tensor)
        x = input.detach()
        extremes = x.flatten(1).aminmax(dim=1) if per_row_fake_quant else x.aminmax()
        ends = torch.stack(tuple(extremes), -1).full_tensor()  # type: ignore[attr-defined]
        rest = averaging_const, quant_min, quant_max, ch_axis, per_row_fake_quant, symmetric_quant
        if not ends.is_meta:
            func(ends, observer_on, fake_quant_on, *kept, *rest)
    if not _is_on(fake_quant_on):
        return input.clone()
    if per_row_fake_quant:
        return torch.fake_quantize_per_channel_affine(input, scale, zero_point, ch_axis, quant_min, quant_max)
    return torch.fake_quantize_per_tensor_affine(input, scale, zero_point, quant_min, quant_max)


def _is_on(flag: torch.Tensor) -> bool:
    """What a flag says; in a summary, where none has a value, that it is on."""
    plain = plain_of(flag)
    return plain.is_meta or bool(plain)


def _between(points: torch.Tensor, least: int, most: int) -> bool:
    return points.is_meta or bool(((points >= least) & (points <= most)).all())
