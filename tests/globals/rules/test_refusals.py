"""What torch refuses: every worker raises it, also those whose blocks have no cells."""

import numpy as np
import pytest
import torch
from same import Global, assert_same
from torch.autograd import forward_ad
from torch.nn import functional as F

import distdl
from distdl.globals.layouts.context import Context

DTYPES = [
    torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64, torch.complex128, torch.complex32, torch.uint16,
    torch.float8_e4m3fn,
]  # fmt: skip
index = torch.tensor([0, 1])
places = torch.arange(8).reshape(2, 4) % 2
doubles = torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, 4)
FUNCTIONS = {
    "bitwise_not": torch.bitwise_not, "lgamma": torch.lgamma, "gt": lambda x: x > x, "erfinv": torch.erfinv,
    "bitwise_and_": lambda x: x.bitwise_and_(x), "hardshrink": F.hardshrink, "gelu": F.gelu, "sub": lambda x: x - x,
    "sum": lambda x: x.sum(), "mean": lambda x: x.mean(1), "prod": lambda x: x.prod(0), "amax": lambda x: x.amax(1),
    "var": lambda x: x.var(1), "norm": lambda x: x.norm(), "max norm": lambda x: torch.linalg.vector_norm(x, torch.inf),
    "softmax 0": lambda x: x.softmax(0), "softmax 1": lambda x: x.softmax(1), "softmin": lambda x: F.softmin(x, 0),
    "log_softmax": lambda x: x.log_softmax(1), "logsumexp": lambda x: x.logsumexp(0),
    "cummax": lambda x: x.cummax(0), "cummin": lambda x: x.cummin(1), "cumprod": lambda x: x.cumprod(0),
    "sort": lambda x: x.sort(0), "topk": lambda x: x.topk(1, 0), "median": lambda x: x.median(1),
    "scatter": lambda x: x.scatter(0, places.to(x.device), doubles),
    "scatter_reduce": lambda x: x.scatter_reduce(1, places, x, "amax"),
    "index_add": lambda x: x.index_add(0, index, doubles), "index_copy": lambda x: x.index_copy(0, index, doubles),
    "index_add of its own": lambda x: x.index_add(0, index, x), "index": lambda x: x[x],
    "assignment": lambda x: x.__setitem__(x, 1), "list": lambda x: x[[0.0, 1.0]],
    "masked_select": lambda x: x.masked_select(x), "masked_scatter": lambda x: x.masked_scatter(x, x),
    "geometric": lambda x: x.geometric_(2), "normal": lambda x: x.normal_(0, -1), "uniform": lambda x: x.uniform_(1, 0),
    "matmul": lambda x: x @ x.t(), "of doubles": lambda x: x @ doubles.t(), "inner": lambda x: torch.inner(x, x),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x), "with doubles": lambda x: torch.einsum("ij,ij->i", x, doubles),
    "tensordot": lambda x: torch.tensordot(x, x, 2), "linear": lambda x: F.linear(x, doubles),
    "bilinear": lambda x: F.bilinear(x, x, doubles.new_ones(3, 4, 4)), "outer": lambda x: torch.outer(x[0], x[1]),
    "addbmm": lambda x: torch.addbmm(x @ x.t(), x[None], x.t()[None]), "cdist": lambda x: torch.cdist(x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "layer_norm": lambda x: F.layer_norm(x, (4,)), "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "conv1d": lambda x: F.conv1d(x[None], doubles.new_ones(3, 2, 2)), "max_pool1d": lambda x: F.max_pool1d(x[None], 2),
    "adaptive": lambda x: F.adaptive_avg_pool1d(x[None], 2), "avg_pool1d": lambda x: F.avg_pool1d(x[None], 2),
    "area": lambda x: F.interpolate(x[None], 3, mode="area"),
    "unfold": lambda x: F.unfold(x[:, None, None], (1, 2)), "pad": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "fold": lambda x: F.fold(x[:, :, None].expand(2, 4, 3), (1, 6), (1, 4)),
    "embedding": lambda x: F.embedding(x, doubles),
    "mse_loss": lambda x: F.mse_loss(x, doubles), "cross_entropy": lambda x: F.cross_entropy(x, index),
    "bucketize": lambda x: torch.bucketize(x, doubles[0]), "searchsorted": lambda x: torch.searchsorted(doubles[0], x),
    "isin": lambda x: torch.isin(x, doubles[0]), "take": lambda x: torch.take(x, index),
    "diff": torch.diff, "trapezoid": torch.trapezoid, "gradient": lambda x: torch.gradient(x)[0],
    "cross": lambda x: torch.linalg.cross(x[:, :3], doubles[:, :3]), "rot90": torch.rot90,
    "meshgrid": lambda x: torch.meshgrid(x[0], doubles[0], indexing="ij"),
    "column_stack": lambda x: torch.column_stack([x, x]),
    "gru_cell": lambda x: torch.gru_cell(x, doubles[:, :2], doubles[:1].expand(6, 4), doubles[:1, :2].expand(6, 2)),
    "fft": torch.fft.fft, "one_hot": F.one_hot, "view_as_real": torch.view_as_real,
}  # fmt: skip
# what also takes some dtypes that torch has no kernel for
MORE = {"max_pool1d", "pad", "assignment", "take"}
# and what torch computes by kernels that take blocks otherwise
LESS = {("var", "torch.complex32"), ("addbmm", "torch.float8_e4m3fn")}


def outcome(function, x):
    """What a function raises, or the shape and dtype that it gives."""
    try:
        y = function(x)
    except Exception as error:
        return type(error).__name__, str(error)
    first = y[0] if isinstance(y, tuple) else y
    return None if first is None else (first.shape, first.dtype)


def raised(found):
    return found is not None and isinstance(found[1], str)


def whole(dtype):
    return places.to(dtype) if not (dtype.is_floating_point or dtype.is_complex) else doubles.to(dtype)


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.filterwarnings("ignore:.* has no op for global tensors")
@pytest.mark.parametrize("dim", [0, pytest.param(1, marks=pytest.mark.every_case)])
def test_every_worker_raises_what_torch_raises_for_a_dtype(dim):
    def lies(x):
        """x, of which only the last of three workers has cells; a fourth is beside them."""
        context = Context.of(distdl.world().comm)
        n = x.shape[dim]
        intervals = [((0, m),) if at != dim else ((0, 0), (0, 0), (0, n)) for at, m in enumerate(x.shape)]
        grid = distdl.world()[:3].reshape((3, 1) if dim == 0 else (1, 3))
        return distdl.distribute_tensor(x, grid).redistribute(context.layout(grid.workers, intervals))

    def work():
        return {
            (name, str(dtype)): outcome(function, lies(whole(dtype)))
            for name, function in FUNCTIONS.items()
            for dtype in DTYPES
        }

    found = distdl.run_workers(work, 4)
    for case, ours in found[0].items():
        name, dtype = case[0], next(one for one in DTYPES if str(one) == case[1])
        assert all(other[case] == ours for other in found), f"{case}: {[other[case] for other in found]}"
        theirs = outcome(FUNCTIONS[name], whole(dtype))
        if raised(ours) == raised(theirs) or case in LESS:
            continue
        assert name in MORE and not raised(ours), f"{case}: {ours}, not {theirs}"


@pytest.mark.filterwarnings("ignore")  # (which torch gives once, and so to one worker)
@pytest.mark.parametrize("name", ["sum", "mean", "norm", "cumprod", "cumsum", "trace"])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.complex32, torch.float8_e4m3fn])
def test_every_worker_raises_for_a_dtype_of_few_cells(name, shape, dtype):
    functions = {
        "cumsum": lambda x: x.cumsum(0), "trace": torch.trace, "norm": lambda x: torch.linalg.vector_norm(x, 0)
    }  # fmt: skip

    def work():
        x = distdl.distribute_tensor(torch.zeros(shape, dtype=dtype), distdl.world()[:2].reshape(2, 1))
        return outcome({**FUNCTIONS, **functions}[name], x)

    found = distdl.run_workers(work, 3)
    assert found == found[:1] * 3, found
    assert raised(found[0]) or (name == "norm" and dtype is torch.complex32)


rows, doubled = doubles.reshape(2, 4), doubles.sin()
cube = torch.linspace(-1, 1, 48, dtype=torch.float64).reshape(3, 4, 4)
LATE = {
    "linear": (lambda late: F.linear(rows, doubles, late), doubles[0, :2]),
    "addbmm": (lambda late: torch.addbmm(late, cube, cube), cube[0]),
    "addmm": (lambda late: torch.addmm(late, rows, cube[0]), rows),
    "baddbmm": (lambda late: torch.baddbmm(late, cube, cube), cube),
    "bilinear": (lambda late: F.bilinear(rows, rows, cube, late), rows[0, :3]),
    "conv1d": (lambda late: F.conv1d(cube, cube, late), rows[0, :3]),
    "layer_norm": (lambda late: F.layer_norm(cube, (4,), late), rows[0]),
    "group_norm": (lambda late: F.group_norm(cube, 2, late), rows[0]),
    "instance_norm": (lambda late: F.instance_norm(cube, weight=late), rows[0]),
    "batch_norm": (lambda late: F.batch_norm(cube, late.detach(), late.detach() + 1), rows[0]),
    "embedding": (lambda late: F.embedding(places, late), rows),
    "lerp": (lambda late: torch.lerp(rows, doubled, late), rows),
    "where": (lambda late: torch.where(rows > 0.5, rows, late), doubled),
}


@pytest.mark.parametrize("name", LATE)
def test_only_a_late_argument_is_global(name):
    function, late = LATE[name]
    grid = (2, *[1] * (late.dim() - 1))
    assert_same(function, Global(late), grids=[grid], workers=3, falls_back=True)  # (most have no op for that)


def test_blocks_of_single_cells():
    """Of these, torch makes products by functions that take other dtypes."""

    def work():
        for dtype in (torch.bool, torch.uint8, torch.float16):
            x = distdl.distribute_tensor(whole(dtype), distdl.world()[:3].reshape((1, 3)))
            with pytest.raises((RuntimeError, NotImplementedError)) as theirs:
                FUNCTIONS["with doubles"](whole(dtype))
            with pytest.raises(theirs.type) as ours:
                FUNCTIONS["with doubles"](x)
            assert str(ours.value) == str(theirs.value)

    distdl.run_workers(work, 4)


@pytest.mark.parametrize("call", [
    lambda x, P: forward_ad.make_dual(x, torch.ones(6)),
    lambda x, P: forward_ad.make_dual(torch.ones(6), x),
    lambda x, P: forward_ad.unpack_dual(x),
    lambda x, P: distdl.distribute_tensor(forward_ad.make_dual(torch.ones(6), torch.ones(6)), P),
    lambda x, P: distdl.GlobalTensor.from_local(_dual_on(0, P), P),
], ids=["make_dual", "tangent", "unpack_dual", "distribute_tensor", "from_local"])  # fmt: skip
def test_tangents_of_global_tensors_are_one_error_and_what_it_names_works(call):
    def main():
        P = distdl.world()[:2].reshape(2)
        x = distdl.distribute_tensor(torch.arange(6.0), P)
        with pytest.raises((NotImplementedError, ValueError)) as error:
            call(x, P)
        y, tangent = torch.func.jvp(lambda x: x * x, (x,), (torch.ones(6),))
        return str(error.value), y.tolist(), tangent.tolist()

    with forward_ad.dual_level():
        (text, y, tangent), *others = distdl.run_workers(main, 3)
    assert "torch.func.jvp(function, (x,), (tangent,))" in text and others == [(text, y, tangent)] * 2
    assert y == [0, 1, 4, 9, 16, 25] and tangent == [0, 2, 4, 6, 8, 10]


def _dual_on(worker, P):
    block = torch.ones(3)
    return forward_ad.make_dual(block, torch.ones(3)) if P.rank == worker else block


@pytest.mark.filterwarnings(
    "ignore:.*has no op for global tensors", "ignore:Sparse CSR", "ignore:The PyTorch API of nested"
)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.to_sparse(), lambda x: x.t().to_sparse_csr(),
        lambda x: torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 2])),
        lambda x: torch.nested.nested_tensor([x, x]), lambda x: torch.nested.as_nested_tensor([x, x]),
    ],
)  # fmt: skip
def test_results_of_which_no_worker_can_have_a_block(function):
    def work():
        x = distdl.distribute_tensor(doubles, distdl.world()[:2].reshape(1, 2))
        with pytest.raises(TypeError, match=r"no worker can have a block\. Make it of x\.full_tensor\(\)"):
            function(x)
        assert x.sum().item() == pytest.approx(4)

    function(doubles)  # (torch imports what nested tensors need in their first function, and not in threads at once)
    distdl.run_workers(work, 3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clone().exponential_(0), lambda x: x.clone().log_normal_(0, 0), lambda x: x.clone().cauchy_(0, -1),
        lambda x: F.rrelu(x, 0.5, 0.1), lambda x: x.index_add(0, index, torch.ones(2, dtype=x.dtype)),
        lambda x: x.index_copy(1, index, torch.ones(3, 2, dtype=x.dtype)), lambda x: F.rms_norm(x, (4,), torch.ones(3)),
        lambda x: torch.bucketize(x, doubles), lambda x: F.prelu(x, doubles[:, :2]), lambda x: torch.cat([x, x.sum()]),
        lambda x: torch.arange(8).masked_fill(x.reshape(8) > 2, torch.tensor(1j)), lambda x: x[:, :0].amax(),
        lambda x: F.max_unpool1d(x[None], torch.zeros(1, 2, 3, dtype=torch.int64), 2), lambda x: F.group_norm(x[0], 1),
        lambda x: torch.zeros(2, dtype=x.dtype).masked_scatter_(x > 0, doubles),
    ],
)  # fmt: skip
def test_arguments_that_torch_refuses(function):
    def work():
        x = distdl.distribute_tensor(doubles, distdl.world()[:2].reshape(1, 2))
        with pytest.raises(RuntimeError) as ours:
            function(x)
        with pytest.raises(RuntimeError) as theirs:
            function(doubles)
        assert str(ours.value)[:7] == str(theirs.value)[:7]

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("function", [lambda x: x.numpy(), np.asarray])
def test_no_array_of_what_requires_a_gradient(function):
    def work():
        x = distdl.distribute_tensor(doubles, distdl.world()[:2].reshape(1, 2))
        assert (function(x) == function(doubles)).all()
        plain = doubles.clone().requires_grad_()
        for ours, theirs in ((x.requires_grad_(), plain), (x * 2, plain * 2)):
            with pytest.raises(RuntimeError) as expected:
                function(theirs)
            with pytest.raises(RuntimeError) as found:
                function(ours)
            assert str(found.value) == str(expected.value)
            assert (ours.numpy(force=True) == theirs.numpy(force=True)).all()
            assert (function(ours.detach()) == function(theirs.detach())).all()

    distdl.run_workers(work, 3)


def test_dims_have_no_names():
    def work():
        x = distdl.distribute_tensor(doubles, distdl.world().reshape(1, 2))
        with pytest.raises(AttributeError, match=r"Say dims by their numbers; x\.layout tells how each is split"):
            x.names  # noqa: B018
        assert hasattr(x, "names") == hasattr(doubles, "names")

    distdl.run_workers(work, 2)
