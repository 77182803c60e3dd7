"""Kernel: torch's convolution of one worker's block, by the implementation that is the fastest for it.

On the CPU, torch has two of them: oneDNN's, and its own, which first writes all windows out beside each other and is
meant for what is small. It takes its own for one sample of few elements, but counts them without the last dim: in 3-d,
where ``channels * depth * height`` is at most 20480. A volume of 8 channels and 64^3 cells has more, and its half has
not, so that the half takes five times as long as the whole. The more workers share a volume, the surer are their blocks
among these, so here oneDNN is asked for by name.

The cells around a block are often one cell thick, and one tap reads them. Such a dim is left out: in 2-d, torch's own
implementation is a fast one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn import functional

from distdl.geometry.boxes import Shape
from distdl.geometry.edges import Crop, Line
from distdl.geometry.transposed import TransposedLine
from distdl.tensors.function import Function, gradients_of
from distdl.tensors.modes import is_seen

Lines = Sequence[Line | TransposedLine]

_FIRST = 2  # the first dim of space
_OF_3D = _FIRST + 3  # dims of a tensor in 3-d
_FEW = 20480  # elements up to which torch takes its own implementation
_WIDE = 3  # cells; of a kernel that is larger in both of the last dims, torch asks oneDNN
# outputs and multiplications from which oneDNN was found to be faster: forward; backward, where it copies x into a
# tensor of its own; and of a transposed convolution, which is as fast by torch's own in the forward
_FORWARD, _BACK, _TRANSPOSED_BACK = (256, 1 << 20), (256, 3 << 20), (4096, 6 << 20)
_THIN = 4  # cells; oneDNN's backward of a volume that is thinner is no faster, nor that of fewer channels
_CHANNELS, _TAPS = 8, 6  # nor, of a convolution, that of fewer channels, or of fewer taps for each cell
_BACKWARD = torch.ops.aten.convolution_backward.default
_ONEDNN = torch.ops.aten.mkldnn_convolution.default


@dataclass(frozen=True)
class Kernel:
    """torch's convolution, or its transposed one.

    Attributes:
        stride, dilation, padding, output_padding: for each dim of space.
    """

    stride: Shape
    dilation: Shape
    groups: int
    transposed: bool
    padding: Shape
    output_padding: Shape

    @classmethod
    def of(cls, lines: Lines, groups: int, crops: Sequence[Crop]) -> Kernel:
        """That of some geometry, with the paddings of these crops."""
        return cls(
            tuple(line.stride for line in lines), tuple(line.dilation for line in lines), groups,
            isinstance(lines[0], TransposedLine), tuple(crop.padding for crop in crops),
            tuple(crop.output_padding for crop in crops),
        )  # fmt: skip

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.dim() == _OF_3D:
            dim = self._flat(x, weight)
            if dim:
                return self._without(dim)(x.squeeze(dim), weight.squeeze(dim), bias).unsqueeze(dim)
            if self._runs_elsewhere(x, weight):
                bias = None if bias is None else bias.contiguous()  # oneDNN reads a bias as if it were contiguous
                y: torch.Tensor = _ONEDNN(x, weight, bias, self.padding, self.stride, self.dilation, self.groups)
                return y
        return self._by_torch(x, weight, bias)

    def recorded(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, casts: bool = False
    ) -> torch.Tensor:
        """The same where autograd records it, of any dtype.

        Args:
            casts: whether torch's autocast is on.
        """
        y: torch.Tensor
        own = any(self.output_padding) or (x.dim() == _OF_3D and self._is_elsewhere(x, weight))
        # complex numbers go to torch.nn.functional, which takes them apart
        if own and not (casts or x.is_complex()) and forward_ad._current_level < 0:
            y = _Recorded.apply(self, x, weight, bias)
        elif self.transposed:
            convolve = getattr(functional, f"conv_transpose{x.dim() - _FIRST}d")
            y = convolve(x, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation)
        else:
            convolve = getattr(functional, f"conv{x.dim() - _FIRST}d")
            y = convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return y

    def _by_torch(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups
        )

    def in_steps(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The same by functions of torch that are differentiable any number of times.

        With output padding, its transposed convolution is so only twice. So with less padding more is computed, and
        cut off. (Where zeros would have to be added, there is no bias: see ``Crop.plain``.)
        """
        if not any(self.output_padding):
            return self._by_torch(x, weight, bias)
        crops = [Crop(*pair).plain() for pair in zip(self.padding, self.output_padding, strict=True)]
        plain = replace(self, padding=tuple(crop.padding for crop in crops), output_padding=(0,) * len(crops))
        margins = [width for crop in reversed(crops) for width in (crop.before, crop.behind)]
        return functional.pad(plain._by_torch(x, weight, bias), margins)

    def biases(self, weight: torch.Tensor) -> int:
        """How many biases go with weights."""
        return weight.shape[1] * self.groups if self.transposed else weight.shape[0]

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needed: Sequence[bool]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The gradients of x, weight and bias, as needed."""
        if x.dim() == _OF_3D:
            dim = self._flat(x, weight)
            if dim:
                flat = self._without(dim)
                dx, dw, db = flat.backward(dy.squeeze(dim), x.squeeze(dim), weight.squeeze(dim), needed)
                return dx if dx is None else dx.unsqueeze(dim), dw if dw is None else dw.unsqueeze(dim), db
            if self._comes_back_elsewhere(x, weight):
                dx, dw, db = self._backward(dy, x.to_mkldnn(), weight, (*needed[:2], False))
                if needed[2]:  # oneDNN adds one number after the other: of 65,536, three digits are lost
                    db = dy.sum((0, *range(_FIRST, _OF_3D)))
                return _dense(dx), _dense(dw), db
        return self._backward(dy, x, weight, needed)

    def _backward(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, needed: Sequence[bool]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _BACKWARD(
            dy, x, weight, [self.biases(weight)], self.stride, self.padding, self.dilation, self.transposed,
            self.output_padding, self.groups, needed,
        )  # fmt: skip
        return found

    def _flat(self, x: torch.Tensor, weight: torch.Tensor) -> int:
        """A dim of space of one cell, which one tap reads; 0 if there is none."""
        for dim, (padding, more) in enumerate(zip(self.padding, self.output_padding, strict=True), _FIRST):
            if x.shape[dim] == weight.shape[dim] == 1 and not padding and not more:
                return dim
        return 0

    def _without(self, dim: int) -> Kernel:
        """The kernel for tensors without this dim."""
        numbers = {name: getattr(self, name) for name in ("stride", "dilation", "padding", "output_padding")}
        place = dim - _FIRST
        return replace(self, **{name: one[:place] + one[place + 1 :] for name, one in numbers.items()})

    def _runs_elsewhere(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the forward in 3-d takes oneDNN, where torch would take its own implementation."""
        return not self.transposed and self._is_overlooked(x, weight, _FORWARD)

    def _comes_back_elsewhere(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether the backward in 3-d takes oneDNN, where torch would take its own implementation."""
        # not with a dilation: torch then takes oneDNN's tensors for its own
        if self.transposed:
            fits, least = max(self.dilation) == 1, _TRANSPOSED_BACK
        else:
            taps = prod(weight.shape[_FIRST:])
            fits, least = x.shape[1] >= _CHANNELS and taps >= _TAPS * prod(self.stride), _BACK
        return fits and min(x.shape[1:]) >= _THIN and self._is_overlooked(x, weight, least)

    def _is_elsewhere(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        return self._runs_elsewhere(x, weight) or self._comes_back_elsewhere(x, weight)

    def _is_overlooked(self, x: torch.Tensor, weight: torch.Tensor, least: tuple[int, int]) -> bool:
        """Whether oneDNN is faster and torch takes its own implementation; in 3-d.

        Where a mode of torch sees the operators (a selective checkpoint, a count of operations), they are torch's.

        Args:
            least: outputs (of a transposed convolution, inputs) and multiplications from which oneDNN is faster.
        """
        if x.dtype is not torch.float32 or weight.dtype is not torch.float32 or not x.is_cpu:
            return False
        samples, channels, depth, height, width = x.shape
        kernel, stride = weight.shape[_FIRST:], 1 if self.transposed else prod(self.stride)
        if samples != 1 or self.groups > 1 or channels * depth * height > _FEW or min(kernel[1:]) > _WIDE:
            return False
        cells = depth * height * width // stride
        if cells < least[0] or cells * weight.numel() < least[1] or prod(kernel) <= stride:
            return False
        there = torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
        return there and not is_seen()


class _Recorded(Function):
    @staticmethod
    def forward(
        ctx: Any, kernel: Kernel, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.kernel = kernel
        ctx.save_for_backward(x, weight, bias)
        return kernel(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *gradients_of(ctx.kernel.in_steps, (x, weight, bias), needed, dy)
        return None, *ctx.kernel.backward(dy, x, weight, needed)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of oneDNN's as torch's own; None as it is."""
    return tensor.to_dense() if tensor is not None and tensor.is_mkldnn else tensor
