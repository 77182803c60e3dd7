"""Functions that are made of others."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.globals.tensor.table import TABLE

x4, x3, x2 = noise(3, 5, 7, 6), noise(3, 5, 7), noise(5, 6)
PLACES = torch.tensor([0.0, 1.0, 1.5, 3.0, 3.25, 5.0, 8.0], dtype=torch.float64)
OPTIONS = [
    (lambda x: F.local_response_norm(x, 3, alpha=0.5, k=2.0), x4),
    (lambda x: F.local_response_norm(x, 4, alpha=0.5), x3),
    (lambda x: F.local_response_norm(x, 2, beta=0.5), noise(2, 3, 4, 3, 2)),
    (lambda x: torch.broadcast_tensors(x, x[:, :1], torch.arange(6.0))[1] * 2, x2),
    (lambda x: torch.clip_(x, -0.5, 0.5), x2),
    (lambda x: F.multilabel_soft_margin_loss(x, (noise(5, 6, seed=1) > 0).double()), x2),
    (lambda x: F.triplet_margin_loss(x, noise(5, 6, seed=1), noise(5, 6, seed=2), margin=2.0), x2),
    (lambda x: F.triplet_margin_loss(x, x * x, noise(5, 6, seed=2), swap=True, reduction="none"), x2),
    (lambda x: F.triplet_margin_with_distance_loss(x, x * x, noise(5, 6, seed=2)), x2),
    (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), x4),
    (lambda x: F.max_unpool2d(*F.max_pool2d(x, 3, 2, return_indices=True), 3, 2, output_size=(3, 5, 7, 6)), x4),
    (lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), x3),
    (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), noise(1, 2, 4, 4, 6)),
    (lambda x: torch.diff(x), x3),
    (lambda x: torch.diff(x, 2, 1, prepend=x[:, :1] * 2, append=noise(3, 2, 7, seed=1)), x3),
    (lambda x: x.diff(n=6, dim=0), x2),
    (lambda x: torch.diff(x > 0, dim=0).double() * x[1:], x2),
    (lambda x: torch.trapezoid(x, dx=0.5, dim=1), x3),
    (lambda x: torch.trapz(x, noise(6, seed=1)), x2),
    (lambda x: torch.trapezoid(x, x.cumsum(1).exp(), dim=0), x2),
    (lambda x: torch.gradient(x), x2),
    (lambda x: torch.gradient(x, spacing=(0.5, 2), dim=(1, -1)), x3),
    (lambda x: F.affine_grid(x[..., :3], (5, 2, 4, 6), align_corners=False), noise(5, 2, 4)),
    (lambda x: F.affine_grid(x, [3, 1, 4, 2, 6], align_corners=True), noise(3, 3, 4)),
    (lambda x: F.affine_grid(x[..., :3], (5, 2, 1, 6), align_corners=False), noise(5, 2, 4)),
    (lambda x: (torch.cov(x), x.cov(correction=0), torch.corrcoef(x)), x2),
    (lambda x: torch.gradient(x, dim=0)[0], noise(2, 5)),
    (lambda x: torch.gradient(x, spacing=(0.5, 2), dim=(1, -1), edge_order=2), x3),
    (lambda x: torch.gradient(x, dim=1, edge_order=2)[0], noise(2, 3)),
    (lambda x: torch.cumulative_trapezoid(x, dx=0.5, dim=1), x3),
    (lambda x: torch.cumulative_trapezoid(x), x2),
    (lambda x: torch.cumulative_trapezoid(x, PLACES[: x.shape[-1]]), x2),
    (lambda x: torch.cumulative_trapezoid(x, x.cumsum(1).exp(), dim=0), x2),
    (lambda x: torch.cross(x, noise(3, 5, 7, seed=1), 0), x3),
    (lambda x: torch.linalg.cross(x[:, :3], x[:1, -3:] * 2, dim=1), x4),
    (lambda x: [torch.rot90(x, k, (1, -1)) for k in range(-1, 4)], x3),
    (lambda x: torch.column_stack([x, x[:, 0], x[:, :1]]), x2),
    (lambda x: torch.meshgrid(x[0], x[1, :3], torch.arange(2.0).double(), indexing="xy"), x2),
    (lambda x: torch.meshgrid([x[0], x[1, :3]], indexing="ij"), x2),
    (lambda x: x * torch.bucketize(x.detach(), torch.linspace(-1, 1, 5).double(), right=True), x3),
    (lambda x: x * torch.searchsorted(torch.linspace(-1, 1, 5).double(), x.detach()), x2),
    (lambda x: torch.bincount((x.detach() > 0).flatten().long() * 3, minlength=2), x3),
    (lambda x: (x.detach() > 0).flatten().int().bincount(minlength=9), x2),
    (lambda x: (*torch.unravel_index(x.detach().flatten().argsort()[:4], x.shape), x * 2), x2),
    (lambda x: (x * 1).cumsum_(0).tril_() + (x * 2).cumprod_(1) * (x + 1).triu_(1), x2),
    (lambda x: (x @ x.T).addmm_(x, x.T.exp(), beta=0.5), x2),
    (lambda x: (x * 1).baddbmm_(x @ x.mT, x, alpha=2), x3),
    (lambda x: torch.bincount((x.detach() * 3).long().abs().flatten(), weights=x.detach().exp().flatten()), x3),
    (lambda x: torch.bincount(torch.arange(30) % 7, x.detach().sign().float().flatten(), 9), x2),
    (lambda x: torch.bincount((x.detach() > 0).long().flatten(), torch.arange(30.0)), x2),
    (lambda x: (x.detach().sign().unique(), *(x > 0).unique(return_inverse=True, return_counts=True)), x3),
    (lambda x: x.detach().round().clamp(-1, 1).long().unique(return_counts=True), x3),
    (lambda x: (torch.histc(x.detach(), 4, -1, 2), x.detach().histc(5), (x.detach() * 0 + 2).histc(3)), x3),
    (lambda x: x * torch.isin(x.detach().round(), torch.tensor([0.0, -1.0]).double(), invert=True), x2),
    (lambda x: x * torch.isin(x.detach().round(), torch.tensor(0.0).double()) + torch.isin(x.detach().round(), 1), x2),
    (lambda x: x * torch.isin(elements=x.detach().round(), test_elements=torch.eye(2).double()), x3),
]
NUMBERS = {
    "full": lambda x: torch.full((2, 3), x.max()),
    "linspace": lambda x: torch.linspace(x.min(), x.max(), 5, dtype=torch.float64),
    "logspace": lambda x: torch.logspace(0, x.max(), steps=4, base=3.0, dtype=torch.float64),
    "arange": lambda x: torch.arange((x > 0).sum()),
    "eye": lambda x: torch.eye((x[0] > 0).sum()),
    "new_full": lambda x: x.new_full((2, 2), x.max().item()) * x[0, 0],
    "tensor": lambda x: torch.tensor(x) * 2,
    "full_like": lambda x: torch.full_like(torch.zeros(3).double(), x.max()) * x[0, 0],
    "pad": lambda x: F.pad(x, (1, 1), value=x.min()),
    "reshape": lambda x: x.reshape((x[:, 0] > -9).sum(), 6),
    "view": lambda x: x.view((6, (x[:, 0] > -9).sum())),
    "reshape of a plain tensor": lambda x: noise(30).reshape((x[:, 0] > -9).sum(), -1),
    "reshape of a plain tensor to a tuple": lambda x: noise(30).reshape(((x[:, 0] > -9).sum(), -1)),
    "clamp": lambda x: x.clamp(x.min() / 2, 0.5),
}


@pytest.mark.parametrize(("function", "x"), OPTIONS)
def test_functions_that_are_made_of_others(function, x):
    assert_same(function, Global(x))


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("function", NUMBERS.values(), ids=NUMBERS)
@on_workers
def test_a_tensor_without_dims_is_a_number_where_torch_takes_one(function):
    """Its value comes to every worker; or, for ``torch.tensor``, the tensor is copied."""
    expected = function(x2)
    for grid in [(2, 1), (1, 2)]:
        assert_close(function(split(x2, *grid)), expected)


def test_inside_a_function_of_global_tensors_a_number_is_not_asked_for(monkeypatch):
    """By a handler that hands a global tensor to torch's own code: not every worker may get as far as there."""

    def work():
        x = split(x2)
        with pytest.raises(TypeError, match=r"special_zeta .*number.*item"):
            torch.special.zeta(x, x.max())
        assert_close(x, x2)

    monkeypatch.setitem(TABLE, torch.special.zeta, lambda func, args, kwargs: torch.full((2,), args[1]))
    distdl.run_workers(work, 3)


@on_workers
def test_a_number_is_asked_for_in_what_a_checkpoint_computes_again():
    def scaled(x):
        return (x * torch.full((5, 6), x.detach().max())).sin()

    x, plain = split(x2).requires_grad_(), x2.clone().requires_grad_()
    checkpoint(scaled, x, use_reentrant=False).sum().backward()
    scaled(plain).sum().backward()
    assert_close(x.grad, plain.grad)
    (found,) = torch.autograd.grad(checkpoint(scaled, x, use_reentrant=False).sum(), x)
    assert_close(found, plain.grad)


@pytest.mark.parametrize("function", [lambda x: torch.diff(x, n=0)])
@on_workers
def test_what_torch_copies_is_a_copy(function):
    x = split(x2)
    function(x).add_(100)
    assert_close(x, x2)


RARE = {
    "take": lambda x, w: torch.take(x, torch.tensor([[0, 7], [-1, 3]])),
    "diagflat": lambda x, w: (torch.diagflat(x[0]), x[:2].diagflat(-2), x.sum().diagflat()),
    "diagonal_scatter": lambda x, w: (x.diagonal_scatter(w[0, :5]), torch.diagonal_scatter(w, x[:, 0] * 2, 0, 1, 0)),
    "gradient at places": lambda x, w: torch.gradient(x, spacing=(PLACES[:5], torch.arange(6.0) ** 2), edge_order=2),
    "select_scatter": lambda x, w: (x.select_scatter(w[0, :5], -1, 2), w[:5, :2].slice_scatter(x[:, :1], 1, 1)),
}


@pytest.mark.parametrize("function", RARE.values(), ids=RARE)
def test_what_is_rare_falls_back(function):
    assert_same(function, Global(x2), noise(6, 5, seed=1), falls_back=True)


integers = torch.arange(30).reshape(5, 6) - 9
ALGEBRA = {
    "sum_to_size": lambda x, w: (x.sum_to_size(6), x.sum_to_size((5, 1)), x.sum_to_size([1, 1]), x.sum_to_size(5, 6)),
    "sum_to_size of more dims": lambda x, w: (x[None] * w[0, :, None, None]).sum_to_size(1, *x.shape[1:]),
    "tril_": lambda x, w: (x.sin().tril_(), x.cos().triu_(diagonal=1), (x[1:3] * 2).tril_(-1)),
    "tril_ of a view": lambda x, w: [x, x[:, :3].tril_(), x.sin()][2],
    "cumsum_": lambda x, w: (x.sin().cumsum_(0), x.cos().cumprod_(dim=1)),
    "addmm_": lambda x, w: x.sin().addmm_(x, w @ x, beta=0.5),
    "baddbmm_": lambda x, w: x[None].sin().baddbmm_(x[None], (w @ x)[None]),
    "frexp": lambda x, w: (x * 37).frexp(),
}
OF_INTEGERS = {
    "unravel_index": lambda x: (*torch.unravel_index(x + 9, (3, 10)), *torch.unravel_index(x[0] + 9, 40)),
    "cumsum_": lambda x: (x.int().cumsum_(0), (x + 1).cumsum_(1)),
    "cumsum of a dtype": lambda x: [
        torch.cumsum(100 + x, dim, dtype=dtype) for dim in (0, 1) for dtype in (torch.int32, torch.uint8, torch.float32)
    ],
    "cumprod of a dtype": lambda x: (x.cumprod(0, dtype=torch.int8), x.cumprod(1, dtype=torch.int16)),
    "trapezoid of bytes": lambda x: [
        torch.trapezoid((x + 9).mul(9).to(dtype), dim=dim, dx=3)
        for dtype in (torch.uint8, torch.int8)
        for dim in (0, 1)
    ],
    "tril_": lambda x: (x + 1).tril_(),
    "softmin of bytes": lambda x: F.softmin((x + 9).to(torch.uint8), 1, dtype=torch.float64),
    "sum_to_size": lambda x: (x.int().sum_to_size(()), x.int().amax().sum_to_size(()), x.int().sum_to_size(5, 6)),
}


@pytest.mark.parametrize("name", ALGEBRA)
def test_functions_of_matrices(name):
    weights = noise(6, 5, seed=2)
    assert_same(ALGEBRA[name], Global(x2), weights, twice=name != "frexp", tolerance=1e-11)
    if not name.endswith("_"):
        assert_same(ALGEBRA[name], noise(5, 6, seed=2), Global(noise(6, 5)))


signs = torch.tensor([1, -1, 1, -1, -1])
APART = {
    "kron": lambda x, w: (torch.kron(x, w[:2, None]), x[0].kron(x[:2]), torch.kron(x.sum(), x[:2])),
    "block_diag": lambda x, w: torch.block_diag(x, w, x[0], x.sum(), x[:0]),
    "multi_dot": lambda x, w: torch.linalg.multi_dot([x[:, 0], x, w, x[:, :3]]),
    "put": lambda x, w: torch.put(x, torch.tensor([[3, -1], [7, 0]]), w[:4, 0].reshape(2, 2)),
    "put_": lambda x, w: x.put_(index=torch.tensor([4, 5]), source=x[0, :2] * 2).sin(),
    "vander": lambda x, w: (torch.linalg.vander(x), torch.linalg.vander(x[0], N=2)),
    "cosine_embedding_loss": lambda x, w: F.cosine_embedding_loss(x, w.mT, signs, margin=0.1),
    "norm_except_dim": lambda x, w: torch.norm_except_dim(x, 2, 1),
    "pdist": lambda x, w: (torch.pdist(x), F.pdist(x, p=1.0)),
}


@pytest.mark.parametrize("name", APART)
def test_functions_that_one_worker_computes(name):
    weights = noise(6, 5, seed=2)
    for other in (Global(weights), weights):
        assert_same(APART[name], Global(x2), other, falls_back=True, twice=name != "pdist", tolerance=1e-11)


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_functions_of_whole_numbers(name):
    assert_same(lambda x: OF_INTEGERS[name](x), Global(integers))


def test_places_in_tables_of_each_line():
    """As of rays, along each of which points are drawn by their weights."""

    def points(weights, levels):
        table = weights.softmax(-1).cumsum(-1)
        places = torch.searchsorted(table, levels.abs() % 1, right=True).clamp_max(table.shape[-1] - 1)
        return places, table.gather(-1, places)

    lines, levels = noise(3, 4, 7), noise(3, 4, 5, seed=1)
    assert_same(points, Global(lines), Global(levels))
    assert_same(points, Global(lines), levels)
    assert_same(lambda levels, weights: points(weights, levels), Global(levels), lines)

    def in_one(x, table):
        table = table.detach().sort().values
        return torch.bucketize(x, table), torch.searchsorted(table, x, side="right", out_int32=True)

    for x in (x3, x2, noise(4)):
        assert_same(in_one, Global(x), Global(noise(9)))
        assert_same(in_one, x, Global(noise(9)))


@on_workers
def test_numbers_around_means():
    mean, std = torch.linspace(-9, 9, 4000).reshape(40, 100), torch.linspace(0, 2, 100)
    for given in (
        (split(mean), split(mean) * 0 + std),
        (split(mean), std),
        (mean, split(mean) * 0 + 1),
        (split(mean),),
    ):
        drawn = torch.normal(*given).full_tensor() - mean
        assert abs(float(drawn.mean())) < 0.1 and 0.9 < float(drawn.std()) < 1.3
    assert torch.distributions.Normal(split(mean), 1.0).sample((2,)).shape == (2, 40, 100)
    with pytest.raises(RuntimeError, match="all elements of std"):
        torch.normal(split(mean), split(mean))


DRAWN_ANYWAY = {
    "normal": lambda x: torch.normal(x, 0.0), "deviations": lambda x: torch.normal(1.0, x.abs() * 0),
    "lines": lambda x: torch.normal(x[:, :1], torch.zeros(6)),
    "dtype of means": lambda x: torch.normal(torch.zeros(5, 6), x.abs() * 0), "poisson": lambda x: torch.poisson(x * 0),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN_ANYWAY)
def test_what_is_drawn_has_the_derivative_zero(name):
    assert_same(lambda x: (DRAWN_ANYWAY[name](x), DRAWN_ANYWAY[name](x.detach()).requires_grad), Global(x2))


def test_summary_of_a_model_that_draws_around_means():
    class Draws(torch.nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return torch.normal(y, y.exp()) + y

    assert distdl.summary(Draws(6, 4), (2, 1), (5, 6))


def drawn_in_any_partition(draw, whole):
    """What is drawn by a tensor, the same whatever its partition."""
    found = []
    for grid in ((2, 1), (1, 2)):
        torch.manual_seed(7)
        # (called at once, in this turn of the loop)
        found += distdl.run_workers(lambda: [one.full_tensor() for one in draw(split(whole, *grid))], 3)  # noqa: B023
    assert all(torch.equal(one, other) for ours in found for one, other in zip(ours, found[0], strict=True))
    return found[0]


def test_numbers_of_rare_events():
    rates = torch.tensor([0.0, 0.3, 4.0, 1e5]).repeat(500, 1)
    drawn, nothing = drawn_in_any_partition(lambda x: (torch.poisson(x), torch.poisson(x[:0])), rates)
    assert drawn.dtype is rates.dtype and torch.equal(drawn, drawn.round()) and nothing.shape == (0, 4)
    assert ((drawn.mean(0) - rates[0]).abs() <= 4 * (rates[0] / 500).sqrt()).all()
    assert ((drawn.var(0) - rates[0]).abs() <= 0.3 * rates[0]).all()


@pytest.mark.parametrize("replacement", [False, True])
def test_classes_that_are_drawn(replacement):
    odds = torch.tensor([[0.0, 1.0, 3.0, 4.0], [2.0, 0.0, 0.0, 2.0], [0.0, 0.0, 5.0, 0.0]]).repeat(200, 1)

    def draw(x):
        several = x[::3].multinomial(num_samples=2, replacement=replacement)
        return torch.multinomial(x, 1, replacement), several, torch.multinomial(x[0], 3, True)

    first, several, single = drawn_in_any_partition(draw, odds)
    assert (first.shape, first.dtype, several.shape, single.shape) == ((600, 1), torch.int64, (200, 2), (3,))
    assert (odds.gather(1, first) > 0).all() and (several > 0).all()
    shares = torch.bincount(first[::3, 0], minlength=4) / 200
    assert (shares - odds[0] / 8).abs().max() < 0.12
    assert bool((several[:, 0] == several[:, 1]).any()) is replacement


REFUSED = {
    "normal of no deviation": lambda x: torch.normal(x, x * torch.nan),
    "normal of whole numbers": lambda x: torch.normal(x.long(), 1.0),
    "poisson of no rates": lambda x: torch.poisson(x * torch.nan),
    "multinomial of counts": lambda x: torch.multinomial(x.abs().long() + 1, 1),
    "multinomial of none": lambda x: torch.multinomial(x.abs(), 0),
    "linspace between lines": lambda x: torch.linspace(x[0], 3, 5),
    "put by short numbers": lambda x: x.put(torch.tensor([3]).int(), x[0, :1]),
    "put by a mask": lambda x: x.put(torch.tensor([True]), x[0, :1]),
    "a norm except no dim": lambda x: torch.norm_except_dim(x, 2, 2),
    "poisson of negative rates": lambda x: torch.poisson(x),
    "poisson of whole numbers": lambda x: torch.poisson(x.long()),
    "multinomial of fewer": lambda x: torch.multinomial(x.abs(), 7),
    "multinomial of nothing": lambda x: torch.multinomial(x * 0, 2),
    "multinomial of negative odds": lambda x: torch.multinomial(x, 2),
    "multinomial of whole numbers": lambda x: torch.multinomial(x.long(), 2),
    "multinomial of three dims": lambda x: torch.multinomial(x[None], 2),
    "block_diag of three dims": lambda x: torch.block_diag(x, x[None]),
    "sum_to_size of another": lambda x: x.sum_to_size(2, 6),
    "pdist of a vector": lambda x: torch.pdist(x[0]),
    "pdist of a negative norm": lambda x: torch.pdist(x, -1.0),
    "vander of a number": lambda x: torch.linalg.vander(x.sum()),
    "vander of no powers": lambda x: torch.linalg.vander(x, N=0),
    "multi_dot of one": lambda x: torch.linalg.multi_dot([x]),
    "multi_dot of other shapes": lambda x: torch.linalg.multi_dot([x, x, x]),
    "multi_dot of two dtypes": lambda x: torch.linalg.multi_dot([x, x.T.float()]),
    "put beyond": lambda x: torch.put(x, torch.tensor([30]), torch.ones(1).double()),
    "put of another dtype": lambda x: torch.put(x, torch.tensor([3]), torch.ones(1)),
    "put of too few": lambda x: torch.put(x, torch.tensor([3, 4]), torch.ones(1).double()),
    "tril_ of a vector": lambda x: (x[0] * 1).tril_(),
    "addmm_ of other shapes": lambda x: (x[:, :1] * 1).addmm_(x, x.T),
    "cumsum_ along no dim": lambda x: (x * 1).cumsum_(2),
    "cumsum of truth": lambda x: x.cumsum(0, dtype=torch.bool),
    "trapezoid of other points": lambda x: torch.trapezoid(x, x[0, :2]),
    "cumulative trapezoid of other points": lambda x: torch.cumulative_trapezoid(x, x[0, :2]),
    "gradient of third order": lambda x: torch.gradient(x, edge_order=3),
    "gradient of too few places": lambda x: torch.gradient(x, spacing=(noise(2), noise(6))),
    "gradient of second order of two": lambda x: torch.gradient(x[:2], edge_order=2),
    "trapezoid of one point": lambda x: torch.trapezoid(x, noise(1)),
    "trapezoid of truth": lambda x: torch.trapezoid(x > 0),
    "trapezoid of a number": lambda x: torch.trapezoid(x.sum()),
    "gradient of bytes": lambda x: torch.gradient(x.to(torch.uint8)),
    "gradient twice along a dim": lambda x: torch.gradient(x, dim=(0, 0)),
    "meshgrid of two dtypes": lambda x: torch.meshgrid(x[0], torch.arange(3), indexing="ij"),
    "meshgrid of a matrix": lambda x: torch.meshgrid(x, indexing="ij"),
    "cross of two dtypes": lambda x: torch.linalg.cross(x[:, :3], x[:, :3].float()),
    "cross of four": lambda x: torch.linalg.cross(x[:, :4], x[:, :4]),
    "rot90 of a number": lambda x: torch.rot90(x.sum()),
    "rot90 of a line": lambda x: torch.rot90(x[0]),
    "rot90 in one dim": lambda x: torch.rot90(x, 1, (0,)),
    "rot90 in a dim twice": lambda x: torch.rot90(x, 1, (0, -2)),
    "negative order": lambda x: torch.diff(x, n=-1),
    "triplets of other dims": lambda x: F.triplet_margin_loss(x, x[0], x),
    "a triplet of a number": lambda x: F.triplet_margin_loss(x, x, x.sum(), swap=True),
    "diff along no dim": lambda x: torch.diff(x, dim=2),
}


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
def test_torch_raises_the_same(function):
    assert_raises_the_same(function, x2)


def test_second_derivatives():
    assert_same(lambda x: F.local_response_norm(x, 3, alpha=0.5), Global(x4), twice=True, tolerance=1e-10)
