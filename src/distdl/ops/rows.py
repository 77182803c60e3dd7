"""Rows: a block as the kernels of a normalisation see it, and their passes over it.

A pass costs about as much as a copy. Where several operators make one pass, they do so chunk by chunk, so that what one
of them leaves is still in the cache for the next; and what is only of use inside a pass is as large as a chunk.

The kernels see a contiguous block as *batch, rows, cells*, with one dim of cells or several. A block in channels_last
whose rows are its channels, or those of its samples, they see as it lies: as a matrix of *cells, channels*, in which
samples stand one below the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import repeat
from math import prod
from typing import Any, NamedTuple

import torch

from distdl.geometry.boxes import Shape
from distdl.tensors.memory import empty, is_channels_last

_KERNEL = torch.ops.aten.native_batch_norm.out
_SUMS = torch.ops.aten.native_batch_norm_backward.default
_SMALL = 1 << 17  # elements of a block for which recycled memory and chunks are of no use
_CHUNK = 1 << 18  # elements of a tensor that a pass of several operators takes at a time
_MEASURED = 1 << 16  # the same, where what the operator returns beside the moments is memory that nobody needs
_EXACT = 1 << 15  # elements of a block whose moments cost little more in float64
_SHORT = 1 << 8  # cells of the pieces of a row that are measured one by one
_PIECE = 1 << 12  # cells whose squares are added up in their own dtype
_RUN = 1 << 6  # the same of a matrix, of which the kernels add up one cell after the other
_SAMPLE = 1 << 14  # elements of a sample that a kernel takes by itself; it is faster to copy a block of smaller ones
_MATRIX = 2  # the dims of a matrix of cells and channels
_LONG = 32  # cells of a row that is measured by itself, not together with those of other samples
_FAR = 1024.0  # times the variance of all cells: a square of a mean that costs digits
_NEAR = 64.0  # times the variance of a block's own cells: one that costs none

Standard = tuple[torch.Tensor, torch.Tensor, float]
"""What standardises rows: the mean and the variance of each, and eps."""


class Rows(NamedTuple):
    """How the kernels see a block: as a tensor of batch, rows and cells.

    Attributes:
        extents: of batch, rows and cells.
        leading: the dims of the block that the rows are.
        own: extents of the means along those dims.
        row: extents of weight and bias along those dims; of the cells if they vary along them.
        inner: whether weight and bias vary along the cells, and not from row to row.
        centred: whether there are means; otherwise they are 0.
        per_cell: what makes of sums over the cells behind a mean minus their average.
        far: how large the square of a mean may be beside the variance of its cells here, before digits are lost.
    """

    extents: Shape
    leading: Shape
    own: Shape
    row: Shape
    inner: bool
    centred: bool
    per_cell: float
    far: float

    @classmethod
    def of(cls, cells: Shape, row: Shape, merged: Sequence[int], centred: bool, count: int) -> Rows | None:
        """None if the kernels do not fit, which follows from the dims alone: it is the same on every worker.

        Args:
            cells: shape of the block.
            row: shape of weight and bias, of as many dims.
            merged: the dims along which there is one mean.
            count: the cells behind each mean, those of other blocks included.
        """
        means = tuple(1 if dim in merged else n for dim, n in enumerate(cells))
        rest = centred, -1 / max(count, 1), max(_FAR * prod(cells) / max(prod(means) * count, 1), _NEAR)
        varying = [dim for dim, n in enumerate(row) if n > 1]
        if len(cells) > 1 and merged and merged[0] == 0 and 1 not in merged and varying in ([], [1]):
            own = cells[1:2]
            return cls((cells[0], *own, prod(cells[2:])), own, own, own, False, *rest)
        kept = min(merged, default=len(cells))
        if not merged or list(merged) != list(range(kept, len(cells))):
            return None
        inner = bool(varying) and varying[0] >= kept and row[kept:] == cells[kept:]
        last = kept if inner or not varying else max(kept, varying[-1] + 1)
        leading = cells[:last]
        extents, row = (1, prod(leading), prod(cells[last:])), row[last:] if inner else row[:last]
        return cls(extents, leading, means[:last], row, inner, *rest)

    def of_block(self, x: torch.Tensor) -> torch.Tensor:
        """A block as the kernels read it fast."""
        if self._keeps(x):
            return _as_matrix(x)
        seen = x.dim() > _MATRIX and x.shape[:2] == self.extents[:2] and not self.inner
        return (x if seen else x.reshape(self.extents)).contiguous()

    def _keeps(self, x: torch.Tensor) -> bool:
        """Whether a block is in channels_last, and the kernels see it as it lies."""
        if not self.centred or self.inner or x.is_meta or not is_channels_last(x):
            return False
        (samples, channels, *space), (batch, rows, cells) = x.shape, self.extents
        if cells != prod(space) or batch * rows != samples * channels:
            return False
        return rows == channels or channels * cells >= _SAMPLE

    def beside(self, block: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """As a block is seen, its gradient, or what is made of it."""
        if block.dim() == _MATRIX:
            return _as_matrix(other)
        return (other if other.shape == block.shape else other.reshape(block.shape)).contiguous()

    def to_block(self, seen: torch.Tensor, shape: Shape) -> torch.Tensor:
        """The tensor that is seen so."""
        if seen.dim() != _MATRIX:
            return seen if seen.shape == shape else seen.view(shape)
        batch, channels, *space = shape
        return seen.view(batch, *space, channels).movedim(-1, 1)

    def of_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight in one dim: of each row, or of each cell."""
        if self.inner or self.row == self.leading:
            return weight.reshape(-1).contiguous()
        return self.spread(weight, self.row, weight.dtype)[0]

    def spread(self, values: torch.Tensor, own: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Of each row, one of every kind of values, kind by kind; of values that rows may have in common."""
        values = values.reshape(-1, *own)
        kinds = values.shape[0]
        spread = torch.empty((kinds, *self.leading), dtype=dtype, device=values.device).copy_(values)
        return spread.view(kinds, -1).unbind()

    def gathered(self, values: torch.Tensor, own: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The adjoint: the sums over the rows that have values in common."""
        dims = [dim - len(own) for dim, n in enumerate(own) if n == 1 and self.leading[dim] != 1]
        return values.view(-1, *self.leading).sum(dims, dtype=dtype) if dims else values.to(dtype)

    def measure(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """What this block has of each mean and variance, in float64, and whether a mean is far.

        A mean is far if it is large beside the deviation: the kernels of the CPU multiply before they subtract it, so
        it has to be subtracted before. If none is far here, none is among all cells.
        """
        if not self.centred:
            return self._squares(x), False
        found = self.measured(x)
        if not x.is_cpu:
            return found, False
        mean, variance = found.unbind()
        if not torch.addcmul(variance, mean, mean, value=-1 / self.far).amin().item() < 0:
            return found, False
        centre = mean.to(x.dtype)
        found = self.measured(self.less(x, *self.spread(centre, self.own, x.dtype)))
        found[0].add_(centre)  # the kernels round means to the dtype of x
        return found, True

    def _squares(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of the squares of this block's cells, of each mean, in float64.

        An inf among them, or a sum that overflows, makes it inf, and not nan: then cells that are finite become 0, as
        in torch. A long row is summed piece by piece, for a sum in sequence loses digits.
        """
        _, rows, cells = self.extents
        lines, whole = x.view(rows, cells), cells - cells % _PIECE
        found: torch.Tensor
        if cells <= _PIECE:
            found = torch.linalg.vector_norm(lines, dim=1).double().square_()
        else:
            pieces = lines[:, :whole].unflatten(1, (-1, _PIECE)), lines[:, whole:].unsqueeze(1)
            found = torch.cat([torch.linalg.vector_norm(one, dim=2).double() for one in pieces], 1).square_().sum(1)
        found = found.div_(cells).view(self.leading)
        dims = [dim for dim, n in enumerate(self.own) if n == 1 and self.leading[dim] != 1]
        if dims:
            found = found.mean(dims, keepdim=True)
        return found.view(1, -1)

    def measured(self, x: torch.Tensor) -> torch.Tensor:
        """What this block has of each mean and variance, in float64, whether or not a mean is far."""
        batch, rows, cells = self.extents
        if (x.is_cpu or x.is_meta) and x.numel() <= _EXACT:
            x = x.double()
        if x.dim() == _MATRIX:
            shape = (1, *self.leading, 1)
            found = torch.cat([_measured(one) for (one,) in self._kernels((x,))], 1).view(2, *shape)
        elif self.inner or x.is_meta or (cells >= _LONG and x.is_cpu):
            # the kernel rounds each mean to the dtype of x: those of several pieces are nearer to the mean of the row
            pieces = 1 if self.inner or x.dtype is torch.float64 else _pieces(cells)
            cells //= pieces
            shape = (batch, *self.leading, pieces)
            lines, number = x.view(1, batch * rows * pieces, cells), max(_MEASURED // cells, 1)
            chunks = lines.split(number, 1) if x.is_cpu and number < lines.shape[1] else [lines]
            kernel, counts = torch.native_group_norm, [one.shape[1] for one in chunks]
            # only the moments are kept, so that one normalised chunk at a time is in memory
            parts = [kernel(one, None, None, 1, n, cells, n, 0.0)[1:] for one, n in zip(chunks, counts, strict=True)]
            found = torch.cat([part[kind] for kind in (0, 1) for part in parts], 1).double().view(2, *shape)
            found[1].pow_(-2)
        else:
            shape = (1, *self.leading, 1)
            found = torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0)).double().view(2, *shape)
        dims = [dim for dim, n in enumerate((1, *self.own, 1)) if n == 1 and shape[dim] != 1]
        if dims:
            mean, variance = found.unbind()
            centre = mean.mean(dims, keepdim=True)
            mean.sub_(centre)
            found = torch.stack([centre, variance.addcmul_(mean, mean).mean(dims, keepdim=True)])
        return found.view(2, -1)

    def less(self, x: torch.Tensor, centre: torch.Tensor) -> torch.Tensor:
        """x less a value for each row."""
        found = empty(x.shape, x.dtype, x)
        for one, out, value in self._kernels((x, found), centre):
            torch.sub(one, _beside(value, one), out=out)
        return found

    def applied(
        self, x: torch.Tensor, by: Standard, weight: torch.Tensor | None, bias: torch.Tensor | None, shape: Shape
    ) -> torch.Tensor:
        """``(x - mean) / sqrt(variance + eps) * weight + bias``, of rows or cells; the tensor is of the given shape."""
        mean, variance, eps = by
        if self._is_small(x) and x.shape == shape:
            return torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, eps)[0]
        found = empty(shape, x.dtype, x, x.dim() == _MATRIX)
        y = self.beside(x, found)
        if not self.inner:
            for one, out, centre, spread, slope, shift in self._kernels((x, y), mean, variance, weight, bias):
                _apply(one, (centre, spread, eps), slope, shift, out)
            return found
        for one, out, centre, spread in self._chunks((x, y), mean, variance):
            _apply(one, (centre, spread, eps), None, None, out)
            if weight is not None and bias is not None:
                torch.addcmul(bias, out, weight, out=out)
            elif weight is not None:
                out.mul_(weight)
        return found

    def sums(self, x: torch.Tensor, dy: torch.Tensor, by: Standard) -> torch.Tensor:
        """Of each row, the sums of ``dy (x - mean) / sqrt(variance + eps)`` and of dy."""
        mean, variance, eps = by
        parts = self._kernels((x, dy), mean, variance)
        found = [_sums(one, rise, centre, spread, eps) for one, rise, centre, spread in parts]
        return found[0] if len(found) == 1 else torch.cat(found, 1)

    def weighted_sums(
        self, x: torch.Tensor, dy: torch.Tensor, mean: torch.Tensor, inverse: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The same of ``dy * weight``, where weights vary along the cells; and the gradients of weight and bias.

        Args:
            inverse: ``1 / sqrt(variance + eps)`` of each row.
        """
        _, rows, cells = self.extents
        values = torch.stack([torch.ones_like(mean), mean * inverse, inverse])
        found, over = x.new_empty(2, rows), x.new_zeros(3, cells)
        shifts, slopes = over.split([2, 1])
        for one, slope, value, sums in self._chunks((x, dy), values, found):
            slope, product = slope[0], torch.mul(one[0], slope[0])
            shifts.addmm_(value[:2], slope)
            slopes.addmm_(value[2:], product)
            torch.mv(product, weight, out=sums[0])
            torch.mv(slope, weight, out=sums[1])
        found[0].addcmul_(found[1], mean, value=-1).mul_(inverse)
        return found, [over[2] - over[1], over[0]]

    def gradient(
        self, x: torch.Tensor, dy: torch.Tensor, by: Standard, factors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """``dy * scale + (x - mean) / sqrt(variance + eps) * slope + shift``.

        Args:
            factors: scale, slope and shift of each row; there is no shift where there are no means.
        """
        mean, variance, eps = by
        if self._is_small(x):
            slope, shift = [*factors[1:], None][:2]
            dx = torch.native_batch_norm(x, slope, shift, mean, variance, False, 0.0, eps)[0]
            return dx.addcmul_(dy, _beside(factors[0], dy))
        dx = empty(x.shape, x.dtype, x)
        for sample in self._kernels((x, dy, dx), mean, variance, *factors):
            for one, rise, out, centre, spread, scale, *affine in self._chunks(sample[:3], *sample[3:]):
                slope, shift = [*affine, None][:2]
                _apply(one, (centre, spread, eps), slope, shift, out)
                out.addcmul_(rise, _beside(scale, rise))
        return dx

    def weighted_gradient(
        self,
        x: torch.Tensor,
        dy: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor,
        factors: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """``dy * weight * scale + (x - mean) * scale * slope + shift``, where the weight varies along the cells."""
        scale, slope, *shifts = factors
        slope = slope * scale
        values = [scale, slope, *(torch.addcmul(shift, slope, mean, value=-1) for shift in shifts)]
        dx = empty(x.shape, x.dtype, x)
        for one, rise, out, *own in self._chunks((x, dy, dx), *(value.view(1, -1, 1) for value in values)):
            torch.mul(rise, weight, out=out).mul_(own[0]).addcmul_(one, own[1])
            for shift in own[2:]:
                out.add_(shift)
        return dx

    def _is_small(self, x: torch.Tensor) -> bool:
        return x.is_cpu and x.numel() < _SMALL and x.shape[1] == self.extents[1] and not self.inner

    def _kernels(self, blocks: Sequence[torch.Tensor], *values: torch.Tensor | None) -> Iterator[Any]:
        """Blocks and values of their rows, as a kernel takes them: a matrix of which channels are rows."""
        channels = blocks[0].shape[1]
        if channels == self.extents[1]:
            return iter([(*blocks, *values)])
        parts = [repeat(None) if one is None else one.split(channels) for one in values]
        return zip(*[block.split(self.extents[2]) for block in blocks], *parts, strict=False)

    def _chunks(self, blocks: Sequence[torch.Tensor], *values: torch.Tensor) -> Iterator[Any]:
        """Blocks and values of their rows: of large blocks, some samples, rows or cells of a matrix at a time.

        Rows are dim 1 of the values, or the only one.
        """
        first, (batch, rows, cells) = blocks[0], self.extents
        if first.numel() <= 2 * _CHUNK or not first.is_cpu:
            return iter([(*blocks, *values)])
        if first.dim() == _MATRIX:
            along, size = 0, first.shape[1]
        else:
            along, size = (0, rows * cells) if batch > 1 else (1, cells)
        number = max(_CHUNK // size, 1)
        parts = [repeat(one) if along == 0 else one.split(number, min(one.dim(), 2) - 1) for one in values]
        return zip(*[block.split(number, along) for block in blocks], *parts, strict=False)


@cache
def _pieces(cells: int) -> int:
    """Into how many equal pieces of some hundred cells a row falls."""
    return next((n for n in range(cells // _SHORT, 1, -1) if cells % n == 0), 1)


def _as_matrix(x: torch.Tensor) -> torch.Tensor:
    return x.movedim(1, -1).reshape(-1, x.shape[1]).contiguous()


def _beside(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Values of rows such that they broadcast to a block."""
    return values if x.dim() == _MATRIX else values.view(-1, *[1] * (x.dim() - 2))


def _runs(*blocks: torch.Tensor) -> Iterator[tuple[int, Sequence[torch.Tensor]]]:
    """Blocks as kernels add them up without a loss of digits: of matrices, runs of a few cells stand side by side.

    Returns: how many runs, and the blocks, piece by piece.
    """
    cells, channels = blocks[0].shape[:2]
    if blocks[0].dim() != _MATRIX or not blocks[0].is_cpu or cells <= _RUN:
        yield 1, blocks
        return
    whole = cells - cells % _RUN
    number = max(_CHUNK // (channels * _RUN), 1) * _RUN
    for start in range(0, whole, number):
        runs = min(number, whole - start) // _RUN
        yield runs, [one[start : start + runs * _RUN].view(_RUN, runs * channels) for one in blocks]
    if whole < cells:
        yield 1, [one[whole:] for one in blocks]


def _measured(x: torch.Tensor) -> torch.Tensor:
    """Mean and variance of each channel of a matrix, in float64."""
    parts, shares = [], []
    for runs, (one,) in _runs(x):
        parts.append(torch.stack(torch.batch_norm_update_stats(one, None, None, 0.0)).view(2, runs, -1))
        shares += [len(one) / len(x)] * runs
    if len(shares) == 1:
        return parts[0][:, 0].double()
    means, variances = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).double()
    weights = torch.tensor(shares, dtype=torch.float64, device=x.device)
    mean = weights @ means
    away = means.sub_(mean)
    return torch.stack([mean, weights @ variances.addcmul_(away, away)])


def _sums(x: torch.Tensor, dy: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor, eps: float) -> torch.Tensor:
    found, wanted = [], [False, True, True]
    # kernels of a GPU need a weight, and tensors that a forward saved, which are empty if it is not in training
    weight = None if x.is_cpu or x.is_meta else torch.ones_like(mean)
    saved = None if weight is None else weight.new_empty(0)
    for runs, (one, rise) in _runs(x, dy):
        moments = (mean, variance) if runs == 1 else (mean.repeat(runs), variance.repeat(runs))
        sums = torch.cat(_SUMS(rise, one, weight, *moments, saved, saved, False, eps, wanted)[1:])
        found.append(sums.view(2, -1) if runs == 1 else sums.view(2, runs, -1).sum(1))
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _apply(
    x: torch.Tensor, by: Standard, weight: torch.Tensor | None, bias: torch.Tensor | None, y: torch.Tensor
) -> None:
    """``y = (x - mean) / sqrt(variance + eps) * weight + bias``, of rows."""
    mean, variance, eps = by
    # kernels of a GPU write the moments here, and add them up in this dtype; those of the CPU write nothing
    dtype = torch.float64 if x.dtype is torch.float64 else torch.float32
    left, beside = (torch.empty(0, dtype=dtype, device=x.device) for _ in range(2))
    _KERNEL(x, weight, bias, mean, variance, False, 0.0, eps, out=y, save_mean=left, save_invstd=beside)
