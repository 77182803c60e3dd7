"""Borders against ``torch.nn.functional.pad``: every padding of short tensors, in pieces. No worker runs."""

import itertools

import pytest
import torch
from torch.nn import functional

from distdl.geometry.borders import CONVOLUTION_MODES, PADDING_MODES, Border, source
from distdl.geometry.boxes import balanced
from distdl.ops.padding import Filling

CASES = [(n, before, behind) for n in range(1, 6) for before, behind in itertools.product(range(-7, 8), repeat=2)]


def padded(n, before, behind, mode):
    """What torch makes of the numbers 1 to n; None where it refuses, and where it cuts off cells that it repeats."""
    if mode == "circular" and n + min(before, 0) + min(behind, 0) < max(before, behind, 0):
        return None  # torch returns memory that was never written
    x = torch.arange(1.0, n + 1).reshape(1, 1, n)
    try:
        return functional.pad(x, (before, behind), mode, 9.0 if mode == "constant" else None).reshape(-1)
    except RuntimeError:
        return None


def filled(n, window, mode, border):
    """A window of the numbers 1 to n, from the cells that have to be fetched for it."""
    (((start, stop),),) = border.fetched([[window]], (n,))
    cells = range(start, stop)
    if mode == "circular":
        first, last = border.repeats((n,)).get(0, (0, n))
        cells = [first + (cell - first) % (last - first) for cell in cells]
    assert all(0 <= cell < n for cell in cells)
    return Filling.of(border, (window,), (n,)).fill(torch.tensor([cell + 1.0 for cell in cells]), 9.0)


@pytest.mark.parametrize("mode", PADDING_MODES)
def test_every_padding_of_short_tensors_in_pieces(mode):
    checked = 0
    for n, before, behind in CASES:
        border, expected = Border(mode, ((before, behind),)), padded(n, before, behind, mode)
        if expected is None:
            with pytest.raises(
                ValueError, match=rf"X needs padding .* in dim 0 the padding is {before} and {behind} and"
            ):
                border.check("X", (n,))
            continue
        border.check("X", (n,))
        for parts in (1, 2, 3):
            for start, stop in balanced(len(expected), parts):
                window = (start - before, stop - before)
                assert torch.equal(filled(n, window, mode, border), expected[start:stop]), (n, before, behind, window)
                checked += 1
    assert checked > 900


def test_zeros_are_what_one_finds_beyond_the_tensor():
    border = Border("zeros", ((2, 1),))
    assert border.fetched([[(-2, 3), (3, 6)]], (5,)) == [[(-2, 3), (3, 6)]]
    assert Filling.of(border, ((-2, 3),), (5,)).takes == () and not border.repeats((5,))


def test_the_modes_are_those_of_torch():
    """Each has its own word for zeros; what stands around the tensor else is the same table."""
    x = torch.ones(1, 1, 5)
    for mode in PADDING_MODES:
        assert torch.nn.functional.pad(x, (1, 1), mode).shape == (1, 1, 7)
    for mode in CONVOLUTION_MODES:
        assert torch.nn.Conv1d(1, 1, 3, padding=1, padding_mode=mode)(x).shape == x.shape
        Border(mode, ((1, 1),)).check("X", (5,))
    assert set(PADDING_MODES) ^ set(CONVOLUTION_MODES) == {"constant", "zeros"}


def test_only_windows_beyond_the_tensor_take_a_step():
    for mode in PADDING_MODES:
        border = Border(mode, ((2, 1), (0, 0)))
        assert not border.steps(((0, 5), (1, 3)), (5, 3)) and border.margins(((0, 5), (1, 3)), (5, 3)) == ()


def test_the_drawing_of_the_module():
    cells = {mode: [source(cell, 5, mode) for cell in range(-3, 8)] for mode in ("reflect", "replicate")}
    assert cells["reflect"] == [3, 2, 1, 0, 1, 2, 3, 4, 3, 2, 1]
    assert cells["replicate"] == [0, 0, 0, 0, 1, 2, 3, 4, 4, 4, 4]
