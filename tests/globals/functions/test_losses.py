"""Losses of torch.nn.functional, and losses that users write themselves."""

import pytest
import torch
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F

import distdl

x, t = noise(3, 5, 4, 7), noise(3, 5, 4, 7, seed=1)
numbers = torch.arange(3 * 4 * 7).reshape(3, 4, 7) % 5
w = noise(5, seed=2).abs() + 0.1


@pytest.mark.parametrize("target", [Global(t), Global(t, (1, 1, 3, 1)), t])
@pytest.mark.parametrize(
    "loss",
    [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, lambda x, t: F.mse_loss(x, t, reduction="sum"),
     lambda x, t: F.mse_loss(x, t, reduction="none"), lambda x, t: F.binary_cross_entropy_with_logits(x, t.sigmoid()),
     lambda x, t: F.kl_div(x.log_softmax(1), t.softmax(1), reduction="batchmean")],
)  # fmt: skip
def test_of_elements(loss, target):
    assert_same(loss, Global(x), target)


@pytest.mark.parametrize("loss", [F.mse_loss, F.huber_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weight", [Global(t.abs()), Global(t.abs(), (1, 1, 3, 1)), t.abs()])
def test_of_elements_with_weights(loss, reduction, weight):
    assert_same(lambda x, t, w: loss(x, t, weight=w, reduction=reduction), Global(x), Global(t), weight)


def test_of_rankings():
    assert_same(lambda x, t: F.margin_ranking_loss(x, t, (x - t).detach().sign(), 0.5), Global(x), Global(t))


@pytest.mark.parametrize(
    "options", [{}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 2}, {"label_smoothing": 0.1}]
)
@pytest.mark.parametrize("target", [Global(numbers), numbers])
def test_of_classes(options, target):
    assert_same(lambda x, t: F.cross_entropy(x, t, **options), Global(x), target)


def test_of_classes_with_weights():
    assert_same(lambda x, t, w: F.cross_entropy(x, t, w.detach()), Global(x), Global(numbers, (1, 3, 1)), w)
    assert_same(lambda x, t: F.cross_entropy(x, t.softmax(1)), Global(x), Global(t))
    assert_same(lambda x, t: F.nll_loss(x.log_softmax(1), t), Global(x), numbers)
    assert_same(lambda x, t: F.cross_entropy(x, t), Global(noise(7, 5)), torch.arange(7) % 5)


def test_dice():
    def dice(x, t):
        p = x.softmax(1)
        dims = (0, 2, 3)
        overlap, size = (p * t).sum(dims), p.sum(dims) + t.sum(dims)
        return 1 - ((2 * overlap + 1) / (size + 1)).mean()

    assert_same(dice, Global(x), Global((t > 0).double()))


def test_lookups():
    assert_same(lambda i, table: F.embedding(i, table, padding_idx=2), Global(numbers), noise(5, 3))
    assert_same(F.prelu, Global(x), w)
    for weight in (w, torch.tensor([0.3], dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)):
        assert_same(F.prelu, Global(x), weight)
        assert_same(F.prelu, x, Global(weight))
        assert_same(torch.Tensor.prelu, Global(x), Global(weight))
    assert_same(F.prelu, Global(x), w, twice=True)
    for input in (noise(1, 7), noise(7), noise(), noise(2, 7, 1)):  # (some workers have no cell)
        assert_same(F.prelu, Global(input), torch.tensor([0.3], dtype=torch.float64), twice=True)
    assert_same(F.prelu, Global(noise(2, 7, 1)), noise(7))


def test_variances_of_rows():
    """One for each place along all dims but the last, also where that has as many."""
    for columns in (7, 5):
        mean, aim, var = noise(5, columns), noise(5, columns, seed=1), noise(5).abs() + 0.5
        for own in (var, var[:, None], noise(1, columns).abs() + 0.5):
            assert_same(lambda *of: F.gaussian_nll_loss(*of), Global(mean), Global(aim), own)
            assert_same(lambda *of: F.gaussian_nll_loss(*of, reduction="none"), Global(mean), aim, Global(own))

    def work():
        x = distdl.distribute_tensor(noise(5, 7), distdl.world()[:2].reshape(1, 2))
        with pytest.raises(ValueError, match="var is of incorrect size"):
            F.gaussian_nll_loss(x, noise(5, 7), torch.ones(7))

    distdl.run_workers(work, 3)


def test_of_classes_behind_a_linear_map():
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    chunks = LinearCrossEntropyOptions(batch_chunk_size=2)
    features, classes, bias = noise(6, 4), noise(5, 4, seed=1), noise(5, seed=2)
    numbers, weight = torch.arange(6) % 5, noise(5, seed=3).abs()

    def losses(x, w, b):
        return (
            F.linear_cross_entropy(x, w, numbers, linear_bias=b, reduction="none"),
            F.linear_cross_entropy(x, w, numbers, ignore_index=2, label_smoothing=0.1, weight=weight),
            F.linear_cross_entropy(x[0], w, torch.tensor(3)), F.linear_cross_entropy(x, w, numbers, options=chunks),
            F.linear_cross_entropy(x, w, (x @ w.mT).softmax(1)),
        )  # fmt: skip

    assert_same(losses, Global(features), classes, bias)


SCORES, LETTERS = noise(7, 5, 4), torch.tensor([[1, 2, 2], [3, 1, 3], [1, 0, 0], [2, 3, 1], [3, 3, 3]])
READ, WRITTEN = [7, 6, 3, 7, 4], [3, 2, 0, 1, 3]
APART = {
    "sequences": lambda x, own: F.ctc_loss(x.log_softmax(2), own, READ, WRITTEN, zero_infinity=True),
    "sequences, each": lambda x, own: torch.ctc_loss(x.log_softmax(2), own, READ, WRITTEN),
    "margins from one class": lambda x, own: F.multi_margin_loss(x[0], own[:, 1], p=2, weight=x[0, 0].detach().abs()),
    "margins from several": lambda x, own: F.multilabel_margin_loss(x[0, :, :3] * 2, own % 3, reduction="none"),
}


@pytest.mark.parametrize("loss", APART)
def test_losses_that_one_worker_computes(loss):
    assert_same(APART[loss], Global(SCORES), Global(LETTERS), falls_back=True)


def test_second_derivatives_of_sequences_are_refused_on_every_worker():
    def work():
        x = distdl.distribute_tensor(SCORES, distdl.world()[:2].reshape(1, 2, 1)).requires_grad_()
        loss = F.ctc_loss(x.log_softmax(2), LETTERS, READ, WRITTEN, zero_infinity=True)
        (dx,) = torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="not implemented"):
            dx.square().sum().backward()
        return (x * 2).sum().item()  # all go on

    with pytest.warns(UserWarning, match="ctc_loss has no op"):
        assert len(set(distdl.run_workers(work, 3, "threads"))) == 1


def test_variances_of_rows_and_of_all_cells():
    x, target, var = noise(4, 5), noise(4, 5, seed=1), noise(4, 5, seed=2).abs()
    for one in (var, var[:, :1], var[:, 0]):  # of one dim less: one for each row
        for options in ({"reduction": "none"}, {"full": True}, {"eps": 0.5, "reduction": "sum"}):
            assert_same(lambda *given, o=options: F.gaussian_nll_loss(*given, **o), Global(x), Global(target), one)


def test_variances_that_torch_refuses():
    def work():
        x = distdl.distribute_tensor(SCORES[0], distdl.world()[:2].reshape(2, 1))
        wrong = torch.ones(x.shape)
        wrong[0, 0] = -1  # (of one worker's cells)
        for var, text in ((wrong, "negative"), (torch.ones(1, 1), "incorrect size"), (torch.ones(3, 1), "size")):
            with pytest.raises(ValueError, match=text):
                F.gaussian_nll_loss(x, x * 2, var)
            with pytest.raises(ValueError, match=text):
                F.gaussian_nll_loss(SCORES[0], SCORES[0], var)

    distdl.run_workers(work, 3)


def test_targets_and_options_that_do_not_fit_are_torchs_errors():
    wrong = [torch.zeros(3, 6, dtype=torch.int64), torch.zeros(4, dtype=torch.int64), torch.zeros(3, 6, 2).double()]
    for target in wrong:
        assert_raises_the_same(lambda x, target=target: F.cross_entropy(x, target), noise(3, 6))
        assert_raises_the_same(lambda x, target=target: F.nll_loss(x, target), noise(3, 6))
    right = torch.tensor([0, 5, 2])
    assert_raises_the_same(lambda x: F.cross_entropy(x, right, label_smoothing=1.5), noise(3, 6), text=True)
    assert_same(lambda x: F.cross_entropy(x, right, label_smoothing=-0.5), Global(noise(3, 6)))


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")
@pytest.mark.parametrize("target", [noise(2, 3, 5, 4), noise(5, 4), noise(1, 4)])
@pytest.mark.parametrize("split", [(2, 2), (3, 1), (1, 3)])
def test_batches_that_are_expanded_to_the_target(target, split):
    def of(x, t):
        return F.kl_div(x.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    assert_same(of, Global(noise(5, 4)), target, grids=[split])
    assert_same(of, Global(noise(1, 4)), Global(target), grids=[split])


@pytest.mark.parametrize("loss", [F.cross_entropy, F.nll_loss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_class_weights_of_another_dtype_are_torchs_errors(loss, reduction):
    assert_raises_the_same(lambda x: loss(x, numbers, w.float(), reduction=reduction), x, text=True)
    assert_raises_the_same(lambda x: loss(x, numbers[:, 0, 0], w.float(), reduction=reduction), x[..., 0, 0], text=True)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_probabilities_and_their_weights_may_be_wider_than_scores(reduction, smoothing):
    def of(x, target, weight):
        return F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=smoothing)

    scores, target, weight = noise(3, 5).float(), noise(3, 5, seed=1).softmax(1), noise(5).exp()
    for given in ((target.float(), weight), (target, weight.float()), (target.half(), weight)):
        assert_same(
            of, Global(scores), Global(given[0]), given[1], tolerance=1e-3 if given[0].dtype.itemsize == 2 else 1e-6
        )


@pytest.mark.parametrize("loss", [F.binary_cross_entropy, F.binary_cross_entropy_with_logits])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_weights_of_more_dims_are_torchs_errors(loss, reduction):
    for more in (torch.ones(2, 3, 5, 4, 7, dtype=torch.float64), torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)):
        assert_raises_the_same(lambda x, w=more: loss(x.sigmoid(), t.sigmoid(), w, reduction=reduction), x, text=True)
    row = t[:1].sigmoid()
    assert_raises_the_same(lambda x: loss(x.sigmoid(), row, t.abs(), reduction=reduction), x[:1], text=True)


def test_rankings_of_other_dims_are_torchs_errors():
    assert_raises_the_same(lambda x: F.margin_ranking_loss(x, x[0], x), x, text=True)
    assert_raises_the_same(lambda x: F.margin_ranking_loss(x, t, numbers.sign(), reduction="none"), x, text=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss", [
    lambda x: F.triplet_margin_loss(x, 0.5 * x, 0.1 * x), lambda x: F.gaussian_nll_loss(x, x / 2, x.abs() + 0.1),
])  # fmt: skip
def test_losses_made_of_others_are_as_wide_under_autocast(loss, dtype):
    def function(x):
        with torch.autocast("cpu", dtype):
            return loss(x)

    assert_same(function, Global(x.to(dtype)), tolerance=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("weights", [1, 3])
def test_a_gradient_penalty_reaches_all_that_a_worker_without_cells_has(weights):
    def gradients(x, weight):
        y = F.prelu(x * 1, weight)
        (dx,) = torch.autograd.grad((y * torch.cos(y.detach())).sum(), x, create_graph=True)
        (dx * dx).sum().backward()
        return x.grad, weight.grad

    given, weight = noise(2, 3, 4), noise(weights)
    expected = gradients(given.clone().requires_grad_(), weight.clone().requires_grad_())

    def work():
        x = distdl.distribute_tensor(given, distdl.world()[:2].reshape(1, 1, 2))
        for ours, theirs in zip(gradients(x.requires_grad_(), weight.clone().requires_grad_()), expected, strict=True):
            assert ours is not None
            found = ours.full_tensor() if isinstance(ours, distdl.GlobalTensor) else ours
            assert torch.allclose(found, theirs, rtol=0, atol=1e-12)

    distdl.run_workers(work, 3)
