"""The element-wise losses."""

import copy
from functools import partial

import pytest
import torch
from helpers_layers import assert_options, every_worker_raises, noise, on_workers
from helpers_losses import UNREADABLE, assert_loss_matches, assert_works_in_place_behind_a_loss
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import (
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedHuberLoss,
    DistributedKLDivLoss,
    DistributedL1Loss,
    DistributedMSELoss,
    DistributedPoissonNLLLoss,
    DistributedSmoothL1Loss,
    ZeroVolumeCorrectorFunction,
)
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.testing import Counting
from distdl.utilities.torch import zero_volume_tensor


def probabilities(x):
    return torch.sigmoid(x)


def logarithms(x):
    return functional.log_softmax(x, -1)


def same(x):
    return x


LOSSES = {  # the loss, torch's, options, and what makes an input and a target of noise
    "l1": (DistributedL1Loss, functional.l1_loss, {}, same, probabilities),
    "mse": (DistributedMSELoss, functional.mse_loss, {}, same, probabilities),
    "smooth l1": (DistributedSmoothL1Loss, functional.smooth_l1_loss, {}, same, probabilities),
    "smooth l1, beta": (DistributedSmoothL1Loss, functional.smooth_l1_loss, {"beta": 0.3}, same, probabilities),
    "smooth l1, beta 0": (DistributedSmoothL1Loss, functional.smooth_l1_loss, {"beta": 0.0}, same, probabilities),
    "huber": (DistributedHuberLoss, functional.huber_loss, {}, same, probabilities),
    "huber, delta": (DistributedHuberLoss, functional.huber_loss, {"delta": 0.4}, same, probabilities),
    "poisson": (DistributedPoissonNLLLoss, functional.poisson_nll_loss, {}, same, probabilities),
    "poisson, full": (DistributedPoissonNLLLoss, functional.poisson_nll_loss, {"full": True}, same, torch.exp),
    "poisson, no log": (
        DistributedPoissonNLLLoss, functional.poisson_nll_loss, {"log_input": False, "eps": 1e-2}, torch.exp, torch.exp,
    ),
    "bce": (DistributedBCELoss, functional.binary_cross_entropy, {}, probabilities, probabilities),
    "logits": (DistributedBCEWithLogitsLoss, functional.binary_cross_entropy_with_logits, {}, same, probabilities),
    "kl": (DistributedKLDivLoss, functional.kl_div, {}, logarithms, probabilities),
    "kl, log": (DistributedKLDivLoss, functional.kl_div, {"log_target": True}, logarithms, logarithms),
}  # fmt: skip

WEIGHTS = {  # which weights a loss may have
    DistributedBCELoss: [("weight",)],
    DistributedBCEWithLogitsLoss: [("weight",), ("pos_weight",), ("weight", "pos_weight")],
}

GRIDS = [  # workers of the world, those of P_x, its shape, the extents of its blocks
    (1, [0], (1, 1), ([3], [5])),
    (2, [1, 0], (1, 2), ([3], [1, 4])),
    (3, [0, 2, 1], (3, 1), ([2, 0, 3], [3])),
    (4, [2, 0, 3, 1], (2, 2), ([1, 3], [4, 1])),
    (7, [4, 1, 3, 0, 2, 5], (2, 3), ([1, 3], [2, 0, 5])),
    (3, [1], (1, 1), ([0], [4])),
]


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")  # torch's, of its own kl_div
@pytest.mark.parametrize("name", LOSSES)
def test_matches_sequential(name):
    kind, sequential, options, of_x, of_target = LOSSES[name]
    for workers, members, grid, extents in GRIDS:

        def main(P, members=members, grid=grid, extents=extents):
            P_x = P.create_partition_inclusive(members).create_cartesian_topology_partition(grid)
            shape = [sum(along) for along in extents]
            x, target = of_x(noise(*shape)), of_target(noise(*shape, seed=1))
            for reduction in kind._valid_reductions:
                criterion, blocks = kind(P_x, reduction, **options), [runs(along) for along in extents]
                assert_loss_matches(criterion, partial(sequential, **options), x, target, blocks)

        on_workers(workers, main)


@pytest.mark.parametrize("pos_weight", [None, (), (7,), (1,), (4, 1), (4, 7)])
@pytest.mark.parametrize("weight", [None, (4, 7), (1, 7), (1,)])
def test_weights_of_elements_and_of_classes(weight, pos_weight):
    """weight is local, as the input is; pos_weight is global, and each worker takes its part."""

    def main(P):
        P_x = P[1:].reshape(2, 3)
        blocks = [runs([1, 3]), runs([2, 0, 5])]
        owned = Layout.of(P_x, blocks)
        w = None if weight is None else noise(*weight, seed=2).abs()
        p = None if pos_weight is None else noise(1, *pos_weight, seed=3)[0].abs()
        part = w
        if w is not None and weight[-1] == 7:
            part = owned.block(w.expand(4, 7))[: weight[0]] if P_x.active else zero_volume_tensor()
        x, target = noise(4, 7), probabilities(noise(4, 7, seed=1))
        for reduction in ("none", "mean", "sum"):
            criterion = DistributedBCEWithLogitsLoss(P_x, reduction, part, p)
            sequential = partial(functional.binary_cross_entropy_with_logits, weight=w, pos_weight=p)
            assert_loss_matches(criterion, sequential, x, target, blocks)
            if p is None:
                criterion = DistributedBCELoss(P_x, reduction, part)
                sequential = partial(functional.binary_cross_entropy, weight=w)
                assert_loss_matches(criterion, sequential, probabilities(x), target, blocks)

    on_workers(7, main)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")  # torch's, of its own kl_div
@pytest.mark.parametrize("name", LOSSES)
def test_a_block_without_rows_and_columns(name):
    """It has the shape (0, 0), and its weight may have it, too, which is none that is missing."""
    kind, sequential, options, of_x, of_target = LOSSES[name]

    def main(P):
        P_x, blocks = P.reshape(2, 2), [runs([2, 0]), runs([3, 0])]
        x, target = of_x(noise(2, 3)), of_target(noise(2, 3, seed=1))
        for reduction in kind._valid_reductions:
            criterion = kind(P_x, reduction, **options)
            assert_loss_matches(criterion, partial(sequential, **options), x, target, blocks)
            for given in WEIGHTS.get(kind, ()):
                w = noise(2, 3, seed=2).abs() if "weight" in given else None
                p = noise(3, seed=3).abs() if "pos_weight" in given else None
                part = None if w is None else Layout.of(P_x, blocks).block(w)
                ours = {"weight": part, "pos_weight": p}
                theirs = {"weight": w, "pos_weight": p}
                criterion = kind(P_x, reduction, **{weight: ours[weight] for weight in given})
                torchs = partial(sequential, **{weight: theirs[weight] for weight in given})
                assert_loss_matches(criterion, torchs, x, target, blocks)

    on_workers(4, main)


def test_any_partition_and_any_rank_of_tensor():
    """Axes need not be dims, unless the batch is counted."""

    def main(P):
        x = torch.full((2 + P.rank, 3), 2.0, requires_grad=True)
        loss = DistributedMSELoss(P)(x, torch.zeros(2 + P.rank, 3))
        loss.backward()
        assert loss.item() == (0.0 if P.rank else 4.0)
        assert torch.allclose(x.grad, torch.full_like(x, 4 / 15))
        number = torch.tensor(3.0, requires_grad=True)
        assert DistributedL1Loss(P, "sum")(number, torch.tensor(1.0)).item() == (0.0 if P.rank else 4.0)

    on_workers(2, main)


def test_gradients_that_few_workers_ask_for():
    """The input's on one worker, the target's on another, then nobody's; the loss object is the same."""

    def main(P):
        criterion = DistributedMSELoss(P.reshape(1, 3))
        for asks_x, asks_t in ((0, 2), (1, None), (None, None), (2, 2)):
            x = torch.full((1, 2), 2.0, requires_grad=P.rank == asks_x)
            target = torch.ones(1, 2, requires_grad=P.rank == asks_t)
            loss = criterion(x, target)
            loss.backward()
            assert loss.item() == (0.0 if P.rank else 1.0)
            for tensor, sign in ((x, 1), (target, -1)):
                assert (tensor.grad is not None) == tensor.requires_grad
                assert tensor.grad is None or torch.allclose(tensor.grad, torch.full((1, 2), sign / 3))
        with torch.no_grad():
            assert not criterion(x, target).requires_grad

    on_workers(3, main)


def test_dtypes_follow_torch():
    def main(P):
        P_x = P[:2].reshape(2, 1)
        inside = P.rank < 2
        for mine, theirs in ((torch.float32, torch.float64), (torch.float64, torch.float32), (torch.bfloat16,) * 2):
            x = torch.full((1, 3), 2.0, dtype=mine) if inside else zero_volume_tensor(dtype=mine)
            target = torch.zeros(1, 3, dtype=theirs) if inside else zero_volume_tensor(dtype=theirs)
            x.requires_grad_()
            loss = DistributedMSELoss(P_x)(x, target)
            loss.backward()
            expected = functional.mse_loss(torch.ones(1, dtype=mine), torch.ones(1, dtype=theirs)).dtype
            assert loss.dtype == expected or not inside
            assert x.grad.dtype == mine and x.grad.shape == x.shape
        assert DistributedL1Loss(P_x, "sum")(*[torch.ones(1, 3, dtype=torch.int64) * inside] * 2).item() == 0

    on_workers(3, main)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mean_in_half_precision_does_not_overflow(dtype):
    """70000 ones are more than float16 has, and bfloat16 stops counting ones at 256."""

    def main(P):
        x = torch.ones(35000, 1, dtype=dtype, requires_grad=True)
        loss = DistributedL1Loss(P.reshape(1, 2))(x, torch.zeros(35000, 1, dtype=dtype))
        loss.backward()
        assert loss.dtype == dtype and loss.item() == (0.0 if P.rank else 1.0)
        assert x.grad[0].item() == pytest.approx(1 / 70000, rel=1e-2)

    on_workers(2, main)


def test_autocast_checkpoint_and_copies():
    def main(P):
        P_x = P[:2].reshape(1, 2)
        criterion = copy.deepcopy(DistributedBCEWithLogitsLoss(P_x, pos_weight=torch.ones(2))).double()
        x, target = noise(3, 2)[:, P.rank : P.rank + 1], torch.ones(3, 1).double()
        if P.rank == 2:
            x, target = x[:0], target[:0]
        expected = functional.binary_cross_entropy_with_logits(noise(3, 2), torch.ones(3, 2).double())
        x = x.clone().requires_grad_()
        loss = checkpoint(lambda x: criterion(x, target), x, use_reentrant=False)
        loss.backward()
        assert abs(loss.item() - (0.0 if P.rank else expected.item())) < 1e-14
        assert torch.allclose(x.grad, (torch.sigmoid(x) - 1).detach() / 6, rtol=1e-12)
        with torch.autocast("cpu", torch.bfloat16):
            loss = DistributedMSELoss(P_x)(x.detach().bfloat16(), target.bfloat16())
        assert P.rank == 2 or loss.dtype == torch.float32

    on_workers(3, main)


def test_forward_mode():
    """Worker 1 has a tangent, and rank 0 the derivative of the loss along it."""

    def main(P):
        x = torch.full((1, 2), 3.0).double()
        dual = forward_ad.make_dual(x, torch.ones_like(x)) if P.rank else x
        loss = DistributedMSELoss(P.reshape(1, 2), "sum")(dual, torch.zeros_like(x))
        assert P.rank or forward_ad.unpack_dual(loss).tangent.item() == 12.0

    with forward_ad.dual_level():  # a level is the same for all threads
        on_workers(2, main)


def test_one_agreement_and_one_sum():
    def main(P):
        counting = Counting(P.comm)
        criterion = DistributedMSELoss(Partition(counting).reshape(2, 2))
        local = DistributedMSELoss(Partition(counting).reshape(2, 2), "none")
        x = torch.ones(3, 2, requires_grad=True)
        criterion(x, x.detach()).backward()
        counting.reset()
        criterion(x, x.detach()).backward()
        assert [call for call, _ in counting.log] == ["all_max", "sum", "broadcast"]
        counting.reset()
        local(x, x.detach()).sum().backward()
        assert counting.log == []

    on_workers(4, main)


def bce(P, weight=None, pos_weight=None, shape=(3, 1)):
    return DistributedBCEWithLogitsLoss(P.reshape(1, 2), "mean", weight, pos_weight)(
        torch.ones(shape), torch.ones(shape)
    )


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedMSELoss(P, reduction="max"), "the reductions none, mean, sum; got 'max'"),
    (lambda P: DistributedMSELoss(P, reduction="batchmean"), "got 'batchmean'"),
    (lambda P: DistributedKLDivLoss(P, reduction="max"), "none, mean, sum, batchmean; got 'max'"),
    (lambda P: DistributedHuberLoss(P, delta=0.0), "a positive delta; got 0.0"),
    (lambda P: DistributedSmoothL1Loss(P, beta=-1), "a beta of at least 0; got -1"),
    (lambda P: DistributedMSELoss(P)(torch.ones(2), torch.ones(2 + P.rank)), "on worker 1 they have [2] and [3]"),
    (lambda P: DistributedMSELoss(P)(torch.ones(2), torch.ones(2).to([torch.float32, torch.float64][P.rank])), "dtype"),
    (lambda P: DistributedKLDivLoss(P, "batchmean")(*[torch.ones(2, 2)] * 2), "tensors with 1 dims on all workers"),
    (lambda P: bce(P, torch.ones(3 - P.rank, 1)), "on worker 1 they have [2, 1] and [3, 1]"),
    (lambda P: bce(P, None, torch.ones(3)), "they have [3] and [3, 2]"),
    (lambda P: bce(P, None, torch.ones(2), (3,)), "tensors with 2 dims"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(2, make)


def test_a_loss_of_zero_volume_becomes_a_number():
    """As published: called by ``apply``; the gradient has the shape of the input again."""
    for x in (torch.zeros(0), torch.zeros(3, 0, dtype=torch.float64), torch.tensor(2.0), torch.tensor([2.0])):
        x.requires_grad_()
        loss = ZeroVolumeCorrectorFunction.apply(x)
        assert loss.shape == (x.shape if x.numel() else ()) and loss.dtype == x.dtype
        assert loss.item() == (2.0 if x.numel() else 0.0)
        (gradient,) = torch.autograd.grad(3 * loss, x, create_graph=True)
        assert torch.equal(gradient, torch.full_like(x, 3.0))
    x = torch.zeros(2, 0, dtype=torch.float64, requires_grad=True)
    y = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(ZeroVolumeCorrectorFunction.apply, (y,))
    (gradient,) = torch.autograd.grad(y * ZeroVolumeCorrectorFunction.apply(x), x, create_graph=True)
    assert gradient.shape == (2, 0) and gradient.requires_grad

    def main():
        """A loss of one's own, made of the primitives."""
        P = distdl.world()
        add = distdl.nn.SumReduce(P, P[:1], preserve_batch=False)
        x = torch.full((1,), 2.0, requires_grad=True)
        ZeroVolumeCorrectorFunction.apply(add(x * x)).backward()
        return x.grad.item()

    assert distdl.run_workers(main, 2) == [4.0, 4.0]


@pytest.mark.parametrize("name", LOSSES)
def test_options_are_kept_and_shown(name):
    kind, _, options, _, _ = LOSSES[name]

    def main(P):
        criterion = kind(P.reshape(1, 2), "sum", **options)
        assert_options(criterion, P_x=P.reshape(1, 2), reduction="sum", **options)
        assert repr(criterion).startswith(f"{kind.__name__}(P_x: {P.reshape(1, 2)}; reduction='sum'")
        assert all(f", {option}={value}" in repr(criterion) for option, value in options.items())

    on_workers(2, main)


def test_weights_are_shown():
    def main(P):
        criterion = DistributedBCEWithLogitsLoss(P.reshape(1, 2), "mean", torch.ones(3, 1), torch.ones(2))
        assert repr(criterion).endswith("; reduction='mean', weight: [3, 1], pos_weight: [2])")

    on_workers(2, main)


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_weights_may_be_replaced_between_calls(reduction):
    def main(P):
        P_x, blocks = P.reshape(1, 2), [runs([3]), runs([2, 1])]
        owned, weight = Layout.of(P_x, blocks), noise(3, 3, seed=2).abs()
        criterion = DistributedBCEWithLogitsLoss(P_x, reduction)
        x, target = noise(3, 3), probabilities(noise(3, 3, seed=1))
        for w, p in ((None, None), (weight, None), (weight, 2 * weight[0]), (None, 2 * weight), (None, None)):
            criterion.weight, criterion.pos_weight = None if w is None else owned.block(w), p
            sequential = partial(functional.binary_cross_entropy_with_logits, weight=w, pos_weight=p)
            assert_loss_matches(criterion, sequential, x, target, blocks)

    on_workers(2, main)


def replaced(P, **weights):
    criterion = DistributedBCEWithLogitsLoss(P.reshape(1, 2), "sum", torch.ones(3, 1), torch.ones(2))
    criterion(torch.ones(3, 1), torch.ones(3, 1))
    if P.rank == 1:
        for name, value in weights.items():
            setattr(criterion, name, value)
    return criterion(torch.ones(3, 1), torch.ones(3, 1))


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: replaced(P, weight=None), "needs a weight on all workers or on none; worker 0 has one and worker 1 has"),
    (lambda P: replaced(P, pos_weight=None), "needs a pos_weight on all workers or on none"),
    (lambda P: replaced(P, weight=torch.ones(2, 1)), "on worker 1 they have [2, 1] and [3, 1]"),
    (lambda P: replaced(P, pos_weight=torch.ones(3, 1)), "worker 0 has one of shape [2] and worker 1 [3, 1]"),
    (lambda P: replaced(P, weight=torch.ones(3, 1).double()), "one dtype on all workers"),
    (lambda P: replaced(P, pos_weight=torch.ones(2).to_sparse()), "worker 1: DistributedBCEWithLogitsLoss"),
])  # fmt: skip
def test_a_weight_replaced_on_one_worker_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(2, make)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("what", UNREADABLE)
@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, *_ in LOSSES.values()))
def test_what_has_no_elements_to_read_is_the_same_error_on_every_worker(kind, what):
    for place in (0, 1):

        def main(P, place=place):
            pair = [torch.full((2, 2), 0.5), torch.full((2, 2), 0.5)]
            if P.rank == 1:
                pair[place] = UNREADABLE[what](pair[place])
            kind(P.reshape(1, 2))(*pair)

        assert f"worker 1: {kind.__name__}" in every_worker_raises(2, main)


@pytest.mark.parametrize("name", LOSSES)
def test_in_place_behind_the_losses_of_elements(name):
    kind, sequential, options, of_x, of_target = LOSSES[name]

    def main(P):
        x, target = of_x(noise(2, 3)), of_target(noise(2, 3, seed=1))
        make, torchs = partial(kind, reduction="none", **options), partial(sequential, **options)
        assert_works_in_place_behind_a_loss(P, make, torchs, x, target, (3, 1))

    on_workers(4, main)
