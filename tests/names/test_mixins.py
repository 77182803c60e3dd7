"""The geometry of halos in its published form."""

from itertools import product

import numpy as np
import pytest

from distdl.geometry.boxes import balanced
from distdl.nn.mixins import ConvMixin, HaloMixin, PoolingMixin


class Convolution(HaloMixin, ConvMixin):
    pass


class Pooling(HaloMixin, PoolingMixin):
    pass


@pytest.mark.parametrize("layer", [Convolution(), Pooling()])
def test_the_published_example_of_a_halo(layer):
    expected = (
        [[0, 1], [0, 0], [0, 0], [0, 0]],
        [[0, 1], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [1, 0], [0, 0], [0, 0]],
        [[0, 4], [1, 3], [0, 2], [0, 2]],
    )
    for rank in range(4):
        found = layer._compute_exchange_info([1, 1, 10], [2], [2], [0], [1], True, np.array([1, 1, 4]), [0, 0, rank])
        for array, rows in zip(found, expected, strict=True):
            assert array.shape == (3, 2) and array.dtype.kind == "i" and array[2].tolist() == rows[rank]
        assert not any(array[:2].any() for array in found[:3]) and found[3][:2].tolist() == [[0, 1], [0, 1]]
    assert layer._compute_exchange_info([1, 1, 10], [2], [2], [0], [1], False, [1, 1, 4], None) == (None,) * 4


GEOMETRIES = list(product((5, 8, 12), (1, 2, 3), (1, 2, 3), (0, 1), (1, 2), (1, 2, 3, 4)))


def test_halos_of_every_geometry():
    """What the halo and the needed range say is what the outputs read: every cell, and no other to the left of them."""
    for extent, kernel, stride, padding, dilation, parts in GEOMETRIES:
        if dilation * (kernel - 1) + 1 > extent:
            continue
        outputs = (extent + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        infos = [
            Convolution()._compute_exchange_info(
                [2, extent], [kernel], [stride], [padding], [dilation], True, [1, parts], [0, rank]
            )
            for rank in range(parts)
        ]
        for rank, (halo, receive, send, needed) in enumerate(infos):
            (start, stop), (first, last) = balanced(extent, parts)[rank], balanced(outputs, parts)[rank]
            if first == last:
                assert not halo.any()
                continue
            taps = [o * stride - padding + t * dilation for o in range(first, last) for t in range(kernel)]
            low, high = max(min(taps), 0), min(max(taps), extent - 1) + 1
            assert halo[1].tolist() == receive[1].tolist() == [max(start - low, 0), max(high - stop, 0)]
            assert needed[1, 0] - halo[1, 0] + start == low and needed[1, 1] - halo[1, 0] + start >= high
            assert send[1, 0] == (infos[rank - 1][1][1, 1] if rank else 0)
            assert send[1, 1] == (infos[rank + 1][1][1, 0] if rank + 1 < parts else 0)


def test_halos_of_blocks_that_are_given():
    shapes = np.array([[[1, 4], [1, 1]]])
    halo, _, send, needed = Convolution()._compute_exchange_info(
        [1, 5], [3], [1], [1], [1], True, [1, 2], [0, 1], subtensor_shapes=shapes
    )
    # outputs 3 and 4 read cells 2 to 4; the block has cell 4
    assert (halo[1].tolist(), send[1].tolist(), needed[1].tolist()) == ([2, 0], [0, 0], [0, 3])


def test_halos_where_nothing_is_computed():
    halo, receive, send, needed = Convolution()._compute_exchange_info([3], [3], [1], [0], [1], True, [2], [1])
    assert not halo.any() and not receive.any() and send.tolist() == [[1, 0]] and needed.tolist() == [[0, 1]]
