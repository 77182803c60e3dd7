"""Functions that have no op, and run on one worker: what they return and what they write."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise
from torch import nn
from torch.nn import functional

import distdl

x35 = noise(3, 5)


@torch.library.custom_op("distdl_tests::double", mutates_args={"x"})
def double(x: torch.Tensor) -> None:
    """An operator that writes into its argument and returns nothing."""
    x.mul_(2)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_fallbacks_in_inference_mode():
    """What they return, what they write and return, and what they write and do not return."""
    square, rows = x35 @ x35.t(), torch.tensor([1, 0])
    found = []
    for place in (split, torch.clone):
        before = place(square).requires_grad_()
        with torch.inference_mode():
            x, y, z, w = place(square), place(x35), place(x35), before.detach()
            results = [torch.linalg.matrix_exp(x), torch.linalg.matrix_exp(before)]
            returned = y.index_put_((rows,), y[1:].clone())
            assert returned is y
            double(z)
            double(w)
        found.append([*results, y, z, w, torch.linalg.matrix_exp(x)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)
    assert_close(found[0][3], 2 * x35)
    assert_close(found[0][4], 2 * square)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_a_fallback_writes_a_plain_tensor_on_every_worker():
    """Only one of them has run the function."""
    rows, table = torch.tensor([4, 0, 0, 2]), 3 * noise(5, 3)
    found = []
    for place in (split, torch.clone):
        plain = table.clone()
        view = table.repeat(2, 1)[5:]
        leaf = table.clone().requires_grad_()
        given = place(rows)
        results = [functional.embedding(given, one, max_norm=0.5) for one in (plain, view, leaf)]
        mean, variance = torch.zeros(3), torch.ones(3)  # (whose writes torch does not count)
        weight = place(torch.arange(1.0, 4.0))
        results.append(functional.batch_norm(table.float(), mean, variance, weight, training=True))
        found.append([*results, plain, view, leaf, mean, variance])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_fallbacks_that_return_their_argument():
    """Written or not, and of another size or not."""
    found = []
    for place in (split, torch.clone):
        leaf = place(x35).requires_grad_()
        assert leaf.to_dense() is leaf
        x, y, z = place(x35), place(x35), place(x35)
        assert x.resize_(2, 4) is x
        assert x.shape == (2, 4)
        y.resize_as_(place(noise(5)))
        assert z.apply_(lambda number: 2 * number) is z
        found.append([leaf, 2 * x, x.sum(), y, z])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


WRITTEN_APART = {
    "index_reduce_": lambda x, y: x.index_reduce_(0, torch.tensor([0, 1, 1]), y, "prod"),
    "scatter_add_ of a number": lambda x, y: x[0, 0].clone().scatter_add_(0, torch.tensor(0), y[2, 4]),
    "index_add_ of a number": lambda x, y: x[2, 0].clone().index_add_(0, torch.tensor([0]), y[0, 4].clone()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*has no op", "ignore:index_reduce")
@pytest.mark.parametrize("write", WRITTEN_APART.values(), ids=WRITTEN_APART)
def test_a_fallback_writes_what_has_a_gradient_into_what_has_none(write):
    def outcome(x, y):
        y.requires_grad_()
        written = write(x, y * 1)
        return written, *torch.autograd.grad((written * written).sum(), y)

    def work():
        for grid in ((2, 1), (1, 2)):
            for ours, one in zip(outcome(split(x35, *grid), split(x35 + 1, *grid)), theirs, strict=True):
                assert_close(ours, one)

    theirs = outcome(x35.clone(), x35 + 1)
    distdl.run_workers(work, 3)


x43 = noise(4, 3, 5).float()


GRIDS = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


STEPS, POINTS = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([3, 0, 7], dtype=torch.int32)


ROUNDED = {
    "by a number": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.3, 2, 0, 15),
    "by a tensor": lambda x: torch.fake_quantize_per_tensor_affine(x, STEPS[:1], POINTS[:1], quant_min=0, quant_max=15),
    "by a number of x": lambda x: torch.fake_quantize_per_tensor_affine(
        x, x.detach().abs().amax() / 9, POINTS[0], 0, 15
    ),
    "by channel": lambda x: torch.fake_quantize_per_channel_affine(x, STEPS, POINTS, 1, 0, 15),
    "an empty tensor": lambda x: torch.fake_quantize_per_tensor_affine(x[:0], 0.3, 2, 0, 15),
}


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
@pytest.mark.parametrize("name", ROUNDED)
def test_elements_are_rounded_as_torch_does(name):
    theirs = x43.clone().requires_grad_()
    expected = ROUNDED[name](theirs)
    (expected * expected).sum().backward()
    for grid in GRIDS:
        x = split(x43, *grid).requires_grad_()
        distdl.distribute(nn.Identity(), x.layout.partition)
        y = ROUNDED[name](x)
        (y * y).sum().backward()
        assert torch.equal(y.full_tensor(), expected) and torch.equal(x.grad.full_tensor(), theirs.grad)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_a_point_out_of_range_is_an_error_on_every_worker():
    with pytest.raises(RuntimeError, match=r"zero_point.* must be between"):
        torch.fake_quantize_per_channel_affine(split(x43, 1, 3, 1), STEPS, POINTS, 1, 0, 5)
