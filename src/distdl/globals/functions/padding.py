"""Padding of global tensors."""

from __future__ import annotations

from numbers import Complex, Real
from typing import Any

import torch

from distdl.geometry.borders import Border
from distdl.globals.functions.slicing import part
from distdl.globals.rules.applying import apply, widened
from distdl.globals.rules.meta_checks import result_shape
from distdl.globals.tensor.table import by_name, handles
from distdl.ops.padding import Padding


@handles("pad", "functional")
@by_name
def pad(func: Any, input: Any, pad: Any, mode: str = "constant", value: float | None = None) -> Any:
    """Add cells around a tensor; negative widths remove some.

    Raises: TypeError for a value that is no number; what torch raises for widths that do not fit.
    """
    if isinstance(value, torch.Tensor) and not (value.dim() or value.requires_grad):
        value = value.item()
    if not (value is None or isinstance(value, Complex if input.is_complex() else Real)):
        raise TypeError(f"pad() needs value to be a number; got {value!r}, a {type(value).__name__}")
    widths = tuple(int(n) for n in pad)
    if mode == "replicate" or (mode == "reflect" and len(widths) < 6):  # the modes that autocast of the CPU widens
        input = widened(input, ("cpu",))
    shape = result_shape(
        func, input, (widths, mode, None if mode == "constant" else value), {}
    )  # or raises torch's error
    pairs = [(0, 0)] * input.dim()
    for place in range(len(widths) // 2):
        pairs[-1 - place] = (widths[2 * place], widths[2 * place + 1])
    if mode == "constant" and all(n <= 0 for n in widths):
        cut = [slice(-before, n + behind) for (before, behind), n in zip(pairs, input.shape, strict=True)]
        return part(input, cut).clone()
    if not input.numel() and torch.Size(shape).numel():
        return input.new_full(shape, value or 0)  # no worker has a cell to start from
    padded = tuple(dim for dim, pair in enumerate(pairs) if pair != (0, 0))
    border = Border(mode, tuple(pairs))
    fill = 0.0 if value is None else value
    return apply(lambda: Padding(border, fill, padded), (border, fill, padded), input, "pad")
