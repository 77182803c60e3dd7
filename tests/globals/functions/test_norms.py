"""Norms over split dims: derivatives of second order, also where what a worker has of a vector is zero, or nothing."""

from math import inf

import pytest
import torch
from launched import assert_close, on_workers, split
from same import Global, assert_same, noise
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.globals.functions.norms import _BlockNorm, _NormOfNorms

# over 4 workers along dim 0 the last block is empty; along dim 1, whole blocks are zero, and of dim 0, whole columns
x = noise(3, 7)
x[:, 4:] = 0
x[1, :2] = 0
x[0, 2:4] = 0
x[2, 6] = 1.5
GRIDS = [(1, 4), (4, 1), (2, 2)]


@pytest.mark.parametrize("p", [0.5, 1, 1.5, 2, 3, inf, -1])
def test_second_derivatives_beside_zeros(p):
    def function(x):
        return torch.linalg.vector_norm(x, p, 1), x.norm(p), torch.norm(x[:, :4], p, 0, True)

    assert_same(function, Global(x), grids=GRIDS, twice=True, tolerance=1e-10)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (F.normalize(x), F.normalize(x, 3.0, 1), F.cosine_similarity(x, x.cos() * x + 1)),
        lambda x: (F.pairwise_distance(x, x * x, 2.0, 0.0), torch.dist(x, x * x), (x.norm(dim=1) - 1) ** 2),
        lambda x: (torch.linalg.norm(x), torch.linalg.matrix_norm(x), torch.linalg.norm(x, dim=0)),
    ],
)  # fmt: skip
def test_second_derivatives_of_what_is_made_of_norms(function):
    assert_same(function, Global(x), grids=GRIDS[:2], twice=True, tolerance=1e-10)


def test_vectors_that_are_zero_everywhere():
    """torch's own second derivatives are nan there. Those of the other vectors are not."""
    zero = x.index_fill(0, torch.tensor([1]), 0)
    assert_same(lambda x: (x.norm(dim=1), x.norm()), Global(zero), grids=GRIDS, twice=True, tolerance=1e-10)
    assert_same(lambda x: x.norm(3, 1), Global(zero), grids=GRIDS, twice=True, tolerance=1e-10)


def test_gradient_penalty():
    """Of a critic that normalises its features: of one sample, the gradient is zero on a whole worker."""

    def penalty(x, w):
        features = F.normalize(x * w, dim=1)
        slope = torch.autograd.grad((features * features[:, :1] * w).sum(), x, create_graph=True)[0]
        return (slope.norm(dim=1) - 1) ** 2

    assert_same(penalty, Global(x), noise(7), grids=GRIDS[:1], twice=True, tolerance=1e-9)


def test_complex_numbers():
    z = torch.complex(x, x.flip(0) * 2)
    assert_same(lambda z: (z.norm(dim=1), z.norm(3), z.norm(1.5, 1)), Global(z), grids=GRIDS[2:], twice=True)


def test_few_digits():
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 1.6e-2)):
        few = (noise(4, 40) * 3).to(dtype)
        assert_same(lambda x: (x.norm(dim=1), x.norm(3, 1)), Global(few), grids=[(1, 4), (2, 2)], tolerance=tolerance)


@on_workers
def test_inside_a_checkpoint():
    def function(x):
        return x.norm(dim=1) + x.norm(3.0) + F.normalize(x, dim=0).norm(0.5)

    plain, blocks = x.clone().requires_grad_(), split(x.clone(), 1, 2).requires_grad_()
    for one in (plain, blocks):
        checkpoint(function, one, use_reentrant=False).square().sum().backward()
    assert_close(blocks.grad, plain.grad)


@pytest.mark.parametrize("p", [0.5, 2.0, 3.0])
def test_both_ways_to_differentiate_agree(p):
    def whole(first, second):
        parts = [_BlockNorm.apply(one, p, (1,), None) for one in (first, second)]
        return _NormOfNorms.apply(torch.cat(parts, 1), p, (1,), None)

    blocks = [noise(3, 2).requires_grad_(), noise(3, 4).requires_grad_()]
    assert gradcheck(whole, blocks, check_forward_ad=True)
    assert gradgradcheck(whole, blocks)
    assert gradcheck(whole, [one.to(torch.complex128) * (1 + 2j) for one in blocks], check_forward_ad=True)


def test_cosine_similarity_of_two_dtypes():
    numbers = torch.arange(12).reshape(3, 4)
    assert_same(lambda x: F.cosine_similarity(x, numbers), Global(noise(3, 4)))
    assert_same(lambda x: F.cosine_similarity(numbers.float(), x), Global(noise(3, 4)))
    # (each is divided by its norm in its own dtype, also where it is repeated)
    single = noise(3, 4).float()
    assert_same(lambda x: F.cosine_similarity(single, x), Global(noise(1, 4)))
    assert_same(lambda x: F.cosine_similarity(single, x.sum()), Global(noise(3, 4)))

    def work():
        for refused in (numbers, numbers.to(torch.complex128)):
            x = distdl.distribute_tensor(refused, distdl.world().reshape(2, 1))
            with pytest.raises(RuntimeError, match="expected common dtype to be floating point"):
                F.cosine_similarity(x, x)

    distdl.run_workers(work, 2)


FIRST_IN_INFERENCE = {
    "std": lambda y: y.std(), "var_mean": lambda y: torch.var_mean(y, (0, 2))[0],
    "heads": lambda y: F.scaled_dot_product_attention(y.repeat(1, 2, 1, 1), y, y, enable_gqa=True),
}  # fmt: skip


@pytest.mark.parametrize("function", FIRST_IN_INFERENCE.values(), ids=FIRST_IN_INFERENCE)
@on_workers
def test_what_an_evaluation_in_inference_mode_has_set_up_serves_training(function):
    whole = noise(4, 3, 5, 6).requires_grad_()
    with torch.inference_mode():
        function(split(whole))
    ours = split(whole.detach()).requires_grad_()
    for one in (ours, whole):
        function(one).square().sum().backward()
    assert_close(ours.grad, whole.grad)


@pytest.mark.parametrize("dim", [0, -1])
def test_slices_are_shortened_on_one_worker(dim):
    assert_same(lambda x: torch.renorm(x, 2, dim, 1.5), Global(noise(5, 6)), twice=True, falls_back=True)
    assert_same(lambda x: (x * 1).renorm_(2, dim, 1.5), Global(noise(5, 6)), falls_back=True)
