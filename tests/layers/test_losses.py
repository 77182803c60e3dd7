import itertools

import pytest
import torch
from helpers_layers import every_worker_raises, noise, on_workers
from torch.nn import functional

from distdl.boxes import runs, slices
from distdl.layout import Layout
from distdl.nn import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedCrossEntropyLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedPoissonNLLLoss,
)
from distdl.utilities.torch import zero_volume_tensor

LOSSES = {
    DistributedL1Loss: (functional.l1_loss, None),
    DistributedMSELoss: (functional.mse_loss, None),
    DistributedPoissonNLLLoss: (functional.poisson_nll_loss, None),
    DistributedBCELoss: (functional.binary_cross_entropy, torch.sigmoid),
    DistributedBCEWithLogitsLoss: (functional.binary_cross_entropy_with_logits, None),
    DistributedKLDivLoss: (functional.kl_div, lambda x: functional.log_softmax(x, 1)),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")  # torch's, of its own kl_div
@pytest.mark.parametrize("kind", LOSSES)
def test_value_and_gradient_match_sequential(kind):
    """Over uneven and empty blocks, with a worker outside; scaled, so that the incoming gradient is not 1."""
    sequential, prepare = LOSSES[kind]

    def main(P):
        P_x = P.create_partition_inclusive([4, 1, 3, 0, 2, 5]).reshape(2, 3)
        owned = Layout.of(P_x, [runs([1, 3]), runs([2, 0, 5])])
        whole, target = noise(4, 7), torch.sigmoid(noise(4, 7, seed=1))
        whole = (prepare(whole) if prepare else whole).requires_grad_()
        for reduction in kind._valid_reductions:
            whole.grad = None
            expected = sequential(whole, target, reduction=reduction)
            (3 * expected).sum().backward()
            inside = P.rank in P_x
            x = owned.block(whole.detach()).clone() if inside else zero_volume_tensor(dtype=torch.float64)
            t = owned.block(target) if inside else zero_volume_tensor(dtype=torch.float64)
            x.requires_grad_()
            loss = kind(P_x, reduction)(x, t)
            (3 * loss).sum().backward()
            if reduction == "none":
                assert not inside or torch.allclose(loss, expected[slices(owned[P.rank])], rtol=1e-12)
            else:
                value = expected.item() if P.rank == 4 else 0.0
                assert loss.shape == () and abs(loss.item() - value) <= 1e-12 * abs(value)
            assert x.grad.shape == x.shape
            assert not inside or torch.allclose(x.grad, whole.grad[slices(owned[P.rank])], rtol=1e-12)

    on_workers(7, main)


def test_a_loss_object_is_used_with_and_without_gradients():
    def main(P):
        criterion = DistributedMSELoss(P.reshape(1, 2))
        for requires_grad in (False, True, False):
            x = torch.full((1, 2), 2.0, requires_grad=requires_grad)
            loss = criterion(x, torch.ones(1, 2))
            loss.backward()
            assert loss.item() == (1.0 if P.rank == 0 else 0.0)
            assert (x.grad is not None) == requires_grad
        with torch.no_grad():
            assert not criterion(x, torch.ones(1, 2)).requires_grad

    on_workers(2, main)


CASES = list(
    itertools.product(("none", "mean", "sum"), (None, "weight"), (0.0, 0.3), ("classes", "ignored", "probabilities"))
)


@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 2, 1), (1, 3, 2), (3, 1, 2), (2, 1, 2)])
def test_cross_entropy_matches_sequential(grid):
    batch, classes, space = grid
    workers = batch * classes * space

    def main(P):
        P_x = P[1:].reshape(*grid)
        owned = Layout.of(
            P_x, [runs([5] + [1] * (batch - 1)), runs([4] + [1] * (classes - 1)), runs([1] * (space - 1) + [3])]
        )
        b, c, s = owned.extents
        whole = noise(b, c, s)
        labels = torch.randint(0, c, (b, s), generator=torch.Generator().manual_seed(1))
        for reduction, weight, smoothing, kind in CASES:
            weight = torch.rand(c, generator=torch.Generator().manual_seed(2)).double() if weight else None
            target = labels.clone()
            if kind == "ignored":
                target[:2] = -100
            if kind == "probabilities":
                target = torch.softmax(noise(b, c, s, seed=3), 1)
            reference = whole.clone().requires_grad_()
            expected = functional.cross_entropy(
                reference, target, weight, reduction=reduction, label_smoothing=smoothing
            )
            (2 * expected).sum().backward()
            inside = P.rank in P_x
            x = owned.block(whole).clone() if inside else zero_volume_tensor(2, dtype=torch.float64)
            x.requires_grad_()
            holds = inside and P_x.index[1] == 0
            at = slices(owned[P.rank]) if inside else None
            t = (target[at[0], :, at[2]] if kind == "probabilities" else target[at[0], at[2]]) if holds else None
            loss = DistributedCrossEntropyLoss(P_x, weight, reduction=reduction, label_smoothing=smoothing)(x, t)
            (2 * loss).sum().backward()
            if reduction == "none":
                assert not holds or torch.allclose(loss, expected[at[0], at[2]], rtol=1e-12)
            else:
                value = expected.item() if P.rank == 1 else 0.0
                assert loss.shape == () and abs(loss.item() - value) <= 1e-12 * abs(value), (
                    reduction,
                    weight,
                    smoothing,
                    kind,
                )
            assert x.grad.shape == x.shape
            assert not inside or torch.allclose(x.grad, reference.grad[at], rtol=1e-10, atol=1e-14)

    on_workers(workers + 1, main)


def test_cross_entropy_twice_differentiated():
    def main(P):
        whole = noise(4, 6).requires_grad_()
        target = torch.tensor([0, 5, 3, 3])
        (dx,) = torch.autograd.grad(functional.cross_entropy(whole, target), whole, create_graph=True)
        (dx**2).sum().backward()
        columns = slice(*runs([2, 4])[P.rank])
        x = whole.detach()[:, columns].clone().requires_grad_()
        loss = DistributedCrossEntropyLoss(P.reshape(1, 2))(x, target)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        (dx**2).sum().backward()
        assert torch.allclose(x.grad, whole.grad[:, columns], rtol=1e-10)

    on_workers(2, main)


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedMSELoss(P, reduction="max"), "the reductions none, mean, sum; got 'max'"),
    (lambda P: DistributedMSELoss(P, reduction="batchmean"), "got 'batchmean'"),
    (lambda P: DistributedMSELoss(P)(torch.ones(2), torch.ones(2 + P.rank)), "on worker 1 they have [2] and [3]"),
    (lambda P: DistributedCrossEntropyLoss(P), "P_x: batch x classes x space"),
    (lambda P: DistributedCrossEntropyLoss(P.reshape(1, 2), reduction="batchmean"), "got 'batchmean'"),
    (lambda P: DistributedCrossEntropyLoss(P.reshape(1, 2), label_smoothing=2), "from 0 to 1; got 2"),
    (lambda P: entropy(P)(torch.ones(3, 2), torch.zeros(4)), "shape [3] (class numbers) or [3, 4]"),
    (lambda P: entropy(P, torch.ones(3))(torch.ones(3, 2), torch.zeros(3)), "weight for each of 4 classes; got [3]"),
    (lambda P: entropy(P)(torch.ones(3, 2)), "needs a tensor; got NoneType"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(2, make)


def entropy(P, weight=None):
    return DistributedCrossEntropyLoss(P.reshape(1, 2), weight)


def test_mean_counts_exactly_in_single_precision():
    """2 ** 24 + 2 places: a count in float32 would be off."""

    def main(P):
        places = 2**23 + 1
        x = torch.zeros(places, 1)
        loss = DistributedCrossEntropyLoss(P.reshape(2, 1))(x.expand(places, 2), torch.zeros(places, dtype=torch.int64))
        expected = functional.cross_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)).item()
        assert P.rank or abs(loss.item() - expected) < 1e-6

    on_workers(2, main)
