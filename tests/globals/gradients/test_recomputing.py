"""Activation checkpoints of global tensors."""

import copy
import functools

import pytest
import torch
from covering import in_pairs
from launched import assert_close, on_workers, split
from nets import Checkpointed, assert_same_state, batch, network, partition, run
from same import Global, assert_same, noise
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)


class Places(nn.Module):
    """Weights are read behind the last tensor that is saved."""

    def __init__(self):
        super().__init__()
        self.row, self.column = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        return x.tanh() + self.row + self.column + self.row

    def checkpointed(self, x):
        return checkpoint(self, x, use_reentrant=False)


def test_a_checkpoint_that_reads_weights_behind_all_that_is_saved():
    def work():
        model = distdl.distribute(Places(), distdl.world(), weights="sharded")
        x = distdl.distribute_tensor(torch.ones(4, 3), distdl.world().reshape(3, 1)).requires_grad_()
        model.checkpointed(x).sum().backward()
        assert torch.equal(model.row.grad.full_tensor(), torch.full((3,), 8.0))
        assert torch.allclose(x.grad.full_tensor(), 1 - torch.ones(4, 3).tanh().square())

    distdl.run_workers(work, 3)


class Directions(nn.Module):
    """A function, which measures x first, and a weight."""

    def __init__(self, function):
        super().__init__()
        self.function, self.row = function, nn.Parameter(torch.arange(1.0, 4, dtype=torch.float64))

    def forward(self, x):
        return checkpoint(lambda x: self.function(x) * self.row, x, use_reentrant=False)


@pytest.mark.parametrize(
    "function",
    [nn.functional.normalize, lambda x: x / torch._foreach_norm([x])[0], lambda x: x.exp() if x.requires_grad else x],
)
def test_a_checkpoint_that_computes_norms_of_its_argument(function):
    given = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    x, alone = given.clone().requires_grad_(), Directions(function)
    alone(x)[:, 0].sum().backward()

    def work():
        model = distdl.distribute(Directions(function), distdl.world()[:3].reshape(1, 3), weights="sharded")
        ours = distdl.distribute_tensor(given, distdl.world()[:3].reshape(1, 3)).requires_grad_()
        model(ours)[:, 0].sum().backward()
        assert torch.allclose(ours.grad.full_tensor(), x.grad, rtol=0, atol=1e-12)
        assert torch.allclose(model.row.grad.full_tensor(), alone.row.grad, rtol=0, atol=1e-12)

    distdl.run_workers(work, 4)


def _keeping(kept):
    """The contexts of a checkpoint that saves what some operators give."""

    def policy(context, operator, *args, **kwargs):
        saves = operator.__name__.split(".")[0] in kept.split()
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def _gradients(model, x):
    """Those of x and of weights that are the same each time, after two backwards."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=number))
    x.requires_grad_()
    for _ in range(2):
        (model(x) ** 2).sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


# whether what a selective checkpoint saves goes through hooks of users, too: torch 2.14 asks, where there are some
_BY_HOOKS = [{}, *({"respect_saved_tensors_hooks": by} for by in (False, True) if torch.__version__ >= "2.14")]


@pytest.mark.parametrize("by_hooks", _BY_HOOKS)
@pytest.mark.parametrize(("kept", "weights", "grid"), list(in_pairs(
    ("addmm", "addmm gelu", "mm copy_ slice"), ("replicated", "sharded", "plain"), ((2, 1), (1, 3)),
)))  # fmt: skip
def test_selective_checkpoints(kept, weights, grid, by_hooks):
    """They count the operators of a forward, and hand out what some gave: set-ups and messages are none of them."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = torch.nn.Linear(5, 7).double(), torch.nn.Linear(7, 5).double()

        def body(self, x):
            for _ in range(3):  # (what is looked at in the first uses of a weight ends in a region)
                x = x + self.narrow(torch.nn.functional.gelu(self.wide(x)))
            return x

        def forward(self, x):
            made = _keeping(kept)
            return checkpoint(self.body, x, use_reentrant=False, context_fn=made, **by_hooks)

    theirs = _gradients(torch.nn.Sequential(Layer(), Layer()), noise(6, 5))

    def work():
        P = distdl.world().create_partition_inclusive(range(max(grid))).reshape(*grid)
        model = torch.nn.Sequential(Layer(), Layer())
        model = model if weights == "plain" else distdl.distribute(model, P, weights=weights)
        ours = _gradients(model, distdl.distribute_tensor(noise(6, 5), P))
        for one, other in zip(ours, theirs, strict=True):
            whole = one.full_tensor() if type(one) is GlobalTensor else one
            torch.testing.assert_close(whole, other, rtol=1e-9, atol=1e-9)

    distdl.run_workers(work, 4)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_selective_ones(reentrant, weights):
    """What the inner one keeps of its arguments, autograd detaches where the outer one sees each operator."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = torch.nn.Linear(5, 7).double(), torch.nn.Linear(7, 5).double()

        def body(self, x):
            inner = checkpoint(lambda x: self.wide(x.sin()), x * 2, use_reentrant=reentrant)
            return checkpoint(self.narrow, inner.tanh(), use_reentrant=False) + x

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False, context_fn=_keeping("tanh mul"))

    theirs = _gradients(Layer(), noise(6, 5))

    def work():
        P = distdl.world().create_partition_inclusive(range(2)).reshape(2, 1)
        ours = _gradients(distdl.distribute(Layer(), P, weights=weights), distdl.distribute_tensor(noise(6, 5), P))
        for one, other in zip(ours, theirs, strict=True):
            whole = one.full_tensor() if type(one) is GlobalTensor else one
            torch.testing.assert_close(whole, other, rtol=1e-9, atol=1e-9)

    distdl.run_workers(work, 3)


def _attention(x):
    x = x.flatten(2).mT
    return nn.functional.scaled_dot_product_attention(x, x, x).mT


def _pooled(x):
    return nn.functional.interpolate(nn.functional.max_pool2d(x, 2), size=x.shape[2:], mode="bilinear").flatten(2)


MIXED = {
    "group norm": lambda x: nn.functional.group_norm(x, 2).flatten(2),
    "instance norm": lambda x: nn.functional.instance_norm(x).flatten(2), "attention": _attention, "pooling": _pooled,
    "windows": lambda x: nn.functional.avg_pool2d(x, 3, 1, 1).flatten(2), "sums": lambda x: (x - x.mean()).flatten(2),
}  # fmt: skip


_PRODUCTS = ["convolution", "bmm", "mm", "_safe_softmax", "native_group_norm", "add", "relu"]


SAVING = {
    "all": lambda name: True, "products": lambda name: name in _PRODUCTS, "copies": lambda name: "copy" in name,
    "all but products": lambda name: name not in _PRODUCTS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("mix", "saving", "grid"), list(in_pairs(list(MIXED), list(SAVING), [(1, 1, 2, 1), (2, 1, 1, 1)]))
)
def test_selective_checkpoints_that_save_nearly_all(mix, saving, grid):
    """Of what our own functions consist of, nothing is counted: workers without cells compute it otherwise."""
    mixes, saves = MIXED[mix], SAVING[saving]

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saves(operator.__name__.split(".")[0]) else CheckpointPolicy.MUST_RECOMPUTE

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1).double()

        def body(self, x):
            return (x + mixes(self.conv(x).sin()).reshape(x.shape)).relu()

        def forward(self, x):
            made = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(self.body, x, use_reentrant=False, context_fn=made)

    theirs = _gradients(nn.Sequential(Layer(), Layer()), noise(2, 4, 6, 5))

    def work():
        P = distdl.world().create_partition_inclusive(range(2)).reshape(*grid)
        model = distdl.distribute(nn.Sequential(Layer(), Layer()), P)
        ours = _gradients(model, distdl.distribute_tensor(noise(2, 4, 6, 5), P))
        for one, other in zip(ours, theirs, strict=True):
            whole = one.full_tensor() if type(one) is GlobalTensor else one
            torch.testing.assert_close(whole, other, rtol=1e-10, atol=1e-10)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("kept", ["clone copy_ slice", "linear", ""])
def test_a_selective_checkpoint_of_a_model_and_its_loss(kept, weights):
    """What is compared and made equal before a forward is no part of it; a recomputed one does none of that."""

    made = _keeping(kept)

    def outcome(model, own=0):
        def loss(x, target):
            return (model(x) - target).square().sum()

        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(noise(*parameter.shape, seed=number + own))
        for step in range(6):
            checkpoint(loss, noise(6, 5, seed=step), noise(6, 2), use_reentrant=False, context_fn=made).backward()
        return [parameter.grad for parameter in model.parameters()]

    def work():
        sequential = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2)).double()
        model = distdl.distribute(copy.deepcopy(sequential), partition((3, 1)), weights=weights)
        ours = outcome(model, distdl.world().rank if weights == "replicated" else 0)  # (all get those of worker 0)
        for one, other in zip(ours, outcome(sequential), strict=True):
            whole = one.full_tensor() if type(one) is GlobalTensor else one
            torch.testing.assert_close(whole, other, rtol=1e-10, atol=1e-10)

    run(work)


row = noise(5, seed=2)


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
@on_workers
def test_checkpoints(grid):
    """Also nested, with a block that is empty, and an idle worker."""

    def run(x, w, v):
        def step(a):
            return ((a * w).exp() * v).sum(0, keepdim=True).sigmoid()

        def two(a):
            return checkpoint(step, checkpoint(step, a, use_reentrant=False) * a, use_reentrant=False)

        y = checkpoint(two, x, use_reentrant=False).sum()
        return y, *torch.autograd.grad(y, (x, w))

    one = noise(1, 5)
    weights = [row.clone().requires_grad_() for _ in range(2)]
    expected = run(one.clone().requires_grad_(), weights[0], row)
    found = run(split(one, *grid).requires_grad_(), weights[1], split(row, 2))
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


_places = torch.tensor([2, 0, 3])


SAVED_WITH_CELLS = {  # the tensors for which an operator saves where there are cells
    "picked": lambda x: x[_places],
    "picked along": lambda x: x[:, [[0, 1], [4, 2]]],
    "select": lambda x: x.index_select(0, _places),
    "interleaved": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1]), 0),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 0).values,
    "put": lambda x: x.index_put((_places,), x[0] * 2),
    "put number": lambda x: x.index_put((_places,), torch.tensor(2.0, dtype=x.dtype)),
    "accumulated": lambda x: x.index_put((_places,), x[0] * 2, accumulate=True),
    "add": lambda x: x.index_add(0, _places, x[:3]),
    "add to": lambda x: x.index_add(0, _places, x[:3].detach()),
    "add of": lambda x: x.detach().index_add(0, _places, x[:3]),
    "copy": lambda x: x.index_copy(0, _places, x[:3]),
    "amax": lambda x: x.index_reduce(0, _places, x[:3], "amax"),
    "cummax": lambda x: x.cummax(0).values,
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", SAVED_WITH_CELLS)
def test_the_end_of_a_checkpoint_behind_a_movement_that_has_no_gradient(name):
    """All workers recompute as far as it, also those without cells, and the idle one."""

    def function(x):
        def measured(x):
            assert x.detach().abs().sum() > 0
            return SAVED_WITH_CELLS[name](x)

        return checkpoint(measured, x, use_reentrant=False).sin()

    assert_same(function, Global(noise(4, 5)), grids=[(2, 1), (1, 4), (4, 1)])


@on_workers
def test_a_checkpoint_that_enters_the_graph_again():
    """An autograd function of torch's. It draws again what it drew."""
    x = torch.ones_like(split(x35)).requires_grad_()
    y = checkpoint(lambda x: torch.dropout(x, 0.5, True).exp(), x, use_reentrant=True)
    torch.rand_like(x)
    y.sum().backward()
    dropped = y.full_tensor() == 1
    assert bool(dropped.any()) and bool(((x.grad.full_tensor() == 0) == dropped).all())
    assert bool((torch.dropout(x, 0.5, True).full_tensor() != torch.dropout(x, 0.5, True).full_tensor()).any())


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("by", ["part", "nested", "mixed", "plain"])
def test_checkpoints_outside_of_the_forward(by, weights):
    """What a checkpoint recomputes reads the weights as it has read them, also where forwards have gone before."""

    def parts(model, x):
        again = functools.partial(checkpoint, use_reentrant=False)
        if by == "part":
            return again(lambda x: model.body(x) * model.weight, x)
        if by == "nested":
            return again(lambda x: again(model.body, x).sin() * model.weight, x)
        if by == "mixed":
            return again(lambda x: model.body(model(x).sum(1, keepdim=True) * x), x)
        return model.body(x) * again(lambda one: one * model.weight.sin(), noise(6, 1))

    def work():
        sequential = network(lambda: Checkpointed("module"))
        twin = copy.deepcopy(sequential)
        model = distdl.distribute(twin, partition((2, 1, 2)), fallback="error", weights=weights)
        for one in (model, sequential):
            for step in range(2):
                x, target = batch(step)
                x = distdl.distribute_tensor(x, partition((2, 1, 2))) if one is model else x
                loss = (one(x) - target).square().mean() + parts(one, x).square().mean()
                loss.backward()
        assert_same_state(model, sequential)

    run(work)
