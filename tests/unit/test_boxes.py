import doctest

import numpy as np
import pytest

from distdl.geometry import boxes, windows
from distdl.geometry.boxes import around, balanced, hull, meet, runs, shape, shift, slices, volume, whole, within


def test_balanced_puts_the_remainder_first():
    assert balanced(7, 3) == ((0, 3), (3, 5), (5, 7))
    assert balanced(2, 3) == ((0, 1), (1, 2), (2, 2))
    assert balanced(0, 2) == ((0, 0), (0, 0))


@pytest.mark.parametrize("extent", range(12))
@pytest.mark.parametrize("parts", range(1, 7))
def test_balanced_tiles_and_is_as_even_as_possible(extent, parts):
    split = balanced(extent, parts)
    lengths = [stop - start for start, stop in split]
    assert split == runs(lengths) and sum(lengths) == extent and len(split) == parts
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("extent", "parts"), [(3, 0), (-1, 2)])
def test_balanced_refuses_what_makes_no_sense(extent, parts):
    with pytest.raises(ValueError, match=f"extent {extent} and parts {parts}"):
        balanced(extent, parts)


def test_algebra_of_boxes():
    a, b = ((0, 4), (2, 6)), ((2, 9), (0, 3))
    assert meet(a, b) == ((2, 4), (2, 3)) and volume(meet(a, b)) == 2
    assert volume(meet(a, ((5, 9), (0, 9)))) == 0
    assert within(((2, 4), (2, 3)), a) == ((2, 4), (0, 1))
    assert shift(((2, 4),), (3,)) == ((5, 7),)
    assert shape(((3, 1), (0, 2))) == (0, 2)
    assert whole((2, 3)) == ((0, 2), (0, 3)) and slices(((1, 2),)) == (slice(1, 2),)
    assert volume(()) == 1


@pytest.mark.parametrize("module", [boxes, windows])
def test_docstring_examples(module):
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("box", [((0, 2), (1, 3)), ((1, 1), (0, 4)), ((0, 3), (0, 4)), ((1, 2), (2, 3))])
def test_around_is_what_a_frame_has_outside_of_a_box(box):
    frame = ((0, 3), (0, 4))
    cells = np.zeros((3, 4), dtype=int)
    for part in [box, *around(box, frame)]:
        cells[slices(part)] += 1
    assert (cells == 1).all()


def test_hull_holds_all_boxes():
    assert hull([((1, 2), (0, 1)), ((0, 1), (4, 6))]) == ((0, 2), (0, 6))
