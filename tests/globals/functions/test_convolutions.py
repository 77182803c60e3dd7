"""Convolutions of global tensors, with plain weights."""

import pytest
import torch
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F

import distdl

x3, x4, x5 = noise(2, 4, 11), noise(2, 4, 9, 7), noise(2, 4, 6, 5, 7)


@pytest.mark.parametrize(
    "options",
    [{}, {"padding": 1}, {"stride": 2, "padding": 1}, {"padding": "same"}, {"dilation": 2, "padding": (2, 1)},
     {"groups": 2}, {"stride": (3, 2), "padding": 1, "groups": 4}],
)  # fmt: skip
def test_convolution(options):
    w, b = noise(8, 4 // options.get("groups", 1), 3, 3, seed=1), noise(8, seed=2)
    assert_same(lambda x, w, b: F.conv2d(x, w, b, **options), Global(x4), w, b)


def test_other_kernels_and_dims():
    assert_same(lambda x, w: F.conv1d(x, w, padding=2), Global(x3), noise(3, 4, 5, seed=1))
    assert_same(lambda x, w, b: F.conv3d(x, w, b, padding=1), Global(x5), noise(3, 4, 3, 3, 3, seed=1), noise(3))
    assert_same(lambda x, w, b: F.conv2d(x, w, b), Global(x4), noise(5, 4, 1, 1), noise(5))
    assert_same(lambda x, w: F.conv2d(x, w, stride=4), Global(x4), noise(5, 4, 4, 4))
    assert_same(lambda x, w: F.conv2d(x, w, padding=3), Global(x4), noise(5, 4, 7, 7), twice=True)


def test_empty_blocks():
    assert_same(
        lambda x, w: F.conv2d(x, w, padding=1), Global(noise(1, 2, 3, 3)), noise(3, 2, 3, 3), grids=[(1, 1, 4, 1)]
    )
    assert_same(
        lambda x, w: F.conv2d(x, w, padding=1), Global(noise(1, 2, 3, 3)), noise(3, 2, 3, 3), grids=[(4, 1, 1, 1)]
    )


def test_a_kernel_that_is_global():
    assert_same(lambda x, w: F.conv2d(x, w, padding=1), Global(x4), Global(noise(6, 4, 3, 3), (2, 1, 1, 1)))


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"stride": 2, "padding": 1, "output_padding": 1}, {"groups": 2}, {"dilation": 2, "padding": 1}],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_transposed_convolution(options, dtype):
    w, b = noise(4, 6 // options.get("groups", 1), 3, 3, seed=1, dtype=dtype), noise(6, seed=2, dtype=dtype)
    x = noise(*x4.shape, dtype=dtype)
    assert_same(lambda x, w, b: F.conv_transpose2d(x, w, b, **options), Global(x), w, b)


def test_transposed_convolution_in_other_dims():
    assert_same(lambda x, w: F.conv_transpose1d(x, w, stride=2), Global(x3), noise(4, 3, 4))
    assert_same(lambda x, w: F.conv_transpose3d(x, w, stride=2), Global(x5), noise(4, 3, 2, 2, 2))


def test_bad_shapes_are_torchs_errors():
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 4 channels"):
        assert_same(lambda x, w: F.conv2d(torch.zeros_like(x), w), Global(x4), noise(5, 3, 3, 3))


def test_large_blocks_twice():
    """Their gradients are made in the memory of the windows', and a graph that is kept can be walked again."""

    def twice(x, w):
        y = F.conv2d(F.relu(F.conv2d(x, w, padding=1)), w, padding=2, dilation=2)
        first = torch.autograd.grad(y.square().sum(), [x, w], retain_graph=True)
        second = torch.autograd.grad(y.square().sum(), [x, w], retain_graph=True)
        assert all(bool((one == other).all()) for one, other in zip(first, second, strict=True))
        return y

    assert_same(
        twice, Global(noise(1, 8, 48, 47)), noise(8, 8, 3, 3), grids=[(1, 1, 2, 2), (1, 1, 3, 1)], twice=True,
        tolerance=1e-11,
    )  # fmt: skip


def test_second_derivatives_of_outputs_that_no_cell_reaches():
    """The operator cannot add a bias there: so it is added later, also by the workers that compute nothing."""
    x, w, b, weights = noise(1, 1, 4, 5, 2), noise(1, 1, 4, 3, 1), noise(1), noise(1, 1, 12, 14, 2)

    def twice(*given):
        given = [one.clone().requires_grad_() for one in given]
        y = F.conv_transpose3d(*given, stride=2, padding=1, output_padding=1, dilation=(2, 3, 2))
        first = torch.autograd.grad((y * weights).sum(), given, create_graph=True)
        return torch.autograd.grad(sum((one * 2).square().sum() for one in first), given[:2])

    expected = twice(x, w, b)

    def work():
        for grid in ((3, 1, 1, 1, 1), (1, 1, 2, 1, 1)):
            P = distdl.world()[: 3 if grid[0] == 3 else 2].reshape(grid)
            dx, dw = twice(distdl.distribute_tensor(x, P), w, b)
            assert torch.allclose(dx.full_tensor(), expected[0]) and torch.allclose(dw, expected[1])

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("shape", [(1,), (5,), (7,), (6, 1), ()])
def test_wrong_sizes_of_a_bias_are_torchs_errors(shape):
    bias = torch.ones(shape, dtype=torch.float64)
    for x, space in ((x3, 1), (x4, 2), (x5, 3)):
        convolve, spread = getattr(F, f"conv{space}d"), getattr(F, f"conv_transpose{space}d")
        point = [1] * space
        for groups in (1, 2):
            w, v = noise(6, 4 // groups, *point), noise(4, 6 // groups, *point)
            assert_raises_the_same(lambda x, f=convolve, w=w, n=groups: f(x, w, bias, groups=n), x, text=True)
            assert_raises_the_same(lambda x, f=spread, v=v, n=groups: f(x, v, bias, groups=n), x, text=True)


@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(("stride", "kernel"), [(2, 2), (2, 3), (3, 2)])
def test_third_derivatives_of_a_transposed_convolution(stride, kernel, padding):
    """Of which torch has none with output padding, which blocks have where the whole has not."""

    def slopes(x, w, b):
        y = F.conv_transpose2d(x, w, b, stride, padding).tanh()
        for _ in range(2):
            found = torch.autograd.grad(y.square().sum(), (x, w, b), create_graph=True)
            y = torch.cat([one.reshape(-1).tanh() for one in found[1:]]).sum() + found[0].tanh().sum()
        return y

    weights = noise(2, 2, kernel, kernel) / 4, noise(2)
    assert_same(slopes, Global(noise(1, 2, 5, 3)), *weights, grids=[(1, 1, 2, 1), (1, 1, 3, 1), (1, 1, 2, 2)])
