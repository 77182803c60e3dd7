"""How a normalisation is set up: what all kinds have in common, whatever they measure (see ``ops.normalisation``)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import prod
from operator import or_
from typing import Any, NamedTuple

import torch

from distdl.exchange import Operator, Together
from distdl.geometry.boxes import Interval, Shape
from distdl.ops.affine import affine, less
from distdl.ops.fused_normalisation import Fused
from distdl.ops.moments import Moments
from distdl.ops.provision import statistics_for, weights_for
from distdl.ops.rows import Rows
from distdl.ops.setup import Parts, Setup, Site, same
from distdl.partition import Layout, Signature
from distdl.partition.groups import dims
from distdl.tensors.connection import local, tie
from distdl.tensors.derivatives import NONE, Derivatives
from distdl.tensors.dtypes import carries_gradients
from distdl.transport.label import Label

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Arrangement:
    """How a normalisation sees this worker's block of x.

    Attributes:
        cells: shape of the block, in the dims that the moments have.
        row: shape of the weights that belong to it.
        moments: what is measured; None where running statistics stand for it.
        kept: the channels of which this worker keeps running statistics, if they take note of x.
        momentum: the weight of a new batch in them; None for their average over all batches.
        everywhere: whether every member keeps those of all channels.
    """

    cells: Shape
    row: Shape
    moments: Moments | None
    kept: Interval | None = None
    momentum: float | None = None
    everywhere: bool = False


class Running(NamedTuple):
    """Running statistics of this worker's channels.

    Attributes:
        factor: the weight that this batch gets in them; None if they stand for its moments.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    factor: float | None = None

    def approach(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Move towards the mean and the unbiased variance of a batch."""
        for one, towards in ((self.mean, mean), (self.variance, variance)):
            one.lerp_(towards.view(-1).to(one.dtype), self.factor or 0.0)


@dataclass(frozen=True, eq=False)
class Arrival:
    """What comes in: this worker prepares its tensors, and then some of them move.

    Attributes:
        prepare: of all tensors, what stays here, what moves, and the running statistics.
        moves: brings what moves to where it is needed.
    """

    prepare: Callable[..., tuple[Any, Sequence[torch.Tensor], Tensors]]
    moves: Together

    @property
    def operators(self) -> Sequence[Operator]:
        return self.moves.operators

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, Tensors, Tensors]:
        here, moving, running = self.prepare(*tensors)
        return here, self.moves(*moving), running


class Normalisation(ABC):
    """What the normalisations have in common.

    Attributes:
        eps: what is added to the variance; None for the smallest step of the dtype in which it is used.
    """

    eps: float | None

    @property
    @abstractmethod
    def extents(self) -> Mapping[int, int]:
        """Global extents of x along the dims in which weight and bias vary."""

    @abstractmethod
    def arrange(self, owned: Layout, site: Site) -> Arrangement:
        """What is measured on an x that is split so.

        Raises: ValueError, a function of the layout's extents only.
        """

    @abstractmethod
    def compute(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, running: Running | None
    ) -> torch.Tensor:
        """torch's operator, on a block that has all cells behind each of its means.

        It checks nothing, for what torch's functions check on a block would raise on some workers only. Its result is
        no view.

        Args:
            running: the running statistics, if they take note of x or stand for its moments.
        """

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        """The three steps of any normalisation, of ``(x, weight, bias, running mean, running variance, batches)``.

        ``weight`` and ``bias`` are there as far as they have signatures, the others if there are running statistics:
        those of this worker's balanced block of channels, or of all, and the number of batches that they have taken
        note of. Where every worker has all of the weights, or of the statistics, it takes its part, and they do not
        move.
        """
        x, *weights = signatures
        _check(self, site.label, x, weights)
        arrangement = self.arrange(x.layout, site)
        needed = {dim: x.layout.intervals[dim] for dim in self.extents}
        own = x.layout.box_of(site.me)
        part = Parts([tuple(own[dim] for dim in self.extents)], [tuple(self.extents.values())])
        plan = None if arrangement.moments is None else arrangement.moments.plan()
        row = (prod(arrangement.row),) if plan is None else arrangement.row  # torch takes weights of one dim
        everywhere = bool(weights) and weights[0].layout.is_everywhere
        spread = [weights_for(site, needed, row, weights)] if weights and not everywhere else []
        derivatives = reduce(or_, (one.derivatives for one in weights), NONE)
        absent = bool(weights) and site.me not in weights[0].layout.partition
        given = _Given(len(weights), part if everywhere else None, derivatives, absent)
        if arrangement.moments is None or plan is None:
            lends = arrangement.moments is None and not arrangement.everywhere
            lent = [statistics_for(site, needed, row)] if lends else []
            return _by_torch(self, site, arrangement, x, weights, given, part, spread, lent)
        moments = arrangement.moments
        gather = site.operator(plan, torch.float64, x.derivatives, [moments.measured], [moments.arriving])
        return _by_moments(self, arrangement, moments, x, given, gather, Together(*spread))


def _by_moments(
    op: Normalisation,
    arrangement: Arrangement,
    moments: Moments,
    x: Signature,
    given: _Given,
    gather: Operator,
    moves: Together,
) -> Setup:
    """Where workers share means: they gather entries, and then each normalises its block.

    As one node of autograd; in steps where those are differentiated forward, or the kernels do not fit.
    """
    dtype, work, own = x.dtype, _work(x), x.local

    def prepare(x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor], Tensors]:
        return *given.beside(_block(x, others, dtype, work), others), others[given.number :]

    gathered = moments.gathered
    noted = None if arrangement.kept is None else (gathered[0], arrangement.kept, *gathered[2:])

    def note(means: torch.Tensor, kept: Tensors) -> None:
        if noted is not None and moments.count and means.shape[1]:
            with torch.no_grad():
                means = moments.of(means, noted)
                mean, variance = (means.mean(1) if means.shape[1] > 1 else means).unbind()
                _running(arrangement, kept).approach(mean, variance * (moments.count / (moments.count - 1)))

    def in_steps(block: torch.Tensor, *rows: torch.Tensor, kept: Tensors | None = None) -> torch.Tensor:
        cells = block.reshape(arrangement.cells)
        centre = moments.centre(cells) if moments.centred else None
        rest = cells if centre is None else less(cells, centre)
        means = moments.merge(gather(moments.measure(rest, centre)))
        if kept is not None:
            note(means, kept)
        found = moments.of(means)
        variance, offset = found[0], None
        if centre is not None:
            variance, offset = found[1], (found[0] - centre).to(work)
        scale = (variance + step(op, rest)).rsqrt().to(work)
        return _standardise(rest, scale, offset, [row.reshape(arrangement.row) for row in rows], own)

    rows = None if given.derivatives.tangent or gather.derivatives.tangent else Rows.of(
        arrangement.cells, arrangement.row, moments.merged, moments.centred, moments.count
    )  # fmt: skip
    eps = torch.finfo(work).eps if op.eps is None else op.eps
    fused = None if rows is None else Fused(rows, moments, gather, eps, in_steps, own)

    def normalise(block: torch.Tensor, moved: Tensors, kept: Tensors) -> torch.Tensor:
        weights = [row.to(work) for row in moved]
        if fused is None:
            return in_steps(block, *weights, kept=kept).to(dtype)
        return fused(block, weights, partial(note, kept=kept) if noted else None).to(dtype)

    return Setup(Arrival(prepare, moves), normalise, same, (x.layout,))


def _by_torch(
    op: Normalisation,
    site: Site,
    arrangement: Arrangement,
    x: Signature,
    weights: Sequence[Signature],
    given: _Given,
    part: Parts,
    spread: Sequence[Operator],
    lent: Sequence[Operator],
) -> Setup:
    """Where nothing that is measured moves: torch's own operator does it faster."""
    dtype, work, own, count = x.dtype, _work(x), x.local, len(weights)
    moves = Together(site.identity(work, x.derivatives | given.derivatives, own), *spread, *lent)
    lends = arrangement.moments is None

    def prepare(x: torch.Tensor, *others: torch.Tensor) -> tuple[None, Sequence[torch.Tensor], Tensors]:
        block, rows = given.beside(_block(x, others, dtype, work), others)
        running = others[count : count + 2] if lends else ()
        if running and not lent:
            running = tuple(part.each(running))
        elif running and lent[0].inputs[0] == (0,):
            running = tuple(one[:0] for one in running)
        return None, [block, *rows, *(one.double() for one in running)], others[count:]

    def normalise(here: None, moved: Tensors, kept: Tensors) -> torch.Tensor:
        block, flat = moved[0], [(row if row.dim() == 1 else row.flatten()).to(work) for row in moved[1:]]
        # not of the cells: where a reshape changes the strides of dims of extent 1, torch's derivative goes wrong
        operands = ((block, [1] * block.dim()), *((row, [1]) for row in flat))
        note = _running(arrangement, kept) if arrangement.kept is not None and block.numel() else None
        written = note and Running(note.mean.to(work), note.variance.to(work), note.factor)

        def operator(block: torch.Tensor, *rows: torch.Tensor) -> torch.Tensor:
            weight, bias = [*rows[:count], None, None][:2]
            return op.compute(block, weight, bias, Running(rows[count], rows[count + 1]) if lends else written)

        y = local(operator, own, *operands)
        if note is not None and written is not None and written.mean is not note.mean:
            note.mean.copy_(written.mean)
            note.variance.copy_(written.variance)
        return y.to(dtype)

    return Setup(Arrival(prepare, moves), normalise, same, (x.layout,))


class _Given(NamedTuple):
    """The weights that are given.

    Attributes:
        number: how many.
        part: cuts this worker's part out of each, where every worker has the whole of them.
        derivatives: what they carry, on any member.
        absent: whether this worker stores none of them.
    """

    number: int
    part: Parts | None
    derivatives: Derivatives
    absent: bool

    def beside(self, block: torch.Tensor, others: Tensors) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The block, and the weights of this worker, which stand in front of other tensors."""
        weights = [other.to(block.device) for other in others[: self.number]]
        if self.part is not None:
            weights = self.part.each(weights)
        if self.absent and self.derivatives.gradient and block.requires_grad and not weights[0].requires_grad:
            block, nothing = tie(block, weights[0])
            weights = [nothing] * self.number
        return block, weights


def _work(x: Signature) -> torch.dtype:
    """The dtype in which a block is normalised."""
    return torch.promote_types(x.dtype, torch.float32)


def _block(x: torch.Tensor, others: Tensors, dtype: torch.dtype, work: torch.dtype) -> torch.Tensor:
    """A block as it is worked on; an empty one may come in any dtype and on any device."""
    if not x.numel():
        x = x.to(others[-1].device if others else x.device, dtype)
    return x.to(work)


def _running(arrangement: Arrangement, kept: Tensors) -> Running:
    """The running statistics that take note of x."""
    mean, variance, batches = kept
    factor = 1.0 / max(float(batches), 1.0) if arrangement.momentum is None else arrangement.momentum
    return Running(mean, variance, factor)


def _standardise(
    rest: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, rows: Sequence[torch.Tensor], own: Shape
) -> torch.Tensor:
    """``(rest - offset) * scale * weight + bias``, in one pass over the block, or in two."""
    if rows and prod(torch.broadcast_shapes(scale.shape, rows[0].shape)) < rest.numel():
        scale = scale * rows[0]
        shifts = [*rows[1:]] + ([] if offset is None else [-offset * scale])
        return affine(rest, scale, sum(shifts[1:], shifts[0]) if shifts else None, own)
    shift = None if offset is None else -offset * scale
    if not rows:
        return affine(rest, scale, shift, own)
    return affine(affine(rest, scale, shift), rows[0], rows[1] if len(rows) > 1 else None, own)


def _check(op: Normalisation, label: Label, x: Signature, weights: Sequence[Signature]) -> None:
    extents = op.extents
    if any(x.layout.extents[dim] != extent for dim, extent in extents.items()):
        raise ValueError(
            f"{label} needs an input whose extents are {dims(list(extents.values()))} in dims "
            f"{', '.join(map(str, extents))}; the global shape of the input is {dims(x.layout.extents)}"
        )
    if not (x.dtype.is_floating_point and carries_gradients(x.dtype)):
        raise ValueError(f"{label.kind} needs an input of a floating-point dtype; got {x.dtype}")
    for name, one in zip(("weight", "bias"), weights, strict=False):
        if one.dtype not in (x.dtype, torch.float32 if x.dtype.itemsize < 4 else x.dtype) or (
            one.dtype != weights[0].dtype
        ):
            raise ValueError(
                f"{label} needs {name} of the input's dtype, {x.dtype}, or float32 for less; got {one.dtype}"
            )


def step(op: Normalisation, x: torch.Tensor) -> float:
    return torch.finfo(x.dtype).eps if op.eps is None else op.eps
