"""Parts of global tensors, and what gathers and scatters along dims."""

import numpy as np
import pytest
import torch
from launched import split
from same import Global, assert_raises_the_same, assert_same, noise

import distdl

x4 = noise(3, 5, 7, 4)
x3 = noise(5, 7, 3)
x2 = noise(5, 7)
rows = torch.tensor([4, 0, 2, 2])
labels = torch.tensor([[0, 2, 1, 1, 0], [3, 3, 2, 0, 1], [1, 0, 0, 2, 3]])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[0], lambda x: x[:, -1], lambda x: x[:, 1:], lambda x: x[..., :2], lambda x: x[:, :, ::2, 1::2],
        lambda x: x[1, 2, 3, 0], lambda x: x[..., 0], lambda x: x[:, None], lambda x: x[0, ..., None, -1],
        lambda x: x[:, 3:3], lambda x: x[:, :, 2:-2, -3:], lambda x: x[...], lambda x: x[:, :, 6:1], lambda x: x[2][1],
        lambda x: x[:, torch.tensor(2)], lambda x: x.select(1, -2), lambda x: x.narrow(2, 1, 4), lambda x: x.unbind(1),
        lambda x: torch.unbind(x, dim=-1), lambda x: x.split(2, dim=1), lambda x: x.split([4, 1], 1),
        lambda x: x.chunk(2, 1),
        lambda x: torch.chunk(x, 3, dim=-2), lambda x: x.tensor_split((1, 5), dim=2),
        lambda x: torch.tensor_split(x, 2),
        lambda x: x.split_with_sizes([3, 4], 2), lambda x: torch.vsplit(x, [2]), lambda x: x.hsplit([1, 2]),
        lambda x: list(x), lambda x: x.unsafe_split(2, 1), lambda x: x.unsafe_chunk(2, 1),
        lambda x: torch.unsafe_split_with_sizes(x, [3, 4], 2),
        lambda x: torch.narrow(x, -1, -2, 2), lambda x: x.chunk(2, dim=-1)[0] * x.chunk(2, dim=-1)[1].sigmoid(),
    ],
)  # fmt: skip
def test_basic_indices(function):
    assert_same(function, Global(x4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[rows], lambda x: x[:, rows], lambda x: x[rows, rows],
        lambda x: x[:, rows, torch.tensor([0, 1, 2, 0])],
        lambda x: x[rows, :, torch.tensor([0, 1, 2, 0])], lambda x: x[:, [1, 0]], lambda x: x[1:, rows[:, None]],
        lambda x: x[rows[:, None], rows], lambda x: x[2, rows],
        lambda x: x[torch.tensor([True, False, True, True, False])],
        lambda x: x[..., torch.tensor([2, -1])], lambda x: x[x2 > 0], lambda x: x[np.array([0, 3])],
        lambda x: x[rows[:0]],
        lambda x: x.index_select(1, rows), lambda x: torch.index_select(x, -1, torch.tensor([2, 2])),
    ],
)  # fmt: skip
def test_plain_index_tensors(function):
    assert_same(function, Global(x3))


@pytest.mark.filterwarnings(
    "ignore:Using a non-tuple sequence"
)  # (torch may come to read it otherwise, and then we must)
@pytest.mark.parametrize(
    "index", [[slice(1, None), None, Ellipsis], [[0, 1], [1, 2]], [rows[:2], 1], [0, slice(2)]], ids=str
)
def test_a_list_of_indices_is_a_tuple(index):
    """As for torch, which warns of it: it may come to read such lists otherwise, and then so must we."""
    assert_same(lambda x: x[index], Global(x3))


def test_global_index_tensors():
    assert_same(lambda x, i: x[i], Global(x3), Global(rows))
    assert_same(lambda x, i: x[:, i], Global(x3), Global(labels))
    assert_same(lambda table, i: table[i], noise(4, 2), Global(labels))
    assert_same(lambda table, i: table[..., i], noise(3, 2, 4), Global(labels))
    assert_same(lambda table, i: table[1, :, i, None], noise(3, 2, 4, 2), Global(labels))
    assert_same(lambda table, i: (2 * table)[:, i, 1:], noise(3, 4, 2), Global(labels), twice=True)
    assert_same(lambda x: (x[[]], x[:, []]), Global(x2))
    both = (Global(torch.tensor([[0, -1, 2], [3, 1, -4]])), Global(torch.tensor([1, 0, -3])))
    assert_same(lambda table, i, j: table[i, j], noise(4, 3), *both)
    assert_same(lambda table, i, j: (2 * table)[1, :, i, j, None], noise(2, 2, 4, 3, 2), *both, twice=True)
    assert_same(lambda table, i: table[i, torch.tensor([0, 2, 1])], noise(4, 3), both[0])
    assert_same(lambda table, i: (table[i, i], table[0][i, i], table[..., i, i, i]), noise(4, 4, 4), both[0])
    with pytest.raises((IndexError, distdl.CommunicationError), match="index 4 is out of bounds"):
        distdl.run_workers(lambda: noise(9, 3)[(split(torch.tensor([[1, 0, 4]]), 1, 2),) * 2], 3)


def written(*index):
    def function(x, value):
        x[index if len(index) > 1 else index[0]] = value
        return x.sin()

    return function


@pytest.mark.parametrize(
    ("index", "value"),
    [
        ((0,), 2.0), ((slice(None), slice(1, 4)), Global(noise(5, 3, 3))), ((slice(None), slice(1, 4)), noise(3, 3)),
        ((Ellipsis, 1), Global(noise(5, 7))), ((2, 3, 1), 5),
        ((2, 3, 1), Global(torch.tensor(2.5, dtype=torch.float64))),
        ((slice(1, None, 2), slice(None, None, 3)), Global(noise(2, 3, 1))), ((slice(2, 2),), 1.0),
        ((Ellipsis,), noise(1, 3)),
        ((slice(None), slice(5, 7)), Global(noise(1, 5, 2, 3))),
        ((rows,), 1.0), ((slice(None), rows), -1.0), ((rows, rows), 3.0), ((x2 > 0,), 0.5), ((Global(x2 > 0),), 0.5),
    ],
)  # fmt: skip
def test_assignments(index, value):
    if isinstance(index[0], Global):
        assert_same(lambda x, i, v: written(i)(x, v), Global(x3), index[0], value)
    else:
        assert_same(written(*index), Global(x3), value)


@pytest.mark.parametrize(
    "index",
    [
        (True,), (False,), (torch.tensor(True),), (torch.tensor(False),), (Global(torch.tensor(True)),),
        (slice(None), True, 0), (True, rows), (slice(1, 3), True, rows, True),
    ],
)  # fmt: skip
def test_truths(index):
    """A bool adds a dim, of one row or none."""
    if isinstance(index[0], Global):
        assert_same(lambda x, i: (x[i].sin(), written(i)(x, 2.0)), Global(x3), *index)
    else:
        assert_same(lambda x: (x[index].sin(), written(*index)(x, -2.0)), Global(x3))
    if index[0] is True:  # (of a value that is written nowhere, torch gives no gradient, and we give zeros)
        assert_same(written(*index), Global(x3), Global(noise(3)))


def test_index_put_at_a_truth():
    def function(x, v):
        if isinstance(x, distdl.GlobalTensor):
            return x.index_put((torch.tensor(True),), v), x.index_put((torch.tensor(False),), v)
        return x.clone().copy_(v), x.clone()  # torch's own gets no further than an assertion

    assert_same(function, Global(x3), Global(noise(3)))


def put(x, *given):
    return x.index_put(*given)


def added(x, *given):
    return x.index_put_(*given, accumulate=True).sin()


@pytest.mark.parametrize("value", [Global, Global(noise(3), (3,)), lambda x: x])
def test_assignments_of_tensors_at_index_tensors(value):
    """Each worker writes what it has; nothing comes together."""
    value = value if callable(value) else lambda x, one=value: one if x.dim() == 1 else Global(x)
    i, j = torch.tensor([4, 0, 2]), torch.tensor([-1, 1, 6])
    assert_same(written(i), Global(x3), value(noise(3, 7, 3)))
    assert_same(written(i, j), Global(x3[..., 0]), value(noise(3)), grids=[(2, 2), (4, 1)])
    assert_same(written(slice(None), j), Global(x3), value(noise(5, 3, 3)), grids=[(2, 1, 2), (1, 2, 2)])
    assert_same(written(slice(1, 3), i[:, None] % 2, Ellipsis, j[1:] % 3), Global(x3), value(noise(2, 3, 2)))


def test_index_put():
    i, j = torch.tensor([1, 1, 4]), torch.tensor([3, 3, 0])
    assert_same(lambda x, v: put(x, (i, j), v), Global(x2), Global(torch.full((3,), 0.5, dtype=torch.float64)))
    assert_same(lambda x, v: added(x, (i, j), v), Global(x2), Global(noise(3)), twice=True, grids=[(2, 2)])
    assert_same(lambda x, v: added(x, (i,), v), Global(x2), noise(7))
    assert_same(lambda x, i, v: put(x, (i, j), v), Global(x2), Global(torch.tensor([4, 0, 2])), Global(noise(1)))


@pytest.mark.parametrize("number", [torch.tensor(-2), Global(torch.tensor([5]))])
def test_index_put_at_a_number(number):
    """Other than in a subscript, a number is an index tensor here, also beside others and a mask."""
    i, mask = torch.tensor([1, 1, 4]), noise(5) > 0
    one = (lambda n: n[0]) if isinstance(number, Global) else (lambda n: n)
    assert_same(lambda x, n, v: put(x, (i, one(n)), v, True), Global(x2), number, Global(noise(3)))
    assert_same(lambda x, n, v: added(x, (one(n) - 2, one(n)), v), Global(x2), number, noise())
    assert_same(lambda x, n, v: put(x, (mask, one(n)), v), Global(x2), number, noise(1))
    assert_same(lambda x, m, n, v: put(x, (m, one(n)), v), Global(x2), Global(mask), number, noise(1))


def test_pieces_behind_places():
    assert_same(lambda x: x.tensor_split(torch.tensor([1, 4]), dim=1), Global(x2))


def test_second_derivatives():
    assert_same(lambda x: (x[:, 1:] * x[:, :-1]).sin(), Global(x2), twice=True)
    assert_same(lambda x: x[rows].sin(), Global(x2), twice=True)
    assert_same(lambda x, v: written(slice(None), slice(1, 3))(x, v), Global(x2), Global(noise(5, 2)), twice=True)
    assert_same(lambda x: x.gather(1, labels[:, :2]).sin(), Global(x2), twice=True)


def test_parts_are_views():
    def work():
        P = distdl.world().create_partition_inclusive(range(4)).create_cartesian_topology_partition((2, 2, 1))
        x = distdl.distribute_tensor(x3, P)
        whole = x3.clone()
        for y in (x, whole):
            y[:, 2:].mul_(2)
            y.chunk(2, dim=1)[0].add_(1)
            y[1:, 3, None].zero_()
            y[0] += 1
        assert torch.equal(x.full_tensor(), whole)

    distdl.run_workers(work, 5)


def test_one_hot_targets():
    def one_hot(logits, target):
        return torch.zeros_like(logits).scatter_(1, target.unsqueeze(1), 1.0) * logits

    target = torch.arange(2 * 5 * 7).reshape(2, 5, 7) * 3 % 4
    assert_same(one_hot, Global(noise(2, 4, 5, 7)), Global(target, (1, 2, 2)))
    assert_same(one_hot, Global(noise(2, 4, 5, 7)), target, grids=[(1, 4, 1, 1), (1, 1, 2, 2)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[7], lambda x: x[:, :, :, :], lambda x: x[torch.tensor([9])], lambda x: x.narrow(0, 4, 3),
        lambda x: x.split([3], 0),
        lambda x: x.select(1, 9), lambda x: x.unbind(4), lambda x: x.gather(1, torch.zeros(9, 1, dtype=torch.int64)),
    ],
)  # fmt: skip
def test_torch_raises_the_same(function):
    assert_raises_the_same(function, x2)


def test_what_requires_no_gradient_is_written_with_what_does():
    def shifted(x):
        y = torch.zeros_like(x)
        y[:, 1:] = x[:, :-1]
        y[0] = x[1] * x[2]
        return y * y

    assert_same(shifted, Global(x2), twice=True)
    assert_same(shifted, Global(x2), grids=[(4, 1), (1, 4)])


def test_views_that_are_written_in_place_twice_differentiable():
    def function(x):
        y = x * x
        y[:, 2:].mul_(x[:, :1])
        y[:, :3].add_(x[:1, 2:5])
        return y.sin()

    assert_same(function, Global(x2), grids=[(4, 1), (2, 1)], twice=True)


def _chain(x):
    a = x.reshape(-1)
    b = a.view(1, -1)
    c = b[0]
    c.div_(0.5)
    return a, b, c


def _part(x):
    y = x.transpose(0, 1)[:1]
    z = y.unsqueeze(0)
    y *= y.detach() + 0.5
    return x, y, z


def _assigned(x):
    y, z = x.view(x.shape), x[:1]
    y[:1] = z.clone() * 2
    y[:, :2] = 0.5
    return x, y, z


def _written_whole(x):
    y = x.movedim(0, 1)
    z = y[1:]
    x.mul_(1.5).sin_()
    return x, y, z


def _parts_of_complex(x):
    z = torch.complex(x, x * 0.5)
    y = z.real
    y[:1].mul_(2)
    z.conj().imag.mul_(3)
    w = torch.view_as_complex(torch.stack([x, x], -1))
    w.mul_(2)
    return z.real, y, w.imag


def _between(x):
    y = x[:1].squeeze(0)
    x.t().mul_(1.5)  # (before the view is used for the first time)
    y.add_(x[1].detach().clone())
    return x, y, x.select(0, 0)


@pytest.mark.parametrize("written", [_chain, _part, _assigned, _written_whole, _parts_of_complex, _between])
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (2, 0)])
def test_views_written_in_place_on_workers_without_cells(written, used):
    """Each of the views by itself, in first and second derivatives, where some workers have no cell of any of them."""

    def function(x):
        views = written(x.flip(0, 1) * 1)  # (the second derivative has to go back over the messages of this)
        return sum((views[place] ** 3).sum() for place in used)

    assert_same(function, Global(x2[:2, :3]), grids=[(1, 1), (3, 1), (1, 2)], workers=4, twice=True)


VIEWS_OF_VIEWS = {
    "a part": lambda p: p[:, 1:].unsqueeze(0),
    "the order": lambda p: p.T[1:],
    "a part that some workers have": lambda p: p[:1],
    "written": lambda p: p.mul_(2)[:, 1],
    "a part of complex numbers": lambda p: torch.view_as_complex(p[:, :2]).conj().imag,
}


@pytest.mark.parametrize("view", VIEWS_OF_VIEWS.values(), ids=VIEWS_OF_VIEWS.keys())
@pytest.mark.parametrize("by", ["derivative", "hook"])
def test_a_view_of_a_view_is_differentiated_by_the_view_on_workers_without_cells(view, by):
    def function(x):
        p = (x.flip(0, 1) * 2).reshape(2, 6)[:, :4]
        if by == "hook":
            p = p.reshape(2, 2, 2)[:, 0]
            p.register_hook(lambda dp: dp * dp.sum())
            return view(p).sin().sum()
        (dp,) = torch.autograd.grad(view(p).sin().sum(), p, create_graph=True)
        return dp * p

    grids = [(1, 1, 1), (3, 1, 1), (1, 2, 1)]
    assert_same(function, Global(noise(2, 2, 3)), grids=grids, workers=4, twice=by == "derivative")


def test_views_of_what_has_fallen_back_in_place():
    def function(x):
        y = x.flip(0) * 1
        part = y[:1]
        y.renorm_(2, 0, 0.5)
        return (part**3).sum()

    assert_same(function, Global(noise(2, 3)), grids=[(3, 1), (1, 2)], workers=4, falls_back=True, twice=True)


def test_the_order_of_named_numbers_does_not_matter():
    assert_same(lambda x: x.narrow(dim=1, length=2, start=3), Global(noise(5, 7)))
    assert_same(lambda x: x.select(index=-2, dim=1), Global(noise(5, 7)))


@pytest.mark.parametrize(
    "mask", [torch.tensor([True, False, True]), torch.ones(5, 6, dtype=torch.bool), torch.ones(5, 7, 4).bool()], ids=str
)
def test_masks_of_other_extents(mask):
    """Refused by torch, also where all that the mask chooses is there."""

    def write(x):
        x[mask] = 0.0

    assert_raises_the_same(lambda x: x[mask], x3, text=True)
    assert_raises_the_same(write, x3, text=True)
    assert_raises_the_same(lambda x: x[:, :, mask[:, 0] if mask.dim() > 1 else mask[:2]], x3)


@pytest.mark.parametrize("index", [1.5, {}])
def test_what_is_no_index(index):
    assert_raises_the_same(lambda x: x[index], x3)


def test_index_tensors_that_do_not_broadcast():
    def write(x):
        x[[0, 1], :, [0, 1, 2]] = 0.0

    assert_raises_the_same(lambda x: x[[0, 1], :, [0, 1, 2]], x3, text=True)
    assert_raises_the_same(write, x3, text=True)


def test_a_mask_of_bytes_without_dims():
    for value in (0, 1):
        mask = torch.tensor(value, dtype=torch.uint8)
        assert_same(lambda x, mask=mask: (x[mask], x[mask, 1], x[:, mask]), Global(x2))


def test_split_indices_of_a_plain_table_that_do_not_broadcast():
    table = torch.zeros(4, 3)

    def work():
        i, j = (distdl.distribute_tensor(torch.tensor(one), distdl.world()) for one in ([0, 4], [0, 1, 2]))
        with pytest.raises(IndexError, match="shape mismatch"):
            table[i, j]

    distdl.run_workers(work, 3)
