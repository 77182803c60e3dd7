"""The table of plans: every law of plans is one test over it."""

import numpy as np

from distdl.geometry.boxes import balanced, runs
from distdl.geometry.windows import sliding
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan.planning import all_sum, broadcast, copy, edges, padded_halo
from distdl.testing import Silent


def plans(world):
    """From a name to ``make(me)``: the plan for one worker, or for all if me is None."""
    P = world(12)
    row = P.create_partition_inclusive([1, 2, 3]).reshape(1, 3, 1)
    grid = P.reshape(2, 3, 2)
    some = P.create_partition_inclusive([7, 3, 9, 0]).reshape(2, 2)
    others = P.create_partition_inclusive([3, 4, 5, 6, 9, 11]).reshape(3, 2)
    square = P.create_partition_inclusive(range(4)).reshape(2, 2)
    shapes = {1: (2,), 2: (3, 1), 3: (0, 2)}
    uneven = Layout.of(some, [runs([1, 4]), runs([0, 7])])
    line = P.create_partition_inclusive([0, 1, 2, 3]).reshape(4)
    tensor = Layout.of(line, [runs([2, 1, 4, 3])])
    windows = Layout.of(line, [[sliding(run, 5, stride=2, padding=3) for run in balanced(6, 4)]])
    deep = Layout.of(line, [[sliding(run, 9, padding=4) for run in balanced(10, 4)]])
    around = Layout.of(line, [[sliding(run, 5, padding=2) for run in balanced(10, 4)]])
    pair = P.create_partition_inclusive([5, 2]).reshape(1, 2)
    block, ring = Layout.balanced(pair, (3, 5)), Layout.of(pair, [[(-3, 6)], [(-2, 3), (1, 7)]])
    single = P.create_partition_inclusive([4]).reshape(1)
    alone = Layout.balanced(single, (3,)), Layout.of(single, [[(0, 6)]])
    gathered = Layout.balanced(grid, (3, 4, 5))
    corners = P.create_partition_inclusive(range(9)).reshape(3, 3)
    cells = Layout.balanced(corners, (7, 8))
    wide = Layout.of(corners, [[sliding(run, 3, padding=1) for run in along] for along in cells.intervals])
    return {
        "broadcast": lambda me: broadcast(row, grid, shapes, me),
        "broadcast to itself": lambda me: broadcast(row, row, shapes, me),
        "broadcast transposed": lambda me: broadcast(some.T, square, {w: (w,) for w in range(12)}, me),
        "sum-reduce": lambda me: broadcast(row, grid, shapes, me).T,
        "all-sum": lambda me: all_sum(grid, (0, 2), {w: (w % 6 // 2, 2) for w in range(12)}, me),
        "all-sum over nothing": lambda me: all_sum(grid, (), dict.fromkeys(range(12), (1,)), me),
        "repartition": lambda me: copy(uneven, Layout.balanced(others, (5, 7)), me),
        "repartition back": lambda me: copy(Layout.balanced(others, (5, 7)), Layout.balanced(some, (5, 7)), me),
        "repartition of an empty tensor": lambda me: copy(*(Layout.balanced(P, (0, 7)) for P in (some, others)), me),
        "windows": lambda me: copy(tensor, windows, me),
        "windows over several neighbours": lambda me: copy(tensor, deep, me),
        "circular windows": lambda me: copy(tensor, around, me, {0: (0, 10)}),
        "circular windows that are cut": lambda me: copy(tensor, deep, me, {0: (2, 9)}),
        "circular windows of two workers": lambda me: copy(block, ring, me, {0: (0, 3), 1: (0, 5)}),
        "circular windows of one worker": lambda me: copy(*alone, me, {0: (0, 3)}),
        "all-gather": lambda me: copy(gathered, gathered.gathered((0, 2)), me),
        "reduce-scatter": lambda me: copy(gathered, gathered.gathered((0, 2)), me).T,
        "padded halo": lambda me: padded_halo(corners, *halos(corners, (4, 3), 1), me),
        "padded halo over several neighbours": lambda me: padded_halo(corners, *halos(corners, (2, 2), 3), me),
        "edges": lambda me: edges(tensor, around, 0, me),
        "edges over several neighbours": lambda me: edges(tensor, deep, 0, me),
        "edges along the first of two dims": lambda me: edges(cells, wide, 0, me),
        "edges along the second of two dims": lambda me: edges(cells, wide, 1, me),
    }  # fmt: skip


def halos(P, bulk, width):
    """Local shapes and halos of bulks of one shape, with halos of one width inside the tensor."""
    sizes = np.zeros((*P.workers.shape, 2, 2), dtype=int)
    for index in np.ndindex(*P.workers.shape):
        for dim in range(2):
            before = index[dim] * bulk[dim]
            behind = (P.workers.shape[dim] - index[dim] - 1) * bulk[dim]
            sizes[index][dim] = min(before, width), min(behind, width)
    return np.array(bulk) + sizes.sum(axis=-1), sizes


NAMES = list(plans(lambda size: Partition(Silent(rank=0, size=size))))
