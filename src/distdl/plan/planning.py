"""How plans are made: partitions and shapes in, plans out. Pure functions; no messages, no tensors.

With ``me``, a plan keeps only the moves that touch that worker (and its own shapes), at a cost that follows what it
touches and not the size of the partition. Without, it has the moves of all workers, as tests want it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from types import MappingProxyType

import numpy as np

from distdl.environment.arguments import known
from distdl.geometry.boxes import Box, Interval, Shape, meet, shape, shift, within
from distdl.geometry.edges import beside, rims
from distdl.partition import Partition
from distdl.partition.groups import IntArray, check_axes, check_spread, line_of, teams_of
from distdl.partition.layout import Layout, Ruler
from distdl.plan.plan import Move, Pattern, Plan, Shapes, Team


def copy(
    owned: Layout, needed: Layout, me: int | None = None, repeats: Mapping[int, Interval] = MappingProxyType({})
) -> Plan:
    r"""Plan the copy of the parts of a tensor from where they are to where they are needed.

    Forward: :math:`y_t[c] = x_{o(c)}[c]` for every cell c of the tensor that t needs, o(c) being the worker that owns
    it; needed cells that nobody owns (outside the tensor) are 0. Along dims that repeat, c may be as much as a period
    away from the cell that it stands for.
    Adjoint: :math:`\partial x_s[c] = \sum_{t \text{ needs } c} \partial y_t[c]`.

    Args:
        owned: a tiling of the tensor; x on a worker has the shape of its box.
        needed: one box for each target worker; boxes may overlap and may reach beyond the tensor.
        repeats: for each dim along which the tensor repeats, the cells that do. (Circular padding.)
    Returns: a plan with one move for each pair of workers that share cells, and for each way in which they do.
    Raises: ValueError if the two differ in their number of dims, for a dim that does not exist, or for no worker.
    Source: Hewett & Grady, arXiv:2006.03108 (there: scatter, gather, generalised halo exchange).
    """
    if len(owned.rulers) != len(needed.rulers):
        raise ValueError(
            f"copy needs two layouts of one number of dims; owned has {len(owned.rulers)}, over {owned.partition}, and "
            f"needed has {len(needed.rulers)}, over {needed.partition}"
        )
    if repeats and not all(0 <= dim < len(owned.rulers) and i <= j for dim, (i, j) in repeats.items()):
        raise ValueError(
            f"copy needs repeats to say, for dims from 0 to {len(owned.rulers) - 1}, from where to where the tensor "
            f"repeats; got {dict(repeats)}"
        )
    _check_worker(me, owned.partition)
    turns = _turns(owned.extents, repeats)
    if me is None:
        moves = tuple(move for target in needed for move in _arrivals(owned, needed[target], target, turns))
        return known(Plan, {w: shape(owned[w]) for w in owned}, {w: shape(needed[w]) for w in needed}, moves)
    arriving = _arrivals(owned, needed[me], me, turns) if me in needed.partition else iter(())
    leaving = _departures(needed, owned[me], me, turns) if me in owned.partition else iter(())
    return known(
        Plan,
        {me: shape(owned[me])} if me in owned.partition else {},
        {me: shape(needed[me])} if me in needed.partition else {},
        (*(move for move in arriving if move.source != me), *leaving),
    )


def edges(owned: Layout, windows: Layout, dim: int, me: int | None = None) -> Plan:
    r"""Plan the copy of what windows have along one dim before and behind the blocks that lie in them.

    Forward: y on a worker is what stands before its block and then what stands behind, side by side along the dim; x is
    what others read of a block: its first cells and its last (see :class:`distdl.geometry.edges.Rim`). Along earlier
    dims y is as wide as the block, and along later ones as the window: no cell of a window is in the y of two dims.
    Adjoint: the gradients of all copies of a cell add up in the x of its owner.

    Args:
        owned, windows: the blocks, which tile a tensor, and the windows around them; over one partition.
    """
    blocks = owned.rulers[dim].intervals
    sides = beside(blocks, windows.rulers[dim].intervals)
    ends = rims(blocks, *sides)
    before, behind = (
        known(Layout, owned.partition, (*owned.rulers[:dim], Ruler(tuple(side)), *windows.rulers[dim + 1 :]))
        for side in sides
    )

    def at(worker: int) -> int:
        return owned.partition.index_of(worker)[dim]

    def to_rim(move: Move, among_first: bool) -> Box:
        rim = ends[at(move.source)]
        run = tuple(rim.place(cell, among_first) for cell in move.src[dim])
        return (*move.src[:dim], (run[0], run[1]), *move.src[dim + 1 :])

    def beyond(worker: int) -> Shape:
        start, stop = sides[0][at(worker)]
        return tuple(stop - start if other == dim else 0 for other in range(len(owned.rulers)))

    first, second = copy(owned, before, me), copy(owned, behind, me)
    moves = [Move.known(m.source, to_rim(m, among_first=False), m.target, m.dst) for m in first.moves]
    moves += [
        Move.known(m.source, to_rim(m, among_first=True), m.target, shift(m.dst, beyond(m.target)))
        for m in second.moves
    ]
    inputs = {
        worker: tuple(ends[at(worker)].size if other == dim else n for other, n in enumerate(extents))
        for worker, extents in first.inputs.items()
    }
    outputs = {
        worker: tuple(n + second.outputs[worker][dim] if other == dim else n for other, n in enumerate(extents))
        for worker, extents in first.outputs.items()
    }
    return known(Plan, inputs, outputs, tuple(moves))


Turns = tuple[tuple[Shape, Box], ...]


def _turns(extents: Shape, repeats: Mapping[int, Interval]) -> Turns:
    """Every way to shift a window onto the tensor: by how much, and the cells that count then."""
    cells = tuple(repeats.get(dim, (0, extent)) for dim, extent in enumerate(extents))
    periods = [(0, stop - start, start - stop) if dim in repeats else (0,) for dim, (start, stop) in enumerate(cells)]
    return tuple((offsets, cells) for offsets in product(*periods))


def _arrivals(owned: Layout, box: Box, target: int, turns: Turns) -> Iterator[Move]:
    for offsets, cells in turns:
        window = shift(box, offsets)
        for source, own, shared in owned.meeting(meet(window, cells)):
            yield Move.known(source, within(shared, own), target, within(shared, window))


def _departures(needed: Layout, own: Box, source: int, turns: Turns) -> Iterator[Move]:
    for offsets, cells in turns:
        back = tuple(-by for by in offsets)
        frame = shift(own, back)
        for target, window, shared in needed.meeting(shift(meet(own, cells), back)):
            yield Move.known(source, within(shared, frame), target, within(shared, window))


def broadcast(P_x: Partition, P_y: Partition, shapes: Shapes, me: int | None = None) -> Plan:
    r"""Plan the copy of each worker's tensor in ``P_x`` to the workers of ``P_y`` that match it.

    Forward: :math:`y_t = x_{s(t)}`.   Adjoint: :math:`\partial x_s = \sum_{t:\,s(t)=s} \partial y_t` (a sum-reduce).

    Args:
        P_x, P_y: partitions of one world; every axis of P_x is 1 or equals P_y's (aligned at the last axis).
        shapes: local shape of x on each worker of P_x, in elements. Shapes may differ between workers.
    Returns: a plan whose output on worker t has the shape of x on worker s(t).
    Raises: ValueError, the same on every worker, if an axis does not match, a shape is missing, or for no worker.
    Source: Hewett & Grady, arXiv:2006.03108.
    """
    check_spread(P_x.workers.shape, P_y.workers.shape)
    _check_worker(me, P_x)
    led, fed = teams_of(P_x.workers, P_y.workers, me)
    teams = dict(led + fed)
    moving = {s: _shape_of(s, shapes, "broadcast") for s in teams}
    outputs = {t: moving[s] for s, members in led + fed for t in _own(members, me)}
    return known(
        Plan,
        {s: moving[s] for s, _ in led},
        outputs,
        (),
        Pattern.BROADCAST,
        tuple(Team(s, members, moving[s]) for s, members in teams.items()),
    )


def _shape_of(worker: int, shapes: Shapes, what: str) -> Shape:
    try:
        return tuple(shapes[worker])
    except KeyError:
        raise ValueError(
            f"{what} needs the shape of x on worker {worker}; shapes has those of {list(shapes)}"
        ) from None


def _check_worker(me: int | None, P: Partition) -> None:
    if me is not None and not 0 <= me < P.comm.size:
        raise ValueError(f"a plan is made for a worker from 0 to {P.comm.size - 1}, or for all (None); got me={me}")


def _own(workers: IntArray, me: int | None) -> list[int]:
    """Those of the workers that a plan for ``me`` keeps shapes of."""
    if me is not None:
        return [me] if (workers == me).any() else []
    listed: list[int] = workers.ravel().tolist()
    return listed


def all_sum(P_x: Partition, axes: Sequence[int], shapes: Shapes, me: int | None = None) -> Plan:
    r"""Plan the sum of the tensors along axes of a partition, the result being left on every worker that contributes.

    Forward: :math:`y_t = \sum_{s \in L(t)} x_s`, L(t) being the workers that one reaches from t along the axes.
    Adjoint: the same plan.

    Args:
        axes: partition axes to sum along; none of them: a copy.
        shapes: local shape of x on each worker, in elements; equal along the axes.
    Raises: ValueError for axes that do not exist, if a shape is missing, or for no worker.
    Source: Hewett & Grady, arXiv:2006.03108.
    """
    reduced = check_axes(axes, P_x.workers.ndim, "an all-sum")
    _check_worker(me, P_x)
    if me is None:
        starts = [range(1) if axis in reduced else range(n) for axis, n in enumerate(P_x.workers.shape)]
        lines = [line_of(P_x.workers, reduced, at) for at in np.ndindex(*map(len, starts))]
    else:
        lines = [line_of(P_x.workers, reduced, P_x.index_of(me))] if me in P_x else []
    local = {w: _shape_of(w, shapes, "all_sum") for line in lines for w in _own(line, me)}
    teams = [Team(int(line.flat[0]), line, tuple(shapes[int(line.flat[0])])) for line in lines]
    return known(Plan, local, local, (), Pattern.ALL_SUM, tuple(teams))


def padded_halo(P_x: Partition, shapes: IntArray, halos: IntArray, me: int | None = None) -> Plan:
    r"""Plan the halo exchange of tensors that include their halos already.

    Forward: :math:`y[\text{bulk}] = x[\text{bulk}]`, and each cell of y's halo is the bulk of the worker that owns it,
    in corners and beyond the next neighbour too; cells outside the tensor are 0. What x holds in its halo is ignored.
    Adjoint: the gradients of all copies of a cell add up in the bulk of its owner; the gradient of x's halo is 0.

    Args:
        shapes: local shape of x with its halo, in elements: ``P_x.workers.shape + (dim,)``.
        halos: cells of halo before and behind the bulk: ``P_x.workers.shape + (dim, 2)``.
    Raises: ValueError if the bulks form no grid, a halo is negative or larger than its tensor, or halos in a dim differ
        between workers at one place of its axis.
    """
    bulks = shapes - halos.sum(axis=-1)
    if (halos < 0).any() or (bulks < 0).any():
        at = tuple(np.argwhere(((halos < 0).any(-1)) | (bulks < 0))[0][:-1])
        raise ValueError(
            f"halos must not be negative and must fit into the tensor; on worker {P_x.workers[at]} of {P_x} the halo "
            f"is {halos[at].tolist()} and the tensor's shape is {shapes[at].tolist()}"
        )
    owned = Layout.tiled(P_x, bulks, "x without its halo")
    before = [_per_place(P_x, halos[..., dim, 0], dim) for dim in range(P_x.workers.ndim)]
    behind = [_per_place(P_x, halos[..., dim, 1], dim) for dim in range(P_x.workers.ndim)]
    needed = Layout.along(P_x, [_widen(*one) for one in zip(owned.rulers, before, behind, strict=True)])
    plan = copy(owned, needed, me)

    def origin(worker: int) -> Shape:
        return tuple(before[dim][place] for dim, place in enumerate(P_x.index_of(worker)))

    moves = tuple(Move.known(m.source, shift(m.src, origin(m.source)), m.target, m.dst) for m in plan.moves)
    return known(Plan, plan.outputs, plan.outputs, moves)


def _widen(ruler: Ruler, before: list[int], behind: list[int]) -> list[Interval]:
    return [(i - b, j + e) for (i, j), b, e in zip(ruler.intervals, before, behind, strict=True)]


def _per_place(P_x: Partition, widths: IntArray, dim: int) -> list[int]:
    lines = np.moveaxis(widths, dim, 0).reshape(P_x.workers.shape[dim], -1)
    if (lines != lines[:, :1]).any():
        raise ValueError(
            f"halos in dim {dim} must be equal on workers at one place of axis {dim} of {P_x}; got {lines.tolist()}"
        )
    return [int(width) for width in lines[:, 0]]
