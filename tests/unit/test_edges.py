"""What cells around a block add to a convolution, against torch's convolution of the whole. No worker runs.

Cells and weights are whole numbers, so torch's sums are exact in float64, and pieces have to equal the whole.
"""

import itertools

import pytest
import torch
from torch.nn import functional

from distdl.geometry.boxes import balanced, runs
from distdl.geometry.edges import Crop, Line, beside, rims
from distdl.geometry.transposed import Transposed
from distdl.geometry.windows import sliding, sliding_extent, span


def convolve(x, w, line, padding=0):
    return functional.conv1d(x.view(1, 1, -1), w.view(1, 1, -1), None, line.stride, padding, line.dilation).view(-1)


@pytest.mark.parametrize("extents", [(12,), (6, 6), (5, 4, 5), (1, 8, 0, 4)])
def test_a_block_by_itself_and_what_is_around_it_make_the_outputs(extents):
    x = torch.arange(3.0, sum(extents) + 3, dtype=torch.float64)
    blocks, compared = runs(extents), 0
    for k, s, p, d in itertools.product(range(1, 6), range(1, 4), range(4), range(1, 4)):
        line, w = Line(k, s, p, d), torch.arange(1.0, k + 1, dtype=torch.float64)
        count = sliding_extent(len(x), k, s, (p, p), d)
        if not count:
            continue
        expected, outputs = convolve(x, w, line, p), balanced(count, len(blocks))
        sides = beside(blocks, [sliding(run, *line) for run in outputs])
        for place, (block, run) in enumerate(zip(blocks, outputs, strict=True)):
            crop = line.crop(block, run)
            if crop is None:
                continue
            y = convolve(x[slice(*block)], w, line, crop.padding)
            for cells in (side[place] for side in sides):
                strip = line.strip(cells, run)
                if strip is not None:
                    taps = w[slice(*strip.taps)]
                    y[slice(*strip.outputs)] += convolve(functional.pad(x[slice(*cells)], strip.margins), taps, line)
            assert torch.equal(y, expected[slice(*run)]), (line, block, run)
            compared += 1
    assert compared > 20


def add_up(x, w, line, crop):
    y = functional.conv_transpose1d(
        x.view(1, 1, -1), w.view(1, 1, -1), None, line.stride, crop.padding, crop.output_padding, 1, line.dilation
    )
    return functional.pad(y, (crop.before, crop.behind)).view(-1)


@pytest.mark.parametrize("extents", [(12,), (6, 6), (5, 4, 5), (1, 8, 0, 4)])
def test_a_block_by_itself_and_what_is_around_it_make_the_outputs_of_a_transposed_convolution(extents):
    x = torch.arange(3.0, sum(extents) + 3, dtype=torch.float64)
    blocks, compared = runs(extents), 0
    for k, s, p, d in itertools.product(range(1, 6), range(1, 4), range(4), range(1, 4)):
        w, least = torch.arange(1.0, k + 1, dtype=torch.float64), (len(x) - 1) * s - 2 * p + span(k, d)
        for count in range(max(least, 1), least + s):
            geometry = Transposed((k,), (s,), (p,), (d,), (count - least,))
            line = geometry.line(0)
            expected, outputs = add_up(x, w, line, Crop(p, count - least)), balanced(count, len(blocks))
            sides = beside(blocks, [geometry.window(0, run, len(x)) for run in outputs])
            for place, (block, run) in enumerate(zip(blocks, outputs, strict=True)):
                crop = line.crop(block, run)
                if block[0] == block[1] or run[0] == run[1] or not crop.exact:
                    continue
                y = add_up(x[slice(*block)], w, line, crop)
                for cells in (side[place] for side in sides):
                    strip = line.strip(cells, run)
                    if strip is not None:
                        y[slice(*strip.outputs)] += add_up(
                            x[slice(*cells)], w[slice(*strip.taps)], line, Crop(0, 0, *strip.trims)
                        )
                assert torch.equal(y, expected[slice(*run)]), (line, block, run)
                compared += 1
    assert compared > 20


def test_a_block_that_torchs_padding_does_not_fit_is_told():
    line = Line(3, 1, 0, 1)  # of 8 cells 6 outputs: the first of 4 cells have 3, which zeros on both sides do not give
    assert line.crop((0, 4), (0, 3)) is None and line.crop((4, 8), (3, 6)) is None
    assert line.crop((0, 0), (0, 0)) is None
    assert Line(3, 1, 1, 1).crop((4, 8), (4, 8)) == Crop(1)


def test_a_rim_is_what_others_read():
    """Also over a block that is narrower than what they reach; where its ends meet, it is the whole block."""
    blocks = runs([5, 1, 6])
    (first, second, third) = rims(blocks, *beside(blocks, [(-2, 7), (3, 8), (4, 14)]))
    assert (first, second, third) == ((5, 0, 2), (1, 1, 0), (6, 2, 0))
    assert [first.place(cell, among_first=False) for cell in (3, 4)] == [0, 1]
    assert [third.place(cell, among_first=True) for cell in (0, 1)] == [0, 1]
