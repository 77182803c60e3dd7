import numpy as np
import pytest
import torch
from helpers_layers import noise
from torch.nn import functional

from distdl.nn import Interpolate


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "linear", "bicubic"])
def test_it_computes_any_block_from_the_window_it_reads(mode):
    x = noise(2, 3, 9, 8)
    for corners in (False,) if "nearest" in mode else (False, True):
        options = ((1.5, 2.3), mode, corners)
        by_torch = {"linear": "bilinear"}.get(mode, mode), (corners if mode in ("linear", "bicubic") else None)
        expected = functional.interpolate(x, None, (1.5, 2.3), *by_torch)
        n, m = x.shape, expected.shape
        whole = Interpolate((0,) * 4, n, n, (0,) * 4, m, m, *options)
        assert torch.allclose(whole(x), expected, rtol=1e-12, atol=1e-14)
        block = Interpolate([0, 1, 3, 0], [2, 3, 9, 8], n, np.array([1, 1, 8, 2]), [2, 2, 11, 18], m, *options)
        assert torch.allclose(block(x[:, 1:, 3:]), expected[1:2, 1:2, 8:11, 2:18], rtol=1e-12, atol=1e-14)


def test_it_clamps_to_the_block_that_it_is_given():
    x = torch.arange(8.0).reshape(1, 1, 8)
    block = Interpolate((0, 0, 2), (1, 1, 5), (1, 1, 8), (0, 0, 0), (1, 1, 16), (1, 1, 16))
    assert block(x[..., 2:5])[0, 0].tolist() == [2] * 6 + [3, 3] + [4] * 8
    block = Interpolate((0, 0, 2), (1, 1, 5), (1, 1, 8), (0, 0, 8), (1, 1, 12), (1, 1, 16), None, "linear")
    assert block(x[..., 2:5])[0, 0].tolist() == [3.75, 4, 4, 4]


def test_it_is_linear_and_adjoint_and_takes_a_gradient_of_another_dtype():
    for mode in ("nearest", "nearest-exact", "linear", "bicubic"):
        block = Interpolate(
            (0, 0, 1, 0), (2, 3, 6, 4), (2, 3, 9, 8), (0, 0, 0, 3), (2, 3, 9, 9), (2, 3, 15, 9), (1.7, 1.2), mode
        )
        x = noise(2, 3, 5, 4).requires_grad_()
        y = block(x)
        dy = noise(*y.shape, seed=1).float()
        y.backward(dy)
        assert y.dtype == x.grad.dtype == torch.float64
        forward, adjoint = (y * dy.double()).sum().item(), (x * x.grad).sum().item()
        assert abs(forward - adjoint) < 1e-12 * y.norm().item() * dy.norm().item()
        assert torch.allclose(block(3 * x + 1), 3 * y + 1, rtol=1e-12)  # (weights add up to 1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_it_trains_after_a_first_call_in_inference_mode(device):
    """What it has set up then serves calls that record gradients, too; also what it keeps for another device."""
    layer = Interpolate([0, 0, 0], [1, 1, 4], [1, 1, 4], [0, 0, 0], [1, 1, 8], [1, 1, 8], mode="linear")
    with torch.inference_mode():
        layer(torch.ones(1, 1, 4, device=device))
    x = torch.ones(1, 1, 4, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape and x.grad.device == x.device
    if device == "cpu":
        assert torch.allclose(x.grad, torch.full((1, 1, 4), 2.0))


def test_a_result_without_cells_stays_connected():
    x = torch.ones(1, 1, 3, requires_grad=True)
    y = Interpolate((0, 0, 0), (1, 1, 3), (1, 1, 3), (0, 0, 2), (1, 1, 2), (1, 1, 6))(x)
    y.sum().backward()
    assert y.shape == (1, 1, 0) and x.grad.tolist() == [[[0, 0, 0]]]
    empty = Interpolate((0, 0, 0), (0, 1, 3), (2, 1, 3), (0, 0, 1), (0, 1, 5), (2, 1, 6), None, "linear")
    assert empty(torch.ones(0, 1, 3)).shape == (0, 1, 4)


@pytest.mark.parametrize(("arguments", "words"), [
    (((0, 0, 0), (1, 1, 9), (1, 1, 8), (0, 0, 0), (1, 1, 4), (1, 1, 4)), "x_start <= x_stop <= x_global_shape"),
    (((0, 0, 0), (1, 1, 8), (1, 1, 8), (0, 0, 0), (1, 4), (1, 1, 4)), "y_start <= y_stop <= y_global_shape"),
    (((0, 0, 0), (1, 1, 8), (1, 1, 8), (0, 0, 0), (2, 1, 4), (2, 1, 4)), "one rank, batch and number of channels"),
    (((0, 0, 2), (1, 1, 2), (1, 1, 8), (0, 0, 0), (1, 1, 4), (1, 1, 4)), "a cell of x for its y"),
    (((0, 0), (1, 1), (1, 1), (0, 0), (1, 1), (1, 1)), "1 to 3 dims of space"),
])  # fmt: skip
def test_blocks_that_do_not_fit_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Interpolate(*arguments)


def test_it_refuses_another_input():
    block = Interpolate((0, 0, 0), (1, 1, 4), (1, 1, 4), (0, 0, 0), (1, 1, 8), (1, 1, 8), mode="linear")
    with pytest.raises(ValueError, match=r"a block of shape \[1, 1, 4\]; got \[1, 1, 5\]"):
        block(torch.ones(1, 1, 5))
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        block(torch.ones(1, 1, 4, dtype=torch.int64))
