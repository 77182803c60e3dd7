"""Random primitives over random partitions, each with what it has to give, computed another way.

Everything is drawn from one seed, so every worker builds the same cases and knows the inputs of all the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from distdl.geometry.boxes import balanced, runs, slices
from distdl.nn import (
    AllGather,
    AllSumReduce,
    Broadcast,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan import Plan
from distdl.plan.planning import all_sum, broadcast, copy, padded_halo


@dataclass
class Case:
    """A primitive and its inputs.

    Attributes:
        xs: the local input of every worker; of zero volume outside P_x.
        expected: the output of every worker that has one, for inputs ``xs``.
        plan: the plan of all workers, for derivatives.
    """

    name: str
    layer: Any
    xs: dict[int, torch.Tensor]
    expected: Callable[[dict[int, torch.Tensor]], dict[int, torch.Tensor]]
    plan: Plan


def random_grid(P: Partition, rng: np.random.Generator, dims: int, most: int | None = None) -> Partition:
    """Random workers in random order over a random grid, often leaving some out."""
    while True:
        shape = rng.integers(1, 4, size=dims)
        if np.prod(shape) <= (most or P.size):
            return P.create_partition_inclusive(rng.permutation(P.size)[: np.prod(shape)]).reshape(*shape)


def spread(P: Partition, rng: np.random.Generator) -> tuple[Partition, Partition]:
    """Two random partitions, the first of which spreads over the second."""
    many = random_grid(P, rng, int(rng.integers(1, 4)))
    few_dims = int(rng.integers(1, many.dim + 1))
    shape = [n if rng.random() < 0.5 else 1 for n in many.workers.shape[many.dim - few_dims :]]
    few = P.create_partition_inclusive(rng.permutation(P.size)[: int(np.prod(shape))]).reshape(*shape)
    return few, many


def source_index(few: Partition, at: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i if n > 1 else 0 for n, i in zip(few.workers.shape, at[len(at) - few.dim :], strict=True))


def integers(rng: np.random.Generator, shape: Any) -> torch.Tensor:
    """Whole numbers, so that sums are exact in any order."""
    return torch.from_numpy(rng.integers(-99, 99, tuple(int(n) for n in shape))).double()


def outside(P: Partition, member: Partition, xs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {w: xs[w] if w in member else torch.zeros((2, 0)).double() for w in range(P.size)}


def make_broadcast(P: Partition, rng: np.random.Generator) -> Case:
    few, many = spread(P, rng)
    turn = [bool(rng.random() < 0.3) for _ in range(2)]
    xs = {int(w): integers(rng, rng.integers(0, 4, size=2)) for w in few.workers.flat}

    def expected(xs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {
            int(many.workers[at]): xs[int(few.workers[source_index(few, at)])] for at in np.ndindex(*many.workers.shape)
        }

    layer = Broadcast(
        few.T if turn[0] else few, many.T if turn[1] else many, transpose_src=turn[0], transpose_dest=turn[1]
    )
    plan = broadcast(few, many, {w: tuple(x.shape) for w, x in xs.items()})
    return Case(f"Broadcast {few} to {many} {turn}", layer, outside(P, few, xs), expected, plan)


def make_sum_reduce(P: Partition, rng: np.random.Generator) -> Case:
    few, many = spread(P, rng)
    turn = [bool(rng.random() < 0.3) for _ in range(2)]
    shapes = {int(w): tuple(rng.integers(0, 4, size=2).tolist()) for w in few.workers.flat}
    root = {int(many.workers[at]): int(few.workers[source_index(few, at)]) for at in np.ndindex(*many.workers.shape)}
    xs = {w: integers(rng, shapes[r]) for w, r in root.items()}

    def expected(xs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {r: sum((xs[w] for w in root if root[w] == r), torch.zeros(shapes[r])) for r in shapes}

    layer = SumReduce(
        many.T if turn[0] else many, few.T if turn[1] else few, transpose_src=turn[0], transpose_dest=turn[1]
    )
    return Case(
        f"SumReduce {many} to {few} {turn}", layer, outside(P, many, xs), expected, broadcast(few, many, shapes).T
    )


def make_all_sum_reduce(P: Partition, rng: np.random.Generator) -> Case:
    grid = random_grid(P, rng, int(rng.integers(1, 4)))
    axes = tuple(axis for axis in range(grid.dim) if rng.random() < 0.5)
    keep = tuple(axis for axis in range(grid.dim) if axis not in axes)
    line = {int(grid.workers[at]): tuple(at[axis] for axis in keep) for at in np.ndindex(*grid.workers.shape)}
    shapes = {key: tuple(rng.integers(0, 4, size=3).tolist()) for key in sorted(set(line.values()))}
    xs = {w: integers(rng, shapes[key]) for w, key in line.items()}

    def expected(xs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        return {w: sum((xs[v] for v in line if line[v] == key), torch.zeros(shapes[key])) for w, key in line.items()}

    layer = AllSumReduce(grid, axes_reduce=axes) if rng.random() < 0.5 else AllSumReduce(grid, axes_keep=keep)
    plan = all_sum(grid, axes, {w: tuple(x.shape) for w, x in xs.items()})
    return Case(f"AllSumReduce {grid} over {axes}", layer, outside(P, grid, xs), expected, plan)


def random_runs(rng: np.random.Generator, extent: int, parts: int) -> Any:
    cuts = np.sort(rng.integers(0, extent + 1, size=parts - 1))
    return runs(np.diff([0, *cuts, extent]).tolist())


def joined(owned: Layout, xs: dict[int, torch.Tensor]) -> torch.Tensor:
    """The global tensor whose blocks the workers have."""
    whole = torch.zeros(owned.extents).double()
    for w in owned:
        whole[slices(owned[w])] = xs[w]
    return whole


def make_repartition(P: Partition, rng: np.random.Generator) -> Case:
    dims = int(rng.integers(1, 4))
    P_x, P_y = random_grid(P, rng, dims), random_grid(P, rng, dims)
    extents = [int(n) for n in rng.integers(2, 8, size=dims)]
    if rng.random() < 0.15:
        extents[0] = 0
    owned = Layout.of(P_x, [random_runs(rng, n, p) for n, p in zip(extents, P_x.workers.shape, strict=True)])
    whole = integers(rng, extents)
    xs = {w: whole[slices(owned[w])] for w in owned}

    def expected(xs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        tensor = joined(owned, xs)
        split = [balanced(n, p) for n, p in zip(extents, P_y.workers.shape, strict=True)]
        return {
            int(P_y.workers[at]): tensor[tuple(slice(*split[d][i]) for d, i in enumerate(at))]
            for at in np.ndindex(*P_y.workers.shape)
        }

    plan = copy(owned, Layout.balanced(P_y, extents))
    return Case(f"Repartition {P_x} to {P_y} of {extents}", Repartition(P_x, P_y), outside(P, P_x, xs), expected, plan)


def make_halo_exchange(P: Partition, rng: np.random.Generator) -> Case:
    grid = random_grid(P, rng, int(rng.integers(1, 3)))
    bulk = [rng.integers(1, 4, size=n) for n in grid.workers.shape]
    width = int(rng.integers(0, 4))
    extents = [int(b.sum()) for b in bulk]
    halo = np.zeros((*grid.workers.shape, grid.dim, 2), dtype=int)
    for at in np.ndindex(*grid.workers.shape):
        for d, i in enumerate(at):
            halo[at][d] = min(bulk[d][:i].sum(), width), min(bulk[d][i + 1 :].sum(), width)
    shapes = np.array([[b[i] for b, i in zip(bulk, at, strict=True)] for at in np.ndindex(*grid.workers.shape)])
    shapes = shapes.reshape(*grid.workers.shape, grid.dim) + halo.sum(axis=-1)
    xs = {int(grid.workers[at]): integers(rng, shapes[at]) for at in np.ndindex(*grid.workers.shape)}

    def parts(at: tuple[int, ...]) -> tuple[Any, Any]:
        """Of the block at an index: its bulk in the local tensor, and the whole block in the global tensor."""
        inner = tuple(slice(b, b + int(bulk[d][i])) for d, (i, (b, _)) in enumerate(zip(at, halo[at], strict=True)))
        start = [int(bulk[d][:i].sum()) for d, i in enumerate(at)]
        around = tuple(
            slice(s - b, s + int(bulk[d][at[d]]) + e) for d, (s, (b, e)) in enumerate(zip(start, halo[at], strict=True))
        )
        return inner, around

    def expected(xs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        tensor = torch.zeros(extents).double()
        for at in np.ndindex(*grid.workers.shape):
            inner, around = parts(at)
            core = tuple(slice(a.start + i.start, a.start + i.stop) for a, i in zip(around, inner, strict=True))
            tensor[core] = xs[int(grid.workers[at])][inner]
        return {int(grid.workers[at]): tensor[parts(at)[1]] for at in np.ndindex(*grid.workers.shape)}

    send = np.zeros_like(halo)
    for at in np.ndindex(*grid.workers.shape):
        for d, i in enumerate(at):
            before, behind = ((*at[:d], i + step, *at[d + 1 :]) for step in (-1, 1))
            send[at][d, 0] = halo[before][d, 1] if i > 0 else 0
            send[at][d, 1] = halo[behind][d, 0] if i + 1 < grid.workers.shape[d] else 0
    here = tuple(grid.index) if grid.active else None
    mine = [None if here is None else sizes[here] for sizes in (halo, halo, send)]
    layer = HaloExchange(grid, *mine)
    return Case(
        f"HaloExchange {grid} {bulk} {width}", layer, outside(P, grid, xs), expected, padded_halo(grid, shapes, halo)
    )


def random_blocks(grid: Partition, rng: np.random.Generator) -> tuple[list[int], Layout]:
    extents = [int(n) for n in rng.integers(1, 7, size=grid.dim)]
    return extents, Layout.of(grid, [random_runs(rng, n, p) for n, p in zip(extents, grid.workers.shape, strict=True)])


def make_all_gather(P: Partition, rng: np.random.Generator) -> Case:
    grid = random_grid(P, rng, int(rng.integers(1, 4)))
    extents, owned = random_blocks(grid, rng)
    axes = tuple(axis for axis in range(grid.dim) if rng.random() < 0.6)
    whole = integers(rng, extents)
    xs = {w: whole[slices(owned[w])] for w in owned}

    def expected(xs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        tensor = joined(owned, xs)
        cut = {w: tuple(slice(None) if d in axes else s for d, s in enumerate(slices(owned[w]))) for w in owned}
        return {w: tensor[cut[w]] for w in owned}

    plan = copy(owned, owned.gathered(axes))
    return Case(f"AllGather {grid} along {axes}", AllGather(grid, axes), outside(P, grid, xs), expected, plan)


def make_reduce_scatter(P: Partition, rng: np.random.Generator) -> Case:
    grid = random_grid(P, rng, int(rng.integers(1, 4)))
    extents, owned = random_blocks(grid, rng)
    axes = tuple(axis for axis in range(grid.dim) if rng.random() < 0.6)
    given = rng.random() < 0.5
    kept = [
        list(owned.intervals[d]) if given or d not in axes else balanced(extents[d], p)
        for d, p in enumerate(grid.workers.shape)
    ]
    owned = Layout.of(grid, kept)
    full = owned.gathered(axes)
    xs = {w: integers(rng, [b - a for a, b in full[w]]) for w in owned}

    def expected(xs: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        at = {w: grid.index_of(w) for w in owned}
        group = {
            w: [v for v in owned if all(d in axes or at[v][d] == at[w][d] for d in range(grid.dim))] for w in owned
        }
        cut = {w: tuple(s if d in axes else slice(None) for d, s in enumerate(slices(owned[w]))) for w in owned}
        return {w: sum((xs[v][cut[w]] for v in group[w]), torch.zeros(xs[w][cut[w]].shape)) for w in owned}

    sizes = {axis: [b - a for a, b in owned.intervals[axis]] for axis in axes} if given else None
    layer = ReduceScatter(grid, axes, sizes)
    return Case(
        f"ReduceScatter {grid} along {axes} {sizes}", layer, outside(P, grid, xs), expected, copy(owned, full).T
    )


# "SumReduce": make_sum_reduce, and so on, in the order of this file
MAKERS = {
    "".join(word.capitalize() for word in name.split("_")[1:]): maker
    for name, maker in globals().items()
    if name.startswith("make_")
}
