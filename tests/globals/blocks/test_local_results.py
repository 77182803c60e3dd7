"""What functions of blocks give: where results lie, what they depend on, and what the workers agree on."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise

import distdl
from distdl.partition import Layout

x35, row = noise(3, 5), noise(5, seed=2)


@on_workers
def test_results_of_other_layouts():
    x = split(x35)
    double = distdl.local_map(lambda a: torch.cat([a, a], 1), out=x.layout.partition)
    for _ in range(2):
        y = double(x)
        assert_close(y, torch.cat([x35, x35], 1))
    thirds = Layout.of(x.layout.partition, [[(0, 4), (4, 6)], [(0, 5)]])
    for out in (thirds, lambda layout: thirds):
        y = distdl.local_map(lambda a: torch.cat([a, a]), out=out)(x)
        assert_close(y, torch.cat([x35[:2], x35[:2], x35[2:], x35[2:]]))
    of_rows = split(x35[:, 0]).layout
    for out in (lambda layout: (of_rows, layout), (lambda layout: of_rows, "same"), (of_rows, lambda layout: "same")):
        sums, means = distdl.local_map(lambda a: (a.sum(1), a), out=out)(x)
        assert_close(sums, x35.sum(1))
        assert_close(means, x35)
    with pytest.raises(ValueError, match=r"local_map needs blocks.*on worker 0.* gave 2x1 instead of 2x5"):
        distdl.local_map(lambda a: a[:, :1])(x)
    with pytest.raises(
        ValueError, match=r"as many dims as the partition of out= has axes \(2x1 .*gave \[2\] on 0, \[1\] on 1"
    ):
        distdl.local_map(lambda a: a.sum(1), out=x.layout.partition)(x)
    with pytest.raises(ValueError, match="as many places as results"):
        distdl.local_map(lambda a: (a, a), out=("same",))(x)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda block: block.float(), "needs blocks of one dtype; .* torch.float64 on worker 0 and torch.float32 on"),
        (lambda block: None, "to be a tensor on every worker or on none; on worker 1, function gave none"),
        (lambda block: block[:, :1], "on worker 1, function gave 1x1 instead of 1x5"),
        (
            lambda block: block[:0].float(),
            "needs blocks of one dtype; .* torch.float64 on worker 0 and torch.float32 on",
        ),
        (lambda block: (block, block), "as many results .* gave one result on worker 0 and a tuple of 2 on worker 1"),
        (
            lambda block: {"a": block},
            "as many results .* gave one result on worker 0 and one result with tensors in a dict",
        ),
        (lambda block: [], "as many results .* gave one result on worker 0 and a list of 0 on worker 1"),
    ],
)
def test_a_function_that_gives_something_else_on_one_worker(odd, words):
    """The same error on every worker, also where the odd one could go on with what it has."""

    def work():
        P = distdl.world()

        def function(block):
            return odd(block) if P.rank == 1 else block * 2

        with pytest.raises(ValueError, match=words) as error:
            distdl.local_map(function)(distdl.distribute_tensor(x35, P.reshape(3, 1)))
        P.allgather_data(0)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 3))) == 1


@dataclass(slots=True)
class Slotted:
    n: float

    def __call__(self, a):
        return a * self.n


WRONG = {
    "an object": (lambda a: a, object(), "local_map needs out to be 'same', .* or a tuple of these; got a object$"),
    "a number of a function": (lambda a: a, lambda layout: 3, "local_map needs a function in out= to give .*; got 3$"),
    "one of several": (lambda a: (a, a), ("same", lambda layout: None), "local_map needs a function .*; got None$"),
    "a dict": (
        lambda a: {"a": a},
        "same",
        "needs results to be plain and dense tensors, alone .* gave one result with tensors in a dict$",
    ),
    "a tuple in a tuple": (lambda a: (a, (a,)), "same", "gave a tuple of 2 with tensors in a tuple$"),
    "an object of tensors": (lambda a: SimpleNamespace(y=a), "same", "one result with a SimpleNamespace$"),
    "one beside a tensor": (lambda a: (a, Slotted(a)), "same", "gave a tuple of 2 with a Slotted$"),
    "an object of one": (lambda a: (a, [Slotted(Slotted(a))]), "same", "gave a tuple of 2 with a Slotted$"),
    "a generator": (lambda a: (one for one in (a, a)), "same", "gave one result with a generator$"),
    "a sparse tensor": (lambda a: a.to_sparse(), "same", "gave one result with a tensor that is torch.sparse_coo$"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_place_and_no_result(what):
    function, out, words = WRONG[what]

    def work():
        x = split(x35)
        with pytest.raises((TypeError, ValueError), match=words) as error:
            distdl.local_map(function, out=object() if type(out) is object else out)(x)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 3))) == 1


@on_workers
def test_a_function_of_blocks_that_gives_a_global_tensor():
    """Where one worker has all of it, it has the shape of the block."""
    x = split(x35, 1, 1)
    for function in (lambda a: x * 2, lambda a: (a, x)):
        with pytest.raises(ValueError, match=r"gave (one result|a tuple of 2) with a global tensor$"):
            distdl.local_map(function)(x)


OTHERS = {
    "partitions": (lambda P, odd: P.reshape(1 + odd, 2 - odd), "1x2 on workers 0, 1 .* with out=2x1 on"),
    "layouts": (
        lambda P, odd: rows(P, 1 + odd),
        "a layout over 2x1 on workers 0, 1 in blocks 1[+]2, 5 .* with out=a layout .* in blocks 2[+]1, 5",
    ),
}


def rows(P, count):
    """A layout of 3 x 5 of which the first worker has some rows."""
    return Layout.of(P.reshape(2, 1), [[(0, count), (count, 3)], [(0, 5)]])


@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize("what", OTHERS)
def test_places_that_differ_between_workers(what, function):
    """Each would have had another tensor of what all of them take for one."""
    other, words = OTHERS[what]

    def work():
        x, P = split(x35), distdl.world()[:2]
        place = other(P, distdl.world().rank == 1)
        with pytest.raises(distdl.CommunicationError, match=f"with out={words}") as error:
            distdl.local_map(lambda a: a, out=(lambda layout: place) if function else place)(x)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 3))) == 1


def one_of_two(a, b):
    """Of results that follow from other arguments each; rows without cells have no graph."""
    return (a.sin() if a.numel() else a.detach(), b.cos(), torch.ones_like(a))


FOLLOWING = {
    "one of its arguments": lambda a, b: a.sin(),
    "one of them, without gradients": lambda a, b: a * b.detach(),
    "fewer without cells": lambda a, b: a * b if a.numel() else a,
    "the other without cells": lambda a, b: a * 2 if a.numel() else b,
    "each for itself": one_of_two,
    "what it writes": lambda a, b: (a * 1).mul_(2).add_(b) if a.numel() else (a * 1),
}


@pytest.mark.parametrize("what", FOLLOWING)
def test_results_that_depend_on_some_of_the_arguments(what):
    """A backward goes on to those, also on workers that have no cells; and to no others."""

    def work():
        found = []
        for whole in (False, True):
            leaves = [noise(3, 5, seed=seed).requires_grad_() for seed in (1, 2)]
            P = distdl.world()[:2].reshape(2, 1)  # (and the third worker has none)
            for _ in range(2):
                x, y = leaves if whole else [distdl.distribute_tensor(leaf, P) for leaf in leaves]
                results = (FOLLOWING[what] if whole else distdl.local_map(FOLLOWING[what]))(x, y)
                results = results if isinstance(results, tuple) else (results,)
                results[0].square().sum().backward()
            found.append(([one.requires_grad for one in results], [leaf.grad for leaf in leaves]))
        (flags, ours), (own_flags, theirs) = found
        assert flags == own_flags
        if distdl.world().rank == 0:
            for one, other in zip(ours, theirs, strict=True):
                assert_close(0 * x35 if one is None else one, 0 * x35 if other is None else other)
        distdl.world().allgather_data(0)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:], lambda x: x[:, :2], lambda x: x.T])
def test_a_result_that_is_the_view_it_has_written(view):
    """It stays that view: what is written into it later is written into the tensor, too."""

    def work():
        P, leaves, found = distdl.world()[:2].reshape(2, 1), [x35.clone(), x35.cos()], []
        for place in (partial(distdl.distribute_tensor, P=P), torch.clone):
            x, y = (place(leaf).requires_grad_() for leaf in leaves)
            z = x * 2
            function = (lambda a, b: a.mul_(b)) if place is torch.clone else distdl.local_map(lambda a, b: a.mul_(b))
            function(view(z), view(y)).add_(1)
            found += [z, *torch.autograd.grad(z.square().sum(), [x, y])]
        for ours, theirs in zip(found[:3], found[3:], strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 3)


def test_results_that_depend_on_a_captured_weight_alone():
    """They require a gradient on workers without cells, too, so that another call takes them."""

    def work():
        w = torch.ones((), dtype=x35.dtype, requires_grad=True)
        x = distdl.distribute_tensor(x35, distdl.world()[:2].reshape(2, 1))
        y = distdl.local_map(lambda a: a * w if a.numel() else a.clone())(x)
        z = distdl.local_map(lambda a: a + 1)(y)
        assert z.requires_grad
        z.sum().backward()
        assert_close(distdl.world().allreduce_data(0 * w.detach() if w.grad is None else w.grad), x35.sum())

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("empty", [torch.clone, torch.zeros_like])
def test_results_that_depend_on_a_captured_weight_where_there_are_cells(empty):
    """The backward goes the same way on workers without cells, of which the results depend on the argument, or none."""

    def work():
        w, leaf = torch.ones((), dtype=x35.dtype, requires_grad=True), x35.clone().requires_grad_()
        x = distdl.distribute_tensor(leaf, distdl.world()[:2].reshape(2, 1))
        y = distdl.local_map(lambda a: a.detach() * w if a.numel() else empty(a))(x)
        y.sum().backward()
        assert leaf.grad is None or not leaf.grad.any()
        assert_close(distdl.world().allreduce_data(0 * w.detach() if w.grad is None else w.grad), x35.sum())

    distdl.run_workers(work, 3)


def test_a_function_of_blocks_that_writes_into_its_argument():
    """The argument follows from what was written, on workers without cells, too."""

    def work():
        P, leaves = distdl.world()[:2].reshape(2, 1), [x35.clone().requires_grad_(), x35.cos().requires_grad_()]
        x, y = (distdl.distribute_tensor(leaf, P) for leaf in leaves)
        z = x * 2
        distdl.local_map(lambda a, b: a.mul_(b))(z, y)
        assert_close(z, 2 * x35 * x35.cos())
        z.square().sum().backward()
        if distdl.world().rank == 0:
            for leaf, other in zip(leaves, reversed(leaves), strict=True):
                assert_close(leaf.grad, (8 * leaf * other**2).detach())
        distdl.world().allgather_data(0)

    distdl.run_workers(work, 3)


@on_workers
def test_a_function_of_blocks_that_writes_into_a_leaf_without_gradients():
    """As what sets a weight to its first values does: the leaf stays one, on workers without cells, too."""
    x = split(x35).requires_grad_()
    distdl.local_map(lambda block: torch.nn.init.constant_(block, 3.0))(x)
    assert x.is_leaf
    (dx,) = torch.autograd.grad(x.square().sum(), x)
    assert_close(dx, torch.full_like(x35, 6.0))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@on_workers
def test_a_write_of_a_function_of_blocks_is_counted_on_workers_without_cells(mode):
    """So a backward that has saved what was written raises on every worker."""
    x = split(x35)
    w = x.clone().requires_grad_()
    y = w * x
    with mode():
        distdl.local_map(lambda block: block.mul_(2) + 0)(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
@pytest.mark.parametrize("leaf", [True, False])
@on_workers
def test_a_function_of_blocks_that_detaches_its_argument(leaf, mode):
    """Then nothing follows from that any more, on workers without cells, either."""
    x, other = split(x35).requires_grad_(), split(x35).requires_grad_()
    moved = x if leaf else x.redistribute(distdl.world().reshape(1, 3)).redistribute(x.layout)
    with mode():
        y = distdl.local_map(lambda block: block.detach_() * 2)(moved)
    assert_close(y, x35 * 2)
    assert (moved.requires_grad, moved.is_leaf) == (False, True)
    (moved * other).sum().backward()
    assert x.grad is None
    assert_close(other.grad, x35)


@on_workers
def test_a_function_of_blocks_that_differentiates_by_its_argument():
    """By what it has got itself, which requires a gradient from then on, on every worker."""

    def slope(block):
        return torch.autograd.grad(block.requires_grad_().square().sum(), block)[0]

    x = split(x35)
    for _ in range(2):
        assert_close(distdl.local_map(slope)(x), 2 * x35)
    (x * 3).sum().backward()
    assert_close(x.grad, torch.full_like(x35, 3.0))


@pytest.mark.parametrize("function", [lambda block: block, torch.enable_grad()(lambda block: block * 1)])
@on_workers
def test_a_function_of_blocks_that_gives_a_graph_without_gradients(function):
    x = split(x35).requires_grad_()
    z = x * 1
    with torch.no_grad():
        y = distdl.local_map(function)(z)
    assert y.requires_grad
    (y * 2).sum().backward()
    assert_close(x.grad, torch.full_like(x35, 2.0))


@on_workers
def test_a_result_that_follows_from_an_argument_here_and_from_what_is_captured_there():
    world = distdl.world()
    rows, columns = world.reshape(world.size, 1), world.reshape(1, world.size)
    x = distdl.distribute_tensor(x35, rows).requires_grad_()
    other = x.detach().clone().requires_grad_()
    moved = x.redistribute(columns).redistribute(rows)
    captured, argument = (moved * 3).to_local(), moved * 2
    y = distdl.local_map(lambda one, _: one * 2 if world.rank % 2 else captured * 1)(other, argument)
    y.sum().backward()
    expected = torch.zeros_like(x.to_local()) if world.rank % 2 else torch.full_like(x.to_local(), 3.0)
    assert torch.equal(x.grad.to_local(), expected)


@pytest.mark.parametrize("mode", ["no gradients", "a leaf without"])
def test_arguments_that_require_gradients_on_some_workers(mode):
    def work():
        P = distdl.world()
        odd = P.rank == 1
        x = distdl.distribute_tensor(x35.clone().requires_grad_(), P.reshape(3, 1))
        w = row.clone().requires_grad_(not (odd and mode == "a leaf without"))
        words = "local_map needs the same arguments to require gradients .* function got requires_grad=.* on worker 1"

        def function(block, weight):
            return block * weight

        grad_mode = torch.set_grad_enabled(not (odd and mode == "no gradients"))
        with grad_mode, pytest.raises(ValueError, match=words) as error:
            distdl.local_map(function)(x, w)
        assert_close(x.sum(), x35.sum())
        return str(error.value)

    assert len(set(distdl.run_workers(work, 3))) == 1
