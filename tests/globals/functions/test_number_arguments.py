"""Tensors of one element that are taken for numbers: sizes, dims, counts and offsets that a model computed."""

import pytest
import torch
from launched import on_workers, split
from same import Global, assert_same, noise
from torch.nn import functional

x2, x3 = noise(5, 7), noise(2, 3, 5)
TWO, ZERO = torch.tensor(2), torch.tensor(0)

OF_A_NUMBER = [
    lambda x, n: x.diagonal(n), lambda x, n: x.triu(n), lambda x, n: x.tril(diagonal=n), lambda x, n: x.topk(n)[0],
    lambda x, n: torch.topk(input=x, k=n)[0], lambda x, n: x.kthvalue(n)[0], lambda x, n: x.roll(n, 0),
    lambda x, n: x.roll((n, 1), (0, 1)), lambda x, n: x.repeat(n, 1), lambda x, n: x.tile(n),
    lambda x, n: x.expand(n, 5, 7), lambda x, n: x.narrow(0, n, 2), lambda x, n: x.select(1, n),
    lambda x, n: x.view(n + 33, -1), lambda x, n: x.split(n), lambda x, n: x.chunk(n),
    lambda x, n: x.tensor_split(n), lambda x, n: x.repeat_interleave(n), lambda x, n: x.repeat_interleave(n, dim=0),
    lambda x, n: x.new_zeros(n), lambda x, n: x.new_zeros(n, 3), lambda x, n: x.new_full((n, 3), n),
    lambda x, n: functional.one_hot(x.long().clamp(0, 1), n), lambda x, n: functional.pad(x, (n, 1)),
    lambda x, n: functional.interpolate(x[None, None], size=(n + 3, 4)), lambda x, n: x[n], lambda x, n: x[:, n],
    lambda x, n: torch.zeros(n, 3) + x[0, 0], lambda x, n: torch.full((n, n + 1), 2.0) + x[0, 0],
]  # fmt: skip


@pytest.mark.parametrize("function", OF_A_NUMBER)
def test_numbers_of_global_tensors(function):
    assert_same(function, Global(x2), Global(TWO))


@pytest.mark.parametrize("function", OF_A_NUMBER)
def test_numbers_of_plain_tensors(function):
    assert_same(function, Global(x2), TWO)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x.expand(n, 5, 7), lambda x, n: x.repeat(n, 1), lambda x, n: x.flip(n), lambda x, n: x[n],
        lambda x, n: x.narrow(0, n, 2), lambda x, n: x.repeat_interleave(n), lambda x, n: x.tensor_split(n)[0],
        lambda x, n: x.as_strided((n + 2, 2), (1, 1)), lambda x, n: torch.fft.fft2(x, s=(n + 2, n)),
        lambda x, n: torch.fft.rfft(x, n=n + 2), lambda x, n: functional.pad(x[None], (n, 0, 0, n)),
        lambda x, n: functional.pad(x[None], (n, n), "reflect"), lambda x, n: functional.interpolate(x[None], n + 2),
        lambda x, n: functional.interpolate(x[None], n + 2, mode="linear"),
        lambda x, n: functional.interpolate(x[None, None], (n + 2, n), mode="bilinear", align_corners=True),
        lambda x, n: functional.interpolate(x[None, None], (n + 2, 9), mode="bicubic", antialias=True),
        lambda x, n: functional.interpolate(x[None, None], (n + 2, 3), mode="area"),
        lambda x, n: functional.interpolate(x[None, None], (n + 2, 3), mode="nearest-exact"),
        lambda x, n: functional.interpolate(x[None, None, None], (n + 2, n, 3), mode="trilinear"),
        lambda x, n: functional.adaptive_avg_pool2d(x[None], (n, 3)), lambda x, n: functional.unfold(x[None], (n, 2)),
        lambda x, n: functional.adaptive_max_pool2d(x[None], (3, n)),
        lambda x, n: functional.fold(x[:4, :6], (n + 2, 4), 2),
        lambda x, n: functional.affine_grid(x[None, :2, :3], [1, 1, n + 1, 3], align_corners=False),
        lambda x, n: functional.avg_pool2d(x[None], (n, 2)), lambda x, n: functional.avg_pool1d(x, (n,)),
        lambda x, n: functional.local_response_norm(x[None], n + 1),
        lambda x, n: functional.layer_norm(x, (n + 6,)), lambda x, n: functional.layer_norm(x, [n + 6], x2[0], x2[1]),
        lambda x, n: functional.rms_norm(x, normalized_shape=(n + 4, n + 6), weight=x2 + 1),
    ],
)  # fmt: skip
def test_numbers_beside_plain_tensors(function):
    assert_same(lambda n: function(x2, n), Global(ZERO + 1))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, d: x.sum(d), lambda x, d: x.std(d), lambda x, d: x.softmax(d), lambda x, d: x.flip(d),
        lambda x, d: x.permute(d + 1, d), lambda x, d: x.transpose(d, 1), lambda x, d: torch.cat([x, x], d),
        lambda x, d: torch.stack([x, x], d), lambda x, d: x.cumsum(d), lambda x, d: x.unsqueeze(d),
    ],
)  # fmt: skip
def test_dims(function):
    assert_same(function, Global(x2), Global(ZERO))
    assert_same(function, Global(x2), ZERO)


def test_a_number_that_changes_in_place():
    def function(x):
        n = torch.tensor(0)
        found = []
        for _ in range(3):
            found.append(x.diagonal(n))
            n += 1
        return tuple(found)

    assert_same(function, Global(x2))


def test_a_number_beside_index_tensors():
    """It is a number, and no index tensor: so those that follow it stay where they are."""
    index = torch.tensor([2, 0, 1])
    x = noise(2, 3, 4, 3)
    assert_same(lambda x, n, i: (x[n, :, i], x[n, :, i].shape), Global(x), Global(ZERO + 1), Global(index))
    assert_same(lambda x, n, i: (x[i % 2, :, n], x[n, i, n]), Global(x), Global(ZERO + 1), index)

    def write(x, n, i):
        x[n, :, i] = x.new_ones(3, 3, 3).cumsum(0)
        x[n].mul_(2)  # (a view)
        return x

    assert_same(write, Global(x), Global(ZERO + 1), Global(index))


def test_numbers_of_cells():
    assert_same(lambda k: torch.repeat_interleave(k), Global(torch.tensor([2, 0, 3, 1])))


@on_workers
def test_no_numbers():
    for make in (torch.zeros, torch.ones, torch.empty, torch.eye):
        with pytest.raises(TypeError):
            make(split(x2))


@on_workers
def test_cells_are_repeated_an_integer_number_of_times():
    for n in (split(torch.tensor([2.5])).sum(), torch.tensor(2.5), torch.tensor(True)):
        with pytest.raises(NotImplementedError):
            split(x2).repeat_interleave(n)


COUNTED = [
    lambda x, n: x.diff(n), lambda x, n: torch.diff(x, dim=n - 2), lambda x, n: functional.group_norm(x[:, :6], n),
    lambda x, n: torch.fft.fft(x, n).abs(), lambda x, n: x.gather(n - 2, torch.tensor([[0, 2]])),
    lambda x, n: torch.linalg.vector_norm(x, dim=n - 2), lambda x, n: x.median(n - 2)[0],
    lambda x, n: x.quantile(0.5, n - 2), lambda x, n: torch.trapezoid(x, dx=n), lambda x, n: torch.cdist(x, x, p=n),
    lambda x, n: torch.bincount((x[0] > 0).long(), minlength=n + 2), lambda x, n: x.nansum(n - 2),
    lambda x, n: x.logcumsumexp(n - 2), lambda x, n: torch.gradient(x, dim=n - 2)[0],
    lambda x, n: x.count_nonzero(n - 2), lambda x, n: functional.normalize(x, dim=n - 1),
    lambda x, n: torch.take_along_dim(x, torch.zeros(1, 7, dtype=torch.long), n - 2),
    lambda x, n: x.index_add(n - 2, torch.tensor([0]), x[:1]),
    lambda x, n: x.scatter(n - 2, torch.zeros(1, 7, dtype=torch.long), 1.0),
    lambda x, n: functional.cosine_similarity(x, x + 1, n - 1),
    lambda x, n: functional.cross_entropy(x, torch.tensor([0, 1, 1, 2, 4]), ignore_index=n - 1),
]  # fmt: skip


@pytest.mark.parametrize("kind", [lambda n: n, Global], ids=["plain", "global"])
@pytest.mark.parametrize("function", COUNTED)
def test_numbers_where_torch_says_that_it_wants_one(function, kind):
    """In its signatures: of dims, counts and powers."""
    assert_same(function, Global(x2), kind(TWO), falls_back=True)


CURVED = {
    "beta": lambda x, n: functional.smooth_l1_loss(x, x + 1, beta=n),
    "delta": lambda x, n: functional.huber_loss(x, x + 1, delta=n),
    "a margin": lambda x, n: functional.triplet_margin_loss(x, x + 1, x - 1, margin=n),
    "ignored": lambda x, n: functional.nll_loss(x, torch.tensor([0, 1, 1, 2, 4]), ignore_index=n),
    "a norm": lambda x, n: x.norm(n),
    "a norm of lines": lambda x, n: functional.normalize(x, p=n),
    "dropout": lambda x, n: functional.dropout(x, n, training=False),
    "eps": lambda x, n: functional.batch_norm(x, None, None, training=True, eps=n),
    "a size": lambda x, n: x.unflatten(0, (n, 5)),
    "a scale": lambda x, n: functional.interpolate(x[None], scale_factor=n),
    "a slope": functional.leaky_relu,
}


@pytest.mark.parametrize("function", CURVED.values(), ids=CURVED)
@on_workers
def test_numbers_that_require_gradients_are_refused_on_every_worker(function):
    number = noise(1).requires_grad_()
    with pytest.raises(TypeError):
        function(x2, number.sum())
    for n in (split(number.detach(), 1).requires_grad_().sum(), number.sum()):
        with pytest.raises(TypeError, match=r"must be|invalid combination"):
            function(split(x2), n)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: functional.lp_pool1d(x, n, 2), lambda x, n: functional.lp_pool2d(x, n, (2, 1), (1, 2)),
        lambda x, n: functional.lp_pool3d(x[None], n, 2, ceil_mode=True),
        lambda x, n: functional.triplet_margin_with_distance_loss(x, x + n, x - 1, margin=n),
    ],
)  # fmt: skip
def test_numbers_that_torch_learns(function):
    assert_same(function, Global(x3.abs()), Global(torch.tensor(2.5, dtype=torch.float64)))
    assert_same(function, Global(x3.abs()), torch.tensor(2.5, dtype=torch.float64))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: functional.celu(x, n), lambda x, n: torch.mvlgamma(x.abs() + 2, n),
        lambda x, n: functional.hardtanh(x, 1.0, n), lambda x, n: functional.celu(x.sum(), n),
    ],
)  # fmt: skip
def test_numbers_come_to_workers_without_cells(function):
    """They check them."""
    assert_same(function, Global(x2), Global(TWO))
    assert_same(lambda n: function(x2, n), Global(TWO))
