import itertools

import numpy as np
import pytest

from distdl.backends.serial import SerialCommunicator
from distdl.geometry.boxes import balanced, meet, runs, volume
from distdl.partition import Partition
from distdl.partition.layout import Layout, Ruler


@pytest.fixture
def P(world):
    return world(12).reshape(2, 3, 2)


def test_balanced_layout(P):
    layout = Layout.balanced(P, (5, 7, 1))
    assert layout.extents == (5, 7, 1)
    assert layout[0] == ((0, 3), (0, 3), (0, 1)) and layout[11] == ((3, 5), (5, 7), (1, 1))
    assert list(layout) == list(range(12)) and len(layout) == 12


def test_tiled_layout_lays_reported_shapes_side_by_side(P):
    shapes = np.zeros((2, 3, 2, 3), dtype=int)
    for index in np.ndindex(2, 3, 2):
        shapes[index] = [(4, 1)[index[0]], (0, 5, 2)[index[1]], 3]
    layout = Layout.tiled(P, shapes)
    assert layout.intervals == (runs([4, 1]), runs([0, 5, 2]), runs([3, 3]))


def test_blocks_that_form_no_grid_are_an_error_that_names_two_workers(P):
    shapes = np.full((2, 3, 2, 3), 2)
    shapes[1, 2, 0, 1] = 5
    with pytest.raises(ValueError, match=r"in dim 1, at place 2 of the axis, worker 4 has 2 and worker 10 has 5"):
        Layout.tiled(P, shapes)


@pytest.mark.parametrize("intervals", [
    runs([3, 0, 4, 1]), runs([0, 0, 0]), balanced(9, 4),
    ((-2, 3), (1, 6), (4, 9)),           # windows that overlap
    ((0, 0), (2, 7), (3, 3), (3, 8)),    # an empty one between
    ((5, 9), (0, 3), (2, 6)),            # in no order: then by looking at each
])  # fmt: skip
def test_ruler_finds_exactly_the_intervals_that_share_cells(intervals):
    ruler = Ruler(tuple(intervals))
    for start, stop in itertools.product(range(-3, 11), repeat=2):
        expected = [i for i, one in enumerate(intervals) if volume(meet(((start, stop),), (one,)))]
        assert ruler.meeting((start, stop)) == expected


def test_gathered_layout_has_the_whole_extent_along_its_axes(P):
    layout = Layout.balanced(P, (5, 7, 4)).gathered((1,))
    assert layout[4] == ((0, 3), (0, 7), (0, 2))


def test_everywhere_is_the_whole_on_every_worker_of_the_world(P):
    layout = Layout.everywhere(P, (4, 0, 3))
    assert layout.is_everywhere and layout.extents == (4, 0, 3)
    assert {worker: layout.box_of(worker) for worker in range(12)} == dict.fromkeys(range(12), ((0, 4), (0, 0), (0, 3)))
    assert not Layout.balanced(P, (5, 7, 1)).is_everywhere
    some = Layout.everywhere(P[1:], (4,))
    assert not some.is_everywhere and some.box_of(next(iter(some))) == ((0, 4),)
    outside = next(worker for worker in range(12) if worker not in some)
    assert outside == 0 and some.box_of(outside) == ((0, 0),)


def test_block_cuts_this_workers_part():
    P = Partition(SerialCommunicator())
    tensor = np.arange(6).reshape(2, 3)
    assert np.array_equal(Layout.balanced(P.reshape(1, 1), (2, 3)).block(tensor), tensor)
    assert Layout.balanced(P[:0], (3,)).block(tensor).size == 0 if P[:0].workers.size else True
