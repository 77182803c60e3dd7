import math

import pytest
import torch
from helpers_layers import every_worker_raises, filled, noise, on_workers, penalty, take_weights

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import DistributedLinear
from distdl.testing import Counting, assert_matches_sequential
from distdl.utilities.torch import zero_volume_tensor


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("workers", "grid"), [(1, (1, 1)), (2, (1, 2)), (3, (3, 1)), (4, (2, 2)), (6, (2, 3)), (6, (3, 2))]
)
def test_matches_sequential(workers, grid, bias):
    def main(P):
        out, inner = grid
        P_w = P.reshape(*grid)
        P_x, P_y = P[P.size - inner :].reshape(1, inner), P[:out].reshape(1, out)
        layer = DistributedLinear(P_x, P_y, P_w, 7, 5, bias=bias).double()
        reference = filled(torch.nn.Linear(7, 5, bias=bias))
        assert_matches_sequential(layer, reference, noise(3, 7))
        assert_matches_sequential(layer, reference, noise(4, 7), [runs([4]), runs([7] + [0] * (inner - 1))])
        assert_matches_sequential(layer, reference, noise(0, 7))

    on_workers(workers, main)


@pytest.mark.parametrize(
    ("batch", "out", "inner", "extents"),
    [((2,), 1, 2, (3,)), ((2,), 2, 1, (3, 2)), ((1, 2), 1, 2, (2, 3)), ((2, 2), 1, 1, (3, 1)), ((1,), 2, 2, (2, 3, 2))],
)
def test_a_batch_of_any_rank_that_may_be_split(batch, out, inner, extents):
    """P_x, P_y and P_w lie on workers of their own order, and one worker is in none of them."""

    def main(P):
        P_w = P.create_partition_inclusive([3, 0, 2, 1]).reshape(*batch, out, inner)
        P_x = P.create_partition_inclusive([1, 2, 4, 3][: math.prod(batch) * inner]).reshape(*batch, inner)
        P_y = P.create_partition_inclusive([0, 4, 1, 2][: math.prod(batch) * out]).reshape(*batch, out)
        layer = DistributedLinear(P_x, P_y, P_w, 5, 3).double()
        check_any_rank(layer, filled(torch.nn.Linear(5, 3)), noise(*extents, 5))
        parts = padded(P_x, len(extents) + 1).workers.shape
        blocks = [runs([n] + [0] * (p - 1)) for n, p in zip((*extents, 5), parts, strict=True)]
        check_any_rank(layer, filled(torch.nn.Linear(5, 3)), noise(*extents, 5), blocks)

    on_workers(6, main)


def padded(P, rank):
    return P.reshape(*P.workers.shape[:-1], *[1] * (rank - P.workers.ndim), P.workers.shape[-1])


def check_any_rank(layer, reference, x, blocks=None):
    """The blocks of x have dims that P_x has no axes for."""

    class View:
        P_x, P_y, parameter_layouts = padded(layer.P_x, x.dim()), padded(layer.P_y, x.dim()), layer.parameter_layouts
        zero_grad, get_parameter, named_parameters = layer.zero_grad, layer.get_parameter, layer.named_parameters

        def __call__(self, x):
            return layer(x)

    assert_matches_sequential(View(), reference, x, blocks)


def test_one_layer_takes_inputs_of_several_ranks():
    def main(P):
        layer = DistributedLinear(P[:2].reshape(1, 2), P[2:].reshape(1, 2), P.reshape(2, 2), 5, 3).double()
        for extents in ((4,), (2, 3), (2, 1, 3, 2), (0, 3), (2, 0)):
            check_any_rank(layer, filled(torch.nn.Linear(5, 3)), noise(*extents, 5))

    on_workers(4, main)


def test_walk_of_the_design_with_an_idle_worker_in_the_world():
    def main(P):
        team = P.create_partition_inclusive(range(6))
        P_w = team.reshape(2, 3)
        P_x, P_y = (
            P.create_partition_inclusive([1, 2, 3]).reshape(1, 3),
            P.create_partition_inclusive([4, 0]).reshape(1, 2),
        )
        layer = DistributedLinear(P_x, P_y, P_w, 7, 5).double()
        assert_matches_sequential(layer, filled(torch.nn.Linear(7, 5)), noise(3, 7))
        weight, bias = layer.sublinear.weight, layer.sublinear.bias
        assert weight.shape == ({4: (2, 2)}.get(P.rank, weight.shape)) and weight.grad is not None
        assert (bias.numel() > 0) == (P_w.active and P_w.index[-1] == 0) and bias.grad is not None
        y = layer(zero_volume_tensor(3) if not P_x.active else noise(3, [3, 2, 2][P_x.rank]))
        assert y.shape == ((3, 0) if not P_y.active else (3, [3, 2][P_y.rank]))
        assert y.dtype == (torch.float32 if P.rank == 6 else torch.float64)

    on_workers(7, main)


def test_fewer_features_than_workers_leave_blocks_empty():
    def main(P):
        layer = DistributedLinear(P[:3].reshape(1, 3), P[3:5].reshape(1, 2), P.reshape(2, 3), 2, 1).double()
        assert_matches_sequential(layer, filled(torch.nn.Linear(2, 1)), noise(3, 2))

    on_workers(6, main)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize(("out", "inner"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_no_features_give_the_bias(out, inner):
    def main(P):
        grid = P[: out * inner].reshape(out, inner)
        layer = DistributedLinear(P[:inner].reshape(1, inner), P[:out].reshape(1, out), grid, 0, 3).double()
        assert_matches_sequential(layer, filled(torch.nn.Linear(0, 3)), noise(2, 0))
        with torch.autocast("cpu", torch.bfloat16):
            y = layer.float()(torch.zeros(2, 0) if P.rank < inner else torch.zeros(0, 0))
        assert y.dtype is torch.bfloat16 or P.rank >= out

    on_workers(5, main)


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_no_features_of_a_batch_that_is_split_give_the_bias():
    def main(P):
        layer = DistributedLinear(P.reshape(2, 2), P[:2].reshape(2, 1), P.reshape(2, 1, 2), 0, 3).double()
        assert_matches_sequential(layer, filled(torch.nn.Linear(0, 3)), noise(4, 0))

    on_workers(4, main)


def test_a_default_dtype_input_of_zero_volume_beside_float64():
    def main(P):
        layer = DistributedLinear(P[:1].reshape(1, 1), P[1:].reshape(1, 1), P[:1].reshape(1, 1), 4, 4).double()
        y = layer(torch.ones(3, 4).double() if P.rank == 0 else zero_volume_tensor(3))
        assert y.dtype == torch.float64 and y.shape == ((3, 0) if P.rank == 0 else (3, 4))

    on_workers(2, main)


def test_stock_optimisers_and_one_agreement_per_call():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedLinear(team[:2].reshape(1, 2), team[:2].reshape(1, 2), team.reshape(2, 2), 6, 4)
        optimiser = torch.optim.Adam(layer.parameters(), lr=0.1)
        x = torch.ones(2, 3) if P.rank < 2 else zero_volume_tensor(2)
        before = layer.sublinear.weight.detach().clone()
        for _ in range(2):
            optimiser.zero_grad()
            team.comm.reset()
            layer(x).square().sum().backward()
            optimiser.step()
        assert not torch.equal(before, layer.sublinear.weight)
        assert [name for name, _ in team.comm.log].count("all_max") == 1

    on_workers(4, main)


def test_double_backward_matches_sequential():
    def main(P):
        reference = filled(torch.nn.Linear(7, 5))
        P_w = P.reshape(2, 2)
        layer = DistributedLinear(P[1:3].reshape(1, 2), P[2:].reshape(1, 2), P_w, 7, 5).double()
        take_weights(layer, reference)
        whole = noise(3, 7).requires_grad_()

        penalty(reference, whole).backward()
        columns = runs([4, 3])[P.rank - 1] if P.rank in (1, 2) else (0, 0)
        x = (
            whole.detach()[:, slice(*columns)].clone().requires_grad_()
            if columns[1]
            else zero_volume_tensor(3, torch.float64, True)
        )
        penalty(layer, x).backward()
        if columns[1]:
            assert torch.allclose(x.grad, whole.grad[:, slice(*columns)], rtol=1e-10)
        weights = layer.parameter_layouts["sublinear.weight"]
        assert torch.allclose(layer.sublinear.weight.grad, weights.block(reference.weight.grad), rtol=1e-10)

    on_workers(4, main)


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedLinear(P.reshape(1, 4), P.reshape(1, 4), P.reshape(2, 2), 8, 8), "1x4, P_y: 1x4, P_w: 2x2"),
    (lambda P: DistributedLinear(P.reshape(4, 1), P[:1].reshape(1, 1), P.reshape(1, 4), 8, 8), "P_x: 4x1"),
    (lambda P: DistributedLinear(P.reshape(4, 1), P.reshape(4, 1), P[:1].reshape(1, 1), 8, 8), "P_w: 1x1"),
    (lambda P: DistributedLinear(P, P, P.reshape(4, 1), 8, 8), "P_x: 4, P_y: 4, P_w: 4x1"),
    (lambda P: linear(P)(torch.ones(2, 3)), "an input with 8 channels in dim 1; the global shape of the input is 2x6"),
    (lambda P: linear(P)(torch.ones(4)), "an input with at least 2 dims, one for each axis of P_x; got one with 1"),
    (lambda P: linear(P)(torch.ones(*[2] * (P.rank == 1), 2, 4)), "2 dims on all workers"),
    (lambda P: linear(P)(torch.ones(2 + P.rank, 4)), "form a grid"),
    (lambda P: linear(P)(torch.ones(2, 4).double()), "one dtype; got torch.float64, torch.float32"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(4, make)


def linear(P):
    return DistributedLinear(P[:2].reshape(1, 2), P[:2].reshape(1, 2), P.reshape(2, 2), 8, 8)
