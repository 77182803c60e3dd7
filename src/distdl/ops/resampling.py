"""Resampling: which inputs an output of an interpolation reads, with which weights, and the operator on one block.

torch computes where an output lies among the inputs in floating point, and rounds it down. A product that is just below
a whole number in one arithmetic is that number in another, and then another input is read. So the arithmetic here is
torch's own on CPUs, operation by operation, in the same precision; and windows are made from the same indices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from distdl.geometry.boxes import Box, shape
from distdl.ops.weighing import FloatArray, IntArray, Tap, Weighing
from distdl.tensors.connection import local
from distdl.tensors.function import Function
from distdl.tensors.memory import empty

_MODES = {
    "nearest": ("nearest", (1, 2, 3)),
    "nearest-exact": ("nearest-exact", (1, 2, 3)),
    "linear": ("linear", (1, 2, 3)),
    "bilinear": ("linear", (2,)),
    "trilinear": ("linear", (3,)),
    "bicubic": ("cubic", (2,)),
}
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_PIECE = 1 << 20  # cells of channels that are interpolated together: of a few, each operator takes longer to call
_SMALL = 128  # the largest height plus width of a result for which torch takes another kernel


@dataclass(frozen=True)
class Resampling:
    """How one dim is interpolated.

    Attributes:
        kind: nearest, nearest-exact, linear or cubic.
        inputs, outputs: global extents.
        factor: the scale factor that was given; None for the ratio of the extents.
        align_corners: whether the first and the last cells lie on each other, and not their outer edges.
        wide: whether torch computes indices in float64, as for tensors of float64; else in float32.
        small: whether torch takes its kernel for small images, which always computes nearest in float32.
    """

    kind: str
    inputs: int
    outputs: int
    factor: float | None = None
    align_corners: bool = False
    wide: bool = True
    small: bool = False

    @property
    def copies(self) -> bool:
        """Whether each output is the input at its own place: for linear kinds that is so whatever the factor."""
        return self.inputs == self.outputs and self.kind == "linear"

    @property
    def step(self) -> float:
        """Inputs from one output to the next."""
        return self.inputs / self.outputs if self.factor is None or self.copies else 1 / self.factor

    def taps(self, outputs: IntArray) -> list[Tap]:
        """The inputs that each of these outputs reads, in ascending order, and their weights (None: 1)."""
        last = self.inputs - 1
        if self.copies:
            return [(outputs, None)]
        if self.kind.startswith("nearest"):
            return [(np.minimum(self._nearest(outputs), last), None)]
        place = self._place(outputs)
        below = np.minimum(_floor(place), last)
        t = _clamp(place - below.astype(place.dtype), 0, 1)
        if self.kind == "linear":
            return [(below, 1 - t), (np.minimum(below + 1, last), t)]
        weights = (_outer(t + 1), _inner(t), _inner(1 - t), _outer(1 - t + 1))
        return [(_clamp(below + k, 0, last), weight) for k, weight in enumerate(weights, start=-1)]

    def ends(self, outputs: Sequence[int]) -> tuple[list[int], list[int]]:
        """The first and the last input that each of these outputs reads. Both never decrease."""
        taps = self.taps(np.asarray(outputs, dtype=np.int64))
        return taps[0][0].tolist(), taps[-1][0].tolist()

    def _nearest(self, outputs: IntArray) -> IntArray:
        exact = self.kind == "nearest-exact"
        if not self.small:
            wide = self._dtype
            return _floor(self._centre(outputs) + wide(0.5) if exact else self._scale(wide) * outputs.astype(wide))
        if exact:
            return _floor((outputs + 0.5) * np.float64(self._scale(np.float32)))
        if self.outputs in (self.inputs, 2 * self.inputs):
            return outputs * self.inputs // self.outputs  # whatever the factor
        return _floor(outputs.astype(np.float32) * self._scale(np.float32))

    def _place(self, outputs: IntArray) -> FloatArray:
        """Where the outputs lie among the inputs."""
        if self.align_corners:
            real = self._dtype
            step = real(self.inputs - 1) / real(self.outputs - 1) if self.outputs > 1 else real(0)
            return np.asarray(step * outputs.astype(real))
        centre = self._centre(outputs)
        return centre if self.kind == "cubic" else np.maximum(centre, 0)

    def _centre(self, outputs: IntArray) -> FloatArray:
        real = self._dtype
        return _fused(self._scale(real), outputs.astype(real) + real(0.5), -0.5)

    def _scale(self, real: Any) -> Any:
        return real(self.inputs) / real(self.outputs) if self.factor is None else real(1 / self.factor)

    @property
    def _dtype(self) -> Any:
        return np.float64 if self.wide else np.float32


def _floor(values: FloatArray) -> IntArray:
    # torch calls floorf, which takes a float32: what is within its rounding of a whole number is that number
    return np.floor(values.astype(np.float32)).astype(np.int64)


def _clamp(values: Any, least: int, most: int) -> Any:
    return np.minimum(np.maximum(values, least), most)


def _fused(a: Any, b: FloatArray, c: float) -> FloatArray:
    # a * b + c, rounded once and not twice: torch's kernels are compiled with fused products and sums
    return (np.longdouble(a) * b + np.longdouble(c)).astype(b.dtype)


_A = -0.75  # of the family of cubic convolutions, torch's


def _inner(t: FloatArray) -> FloatArray:
    """The weight of a cell at a distance up to 1: ``(A + 2) t^3 - (A + 3) t^2 + 1``."""
    return _fused(_fused(_A + 2, t, -_A - 3) * t, t, 1)


def _outer(t: FloatArray) -> FloatArray:
    """The weight of a cell at a distance from 1 to 2: ``A t^3 - 5 A t^2 + 8 A t - 4 A``."""
    return _fused(_fused(_fused(_A, t, -5 * _A), t, 8 * _A), t, -4 * _A)


@dataclass(frozen=True)
class Mode:
    """The options of an interpolation: a kind, whether corners are aligned, and the factors for each dim of space."""

    kind: str
    align_corners: bool
    factors: tuple[float, ...] | None

    @classmethod
    def of(cls, name: str, space: int, mode: str, align_corners: bool | None, scale_factor: Any) -> Mode:
        """From options as torch takes them; ``linear`` also stands for bilinear and trilinear.

        Raises: ValueError that names the layer, for a mode that does not fit the dims of space, aligned corners without
            weights, or factors that are not positive.
        """
        if space not in (1, 2, 3):
            raise ValueError(f"{name} needs batch x channels x 1 to 3 dims of space; got {space} dims of space")
        kind, spaces = _MODES.get(mode, ("", ()))
        if space not in spaces:
            fitting = ", ".join(known for known, (_, fits) in _MODES.items() if space in fits)
            raise ValueError(f"{name} has the modes {fitting} for {space} dims of space; got {mode!r}")
        if align_corners and kind.startswith("nearest"):
            raise ValueError(f"{name} has align_corners with modes that weigh cells only; got it with {mode!r}")
        return cls(kind, bool(align_corners), _factors(name, space, scale_factor))

    def check_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Raises: ValueError that names the layer, for a dtype that torch does not interpolate in this mode."""
        if dtype not in _FLOATS and not (dtype is torch.uint8 and self.kind.startswith("nearest")):
            raise ValueError(
                f"{name} interpolates float64, float32, float16 and bfloat16, and nearest cells of uint8; got {dtype}"
            )

    def along(self, extents: Sequence[int], results: Sequence[int], dtype: torch.dtype) -> list[Resampling]:
        """How each dim is interpolated; batch and channels are copied.

        Args:
            extents, results: global shapes of x and y.
            dtype: of x.
        """
        dims = [Resampling("linear", extent, result) for extent, result in zip(extents[:2], results[:2], strict=True)]
        space = list(zip(extents[2:], results[2:], strict=True))
        small = len(space) == 2 and sum(results[2:]) <= _SMALL
        for (n, m), factor in zip(space, self.factors or [None] * len(space), strict=True):
            dims.append(Resampling(self.kind, n, m, factor, self.align_corners, dtype is torch.float64, small))
        return dims


def _factors(name: str, space: int, scale_factor: Any) -> tuple[float, ...] | None:
    if scale_factor is None:
        return None
    try:
        factors = np.asarray(scale_factor, dtype=float)
    except (TypeError, ValueError):
        factors = np.empty(0)
    if factors.shape not in ((), (space,)) or not (np.isfinite(factors) & (factors > 0)).all():
        raise ValueError(
            f"{name} needs scale_factor to be one positive number, or {space} of them; got {scale_factor!r}"
        )
    return tuple(np.broadcast_to(factors, (space,)).tolist())


class Resampler:
    """The interpolation of one block: a linear map, made of one for each dim. No communication.

    Args:
        along: how each dim is interpolated.
        x, y: boxes of the block that is read and of the block that is computed. An input outside of x is replaced by
            the nearest one inside.
    """

    def __init__(self, along: Sequence[Resampling], x: Box, y: Box) -> None:
        self.result = shape(y)
        self._least = tuple(max(extent, 1) for extent in shape(x))
        steps = []
        for dim, (one, (start, stop), run) in enumerate(zip(along, x, y, strict=True)):
            if one.copies and run == (start, stop):
                continue
            taps = one.taps(np.arange(*run, dtype=np.int64))
            inside = [(_clamp(cells - start, 0, max(stop - start - 1, 0)), weights) for cells, weights in taps]
            steps.append(Weighing.of(dim, self._least[dim], inside, len(along), one.step))
        # the least is touched if dims that shrink come first and dims that grow come last; else as torch does
        steps.sort(key=lambda step: (along[step.dim].outputs / along[step.dim].inputs, -step.dim))
        self._steps = {torch.device("cpu"): steps}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return local(self._operate, self.result, (x, self._least))

    def _operate(self, x: torch.Tensor) -> torch.Tensor:
        steps = self._on(x.device)
        if not steps:
            return x.clone()
        y: torch.Tensor = _Weighed.apply(x, steps, False)
        return y

    def _on(self, device: torch.device) -> list[Weighing]:
        if device not in self._steps:
            with torch.inference_mode(False):  # these serve calls that record gradients, too
                self._steps[device] = [step.to(device) for step in self._steps[torch.device("cpu")]]
        return self._steps[device]


class _Weighed(Function):
    """Weighted sums along some dims, one after the other, or their adjoint: each is the derivative of the other.

    Of large blocks some channels are computed at a time: what is between two steps is large, and leaves the cache.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, steps: Sequence[Weighing], adjoint: bool) -> torch.Tensor:
        ctx.steps, ctx.adjoint = steps, adjoint
        order = [*reversed(steps)] if adjoint else steps

        def weigh(x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            for step in order:
                out = y if step is order[-1] else None
                x = step.adjoint(x, out) if adjoint else step(x, out)
            return x

        extents = list(x.shape)
        for step in order:
            extents[step.dim] = step.inputs if adjoint else step.outputs
        number = _together(x, extents, order)
        if not number:
            return weigh(x).to(x.dtype)
        y = empty(extents, x.dtype, x)
        pieces = (one.view(1, -1, *one.shape[2:]).split(number, 1) for one in (x, y))
        for source, target in zip(*pieces, strict=True):
            weigh(source, target)
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Weighed.apply(dy, ctx.steps, not ctx.adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, dx: torch.Tensor, *_: None) -> torch.Tensor:
        dy: torch.Tensor = _Weighed.apply(dx, ctx.steps, ctx.adjoint)
        return dy


def _together(x: torch.Tensor, extents: Sequence[int], steps: Sequence[Weighing]) -> int:
    """How many channels of a large block are interpolated together; 0 for all of them."""
    cells = max(prod(x.shape[2:]), prod(extents[2:]))
    if prod(x.shape[:2]) * cells <= _PIECE or len(steps) < 2 or not (x.is_cpu and x.is_contiguous()):
        return 0
    if any(step.dim < 2 or step.dtype not in (None, x.dtype) for step in steps):
        return 0
    return max(_PIECE // cells, 1)
