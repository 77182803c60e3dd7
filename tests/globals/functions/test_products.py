"""Products of tensors that lie anywhere."""

import warnings
from functools import partial

import pytest
import torch
from same import GRIDS, Global, assert_raises_the_same, assert_same, noise
from torch import nn
from torch.nn import functional as F

import distdl

x3, y3 = noise(3, 5, 7), noise(3, 7, 4, seed=1)
x4, y4 = noise(3, 2, 5, 7), noise(3, 2, 7, 4, seed=1)


@pytest.mark.parametrize("weight", [noise(6, 7), Global(noise(6, 7)), Global(noise(6, 7), (1, 3))])
@pytest.mark.parametrize("bias", [None, noise(6)])
def test_linear(weight, bias):
    grids = [(2, 2, 1), (1, 1, 4), (2, 1, 2), (1, 3, 1), (4, 1, 1)]
    assert_same(F.linear, Global(x3), weight, bias, grids=grids)


def test_linear_of_few_dims():
    assert_same(F.linear, Global(noise(7)), noise(6, 7), noise(6))
    assert_same(F.linear, Global(noise(2, 7)), noise(6, 7), noise(6), grids=[(4, 1), (1, 4), (1, 1)])
    assert_same(F.linear, Global(noise(7)), noise(7), grids=[(3,)])


def test_linear_of_no_features_is_its_bias():
    assert_same(F.linear, Global(noise(3, 5, 0)), noise(6, 0), noise(6), grids=[(2, 2, 1), (1, 4, 1), (1, 1, 1)])


@pytest.mark.parametrize(
    "function, left, right",
    [
        (torch.matmul, x4, y4), (torch.matmul, x4, noise(7, 4)), (torch.matmul, x4, noise(2, 7, 4)),
        (torch.matmul, x3, noise(7)), (torch.matmul, noise(5), noise(3, 5, 2)), (torch.matmul, noise(5), noise(5)),
        (torch.mm, noise(5, 7), noise(7, 3)), (torch.bmm, x3, y3), (torch.mv, noise(5, 7), noise(7)),
        (torch.dot, noise(9), noise(9)), (torch.outer, noise(5), noise(3)), (lambda a, b: a @ b, x3, y3),
        (torch.Tensor.matmul, x4, noise(1, 2, 7, 4)), (torch.inner, x3, noise(2, 7)),
        (lambda a, b: torch.einsum("bik,bkj->bij", a, b), x3, y3),
        (lambda a, b: torch.einsum("...ik,kj", a, b), x3, noise(7, 2)),
        (lambda a, b: torch.einsum("bik,bkj->", a, b), x3, y3),
        (lambda a, b: torch.einsum("bik,bkj->k", [a, b]), x3, y3),
        (lambda a, b: torch.einsum(a, [0, 1, 2], b, [0, 2, 3], [3, 1]), x3, y3),
        (lambda a, b: torch.tensordot(a, b, dims=([2], [1])), x3, y3),
        (lambda a, b: torch.tensordot(a, b), noise(3, 5, 7), noise(5, 7, 2)),
        (lambda a, b: torch.baddbmm(a.sum(), a, b, beta=0.5, alpha=2.0), x3, y3),
    ],
)  # fmt: skip
def test_two_factors(function, left, right):
    assert_same(function, Global(left), Global(right))
    assert_same(function, Global(left), right, grids=GRIDS[left.dim()][1:3])
    last = (1,) * (right.dim() - 1) + (4,)
    assert_same(function, Global(left), Global(right, last), grids=GRIDS[left.dim()][:1])
    # the other one leads
    assert_same(lambda b, a: function(a, b), Global(right), left, grids=GRIDS[right.dim()][:2])


def test_more_factors():
    assert_same(lambda a, b, c: torch.einsum("bik,bkj,jl->bil", a, b, c), Global(x3), Global(y3), noise(4, 3))
    assert_same(
        lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), Global(noise(4)), Global(noise(5, 7)), noise(7, 4)
    )
    assert_same(lambda a, b, c: torch.baddbmm(a, batch1=b, batch2=c, beta=0.5), x3[..., :2], Global(x3), y3[..., :2])
    assert_same(lambda a, b, c: a.addmm(mat2=c, mat1=b), Global(noise(4)), noise(5, 7), noise(7, 4))
    assert_same(F.bilinear, Global(noise(5, 3)), Global(noise(5, 4)), noise(6, 3, 4), noise(6))


APART = {
    "addmv": lambda a, b: torch.addmv(b[0, :4], b.mT[:4] @ a, a[0], beta=0.5, alpha=2),
    "addr": lambda a, b: torch.addr(a, vec1=b[0, :5], vec2=a[1], beta=0),
    "addbmm": lambda a, b: a.addbmm(a[None], (b @ a)[None]),
    "in place": lambda a, b: (a.sin().addr_(a[:, 0], a[0]), a[:, 0].sin().addmv_(a, a[0], alpha=2)),
    "vecdot": lambda a, b: (torch.linalg.vecdot(a, b), torch.linalg.vecdot(a, b[0], dim=0)),
    "sparse.addmm": lambda a, b: torch.sparse.addmm(a, _sparse(5, 5).to_sparse(), b, beta=0.5, alpha=2.0),
}


@pytest.mark.parametrize("product", APART)
def test_products_that_one_worker_computes(product):
    a, b = noise(5, 5), noise(5, 5, seed=1)
    for other in (Global(b), b):
        assert_same(APART[product], Global(a), other, falls_back=True)


def test_one_factor():
    assert_same(lambda a: torch.einsum("nhwpqc->nchpwq", a), Global(noise(2, 3, 2, 2, 3, 2)))
    assert_same(lambda a: torch.einsum("abc->b", a), Global(x3))


def test_a_plain_factor_leads_nothing():
    assert_same(lambda b, a: a @ b, Global(noise(7, 4)), noise(3, 5, 7))
    assert_same(lambda b, a: a.__matmul__(b), Global(noise(7, 4)), noise(3, 5, 7))


def test_distances():
    assert_same(torch.cdist, Global(noise(3, 5, 7)), Global(noise(3, 4, 7)), tolerance=1e-9)
    assert_same(torch.cdist, Global(noise(5, 7)), noise(4, 7), 1.0)


@pytest.mark.parametrize("grid", [Global(noise(2, 6, 3, 2, seed=5) / 2), noise(2, 6, 3, 2, seed=5) / 2])
def test_sampled_images(grid):
    assert_same(lambda x, at: F.grid_sample(x, at, align_corners=True), Global(noise(2, 3, 5, 4)), grid)


def test_second_derivatives():
    assert_same(
        lambda a, b: torch.matmul(a, b).tanh(),
        Global(x3),
        Global(y3, (1, 4, 1)),
        twice=True,
        grids=[(1, 2, 2), (2, 1, 2)],
    )
    assert_same(lambda a, w, b: F.linear(a, w, b).tanh(), Global(x3), noise(6, 7), noise(6), twice=True)


def test_what_a_worker_holds_stays_its_share():
    def work():
        root = distdl.world()
        P = root.create_cartesian_topology_partition((1, 1, 4))
        x = distdl.distribute_tensor(noise(2, 16, 8), P)
        y = F.linear(x, noise(8, 8))
        assert y.to_local().numel() == 2 * 16 * 8 // 4
        scores = distdl.distribute_tensor(noise(2, 8, 16), P)
        values = distdl.distribute_tensor(noise(2, 16, 8), P)
        assert torch.matmul(scores, values).to_local().numel() == 2 * 8 * 8 // 4

    distdl.run_workers(work, 4)


def test_shapes_that_do_not_fit_raise_on_every_worker():
    def work():
        P = distdl.world().create_cartesian_topology_partition((1, 3))
        x = distdl.distribute_tensor(noise(4, 6), P)
        with pytest.raises(RuntimeError, match=r"shapes cannot be multiplied|size mismatch|reduction dim"):
            F.linear(x, noise(3, 5))
        with pytest.raises(RuntimeError):
            torch.matmul(x, noise(5, 4))

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("function", [
    lambda x, w: torch.einsum("bik,bjk->bij", x, x), lambda x, w: torch.einsum("bik,bik->bi", x, x),
    lambda x, w: F.linear(x, w, w[:, 0]), lambda x, w: torch.baddbmm(x[..., :2], x, w.T.expand(3, 4, 5)[..., :2]),
    lambda x, w: F.bilinear(x, x, w[:, None] * w[:, :, None]), lambda x, w: F.prelu(x, w[:4, 0]), torch.matmul,
    lambda x, w: F.prelu(x @ x, w[:4, 0]),
])  # fmt: skip
def test_autocast_casts_as_torch_does_also_where_there_are_no_cells(function):
    def cast(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, w.T if function is torch.matmul else w)
            return y, y + 1, y.sum().float()

    x, w = noise(3, 4, 4).float(), noise(5, 4).float()
    assert_same(cast, Global(x), w, tolerance=0.05)
    assert_same(cast, Global(x), w, grids=[(1, 1, 4)], tolerance=0.05)


def _sparse(*shape):
    x = noise(*shape, seed=3)
    return x.masked_fill(x < 0.3, 0)


SPARSE = {
    "matmul": (lambda x: _sparse(4, 5).to_sparse() @ x, noise(5, 6)),
    "mm": (lambda x: torch.mm(_sparse(4, 5).to_sparse_csr(), x), noise(5, 6)),
    "sparse.mm": (lambda x: torch.sparse.mm(_sparse(4, 5).to_sparse(), x), noise(5, 6)),
    "on the right": (lambda x: x @ _sparse(6, 4).to_sparse_csr(), noise(5, 6)),
    "mv": (lambda x: torch.mv(_sparse(4, 5).to_sparse(), x), noise(5)),
    "bmm": (lambda x: torch.bmm(_sparse(3, 4, 5).to_sparse(), x), noise(3, 5, 6)),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("product", SPARSE)
def test_products_with_a_sparse_constant(product):
    """As of finite elements, graphs, and convolutions on a sphere."""
    function, x = SPARSE[product]
    assert_same(function, Global(x))
    if product != "mv":
        assert_same(function, Global(x), grids=[(1, 3) if x.dim() == 2 else (1, 1, 3)], twice=True)


OF_PARAMETERS = {
    "mm": torch.mm,
    "sparse.mm": torch.sparse.mm,
    "on the right": lambda a, x: x @ a,
    "softmax": lambda a, x: torch.sparse.mm(torch.sparse.softmax(a, 1), x),
}


@pytest.mark.parametrize(
    ("product", "inside"),
    [(name, inside) for name in OF_PARAMETERS for inside in (True, False) if inside or name != "softmax"],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_products_with_a_sparse_tensor_of_parameters(product, inside):
    """As of learnt weights of a graph's edges. (Softmax takes a sparse gradient; a sum over workers is dense.)"""

    class Edges(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(noise(7))

        def forward(self, x):
            ends = torch.tensor([[0, 1, 2, 3, 4, 0, 2], [1, 2, 3, 4, 0, 3, 0]])
            return OF_PARAMETERS[product](torch.sparse_coo_tensor(ends, self.weight, (5, 5)), x)

    def gradients(model, x):
        y = model(x)
        y.square().sum().backward()
        return y.detach(), model.weight.grad

    def work(grid):
        P = distdl.world()[1:].reshape(*grid)
        model = distdl.distribute(Edges(), P, fallback="error") if inside else Edges()
        y, dw = gradients(model, distdl.distribute_tensor(noise(5, 5, seed=2), P, 1))
        return y.full_tensor(), dw

    expected = [gradients(Edges(), noise(5, 5, seed=2))] * 3
    for grid in ((2, 1), (1, 2)):
        torch.testing.assert_close(distdl.run_workers(partial(work, grid), 3, "threads"), expected)


def test_a_sparse_constant_is_refused_on_every_worker_also_without_cells():
    def work():
        x = distdl.distribute_tensor(noise(5, 6), distdl.world()[:2].reshape(1, 2))
        with pytest.raises(RuntimeError) as caught:
            torch.mm(_sparse(4, 5).float().to_sparse(), x)
        return str(caught.value)

    assert len(set(distdl.run_workers(work, 3, "threads"))) == 1


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.inner(x, _sparse(4, 6).to_sparse()), lambda x: x * _sparse(5, 6).to_sparse(),
        lambda x: torch.einsum("ij,kj->ik", x, _sparse(4, 6).to_sparse()),
        lambda x: torch.cdist(x, _sparse(4, 6).to_sparse()),
    ],
)  # fmt: skip
def test_what_takes_no_sparse_constant_is_one_error_on_every_worker(function):
    def work():
        x = distdl.distribute_tensor(noise(5, 6), distdl.world()[:2].reshape(2, 1))
        with pytest.raises(RuntimeError) as caught:
            function(x)
        return str(caught.value)

    assert len(set(distdl.run_workers(work, 3, "threads"))) == 1


def test_linear_with_sparse_weights():
    assert_same(lambda x: F.linear(x, _sparse(4, 6).to_sparse()), Global(noise(5, 6)), falls_back=True)


def test_a_model_with_a_sparse_buffer_begins_alike_on_every_worker():
    class Graph(nn.Module):
        def __init__(self, scale):
            super().__init__()
            self.register_buffer("edges", (_sparse(5, 5) * scale).to_sparse())
            self.register_buffer("rows", (_sparse(5, 5) * scale).to_sparse_csr())

        def forward(self, x):
            return self.edges @ x + self.rows @ x

    def work():
        P = distdl.world().reshape(1, 2)
        y = distdl.distribute(Graph(P.rank + 1), P, fallback="error")(distdl.distribute_tensor(noise(5, 6), P))
        torch.testing.assert_close(y.full_tensor(), 2 * _sparse(5, 5) @ noise(5, 6))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # (those of CSR)
        distdl.run_workers(work, 2, "threads")


@pytest.mark.parametrize(("samples", "split"), [(16, (2, 1)), (17, (2, 1)), (7, (1, 2))])
def test_many_samples_are_split_where_features_were(samples, split):
    """So that what comes next reads whole features: of a classifier, one exchange and its adjoint are all."""
    x, weights = noise(samples, 6, 4, 5), [noise(30, 120, seed=1), noise(8, 30, seed=2)]

    def classify(x):
        for weight in weights:
            x = F.linear(x.flatten(1), weight).tanh()
        return x

    def work():
        P = distdl.world()
        y = classify(distdl.distribute_tensor(x, P.reshape(1, 1, 2, 1)))
        flat = distdl.distribute_tensor(x.flatten(1), P.reshape(1, 2))
        z = F.linear(flat, weights[0])
        assert torch.allclose(y.full_tensor(), classify(x))
        assert torch.allclose(z.full_tensor(), F.linear(x.flatten(1), weights[0]))
        return y.layout.partition.workers.shape, z.layout.partition.workers.shape

    assert distdl.run_workers(work, 2) == [(split, split)] * 2


@pytest.mark.parametrize("ends", [[4, 5, 12], [0, 12, 12], [1, 2, 12]])
def test_rows_that_are_sorted_by_groups(ends):
    """As mixtures of experts compute; in float32, which torch asks for."""
    x, weight = noise(12, 16, dtype=torch.float32), noise(3, 16, 8, dtype=torch.float32)
    ends = torch.tensor(ends, dtype=torch.int32)
    grids = [(2, 1), (5, 1), (1, 2), (2, 2)]
    for offs in (ends, Global(ends, (2,))):
        for function in (
            lambda x, w, e: F.grouped_mm(x, w, offs=e), lambda x, w, e: F.grouped_mm(x, w, offs=e).t().contiguous(),
            lambda x, w, e: F.grouped_mm(x.t().contiguous().t(), w, offs=e).sin(),
        ):  # fmt: skip
            assert_same(function, Global(x), weight, offs, grids=grids, tolerance=1e-5)


def test_what_torch_refuses_of_groups_is_refused_on_every_worker():
    x, weight, ends = noise(12, 16), noise(3, 16, 8), torch.tensor([4, 5, 12], dtype=torch.int32)
    assert_raises_the_same(lambda x: F.grouped_mm(x, weight, offs=ends), x)
    assert_raises_the_same(lambda x: F.grouped_mm(x.float(), weight.float(), offs=ends.long()), x)


def _ones(*shape, dtype=torch.float64):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize("bias", [_ones(2), _ones(5, 3), _ones(3, 1), _ones(3, dtype=torch.float32), _ones(2, 4, 3)])
@pytest.mark.parametrize("x", [noise(4, 6), noise(4, 6, 1, 6)])
def test_a_bias_of_a_linear_map_that_torch_refuses(x, bias):
    assert_raises_the_same(lambda x: F.linear(x, _ones(3, 6), bias), x)
    assert_raises_the_same(lambda x: F.linear(_ones(4, 6), _ones(3, 6), bias * x.sum().to(bias.dtype)), x)


def test_a_bias_of_more_features_than_the_product_has():
    for x in (noise(4, 6), noise(4, 6, 1, 6)):
        assert_raises_the_same(lambda x: F.linear(x, _ones(1, 6), _ones(3)), x)


def test_a_bias_of_two_dims():
    assert_same(F.linear, Global(noise(4, 6)), noise(3, 6), noise(4, 1), grids=[(2, 2), (1, 3), (4, 1)])
    assert_same(F.linear, Global(noise(5, 4, 6)), noise(3, 6), noise(4, 3), grids=[(1, 2, 1), (2, 1, 1), (1, 1, 3)])


@pytest.mark.parametrize("bias", [_ones(1), _ones(3), _ones(2, dtype=torch.float32)])
def test_a_bias_of_a_bilinear_map_that_torch_refuses(bias):
    x, w = noise(5, 6), _ones(2, 6, 6)
    assert_raises_the_same(lambda x: F.bilinear(x, x, w, bias), x, text=True)
    assert_raises_the_same(lambda x: F.bilinear(_ones(5, 6), _ones(5, 6), w, bias * x.sum().to(bias.dtype)), x)


@pytest.mark.parametrize(
    ("function", "wrong", "shapes"),
    [(torch.addmm, [(2, 1), (1, 3, 5), (2,)], [(3, 4), (4, 5)]),
     (torch.baddbmm, [(3, 3, 5), (1, 2, 3, 5), (2,)], [(2, 3, 4), (2, 4, 5)])],
)  # fmt: skip
@pytest.mark.parametrize("beta", [1, 0])
def test_what_is_added_to_a_product_is_not_larger(function, wrong, shapes, beta):
    first, second = (_ones(*shape) for shape in shapes)
    for shape in wrong:
        added = _ones(*shape)
        assert_raises_the_same(
            lambda x, y=added: function(y * x.sum(), first, second, beta=beta), noise(4, 4), text=True
        )
        assert_raises_the_same(
            lambda x, y=added: function(y, first * x.sum(), second, beta=beta), noise(4, 4), text=True
        )
    single = torch.ones(1)
    assert_raises_the_same(lambda x: function(single, first * x.sum(), second, beta=beta), noise(4, 4), text=True)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [(torch.addmm, [(4, 6), (4, 5), (5, 6)]), (torch.baddbmm, [(3, 4, 6), (3, 4, 5), (3, 5, 6)])],
)
def test_what_is_added_no_times_has_a_gradient_of_zeros(function, shapes):
    added, first, second = (noise(*shape, seed=seed) for seed, shape in enumerate(shapes))
    added[0] = torch.nan  # (which is not read)
    for one in (Global(added), added[:1]):
        assert_same(lambda x, a, b: function(x, a, b, beta=0), one, Global(first), Global(second))


def test_products_of_equal_shapes_have_the_dtypes_of_their_own_functions_under_autocast():
    """torch's casts matmul, and not mv and dot."""
    matrix, vector = noise(4, 6).float(), noise(6).float()

    def function(x, v):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.mv(x, v), torch.matmul(x, v), torch.dot(v, v), v @ v

    assert_same(function, Global(matrix), Global(vector), tolerance=0.02)
