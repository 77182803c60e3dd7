"""Functions that run on one worker: their derivatives, and what these raise."""

import gc
import warnings
from collections import Counter

import pytest
import torch
from launched import assert_close, on_workers, split
from same import Global, assert_same, noise
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor

square = noise(4, 4)
pytestmark = pytest.mark.filterwarnings("ignore:.*has no op for global tensors")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.alias_copy(x * w).sin(), lambda x, w: torch.linalg.inv(x @ x.mT + w @ w.mT),
        lambda x, w: torch.linalg.svdvals(x * w), lambda x, w: torch.linalg.eigh(x + x.mT)[0] * w,
        lambda x, w: torch.linalg.qr(x * w), lambda x, w: torch.linalg.solve(x, w), lambda x, w: torch.linalg.svd(x)[1],
        lambda x, w: x.renorm_(2, 0, 1.0) * x,
    ],
)  # fmt: skip
def test_derivatives_of_second_order(function):
    assert_same(function, Global(square), noise(4, 4, seed=3), falls_back=True, twice=True, tolerance=1e-9)


def test_one_warning_for_each_line_that_calls():
    """A line of the user's: code of torch lies between it and what has no op."""

    def work():
        x = distdl.distribute_tensor(square[None], distdl.world().reshape(1, 2, 1))
        for _ in range(3):
            torch.nn.functional.fractional_max_pool2d(x, 2, 2)
        torch.nn.FractionalMaxPool2d(2, 2)(x)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        distdl.run_workers(work, 2)
    first = work.__code__.co_firstlineno
    assert Counter((one.filename, one.lineno - first) for one in told) == {(__file__, 3): 2, (__file__, 4): 2}
    assert all(f"(called at {one.filename}:{one.lineno})" in str(one.message) for one in told)


def differentiated(function, x):
    """What is raised where a function's sum is differentiated."""
    with pytest.raises(RuntimeError) as raised:
        torch.autograd.grad(function(x).sum(), x)
    return str(raised.value)


def derivative_of_segments(x):
    """Of a function that can be differentiated once."""
    y = torch.segment_reduce(x, "max", lengths=torch.tensor([1, 3]))
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.unique(x * 2, dim=0), lambda x: x.unique(dim=0).sum() + x.exp().sum(),
        lambda x: torch.linalg.qr(x[:, :2], mode="r")[1], derivative_of_segments,
    ],
)  # fmt: skip
@on_workers
def test_a_derivative_that_raises_raises_on_every_worker(function):
    theirs = differentiated(function, square.clone().requires_grad_())
    x = split(square.clone()).requires_grad_()
    ours = differentiated(function, x)
    assert theirs in ours and "of a global tensor, on worker 0: " in ours
    assert_close((x * 2).sum(), (square * 2).sum())  # all go on


@on_workers
def test_of_a_result_that_every_worker_has():
    x = split(square.clone()).requires_grad_()
    with pytest.raises(RuntimeError, match=r"derivative of unique.*, on worker 0: .*not implemented"):
        (x.unique(dim=0).full_tensor() * 2).sum().backward()


@on_workers
def test_a_graph_that_is_kept_and_one_that_is_not():
    x = split(square.clone()).requires_grad_()
    y = torch.linalg.inv(x).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=kept)[0].full_tensor() for kept in (True, False))
    assert torch.equal(first, second)
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(y, x)


@on_workers
def test_inside_a_checkpoint():
    plain = square.clone().requires_grad_()
    x = split(square.clone()).requires_grad_()

    def function(x):
        return torch.linalg.inv(x.exp()).sin() * x

    for one in (plain, x):
        checkpoint(function, one, use_reentrant=False).square().sum().backward()
    assert_close(x.grad, plain.grad)


def test_a_checkpoint_keeps_nothing_after_its_derivative():
    """What an operator's own node saves of its result would keep the node, which keeps it."""

    def matrices():
        gc.collect()
        return sum(type(one) is torch.Tensor and one.shape == (23, 23) for one in gc.get_objects())

    def work():
        x = distdl.distribute_tensor(torch.eye(23), distdl.world().reshape(1, 1)).requires_grad_()
        found = []
        for _ in range(4):
            checkpoint(torch.linalg.inv, x, use_reentrant=False).sum().backward()
            found.append(matrices())
        return found

    ((first, *_, last),) = distdl.run_workers(work, 1)
    assert first == last


@on_workers
def test_what_is_written_in_place():
    x = split(square.clone(), 1, 1).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.renorm_(2, 0, 0.1)
    assert_close(x, square)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_second_derivatives_of_what_runs_on_one_worker():
    """All workers go through the same exchanges, also those that do not compute it."""

    def second(x):
        x, w = x.requires_grad_(), torch.ones(4, dtype=x.dtype, requires_grad=True)
        dx, dw = torch.autograd.grad(torch.linalg.pinv(x * w).sum(), [x, w], create_graph=True)
        ((dx * dx).sum() + (dw * dw).sum()).backward()
        return x.grad, w.grad

    for one, alone in zip(second(split(noise(4, 4, 4))), second(noise(4, 4, 4)), strict=True):
        torch.testing.assert_close(one.full_tensor() if isinstance(one, GlobalTensor) else one, alone)
