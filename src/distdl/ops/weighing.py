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
from distdl.tensors.memory import empty, is_channels_last

FloatArray = NDArray[np.floating[Any]]
Tap = tuple[IntArray, FloatArray | None]

_PERIOD = 8  # the most outputs after which inputs go on as before
_RUNS, _LENGTH = 16, 4  # the most runs, and the least outputs of one on average, that cost less than single inputs
_ALL = slice(None)


Inputs = tuple[slice, ...] | torch.Tensor  # an index, or cells that are picked one by one


@dataclass(frozen=True, eq=False)
class Run:
    """Outputs, and for each tap the inputs that they read, and the weights of these.

    Attributes:
        outputs: an index.
        taps: weights are a tensor that multiplies inputs, or None for 1.
        apart: whether the outputs lie apart in memory: then sums are made beside them.
    """

    outputs: tuple[slice, ...]
    taps: tuple[tuple[Inputs, torch.Tensor | None], ...]
    apart: bool

    def to(self, device: torch.device) -> Run:
        """The same on a device."""
        moved = [
            (inputs if isinstance(inputs, tuple) else inputs.to(device), None if w is None else w.to(device))
            for inputs, w in self.taps
        ]
        return replace(self, taps=tuple(moved))


@dataclass(frozen=True, eq=False)
class Weighing:
    r"""Weighted sums along one dim: :math:`y_o = \sum_k w_{ok} \, x_{i(o, k)}`. A linear map, with its adjoint.

    Attributes:
        dim: along which.
        inputs, outputs: extents along it.
        runs: of the outputs.
        dtype: of the weights, in which sums are made; None for that of x.
    """

    dim: int
    inputs: int
    outputs: int
    runs: tuple[Run, ...]
    dtype: torch.dtype | None

    @classmethod
    def of(cls, dim: int, inputs: int, taps: Sequence[Tap], rank: int, step: float) -> Weighing:
        """From the input that each output reads, and its weight, for each k. (There is one k, or each has weights.)

        Args:
            rank: dims of the tensors.
            step: about how many inputs there are from one output to the next.
        """
        count, ratio = len(taps[0][0]), Fraction(step).limit_denominator(_PERIOD)
        period, apart = ratio.denominator, dim == rank - 1 and ratio.denominator > 1
        weights = [None if w is None else torch.from_numpy(w).view(-1, *[1] * (rank - dim - 1)) for _, w in taps]
        dtype, lead = None if weights[0] is None else weights[0].dtype, (_ALL,) * dim
        found = list(regular([cells for cells, _ in taps], period, ratio.numerator)) if ratio else []
        if not found or len(found) > min(_RUNS, count // _LENGTH):
            picked = tuple((torch.from_numpy(cells), w) for (cells, _), w in zip(taps, weights, strict=True))
            return cls(dim, inputs, count, (Run((*lead, _ALL), picked, False),) if count else (), dtype)
        runs = tuple(
            Run(
                (*lead, outputs),
                tuple(
                    ((*lead, read), None if w is None else w[outputs].contiguous())
                    for read, w in zip(reads, weights, strict=True)
                ),
                apart,
            )
            for outputs, reads in sorted(found, key=lambda run: (run[1][0].step, run[1][0].start - run[1][0].stop))
        )
        return cls(dim, inputs, count, runs, dtype)

    def to(self, device: torch.device) -> Weighing:
        """The same for tensors on a device."""
        return replace(self, runs=tuple(run.to(device) for run in self.runs))

    def __call__(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """y from x; made, if it is not given."""
        x = x if self.dtype is None else x.to(self.dtype)
        y = self._empty(x, self.outputs) if y is None else y
        for run in self.runs:
            target = y[run.outputs]
            (inputs, weights), *others = run.taps
            source = self._read(x, inputs)
            if weights is None:
                target.copy_(source)
                continue
            # in channels_last, the last dim is not the last one in memory
            apart = run.apart and not is_channels_last(x)
            total = empty(target.shape, x.dtype, x) if apart else target
            torch.mul(source, weights, out=total)
            for inputs, weights in others:
                assert weights is not None
                total.addcmul_(self._read(x, inputs), weights)
            if apart:
                target.copy_(total)
        return y

    def adjoint(self, dy: torch.Tensor, dx: torch.Tensor | None = None) -> torch.Tensor:
        """The gradient of x from that of y; made, if it is not given."""
        dy = dy if self.dtype is None else dy.to(self.dtype)
        dx = self._empty(dy, self.inputs) if dx is None else dx
        written = False
        for run in self.runs:
            source = dy[run.outputs]
            if run.apart and len(run.taps) > 1 and not is_channels_last(dy):
                source = empty(source.shape, dy.dtype, dy).copy_(source)
            for inputs, weights in run.taps:
                if not written and isinstance(inputs, tuple) and inputs[self.dim].step == 1:
                    self._begin(dx, inputs, source, weights)
                else:
                    self._add(dx if written else dx.zero_(), inputs, source, weights)
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

    def _add(self, dx: torch.Tensor, inputs: Inputs, source: torch.Tensor, weights: torch.Tensor | None) -> None:
        if isinstance(inputs, tuple):
            _ = dx[inputs].add_(source) if weights is None else dx[inputs].addcmul_(source, weights)
            return
        source = source if weights is None else source * weights
        if self.dim < dx.dim() - 1:
            dx.index_add_(self.dim, inputs, source)
        else:
            dx.scatter_add_(self.dim, inputs.expand(*source.shape[:-1], -1), source)

    def _read(self, x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        if isinstance(inputs, tuple):
            return x[inputs]
        if self.dim < x.dim() - 1:
            return x.index_select(self.dim, inputs)
        return x.gather(self.dim, inputs.expand(*x.shape[:-1], -1))  # along the last dim, this is several times faster

    def _empty(self, x: torch.Tensor, extent: int) -> torch.Tensor:
        shape = (*x.shape[: self.dim], extent, *x.shape[self.dim + 1 :])
        return empty(shape, x.dtype, x, is_channels_last(x))


def regular(cells: Sequence[IntArray], period: int, step: int) -> Iterator[tuple[slice, list[slice]]]:
    """Runs of outputs that are a period apart, and for each tap the run of inputs, a step apart, that they read.

    >>> list(regular([np.array([0, 0, 0, 1, 1, 2])], 2, 1))
    [(slice(0, 1, 2), [slice(0, 1, 1)]), (slice(2, 5, 2), [slice(0, 2, 1)]), (slice(1, 6, 2), [slice(0, 3, 1)])]
    """
    for first in range(min(period, len(cells[0]))):
        own = [along[first::period] for along in cells]
        breaks = np.logical_or.reduce([np.diff(along) != step for along in own])
        ends = [0, *(breaks.nonzero()[0] + 1).tolist(), len(own[0])]
        for start, stop in itertools.pairwise(ends):
            by = step if stop - start > 1 else 1
            outputs = slice(first + start * period, first + (stop - 1) * period + 1, period)
            yield outputs, [slice(int(along[start]), int(along[stop - 1]) + 1, by) for along in own]
