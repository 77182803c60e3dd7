"""Rules, options and errors of the primitives that random partitions do not reach."""

import contextlib

import numpy as np
import pytest
import torch
from helpers_layers import every_worker_raises, on_workers
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import distdl
from distdl.nn import (
    AllGather,
    AllSumReduce,
    Broadcast,
    DistributedEmbedding,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from distdl.testing import Counting, assert_adjoint
from distdl.utilities.torch import zero_volume_tensor


def halo_layer(P, halo, receive=None, send=None):
    return HaloExchange(P, halo, halo if receive is None else receive, halo if send is None else send)


def inner_halo(P, width=1):
    """One width of halo wherever there is a neighbour."""
    return np.array([[width * (i > 0), width * (i + 1 < n)] for i, n in zip(P.index, P.shape, strict=True)])


class Wrapper(torch.Tensor):
    """A tensor whose elements lie in another one, as those of torch.masked do: its own address is 0."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, operator, types, arguments=(), options=None):
        if operator in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return arguments[0]
        raise TypeError("nothing else is needed here")


def masked(x):
    """A tensor of torch.masked, of which the first element is left out."""
    return torch.masked.masked_tensor(x, torch.arange(len(x)) > 0)


def repeatedly(layer, x, wrap):
    """Agree on a plain tensor, and then pass one of equal shape and dtype that is none."""
    layer(x)
    layer(x)
    layer(x if wrap is None else wrap(x))


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: Broadcast(P.reshape(2, 2), P), "at most as many axes as P_y; P_x has 2 and P_y has 1"),
    (lambda P: SumReduce(P, P.reshape(2, 2)), "at most as many axes as P_x; P_y has 2 and P_x has 1"),
    (lambda P: SumReduce(P.reshape(2, 2), P[:3]), "every axis of P_y to be 1 or to equal P_x's; axis 1 is 3"),
    (lambda P: AllSumReduce(P), "exactly one of axes_reduce and axes_keep; got None and None"),
    (lambda P: AllSumReduce(P, [0], [0]), "exactly one of axes_reduce and axes_keep; got [0] and [0]"),
    (lambda P: AllSumReduce(P, [1]), "got [1]"),
    (lambda P: Repartition(P, P.reshape(2, 2)), "equally many axes; P_x has 1 and P_y has 2 (P_x: 4, P_y: 2x2)"),
    (lambda P: Repartition(P, P)(torch.ones(2, 2)), "1 dims on all workers"),
    (lambda P: Repartition(P[:1], P)(torch.ones(1) if P.rank == 0 else zero_volume_tensor()), "global extent 1; dim 0"),
    (lambda P: AllGather(P, [0, 0]), "each axis at most once"),
    (lambda P: AllGather(P.reshape(2, 2), 0)(torch.ones(3)), "2 dims on all workers"),
    (lambda P: ReduceScatter(P, [0], {0: [1, 2]}), "one for each worker along the axis; got (1, 2)"),
    (lambda P: ReduceScatter(P, [0], {0: [1, 2, 3, 4]})(torch.ones(9)), "add up to 10, and the tensors have 9"),
    (lambda P: ReduceScatter(P, [0])(torch.ones(4 + P.rank)), "one shape on workers whose tensors are added"),
    (lambda P: halo_layer(P, [[1, 0]] if P.rank else [[0, 1, 0]])(torch.ones(3)), "of shape 1 x 2, none of them neg"),
    (lambda P: halo_layer(P, inner_halo(P.reshape(4), 1), send=[[0, 0]])(torch.ones(3)), "which sends 0"),
    (lambda P: halo_layer(P, inner_halo(P.reshape(4), 1), receive=[[0, 0]])(torch.ones(3)), "1 cells and receives 0"),
    (lambda P: halo_layer(P, inner_halo(P.reshape(4), 2))(torch.ones(1)), "halos must not be negative and must fit"),
    (lambda P: Broadcast(P, distdl.Partition(Counting(P.comm))), "different worlds"),
    (lambda P: Broadcast(P, P)(Wrapper(torch.ones(3)) if P.rank == 2 else torch.ones(3)), "worker 2: Broadcast"),
    (lambda P: repeatedly(Broadcast(P, P), torch.ones(3), Wrapper if P.rank == 2 else None),
     "that is a Wrapper, which wraps other tensors"),
    (lambda P: P.broadcast_data(Wrapper(torch.ones(3)), root=2), "worker 2: a message needs a tensor that has data of"),
    (lambda P: P.allreduce_data(torch.ones(3).to_sparse() if P.rank else torch.ones(3)), "is torch.sparse_coo"),
    (lambda P: DistributedEmbedding(P, P.reshape(4, 1), P.reshape(4, 1, 1), 5, 3)(Wrapper(torch.ones(3).long())),
     "which wraps other tensors"),
    (lambda P: Broadcast(P, P)(masked(torch.ones(3)) if P.rank == 2 else torch.ones(3)),
     "worker 2: Broadcast (P_x: 4 on workers 0..3; P_y: 4 on workers 0..3) needs a tensor that has data of its own; "
     "got one that is a MaskedTensor, which wraps other tensors"),
    (lambda P: repeatedly(Broadcast(P, P), torch.ones(3), masked if P.rank == 2 else None), "that is a MaskedTensor"),
    (lambda P: P.broadcast_data(masked(torch.ones(3)), root=2), "that is a MaskedTensor, which wraps other tensors"),
    (lambda P: DistributedEmbedding(P, P.reshape(4, 1), P.reshape(4, 1, 1), 5, 3)(masked(torch.ones(3).long())),
     "that is a MaskedTensor, which wraps other tensors"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors is in prototype stage:UserWarning")
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(4, make)


def test_fixed_shapes_refuse_a_tensor_that_wraps_others():
    def main(P):
        layer, x = Broadcast(P[:1], P), torch.ones(3)
        layer(x)
        with distdl.fixed_shapes():
            layer(Wrapper(x) if P.rank == 0 else x)

    with pytest.raises(RuntimeError, match=r"promised fixed shapes; worker 0 .* that is a Wrapper"):
        on_workers(2, main)


@pytest.mark.parametrize("fixed", [False, True])
def test_zeros_that_torch_keeps_without_memory_move_like_others(fixed):
    """Such zeros are what torch passes backward from the other part of a complex number, for one."""

    def main(P):
        layer = SumReduce(P, P[:1])
        layer(torch.ones(3))
        with distdl.fixed_shapes() if fixed else contextlib.nullcontext():
            y = layer(torch._efficientzerotensor((3,)) if P.rank == 1 else torch.full((3,), 1.0 + P.rank))
        assert y.tolist() == ([1 + 3 + 4] * 3 if P.rank == 0 else [[]] * 3)
        x = torch.ones(3, requires_grad=True)
        y = layer(x)
        y.backward(torch._efficientzerotensor((3,)) if P.rank == 0 else torch.ones_like(y))
        assert x.grad.tolist() == [0.0] * 3
        assert P.allreduce_data(torch._efficientzerotensor((2,))).tolist() == [0.0] * 2

    on_workers(4, main)


def test_a_tangent_of_zeros_without_memory_moves():
    def main():
        P = distdl.world()
        with forward_ad.dual_level():
            x = forward_ad.make_dual(torch.ones(3), torch._efficientzerotensor((3,)))
            assert forward_ad.unpack_dual(Broadcast(P, P)(x)).tangent.tolist() == [0.0] * 3

    distdl.run_workers(main, 1, "serial")


def test_a_halo_exchange_inside_a_3x3_grid_sends_8_messages():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        grid = team.reshape(3, 3)
        halo = inner_halo(grid)
        layer = halo_layer(grid, halo)
        x = torch.ones(*(np.array([4, 4]) + halo.sum(axis=1)), requires_grad=True)
        layer(x)
        team.comm.reset()
        y = layer(x)
        neighbours = {0: 3, 1: 5, 4: 8}.get(P.rank, len(team.comm.sent))
        assert sum(team.comm.sent.values()) == len(team.comm.sent) == neighbours == len(team.comm.received)
        team.comm.reset()
        y.sum().backward()
        assert sum(team.comm.sent.values()) == neighbours

    on_workers(9, main)


def test_a_repartition_sends_one_message_to_each_worker_that_shares_cells():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = Repartition(team.reshape(4, 1), team.reshape(1, 4))
        layer(torch.ones(2, 8))
        team.comm.reset()
        layer(torch.ones(2, 8))
        assert team.comm.sent == {w: 1 for w in range(4) if w != P.rank} == team.comm.received

    on_workers(4, main)


def test_halo_exchange_ignores_what_lies_in_the_halo_and_writes_nothing():
    def main(P):
        line = P.reshape(3)
        halo = inner_halo(line, 2)
        x = torch.full((3 + int(halo.sum()),), float("nan"))
        x[int(halo[0, 0]) : int(halo[0, 0]) + 3] = torch.arange(3.0) + 3 * P.rank
        before = x.clone()
        x.requires_grad_()
        y = halo_layer(line, halo)(x)
        assert y.tolist() == list(range(max(3 * P.rank - 2, 0), min(3 * P.rank + 5, 9)))
        dy = torch.ones_like(y)
        y.backward(dy)
        assert torch.equal(torch.isnan(x.detach()), torch.isnan(before)) and (dy == 1).all()
        outside = torch.ones_like(x.detach(), dtype=torch.bool)
        outside[int(halo[0, 0]) : int(halo[0, 0]) + 3] = False
        assert (x.grad[outside] == 0).all() and x.grad.sum() == {0: 5, 1: 7, 2: 5}[P.rank]

    on_workers(3, main)


def test_halo_exchange_at_the_border_of_the_tensor_is_zero():
    def main(P):
        line = P.reshape(2)
        halo = np.array([[1, 1]])
        receive = send = inner_halo(line)
        y = HaloExchange(line, halo, receive, send)(torch.full((4,), P.rank + 1.0))
        assert y.tolist() == [[0, 1, 1, 2], [1, 2, 2, 0]][P.rank]

    on_workers(2, main)


def test_all_gather_and_reduce_scatter_are_each_others_adjoint():
    def main(P):
        grid = P.reshape(2, 3)
        rows, columns = [2, 3], [1, 0, 4]
        i, j = grid.index
        gather = AllGather(grid, [1])
        scatter = ReduceScatter(grid, [1], {1: columns})
        x = torch.randn(rows[i], columns[j], generator=torch.Generator().manual_seed(P.rank)).double().requires_grad_()
        y = gather(x)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(9 + P.rank)).double()
        y.backward(dy)
        assert torch.allclose(x.grad, scatter(dy), rtol=1e-14)
        assert_adjoint(scatter, dy)

    on_workers(6, main)


def test_reduce_scatter_splits_as_evenly_as_possible_without_sizes():
    def main(P):
        y = ReduceScatter(P, [0])(torch.ones(7))
        assert y.tolist() == [3.0] * (3 if P.rank == 0 else 2)

    on_workers(3, main)


PRIMITIVES = ["Broadcast", "SumReduce", "AllSumReduce", "Repartition", "AllGather", "ReduceScatter", "HaloExchange"]


@pytest.mark.parametrize("name", PRIMITIVES)
def test_gradcheck_and_gradgradcheck_on_one_worker(name):
    def main():
        P = distdl.world().reshape(1, 1)
        layer = {
            "Broadcast": lambda: Broadcast(P, P), "SumReduce": lambda: SumReduce(P, P),
            "AllSumReduce": lambda: AllSumReduce(P, [0]), "Repartition": lambda: Repartition(P, P),
            "AllGather": lambda: AllGather(P, [1]), "ReduceScatter": lambda: ReduceScatter(P, [0]),
            "HaloExchange": lambda: halo_layer(P, [[0, 1], [1, 0]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]),
        }[name]()  # fmt: skip
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
        assert gradcheck(layer, (x,), check_forward_ad=True, check_backward_ad=True)
        assert gradgradcheck(layer, (x,))
        z = torch.randn(2, 3, dtype=torch.complex128, requires_grad=True)
        assert gradcheck(layer, (z,), check_forward_ad=True)

    distdl.run_workers(main, 1, "serial")


def test_what_a_worker_outside_passes_is_ignored_and_its_gradient_is_zero():
    def main(P):
        x = torch.full((4,), 1.0 + P.rank, requires_grad=True)
        y = Broadcast(P[:1], P[1:2])(x)
        y.sum().backward()
        assert y.tolist() == {0: [[]] * 4, 1: [1.0] * 4}[P.rank]
        assert x.grad.tolist() == {0: [1.0] * 4, 1: [0.0] * 4}[P.rank]

    on_workers(2, main)


def test_a_layer_may_be_called_with_the_same_partition_twice():
    def main(P):
        for make in (Broadcast, SumReduce, Repartition):
            x = torch.ones(2)
            y = make(P, P)(x)
            assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()

    on_workers(3, main)


def test_topologies_may_be_mixed():
    def main(P):
        x = torch.full((2,), float(P.rank)) if P.rank == 1 else zero_volume_tensor()
        assert Broadcast(P[1:2], P.reshape(2, 2))(x).tolist() == [1.0, 1.0]
        y = SumReduce(P.reshape(2, 2), P.create_partition_inclusive([3]))(torch.ones(2))
        assert y.tolist() == ([4.0, 4.0] if P.rank == 3 else [[], []])

    on_workers(4, main)


def test_zero_volume_outputs_broadcast_against_each_other():
    def main(P):
        y = SumReduce(P, P[:1])(zero_volume_tensor())
        assert y.shape == ((0,) if P.rank == 0 else (0, 0))
        assert (y + zero_volume_tensor()).numel() == 0

    on_workers(3, main)


def test_a_scalar_goes_through_the_primitives_that_do_not_split():
    def main(P):
        x = torch.tensor(float(P.rank), requires_grad=True)
        y = AllSumReduce(P, [0])(x)
        assert y.shape == () and y.item() == 3.0
        y.backward()
        assert x.grad.item() == 3.0
        z = SumReduce(P, P[:1])(torch.tensor(1.0))
        assert z.shape == (() if P.rank == 0 else (0,))

    on_workers(3, main)


def test_planning_again_only_when_something_changes(monkeypatch):
    def main(P):
        layer = Repartition(P.reshape(2, 1), P.reshape(1, 2))
        made = []
        derive = layer._derive
        monkeypatch.setattr(layer, "_derive", lambda *reports: made.append(reports) or derive(*reports), raising=True)
        for rows in (2, 2, 3, 2, 3, 3):
            layer(torch.ones(rows, 4))
        assert len(made) == 2

    on_workers(2, main)
