"""Functions that give the same cells another shape."""

import pytest
import torch
from same import GRIDS, Global, assert_raises_the_same, assert_same, noise

import distdl

x3, x4, x5 = noise(3, 5, 7), noise(2, 5, 4, 3), noise(2, 3, 4, 5, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.permute(0, 2, 3, 1), lambda x: torch.permute(x, (3, 0, -2, 1)), lambda x: x.transpose(1, 2),
        lambda x: x.transpose(dim0=-1, dim1=0), lambda x: x.movedim(1, -1), lambda x: torch.moveaxis(x, (0, 1), (2, 0)),
        lambda x: x.mT, lambda x: x.mH, lambda x: x.adjoint(), lambda x: x.swapaxes(0, 3),
        lambda x: x.transpose_(0, 1) + 1,
    ],
)  # fmt: skip
def test_permutations(function):
    assert_same(function, Global(x4))


def test_permutations_of_few_dims():
    assert_same(lambda x: (x.t(), x.T, x.H, torch.t(x)), Global(noise(5, 3)))
    assert_same(lambda x: x.t(), Global(noise(5)))
    assert_same(lambda x: (x.permute(()), x.t()), Global(torch.tensor(2.0, dtype=torch.float64)))


RESHAPES = [
    ((2, 5, 4, 3), (2, 5, 12)), ((2, 5, 4, 3), (10, 12)), ((2, 5, 4, 3), (-1,)), ((2, 5, 4, 3), (2, 20, 3)),
    ((2, 5, 4, 3), (40, 3)), ((2, 5, 4, 3), (2, 5, 2, 2, 3)), ((2, 5, 4, 3), (2, 5, 6, 2)),
    ((2, 5, 4, 3), (3, 4, 5, 2)),
    ((1, 6, 6, 3), (1, 3, 2, 2, 3, 3)), ((1, 6, 6, 3), (6, 6, 3)), ((1, 6, 6, 3), (36, 1, 3)),
    ((2, 8, 9), (2, 8, 3, 3)),
    ((2, 9, 8), (2, 9, 4, 2)), ((2, 9, 8), (2, 9, 2, 4)), ((7, 6), (7, 3, 2)), ((7, 6), (7, 2, 1, 3)), ((5, 8), (40,)),
    ((40,), (2, 4, 5)), ((12,), (3, 4)), ((1, 1), (1,)), ((0, 4), (2, 2, 0)), ((2, 3, 4, 5, 2), (6, 4, 10)),
    ((2, 2, 2, 2), (4, 4)), ((1, 4, 2, 4, 2, 3), (8, 8, 3)),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), RESHAPES)
def test_reshapes(before, after):
    x = noise(*before)
    more = {1: [(5,)], 2: [(2, 2), (1, 4), (4, 1), (1, 5)]}
    assert_same(lambda x: x.reshape(after), Global(x), grids=[*GRIDS[len(before)], *more.get(len(before), [])])
    assert_same(lambda x: (x.view(after) * 2).sin().reshape(before), Global(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flatten(1), lambda x: torch.flatten(x, 1, 2), lambda x: x.flatten(),
        lambda x: x.flatten(2).transpose(1, 2),
        lambda x: x.unflatten(2, (2, -1)), lambda x: x.ravel(), lambda x: x.unsqueeze(0), lambda x: x.unsqueeze(-1),
        lambda x: x.view(2, -1, 3), lambda x: x.view(x.size(0), 5, 2, 2, 3),
        lambda x: x.permute(0, 2, 3, 1).reshape(2, 12, 5), lambda x: x.reshape_as(x.flatten()),
        lambda x: x.view_as(x.flatten(1)),
        lambda x: torch.atleast_3d(x), lambda x: x.unsqueeze_(1) + 1, lambda x: x.view(-1).mul_(2),
    ],
)  # fmt: skip
def test_names_of_reshapes(function):
    assert_same(function, Global(x4))


def test_unit_dims():
    x = noise(1, 5, 1, 3)
    assert_same(lambda x: (x.squeeze(), x.squeeze(0), x.squeeze(2), x.squeeze(1), x.squeeze((0, 2))), Global(x))
    # the one cell of a dim may lie at any place of the axis that splits it
    assert_same(lambda x: x.squeeze(), Global(x), grids=[(4, 1, 1, 1), (1, 2, 2, 1)])
    assert_same(
        lambda x: (torch.atleast_1d(x), x.view(1, 1), x.reshape(-1)), Global(torch.tensor(2.0, dtype=torch.float64))
    )
    assert_same(lambda x: torch.atleast_2d(x), Global(noise(5)))
    assert_same(lambda x: (x.sum((1, 2)).view(()), x.sum().view(1)), Global(noise(1, 5, 3)))


def test_windows_of_a_swin_transformer():
    def partition(x):
        windows = x.view(2, 3, 2, 2, 3, 3).permute(0, 1, 3, 2, 4, 5).reshape(-1, 6, 3)
        back = (windows * windows).view(2, 3, 2, 2, 3, 3).permute(0, 1, 3, 2, 4, 5)
        return windows, back.reshape(2, 6, 6, 3)

    assert_same(partition, Global(noise(2, 6, 6, 3)), grids=[*GRIDS[4], (1, 2, 2, 1), (1, 4, 1, 1), (1, 1, 3, 1)])


def test_uneven_windows_stay_where_they_are():
    """Of 7 rows of windows in each of two samples, two workers have 4 and 3: so many windows, and not half of them."""

    def windows(x):
        y = x.reshape(98, 3)
        y = (y * y).view(2, 49, 3) + noise(49, 1)
        return y.reshape(98, 3).view(2, 7, 7, 3)

    assert_same(windows, Global(noise(2, 7, 7, 3)), grids=[(2, 2, 1, 1), (1, 2, 1, 1), (2, 1, 2, 1), (1, 4, 1, 1)])

    def work():
        x = distdl.distribute_tensor(noise(2, 7, 7, 3), distdl.world().reshape(2, 2, 1, 1))
        with distdl.ledger() as book:
            y = windows(x)
        assert not book.entries
        assert y.layout is x.layout

    distdl.run_workers(work, 4)


def test_heads_of_attention():
    def heads(x):
        q = x.reshape(2, 7, 2, 6).permute(0, 2, 1, 3)
        return q, (q + 1).transpose(1, 2).reshape(2, 7, 12)

    assert_same(
        heads, Global(noise(2, 7, 12)), grids=[*GRIDS[3], (1, 1, 4), (1, 1, 3), (1, 4, 1), (2, 2, 1)], twice=True
    )


def test_blocks_stay_small():
    def work():
        root = distdl.world()
        P = root.create_partition_inclusive(range(4))
        for grid, shape, after in [
            ((1, 1, 1, 4), (2, 3, 8, 8), (2, 3, 64)), ((1, 1, 2, 2), (1, 3, 8, 8), (1, 3, 64)),
            ((1, 4, 1), (2, 16, 6), (32, 6)),
            ((1, 1, 4), (2, 5, 8), (2, 5, 2, 4)), ((1, 1, 4), (3, 4, 7), (84,)),
            ((1, 2, 2, 1), (2, 4, 6, 5), (2, 2, 2, 2, 3, 5)),
            ((1, 1, 4), (3, 16, 4), (3, 16, 1, 2, 2)),
        ]:  # fmt: skip
            x = distdl.distribute_tensor(noise(*shape), P.create_cartesian_topology_partition(grid))
            y = x.reshape(after)
            assert y.to_local().numel() <= 2 * -(-x.numel() // 4), (shape, after, y.layout)

    distdl.run_workers(work, 4)


def test_what_needs_no_movement_is_a_view():
    def work():
        P = distdl.world().create_partition_inclusive(range(4)).create_cartesian_topology_partition((1, 1, 4, 1))
        x = distdl.distribute_tensor(x4, P)
        x.flatten(2).mul_(2)
        x.permute(0, 2, 3, 1).add_(1)
        assert torch.equal(x.full_tensor(), x4 * 2 + 1)
        y = distdl.distribute_tensor(x4, P).permute(0, 1, 3, 2).contiguous()  # its last dim is split now
        y.view(2, 5, 12).mul_(2)
        with pytest.raises(RuntimeError, match="written in place"):
            y.sum()

    distdl.run_workers(work, 5)


def test_complex_parts():
    pairs = noise(3, 5, 2)
    assert_same(lambda x: torch.view_as_complex(x).abs(), Global(pairs), grids=[(1, 4, 1), (2, 1, 2), (3, 1, 1)])
    assert_same(lambda x: torch.view_as_real(x), Global(torch.complex(noise(3, 5), noise(3, 5, seed=1))))


def test_copies_along_dims():
    assert_same(lambda x: x.expand(4, -1, 2, 3), Global(noise(5, 1, 3)))
    assert_same(lambda x: torch.broadcast_to(x, (2, 5, 4)), Global(noise(5, 1)), grids=[(2, 2), (1, 3)])
    assert_same(lambda x, y: (x.expand_as(y) * 2, x.expand_as(y.sin())), Global(noise(5, 1)), Global(noise(3, 5, 4)))
    assert_same(lambda x: x.expand(4), Global(torch.tensor(2.0, dtype=torch.float64)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.view(7), lambda x: x.permute(0, 1), lambda x: x.transpose(0, 9), lambda x: x.unsqueeze(7),
        lambda x: x.expand(3, 3, 3), lambda x: x.flatten(3, 1), lambda x: torch.view_as_complex(x),
    ],
)  # fmt: skip
def test_torch_raises_the_same(function):
    assert_raises_the_same(function, x3, text=True)


@pytest.mark.parametrize("change", ["t_", "unsqueeze_", "squeeze_", "transpose_"])
def test_leaves_do_not_change_their_shape_in_place(change):
    given = {"t_": (), "unsqueeze_": (0,), "squeeze_": (), "transpose_": (0, 1)}[change]

    def work():
        x = distdl.distribute_tensor(noise(5, 7), distdl.world()[:2].reshape(1, 2)).requires_grad_()
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            getattr(x, change)(*given)
        (x * 1).sum().backward()
        assert x.grad.shape == (5, 7)

    distdl.run_workers(work, 3)


CHANGES = {
    "t_": lambda x: x.t_(), "swapaxes_": lambda x: x.swapaxes_(0, 0), "transpose_": lambda x: x.transpose_(0, -1),
    "squeeze_": lambda x: x.squeeze_(), "unsqueeze_": lambda x: x.unsqueeze_(0),
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_has_a_gradient_does_not_change_its_shape_without_gradients(change, mode):
    def work():
        for whole in (noise(1)[0], noise(1, 4)):
            x = distdl.distribute_tensor(whole, distdl.world()[1:3], axes=(None, 0)[: whole.dim()]).requires_grad_()
            y = x * 3
            for one in (x, y):
                with mode(), pytest.raises(RuntimeError, match="would change the shape of a global tensor"):
                    change(one)
            y.sum().backward()
            assert (x.grad.full_tensor() == 3).all()
            with mode():
                assert torch.equal(change(y.detach()).full_tensor(), change(3 * whole))

    distdl.run_workers(work, 4)


def test_the_bits_of_each_element():
    def function(x):
        y = x.detach().clone()
        bits = y.view(torch.int64)
        bits[0] = 0
        return bits, y, x.detach().view(dtype=torch.int64) >> 52

    assert_same(function, Global(noise(5, 7)))
    assert_same(lambda x: x.detach().view(torch.int64), Global(noise()))


ALIKE = {
    "permute": lambda x: x.permute(()), "transpose": lambda x: x.transpose(0, 0), "movedim": lambda x: x.movedim(0, 0),
    "T": lambda x: x.T, "mT": lambda x: x.mT, "H": lambda x: x.H, "mH": lambda x: x.mH, "adjoint": torch.adjoint,
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*deprecated on 0-D tensors", "ignore:adjoint.*is deprecated")
@pytest.mark.parametrize("function", ALIKE.values(), ids=ALIKE)
def test_dims_of_a_tensor_without_dims_are_ordered(function):
    for whole in (noise(1)[0], noise(1, dtype=torch.complex128)[0]):
        assert_same(lambda x: (function(x * 1), function(x.square())), Global(whole), tolerance=1e-9)

    def work():
        x = distdl.distribute_tensor(noise(1)[0], distdl.world()[1:2], axes=()).requires_grad_()
        with torch.no_grad():
            y = function(x * 1)
        (dx,) = torch.autograd.grad((x + y).sum(), x)
        assert dx.item() == 1
        constant = x.detach()
        whole = torch.tensor(1.0)
        assert (function(constant) is constant) == (function(whole) is whole)
        function(constant).requires_grad_()
        assert not constant.requires_grad or function(constant) is constant

    distdl.run_workers(work, 3)


def test_a_tensor_that_need_not_change_is_itself():
    def work():
        x = distdl.distribute_tensor(noise(4, 6), distdl.world()[:2].reshape(1, 2))
        assert x.flatten(1) is x and torch.atleast_2d(x) is x and torch.atleast_1d([x])[0] is x
        assert x.flatten() is not x and x.view(4, 6) is not x

    distdl.run_workers(work, 3)


VIEWS = {
    "view": lambda x: x.view(-1), "reshape": lambda x: x.reshape(x.shape[::-1]), "rows": lambda x: x[1:],
    "column": lambda x: x[:, 0], "cell": lambda x: x[0, 0], "expand": lambda x: x.expand(2, *x.shape),
    "unfold": lambda x: x.unfold(1, 2, 1), "strided": lambda x: x.as_strided((2,), (1,)), "T": lambda x: x.T,
    "of a cell": lambda x: x[2, 1].view(1, 1), "cells": lambda x: x[2, 1].expand(3), "empty": lambda x: x[3:],
}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
def test_views_that_are_made_without_gradients_require_one_alike(function, mode):
    """Of what requires one, a view requires one in torch, too; so it does where its cells had to move."""
    whole = noise(3, 2).requires_grad_()
    with mode():
        theirs = function(whole).requires_grad

    def work():
        P = distdl.world()
        for grid in ((2, 1), (1, 2)):
            x = distdl.distribute_tensor(noise(3, 2), P[1:3].reshape(*grid)).requires_grad_()
            for one in (x, x * 1):
                with mode():
                    y = function(one)
                assert y.requires_grad is theirs
            constant = x.detach()
            with mode():
                assert not function(constant).requires_grad

    distdl.run_workers(work, 4)
