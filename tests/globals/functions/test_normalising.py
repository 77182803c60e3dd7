"""Normalisations of global tensors: results, gradients, and running statistics that are the same everywhere."""

import pytest
import torch
from covering import in_pairs
from same import GRIDS, WORKERS, Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distdl

x2, x4, x5 = noise(5, 6), noise(3, 6, 5, 4), noise(2, 6, 3, 5, 4)
w, b = noise(6, seed=1), noise(6, seed=2)


@pytest.mark.parametrize("x", [x2, x4, x5])
def test_batch_norm(x):
    assert_same(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), Global(x), w, b)
    assert_same(lambda x, m, v: F.batch_norm(x, m.detach(), v.detach() ** 2 + 1, None, None, False), Global(x), w, b)


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics(training):
    alone = torch.nn.BatchNorm2d(6, dtype=torch.float64).train(training)
    alone.running_mean.copy_(w)
    y = alone(x4)

    def work():
        root = distdl.world()
        for grid in GRIDS[4]:
            ours = torch.nn.BatchNorm2d(6, dtype=torch.float64).train(training)
            ours.running_mean.copy_(w)
            P = root.create_partition_inclusive(range(int(torch.Size(grid).numel())))
            found = ours(distdl.distribute_tensor(x4, P.create_cartesian_topology_partition(grid))).full_tensor()
            assert torch.allclose(found, y, rtol=0, atol=1e-12)
            for name, buffer in alone.named_buffers():
                own = ours.get_buffer(name)
                assert torch.allclose(own, buffer, rtol=0, atol=1e-12), name
                assert all(torch.equal(own, other) for other in root.allgather_data(own)), name

    distdl.run_workers(work, WORKERS)


def test_other_normalisations():
    assert_same(lambda x, w, b: F.group_norm(x, 3, w, b), Global(x4), w, b)
    assert_same(lambda x, w, b: F.group_norm(x, 2, w, b), Global(x5), w, b)
    assert_same(lambda x: F.instance_norm(x), Global(x4))
    assert_same(lambda x, w, b: F.instance_norm(x, weight=w, bias=b), Global(x5), w, b)
    assert_same(lambda x, w, b: F.layer_norm(x, (4,), w, b), Global(x4), noise(4), noise(4, seed=1))
    assert_same(lambda x, w, b: F.layer_norm(x, (5, 4), w, b), Global(x4), noise(5, 4), noise(5, 4, seed=1))
    assert_same(lambda x, w: F.rms_norm(x, (4,), w), Global(x4), noise(4))


def test_empty_blocks_and_second_derivatives():
    empty, grids = Global(noise(2, 6, 3)), [(1, 1, 4), (4, 1, 1)]
    assert_same(lambda x: F.batch_norm(x, None, None, None, None, True), empty, grids=grids)
    assert_same(lambda x, w: F.batch_norm(x, None, None, w, None, True), empty, w, grids=grids)
    assert_same(lambda x, b: F.batch_norm(x, None, None, None, b, True), empty, b, grids=grids)
    assert_same(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), Global(x4), w, b, twice=True, tolerance=1e-10)
    assert_same(lambda x: F.batch_norm(x * 10 + 1000, None, None, None, None, True), Global(x5), tolerance=1e-9)
    assert_same(lambda x, w, b: F.layer_norm(x, (6,), w, b), Global(x2), w, b, twice=True, tolerance=1e-10)


def test_infinite_cells_and_squares_that_overflow_are_those_of_torch():
    x = noise(4, 6).float()
    x[0, 1], x[1, 4], x[2, 0] = 1e25, float("inf"), float("nan")
    for shape in ((6,), (2, 3)):
        scale = noise(*shape).float()
        same = Global(x.view(4, *shape) if len(shape) > 1 else x)
        assert_same(lambda x, s=shape: F.rms_norm(x, s), same, tolerance=1e-5)
        assert_same(lambda x, w, s=shape: F.rms_norm(x, s, w), same, scale, tolerance=1e-5)
    long = noise(2, 9000).float().abs()
    assert_same(lambda x: F.rms_norm(x, (9000,)), Global(long), tolerance=2e-6)
    large = noise(3, 4, 6).float()
    large[2, 3, 0] = float("inf")
    for norm in (F.instance_norm, lambda x: F.group_norm(x, 2), lambda x: F.layer_norm(x, (6,))):
        assert_same(norm, Global(large), tolerance=1e-5)
    large[0, 1] *= 1e25
    assert_same(lambda x: F.batch_norm(x, None, None, training=True), Global(large), tolerance=1e-5)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.InstanceNorm1d, torch.nn.BatchNorm1d])
def test_checkpoint_updates_running_statistics_as_often_as_torch(kind, last):
    """Where nothing is saved behind an instance norm, it recomputes no update."""
    x = noise(4, 6, 5) + 3

    def after(x):
        """Running means after the forward, its derivative, and the derivative of that."""
        norm, found = kind(6, affine=False, momentum=0.5, track_running_stats=True, dtype=x.dtype), []

        def noted():
            found.append(norm.running_mean.clone())

        y = checkpoint(norm if last else lambda x: norm(x).pow(3), x, use_reentrant=False)
        y = y.pow(3) if last else y
        noted()
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        noted()
        (dx * dx).sum().backward()
        noted()
        return torch.stack(found)

    alone = after(x.clone().requires_grad_())

    def work():
        root = distdl.world()
        for grid in ((1, 1, 2), (2, 1, 1), (1, 2, 1), (1, 1, 1)):
            P = root.create_partition_inclusive(range(int(torch.Size(grid).numel())))
            P = P.create_cartesian_topology_partition(grid)
            found = after(distdl.distribute_tensor(x, P).requires_grad_())
            assert torch.allclose(found, alone, rtol=0, atol=1e-12), grid

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("normalise", [F.batch_norm, F.instance_norm])
def test_statistics_that_are_global_tensors(normalise, training):
    def run(x, mean, var, weight):
        mean, var = mean.detach().clone(), var.detach().abs()
        return normalise(x, mean, var, weight, None, training, 0.3), mean, var

    given = [Global(noise(3, seed=seed), grid) for seed, grid in ((1, (2,)), (2, (3,)))]
    assert_same(run, Global(noise(2, 3, 5)), *given, noise(3, seed=3))
    assert_same(run, Global(noise(2, 3, 5)), noise(3, seed=1), given[1], Global(noise(3, seed=3), (2,)))


@pytest.mark.parametrize(("mean", "shape", "seed"), [(1e3, (3, 3, 33, 1), 6), (1e5, (2, 3, 40, 7), 5)])
def test_means_that_are_large_beside_deviations(mean, shape, seed):
    """In float32, what blocks have in common does not round off what tells their moments apart. (Of thirds.)"""

    def work():
        z = F.batch_norm(distdl.distribute_tensor(x, distdl.world().reshape(1, 1, 3, 1)), None, None, training=True)
        exact, alone = (F.batch_norm(one, None, None, training=True) for one in (x.double(), x))
        assert (z.full_tensor() - exact).abs().max() <= 8 * (alone - exact).abs().max()

    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + mean
    distdl.run_workers(work, 3)


def _ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


def _assert_refused(function, x, *rest, **given):
    assert_raises_the_same(lambda x: function(x, *rest, **given), x, text=True)


@pytest.mark.parametrize("n", [1, 3, 8])
@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_wrong_sizes_are_torchs_errors(name, n):
    x, given = noise(2, 4, 3, 6), {name: _ones(n)}
    known = {"running_mean": _ones(4), "running_var": _ones(4), **given}
    for training in (True, False):
        _assert_refused(F.batch_norm, x, **known, training=training)
        _assert_refused(F.instance_norm, x, **known, use_input_stats=training)
    if name not in ("weight", "bias"):
        return
    _assert_refused(F.batch_norm, x, None, None, **given, training=True)
    _assert_refused(F.instance_norm, x, **given)
    _assert_refused(F.group_norm, x, 2, **given)
    for shape in ((n,), (1, 6)):
        _assert_refused(F.layer_norm, x, (6,), **{name: _ones(*shape)})


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_other_dtypes_are_torchs_errors(name):
    x, single = noise(2, 4, 3, 6), torch.ones(4)
    known = {"running_mean": _ones(4), "running_var": _ones(4), name: single}
    for training in (True, False):
        _assert_refused(F.batch_norm, x, **known, training=training)
    if name in ("weight", "bias"):
        _assert_refused(F.batch_norm, x, None, None, **{name: single}, training=True)
        _assert_refused(F.instance_norm, x, **{name: single})
        _assert_refused(F.group_norm, x, 2, **{name: single})
        _assert_refused(F.layer_norm, x, (6,), **{name: torch.ones(6)})


@pytest.mark.filterwarnings("ignore:Mismatch dtype", "ignore:Casting complex")
@pytest.mark.parametrize(("dtype", "own", "shape", "eps"), list(in_pairs(
    (torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128),
    (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.complex128, None),
    ((6,), (3, 6)),
    (None, 1e-6),
)))  # fmt: skip
def test_rms_norm_of_any_dtypes(dtype, own, shape, eps):
    x, grids = noise(5, 3, 6, dtype=torch.complex128) / 4096, [(2, 1, 2), (1, 1, 4), (1, 3, 1)]
    tolerance = {torch.bfloat16: 1e-2, torch.float32: 1e-5, torch.complex64: 1e-5}.get(dtype, 1e-12)
    given, weight = (x if dtype.is_complex else x.real).to(dtype), None if own is None else torch.arange(6).to(own)
    scale = None if weight is None else weight.expand(shape).clone()
    assert_same(
        lambda x: F.rms_norm(x, shape, scale, eps), Global(given), grids=grids,
        tolerance=tolerance, curved=dtype.is_floating_point,
    )  # fmt: skip


def test_rms_norm_that_torch_refuses():
    for x, weight in ((noise(4, 6).long(), None), (noise(4, 6), torch.ones(7)), (noise(4, 6), torch.ones(1, 6))):
        _assert_refused(F.rms_norm, x, (6,), weight)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(1, 6), (2, 3), (6, 1)])
def test_batch_norm_counts_the_elements_of_weights(training, shape):
    def run(x, w, b):
        return F.batch_norm(x, torch.zeros(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype), w, b, training)

    # (torch refuses them in its backward)
    assert_same(run, Global(x4), noise(*shape), noise(*shape, seed=1), curved=False)
    assert_same(run, Global(x4), noise(*shape), Global(noise(*shape, seed=1), (1, 3)), curved=False)


def test_batch_norm_of_single_precision_under_autocast():
    """Products round there; the moments of all workers are merged by products."""

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return F.batch_norm(x, None, None, training=True)

    assert_same(function, Global(noise(6, 4, 5).float()), grids=[(3, 1, 1), (1, 1, 2)], tolerance=1e-5)


def _with_statistics(x, momentum=0.1, requires=(False, False)):
    running = [torch.zeros(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)]
    for one, wanted in zip(running, requires, strict=True):
        one.requires_grad_(wanted)
    return F.batch_norm(x, *running, training=True, momentum=momentum), *running


def test_batch_norm_takes_true_for_a_momentum_of_one():
    assert_same(lambda x: _with_statistics(x, momentum=True), Global(noise(4, 3, 5)), grids=[(3, 1, 1), (1, 1, 2)])


@pytest.mark.parametrize("requires", [(True, False), (False, True)])
def test_running_statistics_have_no_gradient(requires):
    assert_raises_the_same(lambda x: _with_statistics(x, requires=requires)[0], noise(4, 3, 5), text=True)


@pytest.mark.filterwarnings("ignore:.*has no op")
def test_running_statistics_reach_every_worker_from_the_one_that_computes():
    def updated(x, mean, variance):
        mean, variance = mean.detach().clone(), variance.detach() ** 2
        torch.batch_norm_update_stats(x, mean, variance, 0.1)
        return mean, variance

    def normalised(x, mean, variance):
        mean, variance = mean.detach().clone(), variance.detach() ** 2
        return torch._native_batch_norm_legit(x, None, None, mean, variance, True, 0.1, 1e-5)[0], mean, variance

    for function in (updated, normalised):
        assert_same(function, Global(x4), w, b, falls_back=True)
