"""Reductions over dims that may be split."""

import pytest
import torch
from launched import on_workers
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F

import distdl

x3 = noise(3, 5, 7)
ties = noise(3, 5, 7).round()
holes = noise(3, 5, 7).masked_fill(noise(3, 5, 7, seed=4) > 0.5, torch.nan)
DIMS = [0, -1, (0, 2), (0, 1, 2), None]
GRIDS = [(2, 1, 2), (1, 4, 1), (3, 1, 1)]


@pytest.mark.parametrize("dim", DIMS)
def test_sums_and_moments(dim):
    def function(x):
        return (
            torch.sum(x, dim), torch.mean(x, dim, keepdim=True), torch.var(x, dim), torch.std(x, dim, correction=0),
            *torch.var_mean(x, dim, keepdim=True), torch.count_nonzero(x.round(), dim),
            torch.nansum(x, dim), torch.nanmean(x, dim),
        )  # fmt: skip

    assert_same(function, Global(x3), grids=GRIDS, tolerance=1e-11)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_added_up_in_float32(dtype):
    """Sums of float16 overflow long before the mean does, and sums of blocks before the sum of all."""
    x = torch.cat([torch.full((2, 90), 999.0), torch.full((2, 90), -998.0)]).to(dtype)

    def function(x):
        sums = x.sum(), x.abs().mean(), x.mean(1), x[:2].abs().mean(0)
        with torch.autocast("cpu", dtype):
            return *sums, F.mse_loss(x, -x), F.l1_loss(x, x * 0)

    def losses(x):
        return F.mse_loss(x / 99, -x / 99), F.l1_loss(x, x * 0), F.huber_loss(x, x * 0), F.smooth_l1_loss(x, x * 0)

    def deviations(x):  # (of which the variance is beyond what float16 holds)
        return x.std(0), *torch.std_mean(x, correction=0), (x.T / 9).std(0), *torch.var_mean(x / 9, 0)

    for one in (function, losses, deviations):
        assert_same(one, Global(x), grids=[(2, 1), (1, 2), (4, 1)], tolerance=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_autocast_computes_in_float32(dtype):
    def function(x):
        with torch.autocast("cpu", dtype):
            return x.trace(), x.quantile(0.3), x.nanquantile(0.9), x.quantile(0.3, dim=0)

    assert_same(function, Global(noise(6, 5).to(dtype)), tolerance=2e-7)  # (torch 2.14 rounds places otherwise)


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("p", [2, 3.5, float("inf"), 0])
def test_norms(dim, p):
    assert_same(lambda x: torch.linalg.vector_norm(x, p, dim), Global(ties), grids=GRIDS[:1])


def test_other_norms():
    def function(x):
        return (
            x.norm(), x.norm(2, 1), torch.norm(x, 1, (0, 2), True), torch.linalg.norm(x), torch.linalg.matrix_norm(x),
            F.normalize(x, dim=1), F.normalize(x, 1, -1), torch.dist(x, x * 2), torch.linalg.norm(x, dim=(0, 1)),
            F.pairwise_distance(x, x * 2), F.cosine_similarity(x, x + 1, -1),
        )  # fmt: skip

    assert_same(function, Global(x3), grids=GRIDS)
    assert_same(lambda x, y: F.cosine_similarity(x, y, 1), Global(x3), noise(5, 7), grids=GRIDS)
    assert_same(lambda x: (x - x).norm(dim=1), Global(x3), grids=GRIDS)


@pytest.mark.parametrize("x", [x3, ties, -ties.abs()])
def test_extremes(x):
    def function(x):
        return (
            x.amax(), x.amax(1), x.amin((0, 2), keepdim=True), x.max(), x.min(), *x.max(1), *x.min(-1, keepdim=True),
            *torch.max(x, 0), torch.max(x, -x), x.argmax(), x.argmin(1), x.argmax(-1, keepdim=True),
            x.argmax(keepdim=True), *torch.aminmax(x), *torch.aminmax(x, dim=2),
        )  # fmt: skip

    assert_same(function, Global(x), grids=[*GRIDS, (1, 1, 4)])


def test_one_dim():
    def function(x):
        return x.amax(), *x.max(0), x.argmax(), x.var(), x.norm(), x.cumsum(0), x.softmax(0), x.logsumexp(0), x.prod()

    assert_same(function, Global(noise(7)))
    assert_same(function, Global(noise(2)))


def test_names_of_numpys():
    def function(x):
        y = (x.std(axis=1, keepdims=True), x.softmax(axis=-1), x.unsqueeze(axis=0), torch.stack([x, x], axis=1))
        return (*y, *x.max(axis=2), x.argmax(axis=0), (x > 0).any(axis=-1), torch.all(x > -1, axis=0, keepdims=True))

    assert_same(function, Global(x3))


def test_truth_and_products():
    def function(x):
        y = x.round()
        truths = (
            (y > 0).any(),
            (y > 0).all(1),
            (y > -9).all(),
            (y > -9)._is_all_true(),
            torch._is_any_true(y > 9),
            torch.any(y, -1, keepdim=True),
            torch.any(y > 0, (0, 1)),
        )
        return (*truths, x.prod(), x.prod(1), y.prod(2, keepdim=True))

    assert_same(function, Global(x3), grids=GRIDS)
    assert_same(lambda x: (x.prod(), x.prod(0), x.amax(1), x.sum(0)), Global(torch.arange(1, 7).reshape(2, 3)))


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax(dim):
    masked = x3.masked_fill(noise(3, 5, 7, seed=2) > 0, -torch.inf)
    masked[0, :, 0], masked[:, 0, 0] = 1.0, 2.0
    masked[..., 0] = 0.5  # (no line is masked all along)
    masked[0] = 1.0
    masked[:, 0] = 0.0

    def function(x):
        return (
            x.softmax(dim), F.softmax(x, dim), F.log_softmax(x, dim=dim), F.softmin(x, dim),
            torch.logsumexp(x, dim), x.logsumexp((0, 2), keepdim=True), F.softmax(x, dim, dtype=torch.float64),
        )  # fmt: skip

    assert_same(function, Global(x3 * 30), grids=[*GRIDS, (1, 1, 4)])
    assert_same(lambda x: (x.softmax(dim), x.logsumexp(dim)), Global(masked), grids=[(1, 1, 4), (1, 4, 1), (3, 1, 1)])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_scans(dim):
    def function(x):
        return (
            x.cumsum(dim), x.cumprod(dim), x.round().cumprod(dim), *x.cummax(dim), x.logcumsumexp(dim), *x.median(dim),
            x.quantile(0.3, dim, True), x.quantile(0.5, dim=dim), *x.kthvalue(2, dim),
        )  # fmt: skip

    assert_same(function, Global(x3), grids=[*GRIDS, (1, 1, 4)])
    assert_same(lambda x: x.cumsum(dim), Global((x3 * 5).long()), grids=GRIDS)


def test_numbers_that_are_none():
    assert_same(lambda x: (x.nansum(1), x.nanmean((0, 2)), *x.nanmedian(1)), Global(holes), grids=GRIDS)


def test_numbers_without_dims():
    assert_same(
        lambda x: (x.sum(), x.mean(), x.amax(), x.prod(), x.norm(), x.softmax(0), x.cumsum(0), x.any(), x.argmax()),
        Global(torch.tensor(2.5, dtype=torch.float64)),
    )
    assert_same(lambda x: x.flip(0), Global(torch.tensor(2.5, dtype=torch.float64)))


def test_complex_numbers():
    z = torch.complex(noise(4, 5), noise(4, 5, seed=1))
    assert_same(lambda x: (x.norm(), x.norm(dim=1), x.var(0), x.sum(1), x.prod(), x.cumsum(1)), Global(z))
    assert_same(lambda x: (x.logsumexp(0), x.logsumexp(1, True), x.logsumexp((0, 1))), Global(z))


@pytest.mark.parametrize(
    "function",
    [lambda x: x.softmax(1), lambda x: x.log_softmax(1), lambda x: x.var((0, 2)), lambda x: x.std(1),
     lambda x: x.norm(dim=1), lambda x: x.norm(3, dim=1), lambda x: x.logsumexp(2), lambda x: x.amax(1) ** 2,
     lambda x: x.prod(1), lambda x: x.cumsum(1) ** 2, lambda x: x.cumprod(1), lambda x: x.logcumsumexp(1),
     lambda x: F.cosine_similarity(x, x.roll(1, 0)), lambda x: F.normalize(x, dim=1),
     lambda x: F.layer_norm(x.cummax(0)[0], (5, 7)), lambda x: x.cummin(1)[0].softmax(1)],
)  # fmt: skip
def test_second_derivatives(function):
    assert_same(function, Global(x3), grids=[(2, 1, 2), (1, 3, 1)], twice=True, tolerance=1e-10)


def test_dims_are_named_once_and_none_of_them_is_none_for_any_and_all():
    for name in ("sum", "mean", "amax", "var", "logsumexp", "norm", "all", "count_nonzero", "nansum"):
        assert_raises_the_same(lambda x, name=name: getattr(torch, name)(x, dim=(1, -2)), x3, text=True)
    assert_same(lambda x: (torch.all(x > 0, ()), torch.any(x > 0, [])), Global(x3), grids=[(1, 2, 2)])


def test_a_loss_over_classes_that_are_split():
    def dice(x, y):
        p = x.softmax(1)
        overlap = (p * y).sum((0, 2))
        return 1 - (2 * overlap / (p.sum((0, 2)) + y.sum((0, 2)))).mean()

    assert_same(dice, Global(x3), Global(noise(3, 5, 7, seed=3).abs()), grids=[(1, 2, 2), (2, 2, 1)], twice=True)


def test_few_digits():
    def function(x):
        y = x.half()
        return y.softmax(1), y.log_softmax(0), y.var(1), F.softmin(y, 2)

    assert_same(function, Global(x3), grids=GRIDS, tolerance=2e-3)


def test_nothing_to_reduce():
    def function(x):
        return x.softmax(0), x.softmax(1), x.logsumexp(1), x.sum(0), x.mean(), x.cumsum(0), x.norm(dim=1)

    assert_same(function, Global(noise(0, 6)), grids=[(2, 2), (1, 4)])

    def work():
        x = distdl.distribute_tensor(noise(0, 6), distdl.world().create_cartesian_topology_partition((2, 2)))
        for reduce in (torch.max, torch.amax, torch.argmax, lambda x: x.max(0), lambda x: x.amin(0)):
            with pytest.raises(
                RuntimeError if reduce in (torch.max, torch.amax) else IndexError, match="reduction dim"
            ):
                reduce(x)

    distdl.run_workers(work, 4)


def test_a_constant_has_a_standard_deviation_with_a_derivative_of_zero():
    constant = noise(5, 7)
    constant[2] = 1.5
    constant[:, 3] = 0.25
    for dim in (0, 1):
        assert_same(lambda x, dim=dim: x.std(dim), Global(constant))


def test_the_larger_of_two_by_name():
    assert_same(lambda x: torch.max(input=x, other=x * 2), Global(noise(5, 7)))


def test_arguments_by_their_names():
    x = noise(3, 5)
    assert_same(lambda x: torch.sum(input=x, dim=0), Global(x))
    assert_same(lambda x: torch.mean(input=x, dim=(0, 1), keepdim=True), Global(x))


@on_workers
def test_the_sum_of_a_number_is_another_tensor():
    x = distdl.distribute_tensor(torch.tensor(2.0), distdl.world()[1:2], axes=()).requires_grad_()
    for y in (x.sum(), x.sum(0), torch.sum(x, dim=0, keepdim=True)):
        assert not y.is_leaf and y.dtype is x.dtype
        y.mul_(3)
        (dx,) = torch.autograd.grad(y, x)
        assert dx.item() == 3 and x.item() == 2
    assert (x > 1).sum().dtype is torch.int64 and x.sum(dtype=torch.float64).dtype is torch.float64
