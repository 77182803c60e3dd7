"""The functions of normalisations: their values, and their derivatives in both modes, once and twice."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from distdl.ops.affine import affine, less

ROWS = [((1, 3, 1), (1, 3, 1)), ((2, 1, 1), (1, 1, 4)), ((2, 3, 4), (2, 3, 1)), ((1, 1, 1), None)]


def noise(*shape):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("scale", "shift"), ROWS)
@pytest.mark.parametrize("wanted", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)])
def test_affine_and_its_derivatives(scale, shift, wanted):
    given = [noise(2, 3, 4), noise(*scale)] + ([] if shift is None else [noise(*shift)])
    expected = given[0] * given[1] + (given[2] if shift else 0)
    assert torch.allclose(affine(*given), expected, atol=1e-15, rtol=0)
    given = [one.requires_grad_(bool(flag)) for one, flag in zip(given, wanted, strict=False)]
    if any(one.requires_grad for one in given):
        assert gradcheck(affine, given, check_forward_ad=True)
        assert gradgradcheck(affine, given, check_fwd_over_rev=True)


def test_a_result_of_another_shape_is_no_view():
    given = [noise(2, 3, 4).requires_grad_(), noise(1, 3, 1), noise(2, 1, 1)]
    y = affine(*given, (2, 12))
    assert not y._is_view() and torch.equal(y, affine(*given).detach().reshape(2, 12))
    assert gradcheck(lambda *given: affine(*given, (2, 12)), given, check_forward_ad=True)
    assert gradgradcheck(lambda *given: affine(*given, (2, 12)), given, check_fwd_over_rev=True)


def test_less_and_its_derivatives():
    x, constant = noise(2, 3, 4), noise(1, 3, 1)
    assert torch.equal(less(x, constant), x - constant)
    assert gradcheck(lambda x: less(x, constant), x.requires_grad_(), check_forward_ad=True)
    assert gradgradcheck(lambda x: less(x, constant) ** 3, x, check_fwd_over_rev=True)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "expanded"])
def test_neither_input_nor_gradient_is_written_and_the_format_stays(layout):
    x = noise(2, 3, 4, 5)
    if layout == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    if layout == "expanded":
        x = x[:1].expand(2, 3, 4, 5)
    dy, scale, shift = noise(1, 1, 1, 1).expand(2, 3, 4, 5), noise(1, 3, 1, 1), noise(1, 3, 1, 1)
    before = [one.clone() for one in (x, dy, scale, shift)]
    y = affine(x.requires_grad_(), scale, shift)
    assert y.is_contiguous(memory_format=torch.channels_last) == (layout == "channels_last")
    less(y, scale).backward(dy)
    assert all(torch.equal(one, other) for one, other in zip((x, dy, scale, shift), before, strict=True))
    assert torch.allclose(x.grad, dy * scale, atol=1e-15, rtol=0)
