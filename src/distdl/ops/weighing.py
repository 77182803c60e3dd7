r"""Weighing: sums of a few inputs for each output, along one dim.

Which input an output reads is mostly regular: of an interpolation to twice the size, each second output reads the next
input. So outputs are computed in runs, each one product of strided views; inputs are only picked one by one where there
is nothing regular::

    outputs   0   1   2   3   4   5            run 1:   1  3  5      run 2:      2  4
              |    \ /     \ /     \                     |  |  |                  |  |
    inputs    0     0       1       2                    0  1  2                  0  1     (and 0 by itself)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from distdl.partition.groups import IntArray as IntArray
from distdl.tensors.memory import empty

FloatArray = NDArray[np.floating[Any]]
Tap = tuple[IntArray, FloatArray | None]

_PERIOD = 8  # the most outputs after which inputs go on as before
_RUNS, _LENGTH = 16, 4  # the most runs of a tap, and the least outputs of one, that cost less than single inputs
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class _Run:
    """Outputs, the input that each of them reads, and its weight.

    Attributes:
        outputs, inputs: as indices of tensors. Where inputs are picked one by one, all outputs, and a tensor of cells.
        weights: as a tensor that multiplies them; None for 1.
    """

    outputs: tuple[slice, ...]
    inputs: tuple[slice, ...] | torch.Tensor
    weights: torch.Tensor | None

    def to(self, device: torch.device) -> _Run:
        """The same on a device."""
        inputs = self.inputs if isinstance(self.inputs, tuple) else self.inputs.to(device)
        return replace(self, inputs=inputs, weights=None if self.weights is None else self.weights.to(device))


@dataclass(frozen=True, eq=False)
class Weighing:
    r"""Weighted sums along one dim: :math:`y_o = \sum_k w_{ok} \, x_{i(o, k)}`. A linear map, with its adjoint.

    Attributes:
        dim: along which.
        inputs, outputs: extents along it.
        taps: runs of the outputs, for each k.
        dtype: of the weights, in which sums are made; None for that of x.
    """

    dim: int
    inputs: int
    outputs: int
    taps: tuple[tuple[_Run, ...], ...]
    dtype: torch.dtype | None

    @classmethod
    def of(cls, dim: int, inputs: int, taps: Sequence[Tap], rank: int, step: float) -> Weighing:
        """From the input that each output reads, and its weight, for each k.

        Args:
            rank: dims of the tensors.
            step: about how many inputs there are from one output to the next.
        """
        found, ratio = [], Fraction(step).limit_denominator(_PERIOD)
        for cells, weights in taps:
            per_cell = None if weights is None else torch.from_numpy(weights).view(-1, *[1] * (rank - dim - 1))
            found.append(_runs(dim, cells, per_cell, ratio))
        outputs, weights = len(taps[0][0]), taps[0][1]
        dtype = None if weights is None else torch.from_numpy(weights).dtype
        return cls(dim, inputs, outputs, tuple(found), dtype)

    def to(self, device: torch.device) -> Weighing:
        """The same for tensors on a device."""
        return replace(self, taps=tuple(tuple(run.to(device) for run in tap) for tap in self.taps))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """y from x."""
        x = x if self.dtype is None else x.to(self.dtype)
        y = self._empty(x, self.outputs)
        for number, tap in enumerate(self.taps):
            for run in tap:
                target, source = y[run.outputs], self._read(x, run.inputs)
                if run.weights is None:
                    target.copy_(source)
                elif number == 0:
                    torch.mul(source, run.weights, out=target)
                else:
                    target.addcmul_(source, run.weights)
        return y

    def adjoint(self, dy: torch.Tensor) -> torch.Tensor:
        """The gradient of x from that of y."""
        dy = dy if self.dtype is None else dy.to(self.dtype)
        dx = self._empty(dy, self.inputs)
        written = False
        for run in (run for tap in self.taps for run in tap):
            source = dy[run.outputs]
            if not isinstance(run.inputs, tuple):
                dx = dx if written else dx.zero_()
                _add_at(dx, self.dim, run.inputs, source if run.weights is None else source * run.weights)
            elif not written and run.inputs[self.dim].step == 1:
                self._begin(dx, run.inputs, source, run.weights)
            else:
                target = (dx if written else dx.zero_())[run.inputs]
                _ = target.add_(source) if run.weights is None else target.addcmul_(source, run.weights)
            written = True
        return dx if written else dx.zero_()

    def _begin(
        self, dx: torch.Tensor, inputs: tuple[slice, ...], source: torch.Tensor, weights: torch.Tensor | None
    ) -> None:
        """Write the gradients of a run of neighbours, and zeros around them."""
        target, cells = dx[inputs], inputs[self.dim]
        if weights is None:
            target.copy_(source)
        else:
            torch.mul(source, weights, out=target)
        dx.narrow(self.dim, 0, cells.start).zero_()
        dx.narrow(self.dim, cells.stop, self.inputs - cells.stop).zero_()

    def _read(self, x: torch.Tensor, inputs: tuple[slice, ...] | torch.Tensor) -> torch.Tensor:
        if isinstance(inputs, tuple):
            return x[inputs]
        if self.dim < x.dim() - 1:
            return x.index_select(self.dim, inputs)
        return x.gather(self.dim, inputs.expand(*x.shape[:-1], -1))  # along the last dim, this is several times faster

    def _empty(self, x: torch.Tensor, extent: int) -> torch.Tensor:
        return empty((*x.shape[: self.dim], extent, *x.shape[self.dim + 1 :]), x.dtype, x)


def _add_at(dx: torch.Tensor, dim: int, cells: torch.Tensor, dy: torch.Tensor) -> None:
    if dim < dx.dim() - 1:
        dx.index_add_(dim, cells, dy)
    else:
        dx.scatter_add_(dim, cells.expand(*dy.shape[:-1], -1), dy)


def _runs(dim: int, cells: IntArray, weights: torch.Tensor | None, ratio: Fraction) -> tuple[_Run, ...]:
    """The outputs in runs, that of most neighbouring inputs first; if they are many, in one run of single inputs."""
    if not len(cells):
        return ()
    lead = (_ALL,) * dim
    found = list(regular(cells, ratio.denominator, ratio.numerator)) if ratio else []
    if not 0 < len(found) <= min(_RUNS, len(cells) // _LENGTH):
        return (_Run((*lead, _ALL), torch.from_numpy(cells), weights),)
    found.sort(key=lambda run: (run[1].step > 1, run[1].start - run[1].stop))
    return tuple(
        _Run((*lead, outputs), (*lead, inputs), None if weights is None else weights[outputs].contiguous())
        for outputs, inputs in found
    )


def regular(cells: IntArray, period: int, step: int) -> Iterator[tuple[slice, slice]]:
    """Runs of outputs that are a period apart, and of inputs that are a step apart, which they read.

    >>> list(regular(np.array([0, 0, 0, 1, 1, 2]), 2, 1))
    [(slice(0, 1, 2), slice(0, 1, 1)), (slice(2, 5, 2), slice(0, 2, 1)), (slice(1, 6, 2), slice(0, 3, 1))]
    """
    for first in range(min(period, len(cells))):
        own = cells[first::period]
        ends = [0, *((np.diff(own) != step).nonzero()[0] + 1).tolist(), len(own)]
        for start, stop in itertools.pairwise(ends):
            outputs = slice(first + start * period, first + (stop - 1) * period + 1, period)
            yield outputs, slice(int(own[start]), int(own[stop - 1]) + 1, step if stop - start > 1 else 1)
