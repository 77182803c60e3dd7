"""What planning costs on one worker of a very large partition, in operations and not in seconds. No worker runs."""

import sys

import numpy as np
import pytest

from distdl.geometry.boxes import balanced
from distdl.geometry.windows import sliding
from distdl.partition import Partition
from distdl.partition.layout import Layout, Lookup
from distdl.plan.planners import all_sum, broadcast, copy
from distdl.testing import Silent

GRIDS = [(16, 8, 8), (64, 64, 32)]


def calls_of(make):
    """How many Python functions a call enters."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        make()
    finally:
        sys.setprofile(None)
    return count


def plans_of(grid):
    """Plans of the worker in the middle, by name; each touches few others."""
    size = int(np.prod(grid))
    me = size // 2 + 5
    P = Partition(Silent(me, size)).reshape(*grid)
    turned = P.reshape(grid[0] // 2, 2 * grid[1], grid[2])
    extents = tuple(4 * n for n in grid)
    shapes = Lookup((), lambda worker: (4, 4))
    windows = [
        [sliding(run, 3, padding=1) for run in balanced(extent, n)] for extent, n in zip(extents, grid, strict=True)
    ]
    return {
        "repartition": lambda: copy(Layout.balanced(P, extents), Layout.balanced(turned, extents), me),
        "halo": lambda: copy(Layout.balanced(P, extents), Layout.of(P, windows), me),
        "broadcast": lambda: broadcast(P[:1], P, shapes, me),
        "all-sum": lambda: all_sum(P, (0,), shapes, me),
    }


@pytest.mark.parametrize("name", ["repartition", "halo", "broadcast", "all-sum"])
def test_the_cost_of_a_plan_does_not_grow_with_the_partition(name):
    costs = []
    for grid in GRIDS:
        make = plans_of(grid)[name]
        make()  # the worker array is built, and looked up, by now
        costs.append(calls_of(lambda make=make: scheduled(make())))
    small, large = costs
    assert large <= 1.3 * small + 50, f"{small} calls with 1,024 workers, {large} with 131,072"


def scheduled(plan):
    worker = next(iter(plan.outputs))
    return plan.schedule(worker), plan.T.schedule(worker)


def test_a_root_that_feeds_everybody_holds_its_group_as_a_view():
    P = Partition(Silent(0, 131072)).reshape(64, 64, 32)
    shapes = Lookup((), lambda worker: (4, 4))
    broadcast(P[:1, :1, :1], P, shapes, 0)
    assert calls_of(lambda: scheduled(broadcast(P[:1, :1, :1], P, shapes, 0))) < 300
    (team,) = broadcast(P[:1, :1, :1], P, shapes, 0).teams
    assert np.shares_memory(team.members, P.workers) and team.members.size == 131072
