"""Interpolate: one block of a tensor from another block of it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import torch

from distdl.geometry.boxes import Box, Shape, shape
from distdl.nn.module import Module, Option
from distdl.ops.resampling import Mode, Resampler
from distdl.partition.arguments import checks_arguments


class Interpolate(Module):
    r"""Interpolate one block of a tensor from another block of it, without communication.

    Forward: :math:`y_o = \sum_k w_{ok} \, x_{i(o, k)}`, dim by dim: the cells of the given block of y, with the indices
    and weights that torch uses for the whole tensor. Where that would read a cell outside of the given block of x, the
    nearest cell inside is read.
    Adjoint: :math:`\partial x_i = \sum_{(o, k):\, i(o, k) = i} w_{ok} \, \partial y_o`.

    Args:
        x_start, x_stop, x_global_shape: the block of x and the global shape, an integer for each dim, batch and
            channels included.
        y_start, y_stop, y_global_shape: the block of y to compute, likewise.
        scale_factor: the factor in the formula for the indices, one number or one for each dim of space, as in
            ``torch.nn.functional.interpolate``. None: the ratio of the global shapes.
        mode: nearest or nearest-exact, linear (any dims of space), or torch's names bilinear, trilinear, bicubic.
        align_corners: whether the centres of the first and the last cells coincide, instead of their outer edges.
    Shapes: x ``x_stop - x_start``, y ``y_stop - y_start``, in elements; 1 to 3 dims of space.
    Raises: ValueError for options that do not fit, a block outside of its tensor, or a block of y with cells but a
        block of x without; in forward, for an input of the wrong shape, or of a dtype that torch does not interpolate.
    """

    x_start = Option[Shape]()
    x_stop = Option[Shape]()
    x_global_shape = Option[Shape]()
    y_start = Option[Shape]()
    y_stop = Option[Shape]()
    y_global_shape = Option[Shape]()
    scale_factor = Option[tuple[float, ...] | None]()
    mode = Option[str]()
    align_corners = Option[bool]()

    @checks_arguments
    def __init__(
        self,
        x_start: Sequence[int],
        x_stop: Sequence[int],
        x_global_shape: Sequence[int],
        y_start: Sequence[int],
        y_stop: Sequence[int],
        y_global_shape: Sequence[int],
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = False,
    ) -> None:
        super().__init__()
        self.x_start, self.x_stop, self.x_global_shape = _block("x", x_start, x_stop, x_global_shape)
        self.y_start, self.y_stop, self.y_global_shape = _block("y", y_start, y_stop, y_global_shape)
        self._mode = Mode.of("Interpolate", len(self.x_global_shape) - 2, mode, align_corners, scale_factor)
        self.scale_factor, self.mode, self.align_corners = self._mode.factors, mode, self._mode.align_corners
        self._x, self._y = _box(self.x_start, self.x_stop), _box(self.y_start, self.y_stop)
        if len(self._y) != len(self._x) or self.y_global_shape[:2] != self.x_global_shape[:2]:
            raise ValueError(
                f"Interpolate needs x and y of one rank, batch and number of channels; got the global shapes "
                f"{list(self.x_global_shape)} and {list(self.y_global_shape)}"
            )
        if 0 in shape(self._x) and 0 not in shape(self._y):
            raise ValueError(f"Interpolate needs a cell of x for its y; the x block is {self._x} and y's is {self._y}")
        self._made: dict[bool, Resampler] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape != shape(self._x):
            raise ValueError(f"Interpolate needs a block of shape {list(shape(self._x))}; got {list(x.shape)}")
        self._mode.check_dtype("Interpolate", x.dtype)
        wide = x.dtype is torch.float64
        if wide not in self._made:
            along = self._mode.along(self.x_global_shape, self.y_global_shape, x.dtype)
            with torch.inference_mode(False):  # it serves calls that record gradients, too
                self._made[wide] = Resampler(along, self._x, self._y)
        return self._made[wide](x)


def _block(what: str, start: Sequence[int], stop: Sequence[int], extents: Sequence[int]) -> tuple[Shape, Shape, Shape]:
    block = [tuple(index(number) for number in numbers) for numbers in (start, stop, extents)]
    if len({len(one) for one in block}) > 1 or any(not 0 <= i <= j <= n for i, j, n in zip(*block, strict=True)):
        raise ValueError(
            f"Interpolate needs 0 <= {what}_start <= {what}_stop <= {what}_global_shape in each dim; got {block[0]}, "
            f"{block[1]} and {block[2]}"
        )
    return block[0], block[1], block[2]


def _box(start: Shape, stop: Shape) -> Box:
    return tuple(zip(start, stop, strict=True))
