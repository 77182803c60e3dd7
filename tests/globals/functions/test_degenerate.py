"""Infinities, nan, zeros, and dims without cells: values and gradients are those of torch."""

from math import inf, nan

import pytest
import torch
from launched import on_workers, split
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F

rows = torch.tensor(
    [
        [1.0, -2, 3, 0.5, 2], [-inf] * 5, [nan] * 5, [0.0] * 5, [-inf, -inf, -900, -901, -inf], [1, nan, 2, 0, 3],
        [2.0] * 5, [-inf, -1, -inf, -2, -3],
    ],
    dtype=torch.float64,
)  # fmt: skip
infinite = torch.tensor([[1.0, inf, 2, 0, 3], [inf] * 5, [inf, -inf, 1, 2, 3]], dtype=torch.float64)
GRIDS = [(1, 4), (2, 2)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.softmax(1), lambda x: x.log_softmax(1), lambda x: x.logsumexp(1), lambda x: x.sum(1),
        lambda x: (x.amax(1), x.max(), x.min()), lambda x: torch.linalg.vector_norm(x, 1, 1),
        lambda x: (torch.linalg.vector_norm(x, inf, 1), torch.linalg.vector_norm(x, -inf)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("x", [rows, infinite], ids=["rows", "infinite"])
def test_values_that_are_no_numbers(function, x):
    assert_same(function, Global(x), grids=GRIDS)


def test_of_whole_dims():
    for x in (rows, infinite):
        assert_same(lambda x: torch.var_mean(x, 1), Global(x), grids=[(4, 1)])
        assert_same(lambda x: (torch.linalg.vector_norm(x, inf, 1), x.norm(3, 1)), Global(x), grids=[(4, 1)])
    assert_same(lambda x: (x.std(1), F.normalize(x)), Global(rows[[0, 3, 6]]), grids=GRIDS)
    target = torch.tensor([0, 1, 2, 3, 2, 0, 4, 1])
    finite = rows[[0, 3, 4, 6, 7]]
    assert_same(lambda x: F.cross_entropy(x, target[[0, 3, 4, 6, 7]], reduction="none"), Global(finite), grids=GRIDS)


@pytest.mark.filterwarnings("ignore:group_norm has no op for global tensors")
@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: F.conv1d(x, w, b, padding=1), lambda x, w, b: F.conv2d(x[..., None], w[..., None], b),
        lambda x, w, b: F.group_norm(x, 2), lambda x, w, b: F.group_norm(x, 1, b[:0], b[:0]),
    ],
)  # fmt: skip
def test_no_channels(function):
    x, weight, bias = (torch.ones(shape, dtype=torch.float64) for shape in ((2, 0, 5), (3, 0, 2), (3,)))
    try:
        function(x, weight, bias)
    except RuntimeError:  # (a group norm, since torch 2.14)
        assert_raises_the_same(lambda x: function(x, weight, bias), x)
    else:
        assert_same(function, Global(x), weight, bias, grids=[(2, 1, 1), (1, 1, 2)], falls_back=True)


def test_gradients_of_norms_beside_infinite_cells():
    for x in (rows, infinite, torch.tensor([[1e200, 1e200, 1, 2], [0, 0, 0, 3]], dtype=torch.float64)):
        assert_same(lambda x: (x.norm(2, 1), x.norm(3, 1), x.norm(2, 0), x.norm()), Global(x), grids=GRIDS)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (4, 1)])
@pytest.mark.parametrize("dim", [0, 1, (0, 1)])
def test_dims_without_cells(shape, dim):
    def function(x):
        spread = x.var(dim, correction=0) if x.numel() else x.mean(dim)
        found = [x.logsumexp(dim), spread, x.sum(dim), torch.linalg.vector_norm(x, 2, dim), x.norm(1, dim)]
        return [*found, x.prod(), x.prod(dim)] if isinstance(dim, int) else [*found, torch.dist(x, x * 2)]

    assert_same(function, Global(torch.ones(shape, dtype=torch.float64)), grids=[(4, 1), (1, 4), (2, 2)])


@on_workers
def test_what_has_no_value():
    for shape in ((0, 4), (4, 0)):
        x, plain = split(torch.zeros(shape), 1, 2), torch.zeros(shape)
        for function in (torch.max, lambda x: torch.linalg.vector_norm(x, inf), lambda x: x.quantile(0.5, 0)):
            with pytest.raises(RuntimeError) as expected:
                function(plain)
            with pytest.raises(RuntimeError) as found:
                function(x)
            assert str(found.value)[:40] == str(expected.value)[:40]


def test_layer_norms_of_one_dim_of_which_a_worker_has_one_cell_or_none():
    row, weight = Global(torch.arange(5.0, dtype=torch.float64) ** 2), torch.linspace(0, 1, 5, dtype=torch.float64)
    assert_same(lambda x, w: (F.layer_norm(x, (5,)), F.rms_norm(x, (5,), w)), row, weight, twice=True, tolerance=1e-9)


def test_extremes_of_no_complex_numbers_are_none():
    nothing = torch.zeros(0, 2, dtype=torch.complex128)
    assert_same(lambda x: (torch.amax(x.detach(), 1), x.detach().amin((1,), True)), Global(nothing))


REFUSED = {
    "odd halves": (lambda x: F.glu(x), torch.ones(2, 3)),
    "a mean of integers": (lambda x: x.mean(0), torch.ones(3, 2, dtype=torch.int64)),
    "a deviation of integers": (lambda x: x.std(), torch.ones(3, 2, dtype=torch.int32)),
    "a norm of integers": (lambda x: torch.linalg.vector_norm(x), torch.ones(3, 2, dtype=torch.int64)),
    "a norm of integers as another": (
        lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
        torch.ones(3, 2, dtype=torch.int64),
    ),
    "a norm as integers": (lambda x: torch.linalg.vector_norm(x, dtype=torch.int64), torch.ones(3, 2)),
    "a solution of integers": (lambda x: torch.linalg.solve(x, x), torch.ones(2, 2, dtype=torch.int64)),
    "extremes of complex numbers": (torch.aminmax, torch.ones(3, 2, dtype=torch.complex64)),
    "extremes of nothing": (torch.aminmax, torch.ones(3, 0)),
    "extremes along nothing": (lambda x: torch.aminmax(x, dim=1), torch.ones(3, 0, dtype=torch.complex64)),
    "a mean loss of integers": (lambda x: F.l1_loss(x, x), torch.ones(3, 2, dtype=torch.int64)),
    "averages of integers": (lambda x: F.adaptive_avg_pool1d(x, 1), torch.ones(2, 3, 4, dtype=torch.int64)),
    "the place of the largest truth": (lambda x: x.argmax(), torch.ones(3, 2, dtype=torch.bool)),
    "an index of other dims": (lambda x: x.scatter(1, torch.ones(3, dtype=torch.int64), 2.0), torch.ones(3, 2)),
    "complex numbers in order": (lambda x: x.sort(0), torch.ones(3, 2, dtype=torch.complex64)),
}


@pytest.mark.parametrize("what", REFUSED)
@on_workers
def test_what_torch_refuses_is_refused_where_there_are_no_cells_too(what):
    function, x = REFUSED[what]
    with pytest.raises((RuntimeError, TypeError, IndexError)) as theirs:
        function(x)
    with pytest.raises(type(theirs.value)) as ours:
        function(split(x))
    assert str(ours.value) == str(theirs.value)


def test_a_number_is_no_truth_value():
    images = torch.ones(1, 3, 4, 4)
    for refused in (
        lambda x: F.batch_norm(x, None, None, training=-7),
        lambda x: F.max_pool2d(x, True, 1, 0),
        lambda x: F.avg_pool2d(x, 2, True),
    ):
        with pytest.raises(TypeError, match="bool"):
            refused(images)

        def work(refused=refused):
            x = split(images, 1, 1, 2, 1)
            with pytest.raises(TypeError, match="bool"):
                refused(x)

        on_workers(work)()


NUMBER, FIRST = noise(), torch.tensor([0])
OF_NUMBERS = {
    "index_fill": lambda x, y: (x.index_fill(0, FIRST, 2.0), (x * 1).index_fill_(0, FIRST, 3)),
    "index_add": lambda x, y: (x.index_add(0, FIRST, y, alpha=2), x.index_copy(0, FIRST, y), x.index_select(0, FIRST)),
    "masked_fill": lambda x, y: (x.masked_fill(torch.tensor(True), y), (x * 1).masked_fill_(torch.tensor(False), y)),
    "expand_as": lambda x, y: (x.expand_as(y), y.expand_as(x)),
    "scatter_reduce": lambda x, y: (x * 1).scatter_reduce_(0, torch.tensor(0), y, "prod", include_self=False),
    "index_reduce": lambda x, y: (x * 1).index_reduce_(0, FIRST, y, "amax"),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", OF_NUMBERS)
def test_tensors_without_dims(name):
    for other in (noise(seed=1), Global(noise(seed=2))):
        assert_same(OF_NUMBERS[name], Global(NUMBER), other, falls_back=True)


def test_what_does_nothing_gives_its_argument():
    x, more = noise(5, 3), noise(2, 3)
    assert_same(lambda x, y: x.diff(n=0, dim=0, append=y), Global(x), more)
    assert_same(lambda x: (torch.cartesian_prod(x), *torch.atleast_1d(x, x.sum())), Global(x[:, 0]), falls_back=True)
    assert_same(lambda x, none: (torch.cat([none, x], 1), torch.cat([x, none])), Global(x), torch.zeros(0))
    assert_same(lambda none, x: torch.cat([none, x], 1), Global(torch.zeros(0)), x, grids=[(2,)])
    assert_same(lambda x: F.feature_alpha_dropout(x, 0.5), Global(x[:, 0]))


def test_dtypes_of_integers_and_truths():
    whole, mask = torch.arange(12).reshape(3, 4), torch.arange(12).reshape(3, 4) % 3 > 0
    assert_same(lambda x: torch.addmm(x[:, :3], x, x.mT, beta=0.6, alpha=1.6), Global(whole))
    assert_same(lambda x: (x.prod(1, dtype=torch.bool), x.prod(0)), Global(mask))
    assert_same(lambda x, at: torch.take_along_dim(x, at, 1), Global(whole), torch.tensor([[0, -1], [-4, 2], [1, 1]]))


def test_what_nothing_is_picked_from():
    """Torch does not look whether indices are out of range."""
    assert_same(
        lambda x: (x[..., [1], :0], x[:0, [4, 5]], x[[7], :, :0]), Global(noise(2, 1, 3)), grids=[(2, 1, 1), (1, 1, 2)]
    )
