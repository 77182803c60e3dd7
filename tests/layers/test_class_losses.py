"""The losses of classes: negative log-likelihood and cross-entropy."""

import copy
import itertools
from functools import partial
from math import inf

import pytest
import torch
from helpers_layers import assert_options, every_worker_raises, noise, on_workers, share
from helpers_losses import UNREADABLE, assert_loss_matches, assert_works_in_place_behind_a_loss
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from distdl.geometry.boxes import runs
from distdl.nn import DistributedCrossEntropyLoss, DistributedNLLLoss
from distdl.partition import Partition
from distdl.testing import Counting
from distdl.utilities.torch import zero_volume_tensor
from distdl.workers.ledger import ledger

GRIDS = [  # workers of the world, those of P_x, its shape, the extents of its blocks
    (1, [0], (1, 1), ([4], [3])),
    (2, [1, 0], (1, 2), ([4], [1, 4])),
    (3, [0, 2, 1], (1, 3), ([4], [2, 0, 3])),
    (3, [1, 2, 0], (1, 3), ([3], [0, 1, 1])),
    (4, [2, 0, 3, 1], (2, 2, 1), ([1, 3], [4, 1], [2])),
    (7, [4, 1, 3, 0, 2, 5], (1, 3, 2), ([3], [1, 2, 2], [0, 3])),
    (5, [3, 0, 1, 4], (2, 2, 1, 1), ([3, 0], [2, 1], [2], [3])),
    (3, [1, 2], (2, 1), ([2, 1], [4])),
    (4, [0, 1, 2, 3], (2, 2), ([4, 0], [3, 0])),
]


OPTIONS = list(itertools.product((False, True), (0.0, 0.3)))  # whether there is a weight, and the smoothing


def numbers(classes, *shape, seed=1):
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(seed))


def cut(members, grid, extents, P):
    P_x = P.create_partition_inclusive(members).create_cartesian_topology_partition(grid)
    shape = [sum(along) for along in extents]
    return P_x, shape, shape[:1] + shape[2:], [runs(along) for along in extents]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
def test_negative_log_likelihood_matches_sequential(reduction, weighted):
    for workers, *how in GRIDS:

        def main(P, how=how):
            P_x, shape, places, blocks = cut(*how, P)
            weight = noise(shape[1], seed=2).abs() if weighted else None
            for ignored in (-100, 0, shape[1] + 3):
                target = torch.where(noise(*places) > 0.5, ignored, numbers(shape[1], *places))
                criterion = DistributedNLLLoss(P_x, weight, ignored, reduction)
                sequential = partial(functional.nll_loss, weight=weight, ignore_index=ignored)
                assert_loss_matches(
                    criterion, sequential, functional.log_softmax(noise(*shape), 1), target, blocks, classes=True
                )

        on_workers(workers, main)


@pytest.mark.parametrize("of", [2, pytest.param(1, marks=pytest.mark.every_case)])
@pytest.mark.parametrize(("first", "reduction"), list(enumerate(["none", "mean", "sum"])))
@pytest.mark.parametrize("kind", ["classes", "ignored", "probabilities"])
def test_cross_entropy_matches_sequential(first, reduction, kind, of):
    for number, (workers, *how) in enumerate(GRIDS, first):

        def main(P, how=how, number=number):
            P_x, shape, places, blocks = cut(*how, P)
            for weighted, smoothing in share(OPTIONS, number, of):
                weight = noise(shape[1], seed=2).abs() if weighted else None
                target = numbers(shape[1], *places)
                if kind == "ignored":
                    target = torch.where(noise(*places) > 0.5, -100, target)
                if kind == "probabilities":
                    target = torch.softmax(noise(*shape, seed=3), 1)
                criterion = DistributedCrossEntropyLoss(P_x, weight, reduction=reduction, label_smoothing=smoothing)
                sequential = partial(functional.cross_entropy, weight=weight, label_smoothing=smoothing)
                assert_loss_matches(criterion, sequential, 10 * noise(*shape), target, blocks, classes=True)

        on_workers(workers, main)


def test_classes_that_are_masked_out():
    """Scores of minus infinity, on all of the classes of worker 2, as one pads a vocabulary."""

    def main(P):
        scores = 3 * noise(5, 6)
        scores[:, 3:] = -inf
        target = numbers(3, 5)
        x = scores.clone().requires_grad_()
        functional.cross_entropy(x, target, reduction="sum").backward()
        columns = slice(*runs([2, 2, 2])[P.rank])
        local = scores[:, columns].clone().requires_grad_()
        expected = functional.cross_entropy(scores, target, reduction="sum").item()
        loss = DistributedCrossEntropyLoss(P.reshape(1, 3), reduction="sum")(local, target)
        loss.backward()
        assert abs(loss.item() - (0.0 if P.rank else expected)) < 1e-12
        assert torch.allclose(local.grad, x.grad[:, columns], rtol=1e-12, atol=1e-15)

    on_workers(3, main)


def test_large_scores_neither_overflow_nor_lose_the_small_ones():
    """In single precision: a confident prediction among scores of a few thousand."""

    def main(P):
        scores = torch.tensor([[5000.0, 4990.0, 4985.0, -5000.0]])
        x = scores.double().requires_grad_()
        expected = functional.cross_entropy(x, torch.tensor([0]))
        expected.backward()
        columns = slice(2 * P.rank, 2 * P.rank + 2)
        local = scores[:, columns].clone().requires_grad_()
        loss = DistributedCrossEntropyLoss(P.reshape(1, 2))(local, torch.tensor([0]))
        loss.backward()
        assert loss.dtype == torch.float32
        assert abs(loss.item() - (0.0 if P.rank else expected.item())) < 1e-7
        assert torch.allclose(local.grad.double(), x.grad[:, columns], atol=1e-7)

    on_workers(2, main)


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", [DistributedNLLLoss, DistributedCrossEntropyLoss])
def test_the_mean_of_nothing_is_nan_with_gradient_zero(kind, grid):
    """As in torch."""

    def main(P):
        x = torch.ones(2, 3, requires_grad=True)
        loss = kind(P.reshape(*grid))(x, torch.full((2,), -100))
        loss.backward()
        assert P.rank or torch.isnan(loss)
        assert not P.rank or loss.item() == 0.0
        assert torch.equal(x.grad, torch.zeros(2, 3))

    on_workers(2, main)


def test_mean_counts_exactly_in_single_precision():
    """2 ** 24 + 2 places: a count in float32 would be off."""

    def main(P):
        places = 2**23 + 1
        x = torch.zeros(places, 1)
        loss = DistributedCrossEntropyLoss(P.reshape(2, 1))(x.expand(places, 2), torch.zeros(places, dtype=torch.int64))
        expected = functional.cross_entropy(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)).item()
        assert P.rank or abs(loss.item() - expected) < 1e-6

    on_workers(2, main)


@pytest.mark.parametrize("kind", [DistributedNLLLoss, DistributedCrossEntropyLoss])
@pytest.mark.parametrize("grid", [(3, 1), (1, 3)])
def test_dtypes_autocast_checkpoint_and_copies(kind, grid):
    def main(P):
        P_x = P[:3].reshape(*grid)
        criterion = copy.deepcopy(kind(P_x, torch.ones(6) if grid[1] == 3 else torch.ones(2)))
        shape = (3, 2) if P.rank < 3 else (0,)
        target = torch.ones(shape[:1], dtype=torch.int64)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            x = torch.zeros(shape, dtype=dtype, requires_grad=True)
            loss = checkpoint(lambda x: criterion(x, target), x, use_reentrant=False)
            loss.backward()
            assert loss.dtype == dtype and x.grad.dtype == dtype and x.grad.shape == x.shape
            value = torch.zeros(6 if grid[1] == 3 else 2).exp().sum().log() * (kind is DistributedCrossEntropyLoss)
            assert abs(loss.item() - (0.0 if P.rank else value)) < 1e-2
            with torch.autocast("cpu", torch.bfloat16):
                loss = criterion(x.detach(), target.to(torch.uint8))
            assert loss.dtype == (torch.float32 if dtype == torch.bfloat16 and P.rank < 3 else dtype)

    on_workers(4, main)


def test_gradients_that_one_worker_asks_for_and_calls_without():
    def main(P):
        criterion = DistributedCrossEntropyLoss(P.reshape(1, 3))
        target = torch.tensor([0, 5])
        for asks in (1, None, 2):
            x = torch.zeros(2, 2, requires_grad=P.rank == asks)
            criterion(x, target if P.rank == 0 else None).backward()
            assert (x.grad is not None) == (P.rank == asks)
            if P.rank == asks:
                expected = torch.full((2, 2), 1 / 12)
                expected[1, 1] -= 0.5 * (P.rank == 2)
                assert torch.allclose(x.grad, expected)
        with torch.no_grad():
            assert not criterion(x, target).requires_grad

    on_workers(3, main)


def test_forward_mode():
    def main(P):
        x = noise(4, 6)[:, 3 * P.rank : 3 * P.rank + 3]
        direction = noise(4, 6, seed=1)[:, 3 * P.rank : 3 * P.rank + 3]
        loss = DistributedCrossEntropyLoss(P.reshape(1, 2))(forward_ad.make_dual(x, direction), target)
        tangent = forward_ad.unpack_dual(loss).tangent
        assert P.rank or abs(tangent.item() - expected) < 1e-12

    whole, target = noise(4, 6).requires_grad_(), torch.tensor([0, 5, 3, 3])
    functional.cross_entropy(whole, target).backward()
    expected = (whole.grad * noise(4, 6, seed=1)).sum().item()
    with forward_ad.dual_level():  # a level is the same for all threads
        on_workers(2, main)


def calls_of(P, kind, grid, **options):
    """The calls of a forward and a backward after the first."""
    counting = Counting(P.comm)
    criterion = kind(Partition(counting).reshape(*grid), **options)
    x = torch.zeros(4, 50, requires_grad=True)
    target = torch.zeros(4, dtype=torch.int64)
    criterion(x, target).sum().backward()
    counting.reset()
    criterion(x, target).sum().backward()
    return [call for call, _ in counting.log]


def test_calls():
    def main(P):
        split = ["all_max", "broadcast", "exchange", "sum", "broadcast", "exchange"]
        assert calls_of(P, DistributedCrossEntropyLoss, (1, 3)) == split
        assert calls_of(P, DistributedCrossEntropyLoss, (1, 3), reduction="none") == split
        assert calls_of(P, DistributedCrossEntropyLoss, (3, 1)) == ["all_max", "sum", "broadcast"]
        assert calls_of(P, DistributedNLLLoss, (1, 3)) == ["all_max", "broadcast", "sum", "broadcast"]
        assert calls_of(P, DistributedNLLLoss, (3, 1), reduction="none") == ["all_max"]

    on_workers(3, main)


def test_scores_stay_where_they_are():
    """Of 4 x 150 scores on 3 workers, one number of 8 bytes for each place and worker goes, and its gradient comes."""

    def main(P):
        criterion = DistributedCrossEntropyLoss(P.reshape(1, 3))
        x = torch.zeros(4, 50, requires_grad=True)
        target = torch.zeros(4, dtype=torch.int64)
        criterion(x, target).backward()
        with ledger() as recorded:
            criterion(x, target).backward()
        sent = {entry.operation: (entry.calls, entry.messages, entry.sent) for entry in recorded.entries}
        assert sent["exchange"] == ((2, 2, 64) if P.rank == 0 else (2, 1, 32))

    on_workers(3, main)


def entropy(P, weight=None, x=None, target=None, kind=DistributedCrossEntropyLoss, **options):
    x = torch.ones(3, 2) if x is None else x
    return kind(P.reshape(1, 2), weight, **options)(x, torch.zeros(3, dtype=torch.int64) if target is None else target)


def again(P, target):
    """A call that is well, then one that is not, then one that is well."""
    criterion = DistributedNLLLoss(P.reshape(2, 1))
    assert criterion(torch.zeros(2, 3), torch.tensor([0, 2])).item() == 0.0
    try:
        criterion(torch.zeros(2, 3), torch.tensor(target if P.rank else [0, 1]))
    finally:
        assert criterion(torch.zeros(2, 3), torch.tensor([0, -100])).item() == 0.0


def replaced(P, weight):
    """The second call has another weight on worker 1."""
    criterion = DistributedCrossEntropyLoss(P.reshape(1, 2), torch.ones(4))
    criterion(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))
    criterion.weight = weight if P.rank else criterion.weight
    criterion(torch.ones(3, 2), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedCrossEntropyLoss(P), "P_x: batch x classes x space"),
    (lambda P: DistributedNLLLoss(P.reshape(1, 2), reduction="batchmean"), "got 'batchmean'"),
    (lambda P: DistributedCrossEntropyLoss(P.reshape(1, 2), label_smoothing=2), "from 0 to 1; got 2"),
    (lambda P: entropy(P, target=torch.zeros(4)), "shape [3] (class numbers) or [3, 4]"),
    (lambda P: entropy(P, target=torch.zeros(3, 4), kind=DistributedNLLLoss), "a target of shape [3] on worker 0"),
    (lambda P: entropy(P, torch.ones(3)), "weight for each of 4 classes; got [3]"),
    (lambda P: DistributedCrossEntropyLoss(P.reshape(1, 2))(torch.ones(3, 2)), "needs a tensor; got NoneType"),
    (lambda P: entropy(P, x=torch.ones(3, 2, 1)), "tensors with 2 dims"),
    (lambda P: entropy(P, x=torch.ones(3, 0)), "at least one class in dim 1"),
    (lambda P: entropy(P, target=torch.zeros(3)), "class numbers of dtype torch.int64 as targets; got torch.float32"),
    (lambda P: entropy(P, target=torch.zeros(3, 4).long()), "of a floating-point dtype as targets; got torch.int64"),
    (lambda P: entropy(P, target=torch.ones(3, 4), ignore_index=0), "by class where targets are probabilities; got 0"),
    (lambda P: entropy(P, target=torch.tensor([0, 4, 1])), "from 0 to 3, or -100 to ignore a place; worker 0 has 4"),
    (lambda P: entropy(P, target=torch.tensor([-100, -1, 9])), "worker 0 has -1"),
    (lambda P: again(P, [1, 3]), "from 0 to 2, or -100 to ignore a place; worker 1 has 3"),
    (lambda P: again(P, [-7, 0]), "worker 1 has -7"),
    (lambda P: entropy(P, x=torch.ones(3, 2).long()), "an input of real floating-point numbers; got torch.int64"),
    (lambda P: entropy(P, x=torch.ones(3, 2) * 1j, kind=DistributedNLLLoss), "numbers; got torch.complex64"),
    (lambda P: replaced(P, None), "needs a weight on all workers or on none; worker 0 has one and worker 1 has none"),
    (lambda P: replaced(P, torch.ones(3)), "weight for each of 4 classes; got [3] on worker 1"),
    (lambda P: replaced(P, torch.ones(4, device="meta")), "worker 1: DistributedCrossEntropyLoss"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(2, make)


def test_the_number_of_classes_may_change_from_call_to_call():
    """Class numbers are judged by the number of classes of this call, not of the one before."""

    def main(P):
        criterion = DistributedNLLLoss(P[:2].reshape(1, 2), reduction="sum")
        for classes in (2, 5, 3):
            x = torch.full((1, classes), 1.0) if P.rank < 2 else zero_volume_tensor()
            loss = criterion(x, torch.tensor([2 * classes - 1]))
            assert loss.item() == (0.0 if P.rank else -1.0)

    on_workers(3, main)


KINDS = {DistributedNLLLoss: functional.nll_loss, DistributedCrossEntropyLoss: functional.cross_entropy}


@pytest.mark.parametrize("kind", KINDS)
def test_options_are_kept_and_shown(kind):
    more = {"label_smoothing": 0.5} if kind is DistributedCrossEntropyLoss else {}

    def main(P):
        criterion = kind(P.reshape(1, 2), torch.ones(4), 3, "sum", **more)
        assert_options(criterion, P_x=P.reshape(1, 2), ignore_index=3, reduction="sum", **more)
        listed = f"P_x: {criterion.P_x}; ignore_index=3, reduction='sum'{', label_smoothing=0.5' if more else ''}"
        assert repr(criterion) == f"{kind.__name__}({listed}, weight: [4])"

    on_workers(2, main)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
def test_the_weight_may_be_replaced_between_calls(kind, grid):
    def main(P):
        P_x, blocks = P.reshape(*grid), [runs([3, 1] if grid[0] == 2 else [4]), runs([3, 1] if grid[1] == 2 else [4])]
        criterion, weight = kind(P_x), noise(4, seed=2).abs()
        x, target = functional.log_softmax(noise(4, 4), 1), numbers(4, 4)
        for one in (None, weight, 2 * weight**2, None):
            criterion.weight = one
            assert_loss_matches(criterion, partial(KINDS[kind], weight=one), x, target, blocks, classes=True)

    on_workers(2, main)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_elements_to_read_is_the_same_error_on_every_worker(kind, what):
    """In the first call, and when the number of classes is known and class numbers are looked at."""
    for place, calls in itertools.product((0, 1), (1, 2)):

        def main(P, place=place, calls=calls):
            criterion = kind(P.reshape(2, 1))
            pair = [torch.zeros(2, 2), torch.ones(2, dtype=torch.int64)]
            for _ in range(calls - 1):
                criterion(*pair)
            if P.rank == 1:
                pair[place] = UNREADABLE[what](pair[place])
            criterion(*pair)

        assert f"worker 1: {kind.__name__}" in every_worker_raises(2, main)


@pytest.mark.parametrize(("shape", "grid"), [
    ((2, 3), (3, 1)), ((2, 2), (1, 3)), ((2, 3, 4), (3, 1, 1)), ((2, 3, 2), (1, 1, 3)), ((2, 2, 1, 2), (1, 3, 1, 1)),
    ((2, 3, 1, 2, 2), (3, 1, 1, 1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_in_place_behind_the_losses_of_places(kind, shape, grid):
    def main(P):
        x, target = functional.log_softmax(noise(*shape), 1), numbers(shape[1], shape[0], *shape[2:])
        assert_works_in_place_behind_a_loss(P, partial(kind, reduction="none"), KINDS[kind], x, target, grid)

    on_workers(4, main)
