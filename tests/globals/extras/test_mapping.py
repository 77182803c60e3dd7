"""torch.vmap of functions of global tensors, against torch's own of plain ones."""

import warnings

import pytest
import torch
from launched import assert_close, on_workers, split
from same import Global, assert_same, noise
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.func import grad, jacfwd, jvp, vmap
from torch.utils import _pytree as pytree

import distdl

x35 = noise(3, 5)


y35 = noise(3, 5, seed=1)


row = noise(5, seed=2)


w55 = noise(5, 5, seed=3)


def curved(x):
    return (x.sin() * x.roll(1, 0)).cumsum(1).tanh()


def assert_alike(function, *arguments, **options):
    """The same results and gradients as torch's, whatever structure the results have."""
    assert_same(lambda *given: tuple(pytree.tree_leaves(function(*given))), *arguments, **options)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: vmap(lambda a: curved(a[None]).sum())(x),
        lambda x, y: vmap(torch.outer, out_dims=-1)(x, y),
        lambda x, y: vmap(lambda a, b: {"one": a * b, "two": (a.cumsum(0), b.cos())}, in_dims=1, out_dims=1)(x, y),
        lambda x, y: vmap(lambda a: (a * 2, w55[0]), out_dims=(0, None))(x),
        lambda x, y: vmap(lambda a: (a * 2, 3, None), out_dims=(0, None, None))(x),
        lambda x, y: vmap(vmap(lambda a, b: (a * b).sum(), (None, 0)), (0, None))(x, y),
        lambda x, y: vmap(lambda a: (a * y).sum())(x),
        lambda x, y: vmap(grad(lambda a: curved(a[None]).square().sum()))(x),
        lambda x, y: vmap(lambda a, b: jvp(torch.sin, (a,), (b,)))(x, y),
        lambda x, y: vmap(lambda a: a.square().sum(), chunk_size=2)(x),
        lambda x, y: vmap(lambda a, *, scale: a * scale, randomness="different")(x, scale=y[0]),
        lambda x, y: vmap(lambda a, b: (a @ w55) * b, (0, None))(x, row),
        lambda x, y: vmap(lambda a, b: (a @ w55) * b)(x, noise(3, 5)),
    ],
)
def test_samples(function):
    assert_alike(function, Global(x35), Global(y35))
    # (samples on all workers)
    assert_alike(function, Global(x35), Global(y35, (3, 1)), grids=[(3, 1)], workers=3)


def test_samples_on_their_workers_send_no_message():
    def work():
        root = distdl.world()
        x = distdl.distribute_tensor(x35, root.reshape(3, 1))
        with distdl.ledger() as book:
            y = vmap(grad(lambda a: curved(a[None]).sum()))(x)
        assert not book.entries
        assert_close(y, vmap(grad(lambda a: curved(a[None]).sum()))(x35))

    distdl.run_workers(work, 3)


def test_vmap_of_no_samples():
    for function in (torch.sin, lambda r: (r.sum(), {"places": r.argsort()}), lambda r: r.float().outer(r)):
        assert_alike(vmap(function), Global(x35[:0]))
        assert_alike(vmap(function, in_dims=1), Global(x35[:, :0]))


@on_workers
def test_random_numbers_of_samples():
    x = split(torch.ones(4, 50))
    for randomness, alike in (("same", True), ("different", False)):
        masks = [vmap(torch.nn.functional.dropout, randomness=randomness)(x).full_tensor() for _ in range(2)]
        assert torch.equal(masks[0][0], masks[0][3]) == alike
        assert not torch.equal(masks[0], masks[1])
        known = vmap(lambda w: torch.nn.functional.dropout(x * w), randomness=randomness)(torch.ones(3)).full_tensor()
        assert torch.equal(known[0], known[2]) == alike


class Masked(torch.nn.Module):
    """A mask as language models make it, by vmap over places: a call for each of them would take for ever."""

    def forward(self, x):
        places = torch.arange(100)
        with TransformGetItemToIndex():
            return x * vmap(vmap(lambda i, j: x[i % 3, j % 3], (None, 0)), (0, None))(places, places)[:3, :5]


@on_workers
def test_places_of_a_mask_are_not_taken_one_by_one():
    model = distdl.distribute(Masked(), distdl.world()[:2].reshape(2, 1))
    with pytest.raises(RuntimeError, match=r"torch\.vmap and .* do not work here"):
        model(split(x35))


def test_forward_mode_inside_of_vmap_on_threads():
    """Of which torch has one level for all threads."""

    def work():
        for _ in range(20):
            assert_close(jacfwd(curved)(x35), expected)
            x = distdl.distribute_tensor(x35, distdl.world().reshape(3, 1))
            assert_close(vmap(jacfwd(lambda a: a.sin().cumsum(0)))(x), of_each)
            assert_close(distdl.local_map(lambda a: a @ jacfwd(torch.sin)(row))(x), x35 @ row.cos().diag())

    expected, of_each = jacfwd(curved)(x35), vmap(jacfwd(lambda a: a.sin().cumsum(0)))(x35)
    distdl.run_workers(work, 3)


@pytest.mark.parametrize("count", [200, 300])
def test_many_samples_that_are_taken_one_by_one_are_told_once_for_each_line(count):
    def work():
        weight = w55.clone().requires_grad_()

        def through(sample):
            return (sample @ weight).sum()

        for _ in range(2):
            vmap(through)(split(noise(count, 5)))

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        distdl.run_workers(work, 2)
    texts = [str(one.message) for one in told if "vmap" in str(one.message)]
    if count == 200:
        assert not texts
    else:
        assert len(texts) == 2 and all(one.filename == __file__ for one in told)  # (on each worker)
        assert "vmap of through takes its samples one by one, in 300 calls" in texts[0]
