"""Buffers, and what of the layers needs no MPI."""

import numpy as np
import pytest
import torch
from helpers_layers import filled, noise

import distdl
from distdl.backends.mpi.buffer import MPIBufferManager, MPIExpandableBuffer
from distdl.nn import DistributedGeneralConv2d, HaloExchange, Repartition
from distdl.testing import assert_matches_sequential
from distdl.utilities.torch import distdl_padding_to_torch_padding


def test_transpose_is_repartition():
    assert distdl.nn.DistributedTranspose is Repartition is distdl.nn.transpose.DistributedTranspose


def test_padding_order():
    assert distdl_padding_to_torch_padding(np.array([[1, 2], [3, 4]])) == (3, 4, 1, 2)


def test_expandable_buffer():
    buffer = MPIExpandableBuffer(np.float32)
    assert buffer.raw_buffer.shape == (0,) and buffer.raw_buffer.dtype == np.float32
    buffer.expand(5)
    assert buffer.raw_buffer.shape == (5,) and buffer.capacity == 5
    first = buffer.raw_buffer
    assert buffer.get_view((2, 2)).shape == (2, 2) and buffer.raw_buffer is first
    buffer.get_view((2, 2))[:] = 7
    buffer.allocate_view((2, 3, 4))
    assert buffer.raw_buffer.shape == (24,) and buffer.raw_buffer is not first
    assert (buffer.get_view((2, 2)) == 7).all() and set(buffer.views) == {(2, 2), (2, 3, 4)}


def test_buffer_manager():
    manager = MPIBufferManager()
    assert manager.buffers_map == {}
    two = manager.request_buffers(2, np.float32)
    assert manager.request_buffers(3, np.float32)[:2] == two and list(manager.buffers_map) == [np.float32]
    assert len(manager.request_buffers(1, np.float64)) == 1


@pytest.mark.parametrize("wrong", ["a", None, 2.5, object(), -7])
def test_buffers_refuse_wrong_numbers(wrong):
    buffer, shape = MPIExpandableBuffer(np.float32, 3), wrong if wrong is None else (wrong,)
    calls = [(buffer.expand, wrong), (buffer.get_view, shape), (buffer.allocate_view, shape)]
    calls.append((lambda count: MPIBufferManager().request_buffers(count, np.float32), wrong))
    for call, value in calls:
        with pytest.raises((ValueError, TypeError), match=r"MPI\w*\.\w+ needs \w+ to be a (whole number|sequence)"):
            call(value)
    with pytest.raises(ValueError, match="a buffer needs at most"):
        buffer.expand(2**62)
    assert buffer.capacity == 3 and not buffer.views


def test_layers_check_their_buffer_manager():
    P = distdl.world().reshape(1, 1)
    halo = np.zeros((2, 2), dtype=int)
    Repartition(P, P, buffer_manager=MPIBufferManager())
    HaloExchange(P, halo, halo, halo, buffer_manager=MPIBufferManager())
    with pytest.raises(ValueError, match="buffer_manager must be None or have request_buffers; got dict"):
        Repartition(P, P, buffer_manager={})
    with pytest.raises(ValueError, match="buffer_manager"):
        HaloExchange(P, halo, halo, halo, buffer_manager=3)


def test_overlaps_of_a_repartition():
    def main():
        P = distdl.world()
        same = Repartition(P.reshape(2, 1), P.reshape(2, 1))
        assert same.P_x_to_y_overlaps == []
        same(torch.ones(2, 3))
        here = P.rank
        expected = [(None, None, None)] * 2
        expected[here] = ((slice(0, 2), slice(0, 3)), (2, 3), "self")
        assert same.P_x_to_y_overlaps == expected == same.P_y_to_x_overlaps
        turn = Repartition(P.create_partition_inclusive([1, 0]).reshape(2, 1), P.reshape(1, 2))
        turn(torch.ones(2, 4))
        partners = [overlap[2] for overlap in turn.P_x_to_y_overlaps]
        assert partners == ["self" if w == here else {1: 0, 0: 1}[w] for w in (0, 1)]
        shapes = [overlap[1] for overlap in turn.P_x_to_y_overlaps]
        assert shapes == [(2, 2), (2, 2)] == [overlap[1] for overlap in turn.P_y_to_x_overlaps]

    distdl.run_workers(main, 2)


def test_overlaps_are_those_of_the_latest_forward_also_of_a_shape_that_was_there_before():
    def main():
        P = distdl.world()
        turn = Repartition(P.reshape(2, 1), P.reshape(1, 2))
        seen = []
        for rows, columns in ((2, 5), (3, 2), (2, 5), (3, 2)):
            turn(torch.ones(rows if P.rank else 1, columns))
            seen.append((turn.P_x_to_y_overlaps, turn.P_y_to_x_overlaps))
        assert seen[0] == seen[2] != seen[1] == seen[3]
        sent, received = seen[2]
        assert [overlap[1] for overlap in sent] == [(P.rank + 1, 3), (P.rank + 1, 2)]
        assert [overlap[1] for overlap in received] == [(1, 3 - P.rank), (2, 3 - P.rank)]

    distdl.run_workers(main, 2)


def test_any_overlap_of_sixteen_workers():
    def main():
        P = distdl.world()
        P_x, P_y = P[4:12].reshape(1, 2, 2, 2), P.create_partition_inclusive(range(15, 7, -1)).reshape(1, 2, 2, 2)
        torch_layer = filled(torch.nn.Conv2d(4, 6, 3, padding=1))
        layer = DistributedGeneralConv2d(P_x, P_y, P.reshape(2, 2, 2, 2), 4, 6, 3, padding=1).double()
        assert_matches_sequential(layer, torch_layer, noise(2, 4, 7, 5))
        assert layer.weight.grad is not None and layer.bias.grad is not None
        assert layer.stores_bias == (P.rank in (0, 8)) == bool(layer.bias.numel())

    distdl.run_workers(main, 16)
