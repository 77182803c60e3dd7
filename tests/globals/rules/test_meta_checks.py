"""How often torch is asked about sizes, and that its errors come also behind sizes that fit."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import Global, assert_same, noise
from torch.nn import functional as F

import distdl
from distdl import GlobalTensor
from distdl.globals.functions import interpolation
from distdl.globals.layouts.context import Context
from distdl.globals.rules.meta_checks import check_once
from distdl.globals.rules.work import check_shapes


def _asked(ask, sizes):
    """For each shape, whether torch is asked."""
    seen = []

    def count(x, *rest):
        seen.append(x.shape)
        return x

    told = []
    for shape in sizes:
        before = len(seen)
        ask(count, split(noise(*shape)))
        told.append(len(seen) > before)
    return told


@on_workers
def test_sizes_that_torch_does_not_look_at_are_asked_about_once():
    def ask(count, x):
        check_once(count, (x, 0.1), {}, x, (1,))

    assert _asked(ask, [(2, 4, 5), (3, 4, 7), (2, 4, 5), (2, 3, 5), (2, 4, 1), (7, 4, 1), (2, 4, 0), (2, 4, 2)]) == [
        True, False, False, True, True, False, True, False,
    ]  # fmt: skip


@on_workers
def test_sizes_that_are_compared_are_asked_about_once():
    def ask(count, x):
        check_shapes(count, [x, x.detach()[:2]], compares=True)

    # (the second operand has two rows, which are as many as those of x, or others, or as its columns)
    assert _asked(ask, [(4, 5), (6, 7), (4, 5), (2, 5), (2, 9), (4, 2), (8, 2), (1, 5), (0, 5), (3, 3), (9, 9)]) == [
        True, False, False, True, False, True, False, True, True, True, False,
    ]  # fmt: skip


@on_workers
def test_torch_is_asked_once_about_pictures_of_all_sizes(monkeypatch):
    asked = []
    check = interpolation.check_on_meta
    monkeypatch.setattr(interpolation, "check_on_meta", lambda *call: asked.append(call) or check(*call))
    for n in range(4, 9):
        for mode in ("bilinear", "bicubic"):
            for given in ({"scale_factor": 2}, {"scale_factor": 1.5, "recompute_scale_factor": True}):
                F.interpolate(split(noise(2, 3, n, 2 * n)), mode=mode, **given)
    # (all workers are counted together)
    assert len(asked) <= 3 * 4


def _matched(function, fitting, wrong):
    """A call that torch refuses, behind one of the same kind that it takes."""
    function(*[split(one) for one in fitting[:1]], *fitting[1:])
    with pytest.raises((RuntimeError, ValueError)):
        function(*wrong)
    with pytest.raises((RuntimeError, ValueError)):
        function(split(wrong[0]), *wrong[1:])


@pytest.mark.parametrize(
    "function, fitting, wrong",
    [
        (lambda x: F.batch_norm(x, None, None, training=True), [noise(4, 3, 5, 5)], [noise(1, 3, 1, 1)]),
        (lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)), [noise(4, 3, 5).float()], [noise(4, 2, 5).float()]),
        (F.instance_norm, [noise(4, 3, 5)], [noise(4, 3, 1)]),
        (lambda x: F.group_norm(x, 3), [noise(4, 6, 5)], [noise(1, 3, 1)]),
        (lambda x: F.group_norm(x, 3), [noise(4, 6, 5)], [noise(4, 5, 5)]),
        (lambda x: F.interpolate(x, scale_factor=0.4), [noise(2, 3, 5)], [noise(2, 3, 2)]),
        (lambda x: F.interpolate(x, scale_factor=0.4, mode="bilinear"), [noise(2, 3, 5, 5)], [noise(2, 3, 5, 2)]),
        (lambda x: F.interpolate(x, (4, 4), mode="bilinear"), [noise(2, 3, 5, 5)], [noise(2, 3, 0, 5)]),
        (lambda x: F.interpolate(x, (4, 4), mode="bilinear"), [noise(2, 3, 5, 5)], [noise(2, 3, 5)]),
        (torch.matmul, [noise(4, 5), noise(5, 6)], [noise(4, 5), noise(4, 6)]),
        (torch.matmul, [noise(3, 4, 5), noise(3, 5, 6)], [noise(3, 4, 5), noise(2, 5, 6)]),
        (F.linear, [noise(4, 5), noise(6, 5)], [noise(4, 5), noise(6, 4)]),
        (lambda x, y: torch.einsum("ij,jk", x, y), [noise(4, 5), noise(5, 6)], [noise(4, 5), noise(6, 5)]),
        (torch.cdist, [noise(4, 5), noise(6, 5)], [noise(4, 5), noise(6, 4)]),
    ],
)  # fmt: skip
@on_workers
def test_errors_of_sizes_come_behind_sizes_that_fit(function, fitting, wrong):
    _matched(function, fitting, wrong)


@on_workers
def test_heads_that_share_keys_are_counted_behind_heads_that_fit():
    def attend(q, k):
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    _matched(attend, [noise(2, 4, 5, 3), noise(2, 2, 5, 3)], [noise(2, 5, 4, 3), noise(2, 3, 4, 3)])


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


labels = torch.arange(20).reshape(4, 5) % 3


scores = torch.arange(60.0, dtype=torch.float64).reshape(4, 3, 5).sin()


INDEXED = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "nll_loss": lambda x, t: F.nll_loss(x, t, reduction="sum"),
    "embedding": lambda x, t: F.embedding(t, x.new_zeros(3, 2) if type(t) is torch.Tensor else torch.zeros(3, 2)),
    "one_hot": lambda x, t: F.one_hot(t, 3),
    "gather": lambda x, t: x.gather(1, t.unsqueeze(1)),
    "take_along_dim": lambda x, t: x[0, :, 0].take_along_dim(t),
    "scatter": lambda x, t: torch.zeros_like(x).scatter_(1, t.unsqueeze(1), 1.0),
    "table": lambda x, t: torch.zeros(3)[t],
    "table of two": lambda x, t: torch.arange(9.0).reshape(3, 3)[t, t],
    "index": lambda x, t: x[0, t],
    "index_put": lambda x, t: torch.zeros_like(x[0]).index_put_((t,), torch.ones(5).double()),
    "index_select": lambda x, t: x.index_select(1, t.flatten()),
    "index_add": lambda x, t: x.index_add(-2, t.flatten(), torch.ones(4, 20, 5).double()),
    "index_fill": lambda x, t: x.index_fill(1, t.flatten(), 2.0),
}


@pytest.mark.parametrize("index", [7, -1, -4, 2**40])
@pytest.mark.parametrize("name", INDEXED)
def test_every_worker_raises_an_error_that_says_what_torch_says(name, index):
    function, wrong = INDEXED[name], labels.clone()
    wrong[3, 4] = index  # which one worker reads
    try:
        expected = function(scores, wrong)
    except (IndexError, RuntimeError) as error:
        expected = error

    def assert_told(grid, place):
        told = []

        def work():
            try:
                x = split(scores, *grid)
                t = {"as x": split(wrong, 2), "in columns": split(wrong, 1, 2), "plain": wrong}[place]
                found = function(x, t)
                whole = found.full_tensor() if type(found) is GlobalTensor else found
            except (IndexError, RuntimeError) as error:
                told.append(error)
                raise
            told.append(whole)

        if not isinstance(expected, Exception):
            distdl.run_workers(work, 3)
            assert all(torch.equal(one, expected) for one in told)
            return
        with pytest.raises((type(expected), distdl.CommunicationError)):
            distdl.run_workers(work, 3)
        text = str(expected).split(" for dimension")[0]
        assert all(isinstance(one, (type(expected), distdl.CommunicationError)) and text in str(one) for one in told)
        assert len(told) == 3

    nothing_is_global = name in ("embedding", "one_hot", "table", "table of two")
    for grid in ((2, 1, 1), (1, 3, 1)):
        for place in ("as x", "in columns") if nothing_is_global else ("as x", "in columns", "plain"):
            assert_told(grid, place)


@on_workers
def test_places_to_ignore():
    x = split(scores)
    for mark in (255, -100, -1, 5):
        marked = torch.where(labels == 2, mark, labels)
        expected = F.cross_entropy(scores, marked, ignore_index=mark)
        entered = split(marked, 2)
        blocks = GlobalTensor.from_local(entered.to_local(), entered.layout.partition)
        for target in (entered, marked, blocks):
            assert_close(F.cross_entropy(x, target, ignore_index=mark), expected)
        none = torch.full_like(labels, mark)
        assert F.cross_entropy(x, split(none), ignore_index=mark).isnan()


@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 3, 1)])
def test_a_class_beside_those_to_ignore_that_is_out_of_range(grid):
    marked = torch.where(labels == 0, 255, labels)
    marked[3, 4] = 7
    with pytest.raises((IndexError, distdl.CommunicationError), match="Target 7 is out of bounds"):
        distdl.run_workers(lambda: F.cross_entropy(split(scores, *grid), split(marked, 2), ignore_index=255), 3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_what_is_ignored_by_default_is_no_class_number_of_a_byte(dtype):
    """-100 would be 156 among them."""
    marked = labels.to(dtype)
    marked[3, 4] = 156
    with pytest.raises((IndexError, distdl.CommunicationError), match="Target 156 is out of bounds"):
        distdl.run_workers(lambda: F.nll_loss(split(scores[..., 0], 1, 3), split(marked[:, 4], 2)), 3)
