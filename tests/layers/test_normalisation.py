import copy

import numpy as np
import pytest
import torch
from checks import forward_mode
from helpers_layers import assert_options, every_worker_raises, filled, noise, on_workers
from properties_normalisation import PAIRS, Published, close, pair, second_derivatives
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.geometry.boxes import balanced, runs, slices
from distdl.nn import (
    DistributedBatchNorm,
    DistributedFeatureConv1d,
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
    DistributedRMSNorm,
    init,
)
from distdl.nn.placement import sequential_layouts
from distdl.ops import rows
from distdl.partition.layout import Layout
from distdl.testing import Counting, assert_matches_sequential
from distdl.utilities.torch import zero_volume_tensor

GRIDS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (1, 2, 1)],
    3: [(1, 1, 3), (1, 3, 1)],
    4: [(2, 2, 1), (1, 2, 2)],
    6: [(1, 2, 3), (3, 2, 1)],
}


def sizes(extent, places, way):
    """Blocks that are not the balanced split, some of them empty."""
    none = [0] * (places - 1)
    return runs({"first": [extent, *none], "last": [*none, extent], "uneven": [1, *none[1:], extent - 1]}[way])


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("workers", GRIDS)
def test_matches_sequential(workers, name):
    """On permuted workers of a larger world, in both modes."""

    def main(P):
        team = P.create_partition_inclusive(range(workers, 0, -1))
        for grid in GRIDS[workers]:
            layer, reference = pair(PAIRS[name], team.reshape(grid))
            assert_matches_sequential(layer, reference, noise(4, 6, 5) + 1)
            for way in ("first", "last", "uneven") if workers > 1 else ():
                blocks = [sizes(n, p, way) if p > 1 else runs([n]) for n, p in zip((4, 6, 5), grid, strict=True)]
                for mode in (True, False):
                    assert_matches_sequential(layer.train(mode), reference.train(mode), noise(4, 6, 5), blocks)

    on_workers(workers + 1, main)


@pytest.mark.parametrize(
    "grid", [(2, 2), (4, 1), (2, 1, 2), (2, 1, 1, 2), (1, 2, 2, 1), (1, 1, 2, 1, 2), (2, 2, 1, 1, 1)]
)
def test_batch_norm_of_every_rank(grid):
    def main(P):
        layer = DistributedBatchNorm(P.reshape(grid), 3).double()
        assert_matches_sequential(layer, filled(Published(3, len(grid))), noise(*(5, 3, 4, 2, 3)[: len(grid)]))

    on_workers(4, main)


@pytest.mark.parametrize(("groups", "parts"), [(1, [3, 2, 1]), (2, [1, 4, 1]), (3, [1, 0, 5]), (6, [2, 2, 2])])
def test_groups_need_not_respect_the_blocks(groups, parts):
    def main(P):
        layer = DistributedGroupNorm(P.reshape(1, 3, 2), groups, 6).double()
        blocks = [runs([2]), runs(parts), runs([3, 1])]
        assert_matches_sequential(layer, filled(torch.nn.GroupNorm(groups, 6)), noise(2, 6, 4), blocks)
        second_derivatives(
            lambda P_x: (DistributedGroupNorm(P_x, groups, 6), torch.nn.GroupNorm(groups, 6)),
            P.reshape(1, 3, 2),
            noise(2, 6, 4),
            blocks,
        )

    on_workers(6, main)


def test_trailing_dims_split_or_not():
    def main(P):
        for grid, extents in [
            ((4, 1, 1), 5),
            ((1, 1, 4), 5),
            ((2, 1, 2), [6, 5]),
            ((1, 4, 1), 5),
            ((1, 2, 2), [4, 6, 5]),
        ]:
            for affine, bias in ((True, True), (True, False), (False, False)):
                layer = DistributedLayerNorm(P.reshape(grid), extents, 1e-3, affine, bias).double()
                reference = filled(torch.nn.LayerNorm(extents, 1e-3, affine, bias))
                assert_matches_sequential(layer, reference, noise(4, 6, 5))
                layer = DistributedRMSNorm(P.reshape(grid), extents, None, affine).double()
                assert_matches_sequential(layer, filled(torch.nn.RMSNorm(extents, None, affine)), noise(4, 6, 5))

    on_workers(4, main)


def assert_kept(layer, reference):
    """The running statistics are torch's, of this worker's balanced block of channels."""
    P_x, me = layer.P_x, layer.P_x.comm.rank
    blocks = balanced(layer.num_features, P_x.workers.shape[1])
    start, stop = blocks[P_x.index_of(me)[1]] if me in P_x else (0, 0)
    assert layer.num_batches_tracked == reference.num_batches_tracked
    for key in ("running_mean", "running_var"):
        assert torch.allclose(getattr(layer, key), getattr(reference, key)[start:stop], rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.1, None, 0.0])
def test_running_statistics_are_those_of_torch(momentum):
    def main(P):
        team = P[:6]
        layer = DistributedBatchNorm(team.reshape(2, 3, 1), 4, momentum=momentum).double()
        reference = filled(Published(4, 3, momentum=momentum))
        instances = DistributedInstanceNorm(
            team.reshape(3, 2, 1), 4, momentum=momentum, track_running_stats=True
        ).double()
        sequential = torch.nn.InstanceNorm1d(4, momentum=momentum, track_running_stats=True).double()
        cuts = [None, [runs([2, 1]), runs([3, 0, 1]), runs([5])], [runs([0, 3]), runs([0, 1, 3]), runs([5])]]
        for step in range(6):
            mode, x = step % 3 < 2, noise(3, 4, 5, seed=10 + step) * (1 + step) + step
            assert_matches_sequential(layer.train(mode), reference.train(mode), x, cuts[step // 2])
            assert_matches_sequential(instances.train(mode), sequential.train(mode), x)
            assert_kept(layer, reference.inner)
            assert_kept(instances, sequential)
        bits = P.allgather_data(torch.stack([layer.running_mean, layer.running_var]))
        assert all(torch.equal(bits[place], bits[place + 3]) for place in range(3))
        layer.reset_running_stats()
        assert not layer.running_mean.any() and (layer.running_var == 1).all() and not layer.num_batches_tracked

    on_workers(7, main)


def test_without_running_statistics_evaluation_takes_those_of_the_batch():
    def main(P):
        layer = DistributedBatchNorm(P.reshape(2, 2, 1), 3, affine=False, track_running_stats=False).double()
        reference = Published(3, 3, affine=False, track_running_stats=False).double()
        for mode in (True, False):
            assert_matches_sequential(layer.train(mode), reference.train(mode), noise(3, 3, 4) + 2)
        assert layer.running_mean is None and not list(layer.parameters()) and not layer.state_dict()

    on_workers(4, main)


def test_a_batch_without_samples_changes_no_statistics():
    def main(P):
        layer = DistributedBatchNorm(P.reshape(2, 1, 1), 3)
        y = layer(torch.zeros(0, 3, 2, requires_grad=True))
        y.sum().backward()
        assert y.shape == (0, 3, 2) and not layer.running_mean.any() and (layer.running_var == 1).all()
        assert P.rank or not layer.gamma.grad.any()

    on_workers(2, main)


@pytest.mark.parametrize("name", PAIRS)
def test_a_mean_of_a_million_in_float32(name):
    """The error, against float64, is not larger than that of torch's float32 layer on the same numbers."""

    def main(P):
        layer, reference = PAIRS[name](P.reshape(2, 1, 2))
        x = (noise(4, 6, 5) + 1e6).float()
        dy = noise(4, 6, 5, seed=1).float()
        owned = Layout.balanced(layer.P_x, x.shape)
        exact, rounded = x.double().requires_grad_(), x.clone().requires_grad_()
        expected = copy.deepcopy(reference).double()(exact)
        expected.backward(dy.double())
        theirs = reference(rounded)
        theirs.backward(dy)
        block = owned.block(x).clone().requires_grad_()
        y = layer(block)
        y.backward(owned.block(dy))
        assert y.dtype == torch.float32
        for ours, torchs, right in ((y, theirs, expected), (block.grad, rounded.grad, exact.grad)):
            error, allowed = (ours - owned.block(right)).abs().max(), (torchs - right).abs().max()
            assert error <= allowed + 1e-6 * right.abs().max(), (error, allowed)

    on_workers(4, main)


def test_workers_of_very_different_means():
    def main(P):
        x = noise(4, 3, 2)
        x[2:] += 1e6
        assert_matches_sequential(DistributedBatchNorm(P.reshape(2, 1, 1), 3).double(), filled(Published(3, 3)), x)

    on_workers(2, main)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PAIRS)
def test_short_floats_are_computed_in_float32(name, dtype):
    """The result is the nearest number of the dtype, with weights of that dtype or of float32."""

    def main(P):
        for weights in (dtype, torch.float32):
            if name == "DistributedRMSNorm" and weights is not dtype:
                continue  # torch warns
            layer, reference = (module.to(weights) for module in PAIRS[name](P.reshape(2, 2, 1)))
            x = (noise(4, 6, 5) + 3).to(dtype)
            owned = Layout.balanced(layer.P_x, x.shape)
            reference = reference if name != "DistributedBatchNorm" else torch.nn.BatchNorm1d(6).to(weights)
            right = copy.deepcopy(reference).double()(x.double())
            y, theirs = layer(owned.block(x)), reference(x)
            assert y.dtype == theirs.dtype == dtype
            error = (y - owned.block(right)).abs()
            assert error.max() <= (theirs - right).abs().max()
            assert (error <= torch.finfo(dtype).eps / 2 * owned.block(right).abs() + 1e-6).all()

    on_workers(4, main)


@pytest.mark.parametrize("name", PAIRS)
def test_autocast_changes_nothing_as_in_torch(name):
    def main(P):
        layer, reference = PAIRS[name](P.reshape(2, 2, 1))
        for dtype in (torch.float32, torch.bfloat16):
            x = noise(4, 6, 5).to(dtype)
            if name == "DistributedRMSNorm" and dtype is torch.bfloat16:
                continue  # torch warns
            reference = reference if name != "DistributedBatchNorm" else torch.nn.BatchNorm1d(6)
            block = Layout.balanced(layer.P_x, x.shape).block(x).clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y, expected = layer(block), reference(x)
            y.sum().backward()
            assert y.dtype == expected.dtype == dtype and block.grad.dtype == dtype
            assert torch.equal(y, layer(block))

    on_workers(4, main)


@pytest.mark.parametrize("name", PAIRS)
def test_checkpoint_and_running_statistics(name):
    """torch's batch norm takes note of a batch twice under a checkpoint, and so does ours."""

    def main(P):
        layer, reference = pair(PAIRS[name], P.reshape(2, 2, 1))
        for (parameter, layout), whole in zip(layer.parameter_layouts.items(), reference.parameters(), strict=True):
            if parameter in dict(layer.named_parameters()):
                layer.get_parameter(parameter).data = layout.block(whole.data).clone()
        x, owned = noise(4, 6, 5), Layout.balanced(layer.P_x, (4, 6, 5))
        whole, block = x.clone().requires_grad_(), owned.block(x).clone().requires_grad_()
        for network, one in ((reference, whole), (layer, block)):
            (checkpoint(network, one, use_reentrant=False) ** 3).sum().backward()
        assert torch.allclose(block.grad, owned.block(whole.grad), rtol=1e-9)
        if name == "DistributedBatchNorm":
            assert reference.inner.num_batches_tracked == 2
            assert_kept(layer, reference.inner)

    on_workers(4, main)


@pytest.mark.parametrize("name", PAIRS)
def test_double_backward_with_empty_blocks(name):
    def main(P):
        blocks = [runs([0, 4]), runs([6]), runs([5, 0])]
        second_derivatives(PAIRS[name], P[1:].reshape(2, 1, 2), noise(4, 6, 5), blocks)

    on_workers(5, main)


def test_messages_of_a_step():
    """Forward: one agreement, one exchange of moments, one broadcast of gamma and beta; backward: both transposed."""

    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedBatchNorm(team.reshape(2, 1, 2), 3)
        x = torch.randn(2, 3, 4, requires_grad=True)

        def calls(step):
            layer(x).sum().backward()  # what the members agree on anew
            team.comm.reset()
            step()
            return sorted(name for name, _ in team.comm.log), dict(team.comm.sent)

        others = {rank: 1 for rank in range(4) if rank != P.rank}
        assert calls(lambda: layer(x)) == (["all_max", "broadcast", "exchange"], others)
        y = layer(x)
        assert calls(lambda: y.sum().backward()) == (["exchange", "sum"], others)
        layer.eval()
        assert calls(lambda: layer(x)) == (["all_max", "broadcast"], {})
        with distdl.fixed_shapes():
            assert calls(lambda: layer(x)) == (["broadcast"], {})
        layer = DistributedBatchNorm(team.reshape(1, 4, 1), 4)
        x = torch.randn(2, 1, 4, requires_grad=True)
        assert calls(lambda: layer(x).sum().backward()) == (["all_max"], {})
        layer = DistributedLayerNorm(team.reshape(2, 2), 6)
        x = torch.randn(2, 3, requires_grad=True)
        # two workers share features: gamma and beta are a message from one to the other
        assert calls(lambda: layer(x))[0] == ["all_max", "exchange", "exchange"]

    on_workers(4, main)


def test_parameters_of_the_published_interface():
    def main(P):
        layer = DistributedBatchNorm(P[:6].reshape(1, 3, 2), 7)
        stores = P.rank in (0, 2, 4)
        shapes = [list(parameter.shape) for parameter in layer.parameters()]
        assert shapes == ([[1, [3, 2, 2][P.rank // 2], 1]] * 2 if stores else [])
        assert [name for name, _ in layer.named_parameters()] == ["gamma", "beta"] * stores
        assert set(layer.state_dict()) - {"gamma", "beta"} == {"running_mean", "running_var", "num_batches_tracked"}
        x = torch.ones(4, [3, 2, 2][P.rank // 2], 5) if P.rank < 6 else zero_volume_tensor(4)
        y = layer(x)
        assert y.requires_grad == (P.rank < 6) and y.shape == x.shape
        if P.rank < 6:
            y.sum().backward()
        assert all(parameter.grad is not None for parameter in layer.parameters())

    on_workers(7, main)


def test_state_is_that_of_torch_where_the_whole_lives_on_one_worker():
    def main(P):
        line = P.reshape(1, 1, 1)
        for layer, reference in (
            (DistributedGroupNorm(line, 2, 4), torch.nn.GroupNorm(2, 4)),
            (DistributedBatchNorm(line, 4), torch.nn.BatchNorm1d(4)),
            (DistributedInstanceNorm(line, 4, affine=True, track_running_stats=True),
             torch.nn.InstanceNorm1d(4, affine=True, track_running_stats=True)),
            (DistributedLayerNorm(line, [4, 3]), torch.nn.LayerNorm([4, 3])),
            (DistributedRMSNorm(line, 3), torch.nn.RMSNorm(3)),
        ):  # fmt: skip
            for parameter in reference.parameters():
                parameter.data = noise(*parameter.shape).float()
            layer.load_state_dict(reference.state_dict())
            first = next(layer.parameters()).flatten()
            assert torch.equal(first, next(reference.parameters()).flatten()) and first.any()
            reference.load_state_dict(layer.state_dict())
            assert {k: v.shape for k, v in layer.state_dict().items()} == {
                k: v.shape for k, v in reference.state_dict().items()
            }

    on_workers(1, main)


def test_split_channels_read_their_part_of_a_sequential_state():
    def main(P):
        reference = torch.nn.BatchNorm1d(5)
        reference.running_mean, reference.weight.data = torch.arange(5.0), 7 + torch.arange(5.0)
        layer = DistributedBatchNorm(P.reshape(2, 2, 1), 5)
        layer.load_state_dict(reference.state_dict())
        mine = slice(0, 3) if P.rank % 2 == 0 else slice(3, 5)
        assert torch.equal(layer.running_mean, torch.arange(5.0)[mine])
        assert P.rank > 1 or torch.equal(layer.gamma.flatten(), 7 + torch.arange(5.0)[mine])
        layer.load_state_dict(layer.state_dict())
        assert ("gamma" in layer.state_dict()) == (P.rank < 2)

    on_workers(4, main)


def test_stock_optimisers_copies_and_sequences():
    def main(P):
        grid = P[:4].reshape(2, 1, 2)
        network = torch.nn.Sequential(
            DistributedBatchNorm(grid, 3), torch.nn.Tanh(), DistributedLayerNorm(grid, [3, 4])
        )
        network = copy.deepcopy(network).double()
        optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
        x = noise(2, 3, 2, seed=P.rank) if P.rank < 4 else zero_volume_tensor(2)
        losses = []
        for _ in range(3):
            optimiser.zero_grad()
            y = network(x)
            loss = ((y - 1) ** 2).sum()
            loss.backward()
            optimiser.step()
            losses.append(sum(P.allgather_data(float(loss.detach()))))
        assert losses[2] < losses[1] < losses[0]
        assert all(parameter.grad is not None for parameter in network.parameters())

    on_workers(5, main)


def test_what_requires_a_gradient_may_differ_between_workers_and_calls():
    def main(P):
        layer, reference = pair(PAIRS["DistributedBatchNorm"], P.reshape(2, 1, 2))
        x, owned = noise(4, 6, 5), Layout.balanced(layer.P_x, (4, 6, 5))
        for asks in ([0], [3, 1], [], [0, 1, 2, 3]):
            for parameter in layer.parameters():
                parameter.data.fill_(1.5)
            for parameter in reference.parameters():
                parameter.data.fill_(1.5)
            whole = x.clone().requires_grad_()
            block = owned.block(x).clone().requires_grad_(P.rank in asks)
            (reference(whole) ** 3).sum().backward()
            (layer(block) ** 3).sum().backward()
            assert (block.grad is not None) == (P.rank in asks)
            assert P.rank not in asks or torch.allclose(block.grad, owned.block(whole.grad), rtol=1e-9)
        layer.requires_grad_(False)
        assert not layer(owned.block(x)).requires_grad
        y = layer(owned.block(x).requires_grad_(P.rank == 2))
        assert y.requires_grad  # through the moments

    on_workers(4, main)


@pytest.mark.parametrize("name", PAIRS)
def test_forward_mode_and_inference_mode(name):
    def main(P):
        layer, reference = pair(PAIRS[name], P.reshape(2, 1, 2))
        for parameter in (*layer.parameters(), *reference.parameters()):
            parameter.data.fill_(1.5)
        x, t, owned = noise(4, 6, 5), noise(4, 6, 5, seed=1), Layout.balanced(layer.P_x, (4, 6, 5))
        with torch.inference_mode():
            expected, y = reference(x), layer(owned.block(x))
        assert torch.allclose(y, owned.block(expected), rtol=1e-10)
        with forward_mode(P):
            expected = reference(forward_ad.make_dual(x, t))
            y = layer(forward_ad.make_dual(owned.block(x), owned.block(t)))
            ours, theirs = (forward_ad.unpack_dual(one).tangent for one in (y, expected))
        assert torch.allclose(ours, owned.block(theirs), rtol=1e-9)
        layer(owned.block(x).clone().requires_grad_()).sum().backward()  # what the first call kept is no obstacle

    on_workers(4, main)


def test_numbers_of_numpy():
    def main(P):
        n = np.int64(4)
        for layer in (DistributedLayerNorm(P.reshape(1, 2), n), DistributedGroupNorm(P.reshape(1, 2), n, n)):
            assert layer(torch.randn(3, 2)).shape == (3, 2)
        assert DistributedBatchNorm(P.reshape(1, 2), n)(torch.randn(3, 2)).shape == (3, 2)

    on_workers(2, main)


def test_inputs_of_zero_volume_and_default_dtype_beside_float64():
    def main(P):
        layer = DistributedGroupNorm(P.reshape(2, 1, 1), 1, 3).double()
        x = noise(2, 3, 4) if P.rank == 0 else torch.zeros(0, 3, 4)
        x.requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert y.dtype == torch.float64 and y.shape == x.shape and x.grad.dtype == x.dtype

    on_workers(2, main)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grid", [(4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 2, 2)])
def test_channels_last_with_one_sample_on_each_worker(grid, training):
    def main(P):
        batch = grid[0]
        x = noise(batch, 8, 6, 5).to(memory_format=torch.channels_last)
        reference = torch.nn.BatchNorm2d(8).double().train(training)
        whole = x.clone().requires_grad_()
        expected = reference(whole)
        dy = noise(*expected.shape)
        expected.backward(dy)
        layer = DistributedBatchNorm(P.reshape(*grid), 8).double().train(training)
        owned = Layout.balanced(layer.P_x, x.shape)
        mine = owned.block(x).to(memory_format=torch.channels_last).requires_grad_()
        y = layer(mine)
        y.backward(owned.block(dy))
        assert torch.allclose(y, owned.block(expected), atol=1e-12)
        assert torch.allclose(mine.grad, owned.block(whole.grad), atol=1e-12)

    on_workers(4, main)


NORMS = {
    "batch": lambda of, c: of.BatchNorm2d(c),
    "group": lambda of, c: of.GroupNorm(3, c),
    "instance": lambda of, c: of.InstanceNorm2d(c, affine=True),
    "layer": lambda of, c: of.LayerNorm((c, 7, 5)),
}


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("name", NORMS)
def test_channels_last_is_kept(name, samples, small, monkeypatch):
    """In pieces of a few cells, and sample by sample, too."""
    monkeypatch.setattr(rows, "_RUN", 4 if small else 1 << 6)
    monkeypatch.setattr(rows, "_CHUNK", 48 if small else 1 << 18)
    monkeypatch.setattr(rows, "_SAMPLE", 1 if small else 1 << 14)
    x, dy = (noise(samples, 6, 7, 5, seed=seed) for seed in (0, 1))
    norm = filled(NORMS[name](torch.nn, 6))
    # (contiguous: torch's own gradient of an instance norm goes wrong for one sample)
    whole = x.clone().requires_grad_()
    expected = norm(whole)
    (first,) = torch.autograd.grad(expected, whole, dy, create_graph=True)
    (first.square().sum() + expected.square().sum()).backward()
    weights = [one.grad.clone() for one in norm.parameters()]

    def main():
        P = distdl.world().reshape(1, 1, 2, 1)
        network = distdl.distribute(copy.deepcopy(norm), P, fallback="error")
        network.zero_grad()
        block = distdl.distribute_tensor(x, P).to_local().clone(memory_format=torch.channels_last).requires_grad_()
        mine = distdl.GlobalTensor.from_local(block, P)
        y = network(mine)
        seen = y.to_local().is_contiguous(memory_format=torch.channels_last)
        for graph in (False, True):
            dx, *_ = torch.autograd.grad(
                y, mine, distdl.distribute_tensor(dy, P), create_graph=graph, retain_graph=True
            )
            assert torch.allclose(dx.full_tensor(), first, atol=1e-11)
        (dx.square().sum() + y.square().sum()).backward()
        assert torch.allclose(y.full_tensor(), expected, atol=1e-12)
        assert torch.allclose(distdl.GlobalTensor.from_local(block.grad, P).full_tensor(), whole.grad, atol=1e-9)
        for one, grad in zip(network.parameters(), weights, strict=True):
            assert torch.allclose(one.grad, grad, atol=1e-9)
        assert seen == (name == "batch" or (name != "layer" and (small or samples == 1)))

    distdl.run_workers(main, 2, backend="threads")


def test_moments_of_many_cells_in_channels_last():
    """Torch's kernel adds up the cells of a channel in float32 one by one, and loses three digits."""
    x = noise(1, 2, 1024, 1024).float().add_(30).contiguous(memory_format=torch.channels_last)
    expected = torch.nn.BatchNorm2d(2, affine=False).double()(x.double())

    def main():
        P = distdl.world().reshape(1, 1, 2, 1)
        y = distdl.distribute(torch.nn.BatchNorm2d(2, affine=False), P)(distdl.distribute_tensor(x, P))
        assert (y.full_tensor() - expected).abs().max() < 1e-5

    distdl.run_workers(main, 2, backend="threads")


def test_gradients_of_many_cells_in_channels_last():
    """As the moments: a gradient whose cells are of one sign is where the digits are lost."""
    last = {"memory_format": torch.channels_last}
    x, dy = noise(1, 2, 1024, 512).float(), noise(1, 2, 1024, 512, seed=1).float().mul_(0.02).add_(0.2)
    norm = torch.nn.BatchNorm2d(2)
    exact, whole = copy.deepcopy(norm).double(), x.double().requires_grad_()
    exact(whole).backward(dy.double())
    expected = whole.grad, exact.bias.grad

    def main():
        P = distdl.world().reshape(1, 1, 2, 1)
        network = distdl.distribute(copy.deepcopy(norm), P)
        mine = distdl.distribute_tensor(x.contiguous(**last), P).requires_grad_()
        network(mine).backward(distdl.distribute_tensor(dy.contiguous(**last), P))
        for one, right in zip((mine.grad.full_tensor(), network.bias.grad), expected, strict=True):
            assert (one - right).abs().max() < 5e-6 * right.abs().max()

    distdl.run_workers(main, 2, backend="threads")


@pytest.mark.parametrize("grid", [(2, 1, 1, 1), (1, 1, 2, 1)])
def test_instance_norms_of_a_large_mean_in_channels_last(grid):
    x = noise(2, 3, 6, 5).float().add_(1000).contiguous(memory_format=torch.channels_last)
    expected = torch.nn.InstanceNorm2d(3).double()(x.double())

    def main():
        P = distdl.world().reshape(*grid)
        y = distdl.distribute(torch.nn.InstanceNorm2d(3), P)(distdl.distribute_tensor(x, P))
        assert (y.full_tensor() - expected).abs().max() < 1e-3

    distdl.run_workers(main, 2, backend="threads")


def test_channels_last_with_one_sample_in_a_checkpoint():
    def main(P):
        layer = DistributedBatchNorm(P.reshape(1, 1, 1, 1), 8).double().eval()
        gradients = []
        for network in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
            x = noise(1, 8, 6, 5).to(memory_format=torch.channels_last).requires_grad_()
            network(x).backward(noise(1, 8, 6, 5, seed=1))
            gradients.append(x.grad)
        assert torch.equal(*gradients)

    on_workers(1, main)


def test_tensors_that_are_not_contiguous():
    def main(P):
        x = noise(4, 5, 6, 6).permute(0, 3, 1, 2)
        for layer, reference in (
            (DistributedGroupNorm(P.reshape(1, 2, 2, 1), 2, 6), torch.nn.GroupNorm(2, 6)),
            (DistributedBatchNorm(P.reshape(1, 2, 2, 1), 6), Published(6, 4)),
        ):
            layer, reference = layer.double(), filled(reference)
            owned = Layout.balanced(layer.P_x, x.shape)
            assert_matches_sequential(layer, reference, x)
            kept = x.clone()
            assert torch.allclose(layer(owned.block(x)), layer(owned.block(x).contiguous()), rtol=1e-12)
            assert torch.equal(x, kept)

    on_workers(4, main)


def batch(grid, channels=4):
    return lambda P: DistributedBatchNorm(P.reshape(grid), channels)


@pytest.mark.parametrize(("make", "x", "words"), [
    (lambda P: DistributedBatchNorm(P, 3), None, "DistributedBatchNorm needs P_x: batch x channels x space; got 2"),
    (lambda P: DistributedInstanceNorm(P.reshape(2, 1), 3), None, "needs P_x: batch x channels x space; got 2x1"),
    (lambda P: DistributedGroupNorm(P.reshape(2, 1), 2, 3), None, "groups that divide 3 channels; got 2"),
    (lambda P: DistributedLayerNorm(P.reshape(2, 1), [1, 2, 3]), None, "an axis for each dim; got 2x1"),
    (lambda P: DistributedRMSNorm(P.reshape(2, 1), []), None, "at least one dim"),
    (batch((1, 2)), (1, 2), "more than 1 value per channel when training; the global shape of the input is 1x4"),
    (lambda P: DistributedInstanceNorm(P.reshape(1, 2, 1), 4), (3, 2, 1), "more than 1 spatial element"),
    (lambda P: DistributedGroupNorm(P.reshape(1, 2), 4, 4), (1, 2), "more than 1 value per channel"),
    (batch((1, 2)), (3, 3), "extents are 4 in dims 1; the global shape of the input is 3x6"),
    (lambda P: DistributedLayerNorm(P.reshape(1, 2), 4), (3, 3), "the global shape of the input is 3x6"),
    (batch((1, 2)), (3, 2, 1), "2 dims on all workers"),
    (batch((1, 2)), lambda P: torch.ones(3 + P.rank, 2), "form a grid"),
    (batch((1, 2)), lambda P: torch.ones(3, 2).double(), "got torch.float32"),
    (batch((1, 2)), lambda P: torch.ones(3, 2).int(), "a floating-point dtype; got torch.int32"),
    (lambda P: batch((2, 1), 2)(P).train(P.rank == 0), (3, 2), "in training or in evaluation mode on all workers"),
    (batch((2, 1)), lambda P: None, "needs a tensor; got NoneType"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, x, words):
    def main(P):
        layer = make(P)
        layer(x(P) if callable(x) else torch.ones(x))

    assert words in every_worker_raises(2, main)


PLAIN = {
    "DistributedBatchNorm": lambda P: (DistributedBatchNorm(P, 6), torch.nn.BatchNorm1d(6)),
    **{name: make for name, make in PAIRS.items() if name != "DistributedBatchNorm"},
}


@pytest.mark.parametrize("name", PLAIN)
def test_parameters_are_filled_by_the_recipe_of_the_docs(name):
    """In torch's shapes, on every worker; assigned, copied into, and by an initialisation."""

    def main(P):
        layer, reference = PLAIN[name](P[:4].reshape(2, 2, 1))
        network, sequential = torch.nn.Sequential(torch.nn.Tanh(), layer.double()), torch.nn.Sequential(reference)
        x, layouts = noise(4, 6, 5), sequential_layouts(network)
        owned = Layout.balanced(P[:4].reshape(2, 2, 1), x.shape)
        for step, fill in enumerate(("assigned", "copied", "initialised")):
            filled(sequential)
            for (key, layout), value in zip(layouts.items(), sequential.parameters(), strict=True):
                value.data += step
                if fill == "assigned":
                    network.get_parameter(key).data = layout.block(value.detach()).clone()
                elif fill == "copied":
                    with torch.no_grad():
                        network.get_parameter(key).copy_(layout.block(value))
                else:
                    value.data.fill_(0.25)
                    init.constant_(network.get_parameter(key), layout, 0.25)
                assert network.get_parameter(key).shape == layout.block(value).shape
                assert torch.equal(network.get_parameter(key).detach(), layout.block(value.detach()))
            network.zero_grad()
            sequential.zero_grad()
            (sequential(x.tanh()) ** 3).sum().backward()
            y = network(owned.block(x) if P.rank < 4 else zero_volume_tensor(4, dtype=torch.float64))
            if y.requires_grad:  # (where batch norm has no parameters, outside)
                (y**3).sum().backward()
            for (key, layout), value in zip(layouts.items(), sequential.parameters(), strict=True):
                if P.rank in layout:
                    assert torch.allclose(network.get_parameter(key).grad, layout.block(value.grad), rtol=1e-9)

    on_workers(5, main)


def test_batch_norm_has_weight_and_bias_as_torch_has_them():
    def main(P):
        layer = DistributedBatchNorm(P.reshape(2, 2, 1), 5)
        assert [name for name, _ in layer.named_parameters()] == ["gamma", "beta"] * (P.rank < 2)
        assert isinstance(layer.weight, torch.nn.Parameter) and layer.bias.shape == layer.weight.shape
        plain = DistributedBatchNorm(P.reshape(2, 2, 1), 5, affine=False)
        assert plain.weight is None and plain.bias is None and not sequential_layouts(plain)
        if P.rank > 1:
            assert layer.gamma is None and layer.weight.shape == (0,)
            return
        assert layer.weight.shape == layer.running_mean.shape
        layer.weight.square().sum().backward()
        assert torch.equal(layer.gamma.grad, torch.full_like(layer.gamma, 2.0))
        assert torch.equal(layer.weight.grad, torch.full_like(layer.weight, 2.0))
        layer.weight.grad = None
        layer.bias.data = torch.full_like(layer.bias, 3.0)
        assert layer.gamma.grad is None and (layer.beta == 3).all() and layer.beta.dim() == 3
        assert torch.equal(copy.deepcopy(layer).bias, layer.bias)

    on_workers(4, main)


@pytest.mark.parametrize("way", ["method", "attribute"])
@pytest.mark.parametrize("names", [["weight"], ["bias"], ["weight", "bias"]])
def test_batch_norm_is_frozen_by_weight_and_bias(names, way):
    """On every worker alike, those without channels and outside, also in a copy; and thawed again."""

    def set_all(layer, value):
        for name in names:
            if way == "method":
                assert getattr(layer, name).requires_grad_(value).requires_grad is value
            else:
                getattr(layer, name).requires_grad = value

    def train(P, value):
        layer, reference = DistributedBatchNorm(P[:4].reshape(2, 2), 3).double(), filled(torch.nn.BatchNorm1d(3))
        layer.load_state_dict(reference.state_dict())
        set_all(layer, False)
        set_all(reference, False)
        layer = copy.deepcopy(layer)
        if value:
            set_all(layer, True)
            set_all(reference, True)
        whole = noise(4, 3)
        owned = Layout.balanced(P[:4].reshape(2, 2), whole.shape)
        x = owned.block(whole).clone() if P.rank < 4 else zero_volume_tensor(4, dtype=torch.float64)
        for network, part in ((layer, x), (reference, whole)):
            y = network(part.requires_grad_())
            (y**3).sum().backward()
        for name, layout in sequential_layouts(layer).items():
            ours, theirs = getattr(layer, name), getattr(reference, name)
            assert ours.requires_grad is theirs.requires_grad is (value or name not in names)
            with torch.no_grad():
                assert getattr(layer, name).requires_grad is theirs.requires_grad
            if theirs.grad is None:
                assert ours.grad is None
            elif P.rank in layout:
                assert torch.allclose(ours.grad, layout.block(theirs.grad), rtol=1e-9)
        for own, name in layer.sequential_names.items():
            if getattr(layer, own) is not None:
                assert getattr(layer, own).requires_grad is (value or name not in names)

    def main(P):
        train(P, False)
        train(P, True)

    on_workers(5, main)


@pytest.mark.parametrize("prune_it", [
    lambda layer, name: prune.random_unstructured(layer, name, 0.5),
    lambda layer, name: prune.l1_unstructured(layer, name, 1),
    lambda layer, name: prune.identity(layer, name),
    lambda layer, name: prune.custom_from_mask(layer, name, torch.ones_like(getattr(layer, name))),
    lambda layer, name: prune.global_unstructured([(layer, name)], prune.L1Unstructured, amount=0.5),
])  # fmt: skip
@pytest.mark.parametrize(("name", "own"), [("weight", "gamma"), ("bias", "beta")])
def test_pruning_of_batch_norm_has_to_name_what_is_stored(prune_it, name, own):
    """One error on every worker, which leaves the layer as it was."""
    layers = {}

    def main(P):
        layers[P.rank] = DistributedBatchNorm(P.reshape(2, 2), 3)
        prune_it(layers[P.rank], name)

    text = every_worker_raises(4, main)
    assert "DistributedBatchNorm (P_x: 2x2" in text and f"needs {own} to be pruned" in text and f"got {name}" in text
    for rank, layer in layers.items():
        assert [key for key, _ in layer.named_parameters()] == ["gamma", "beta"] * (rank < 2)


def test_a_pruned_batch_norm_trains_as_the_sequential_one():
    def main(P):
        layer, reference = DistributedBatchNorm(P.reshape(2, 2), 3).double(), filled(torch.nn.BatchNorm1d(3))
        layer.load_state_dict(reference.state_dict())
        mask, whole = torch.tensor([1.0, 0.0, 1.0]).double(), noise(4, 3)
        prune.custom_from_mask(reference, "weight", mask)
        if layer.gamma is not None:
            prune.custom_from_mask(layer, "gamma", Layout.balanced(P[:2], [3]).block(mask).reshape(layer.gamma.shape))
        y, expected = layer(Layout.balanced(P.reshape(2, 2), whole.shape).block(whole)), reference(whole)
        (y**3).sum().backward()
        (expected**3).sum().backward()
        assert torch.allclose(y, Layout.balanced(P.reshape(2, 2), whole.shape).block(expected), rtol=1e-9)
        if P.rank < 2:
            block = Layout.balanced(P[:2], [3]).block(reference.weight_orig.grad)
            assert torch.allclose(layer.gamma_orig.grad.flatten(), block, rtol=1e-9)

    on_workers(4, main)


@pytest.mark.parametrize(("make", "extents", "cuts"), [
    (lambda P: DistributedGroupNorm(P.reshape(2, 1), 2, 2), (3, 2), [[2, 1], [2]]),
    (lambda P: DistributedGroupNorm(P.reshape(1, 2), 2, 2), (3, 2), [[3], [2, 0]]),
    (lambda P: DistributedInstanceNorm(P.reshape(1, 2, 1), 3), (2, 3, 4), [[2], [3, 0], [4]]),
    (lambda P: DistributedInstanceNorm(P.reshape(1, 1, 2), 3), (2, 3, 3), [[2], [3], [1, 2]]),
    (lambda P: DistributedBatchNorm(P.reshape(2, 1), 3), (3, 3), [[2, 1], [3]]),
    (lambda P: DistributedBatchNorm(P.reshape(1, 2), 3), (3, 3), [[3], [3, 0]]),
    (lambda P: DistributedLayerNorm(P.reshape(2, 1), 1), (3, 1), [[2, 1], [1]]),
    (lambda P: DistributedRMSNorm(P.reshape(2, 1), 1), (1, 1), [[1, 0], [1]]),
])  # fmt: skip
def test_what_torch_checks_is_checked_on_the_global_shape(make, extents, cuts):
    """One value for a mean on one worker, or none, and more in the whole tensor."""

    def main(P):
        layer = make(P).double()
        owned = Layout.of(layer.P_x, [runs(along) for along in cuts])
        x = owned.block(noise(*extents)).clone().requires_grad_()
        y = layer(x)
        (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        (dx**2).sum().backward()
        assert y.shape == x.shape == x.grad.shape and y.isfinite().all()

    on_workers(2, main)


@pytest.mark.parametrize("make", [
    lambda P: DistributedGroupNorm(P.reshape(2, 1), 2, 2),
    lambda P: DistributedBatchNorm(P.reshape(2, 1), 2),
    lambda P: DistributedInstanceNorm(P.reshape(2, 1, 1), 2),
])  # fmt: skip
def test_one_value_for_a_mean_in_the_whole_tensor_is_the_same_error_on_every_worker(make):
    def main(P):
        layer = make(P)
        layer(torch.ones(1 if P.rank == 0 else 0, 2, *[1] * (layer.P_x.workers.ndim - 2)))

    assert "needs more than 1" in every_worker_raises(2, main)


@pytest.mark.parametrize("kind", [DistributedBatchNorm, DistributedInstanceNorm])
def test_evaluation_before_any_batch(kind):
    """With an average over all batches, of which there is none yet, and also where a block is empty."""

    def main(P):
        x = noise(3, 4, 2)
        for cuts in ([3, 0], [1, 2]):
            layer = kind(P.reshape(2, 1, 1), 4, momentum=None, track_running_stats=True).double().eval()
            owned = Layout.of(layer.P_x, [runs(cuts), runs([4]), runs([2])])
            y = layer(owned.block(x))
            assert torch.allclose(y, owned.block(x) / (1 + 1e-5) ** 0.5) and not layer.running_mean.any()

    on_workers(2, main)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("grid", [(4, 1, 1), (2, 1, 2)])
def test_second_derivatives_of_the_gradients_of_parameters(grid, training):
    """Workers that store no gamma come past its sums, too: its gradients, too, are differentiated."""

    def main(P):
        P_x = P.reshape(grid)
        first, last = (DistributedFeatureConv1d(P_x, 6, 6, 1) for _ in range(2))
        ours = torch.nn.Sequential(first, DistributedBatchNorm(P_x, 6), last).double().train(training)
        one = torch.nn.Conv1d
        theirs = filled(torch.nn.Sequential(one(6, 6, 1), torch.nn.BatchNorm1d(6), one(6, 6, 1))).train(training)
        layouts = sequential_layouts(ours)
        for (name, layout), value in zip(layouts.items(), theirs.parameters(), strict=True):
            ours.get_parameter(name).data = layout.block(value.detach()).clone()
        x = noise(4, 6, 4)
        owned = Layout.of(P_x, [runs([4, 0, *[0] * (grid[0] - 2)]), runs([6]), balanced(4, grid[2])])
        expected = []
        for network, block in ((theirs, x), (ours, owned.block(x))):
            (network(block) ** 4).sum().backward(create_graph=True)
            penalty = sum((parameter.grad**2).sum() for parameter in network.parameters())
            for parameter in network.parameters():
                parameter.grad = None
            penalty.backward()
            if network is theirs:
                expected = [parameter.grad for parameter in theirs.parameters()]
        for (name, layout), gradient in zip(layouts.items(), expected, strict=True):
            if P.rank in layout:  # (training makes the gradient of the first bias 0)
                close(ours.get_parameter(name).grad, layout.block(gradient), max(one.abs().max() for one in expected))

    on_workers(4, main)


def test_eps_and_momentum_may_be_changed_on_all_workers():
    def main(P):
        x, owned = noise(4, 6, 5), Layout.balanced(P.reshape(2, 1, 2), (4, 6, 5))
        layer, reference = DistributedBatchNorm(owned.partition, 6).double(), torch.nn.BatchNorm1d(6).double()
        for eps, momentum in ((1e-5, 0.1), (0.5, 0.1), (0.5, 0.75), (1e-5, None)):
            for one in (layer, reference):
                one.eps, one.momentum = eps, momentum
            for mode in (True, False):
                expected, y = reference.train(mode)(x), layer.train(mode)(owned.block(x))
                assert torch.allclose(y, owned.block(expected)) and (layer.eps, layer.momentum) == (eps, momentum)
            assert_kept(layer, reference)
        for make in PLAIN.values():
            layer, reference = (module.double() for module in make(owned.partition))
            layer.eps = reference.eps = 0.5
            assert torch.allclose(layer(owned.block(x)), owned.block(reference(x)))

    on_workers(4, main)


@pytest.mark.parametrize(("attribute", "text"), [
    ("eps", "needs eps that is equal on all workers; worker 0 has 1e-05 and worker 2 has 0.5"),
    ("momentum", "needs momentum that is equal on all workers; worker 0 has 0.1 and worker 2 has 0.5"),
])  # fmt: skip
def test_a_number_that_is_changed_on_one_worker_is_an_error_on_all(attribute, text):
    def main(P):
        layer = DistributedBatchNorm(P.reshape(3, 1, 1), 2)
        layer(torch.ones(2, 2, 2))
        if P.rank == 2:
            setattr(layer, attribute, 0.5)
        layer(torch.ones(2, 2, 2))

    assert text in every_worker_raises(3, main)


def test_running_statistics_that_one_worker_has_lost():
    def main(P):
        layer = DistributedBatchNorm(P.reshape(2, 1, 1), 2).eval()
        layer(torch.ones(2, 2, 2))
        if P.rank == 1:
            layer.running_var = None
        layer(torch.ones(2, 2, 2))

    assert "worker 0 has 2 and worker 1 has 0" in every_worker_raises(2, main)


OPTIONS = {
    "DistributedBatchNorm": (
        {"num_features": 6, "affine": True, "track_running_stats": True},
        "(P_x: 1x2x1 on workers 0, 1; num_features=6, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)",
    ),
    "DistributedGroupNorm": (
        {"num_groups": 2, "num_channels": 6, "affine": True},
        "(P_x: 1x2x1 on workers 0, 1; num_groups=2, num_channels=6, eps=1e-05, affine=True)",
    ),
    "DistributedInstanceNorm": (
        {"num_features": 6, "affine": True, "track_running_stats": False},
        "(P_x: 1x2x1 on workers 0, 1; num_features=6, eps=1e-05, momentum=0.1, affine=True, track_running_stats=False)",
    ),
    "DistributedLayerNorm": (
        {"normalized_shape": (6, 5), "elementwise_affine": True},
        "(P_x: 1x2x1 on workers 0, 1; normalized_shape=(6, 5), eps=1e-05, elementwise_affine=True)",
    ),
    "DistributedRMSNorm": (
        {"normalized_shape": (5,), "elementwise_affine": True},
        "(P_x: 1x2x1 on workers 0, 1; normalized_shape=(5,), eps=None, elementwise_affine=True)",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_shown_and_cannot_be_changed(name):
    options, shown = OPTIONS[name]

    def main(P):
        layer = PAIRS[name](P.reshape(1, 2, 1))[0]
        assert_options(layer, **options)
        assert repr(layer) == name + shown

    on_workers(2, main)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1)])
def test_rms_norm_of_infinite_cells_and_of_squares_that_overflow_is_that_of_torch(grid):
    whole = noise(4, 6).float()
    whole[0, 1], whole[1, 4], whole[2, 0] = 1e25, float("inf"), float("nan")

    def derived(norm, x):
        y = norm(x.requires_grad_())
        return y, *torch.autograd.grad(y, x, torch.ones_like(y))

    expected = derived(torch.nn.RMSNorm(6), whole.clone())

    def main(P):
        P_x = P.create_partition_inclusive([1, 0]).reshape(*grid)
        mine = slices(Layout.balanced(P_x, whole.shape)[P.rank])
        for ours, theirs in zip(derived(DistributedRMSNorm(P_x, 6), whole[mine].clone()), expected, strict=True):
            torch.testing.assert_close(ours, theirs[mine], equal_nan=True)

    on_workers(2, main)
