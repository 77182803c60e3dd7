"""Blocks inside of the forward of a distributed model: plain tensors, but for their type."""

import copy
import io
import pickle

import numpy
import pytest
import torch
from launched import Calling, assert_close, on_workers, split
from same import noise
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor, nn
from distdl.globals.tensor.block import Block

x35 = noise(3, 5)


def _saved(block):
    file = io.BytesIO()
    torch.save(block, file)
    file.seek(0)
    return torch.load(file)


def _moved(block):
    block.data = block.data * 2
    return block


def _hooked(block):
    y = block * 1
    y.register_hook(lambda dy: 3 * dy)
    return y


def _sums(block):
    total = torch.zeros(2, dtype=block.dtype)
    total[0] += block.sum()
    total[1].add_(block.cos().sum())
    return total.sum() * block


def _foreach(block):
    total = torch.zeros_like(block.detach())
    torch._foreach_add_([total], [block])
    return total


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.values = x.detach().numpy()
        return torch.from_numpy(ctx.values**3)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dy


class _Doubled(torch.autograd.Function):
    """Writes in place."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, dy):
        return 2 * dy


class _Known(torch.autograd.Function):
    """Of a plain tensor; it knows a block."""

    @staticmethod
    def forward(ctx, s, block):
        ctx.block = block
        return s * block()

    @staticmethod
    def backward(ctx, dy):
        return (dy * ctx.block()).sum(), None


def _slope(block):
    (slope,) = torch.autograd.grad(block.sin().sum(), block, create_graph=True)
    return slope * block


def _trained(block):
    leaf = block.detach().clone().requires_grad_()
    leaf.square().sum().backward()
    return block * leaf.grad


def _retained(block):
    y = block * 2
    y.retain_grad()
    return y


USES = {
    "element by element": lambda b: (b.sin() * 2 + noise(5)).relu(),
    "view": lambda b: b.view(-1).view_as(b)[:, 1:].t(),
    "written": lambda b: (b * 1).mul_(2).add_(1),
    "written by": lambda b: torch.ones_like(b.detach()).mul_(b),
    "a view written": lambda b: torch.cat([y := b * 1, y[:1].mul_(3)]),
    "out": lambda b: torch.sin(b.detach(), out=torch.empty_like(b.detach())) * b,
    "sums": _sums,
    "a list": _foreach,
    "data": lambda b: _moved(b * 1),
    "structure": lambda b: b.max(1).values * b.sort(1)[0].sum(1),
    "hook": _hooked,
    "retained": _retained,
    "deepcopy": lambda b: copy.deepcopy(b.detach()) * b,
    "copy": lambda b: copy.copy(b.detach()) * b,
    "pickle": lambda b: pickle.loads(pickle.dumps(b.detach())) * b,
    "saved": lambda b: _saved(b.detach()) * b,
    "numpy": lambda b: torch.from_numpy(numpy.sin(b.detach().numpy()) + numpy.asarray(b.detach())) * b,
    "numbers": lambda b: b * (len(b) + sum(b.detach().flatten().tolist()) + float(b.detach().sum()) + b.dim()),
    "iterated": lambda b: sum(row.sin() for row in b),
    "a leaf": _trained,
    "grad": _slope,
    "a plain leaf": lambda b: b * noise(5).requires_grad_(),
    "an autograd function": lambda b: _Cubed.apply(b) * _Cubed.apply(b.detach()),
    "one that writes": lambda b: _Doubled.apply(b * 1) * b,
    "one that knows a block": lambda b: _Known.apply(noise(1)[0].requires_grad_(), lambda: b.detach()) * b,
    "checkpoint": lambda b: checkpoint(lambda b: b.sin() * 2, b, use_reentrant=False),
    "checkpoint of what is known": lambda b: checkpoint(lambda s: s * b.sin(), noise(1)[0], use_reentrant=False),
    "re-entry": lambda b: checkpoint(lambda b: b.sin() * b, b, use_reentrant=True),
    "autograd functions in re-entry": lambda b: checkpoint(lambda b: _Cubed.apply(b.sin()), b, use_reentrant=True),
    "module": lambda b: torch.nn.GELU()(b),
}  # fmt: skip


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("use", USES)
def test_a_block_does_what_a_plain_tensor_does(use, weights):
    """Each worker has what it would have of its block alone; outside of the forward, that is plain."""

    def forward(m, x):
        y = USES[use]((x * 1).to_local())
        assert type(y) is Block
        return y, x * m.w

    def work():
        P = distdl.world().reshape(2, 1)
        x = distdl.distribute_tensor(noise(4, 5), P).requires_grad_()
        block = x.to_local()
        y, _ = distdl.distribute(Calling(forward), P, weights)(x)
        mine = block.detach().clone().requires_grad_()
        theirs = USES[use](mine * 1)
        assert type(block) is type(y) is torch.Tensor and theirs.requires_grad == y.requires_grad
        torch.testing.assert_close(y, theirs)
        if y.requires_grad:
            y.square().sum().backward()
            theirs.square().sum().backward()
            torch.testing.assert_close(block.grad, mine.grad)

    distdl.run_workers(work, 2)


@pytest.mark.parametrize("use", [
    lambda b: torch.vmap(torch.sin)(b), lambda b: torch.func.grad(lambda b: b.sin().sum())(b),
    lambda b: torch.vmap(lambda s: s * b)(noise(2)), lambda b: torch.func.grad(lambda s: (s * b).sum())(noise(1)[0]),
])  # fmt: skip
@on_workers
def test_transforms_of_blocks_are_refused_in_a_forward(use):
    model = distdl.distribute(Calling(lambda m, x: use(x.to_local())), split(x35).layout.partition)
    with pytest.raises(RuntimeError, match=r"do not take a block, .* call them in distdl.local_map"):
        model(split(x35))


@on_workers
def test_what_is_said_of_blocks():
    told = []

    def forward(m, x):
        block = x.to_local()
        told.append((str(block), f"{block}", block.is_leaf, block.requires_grad, block.shape, isinstance(block, Block)))
        m.kept = [block]
        return x * m.w

    x = split(x35).requires_grad_()
    model = distdl.distribute(Calling(forward), x.layout.partition)
    model(x).sum().backward()
    block, kept = x.to_local(), model.kept[0]
    assert told == [(str(block), f"{block}", True, True, block.shape, True)]
    # outside of a forward, it is a plain tensor
    assert type(kept * 2) is type(block + kept) is torch.Tensor and kept.grad is block.grad
    assert_close(x + kept.detach().sum() * 0, x35)


WAYS = {
    "from_local": lambda m, x, P: GlobalTensor.from_local(x.to_local().sin(), P) * m.w,
    "an argument": lambda m, x, P: distdl.local_map(torch.mul)(x, x.to_local().sin()) * m.w,
    "inside": lambda m, x, P: distdl.local_map(lambda b: x.to_local().sin() * b * m.w)(x),
    "no global one": lambda m, x, P: (
        GlobalTensor.from_local(distdl.local_map(torch.mul)(x.to_local().sin(), m.w), P) * x
    ),
    "on worker 0": lambda m, x, P: distdl.distribute_tensor(x.full_tensor(on=0).sin(), P) * m.w * x,
    "checkpoint": lambda m, x, P: checkpoint(lambda x: WAYS["an argument"](m, x, P), x, use_reentrant=False),
    "re-entry": lambda m, x, P: checkpoint(lambda x: WAYS["an argument"](m, x, P), x, use_reentrant=True),
    "a block of a checkpoint": lambda m, x, P: checkpoint(
        lambda b: distdl.local_map(torch.mul)(x, b) * m.w, x.to_local().sin(), use_reentrant=False
    ),
}


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_back_to_global_tensors(way, weights):
    """Each worker's block gets its own gradient, also where that comes out of a checkpoint."""

    def work():
        P, found = distdl.world().reshape(2, 1), []
        for given in (distdl.distribute_tensor(noise(4, 5), P), noise(4, 5)):
            if type(given) is GlobalTensor:
                model = distdl.distribute(Calling(lambda m, x: WAYS[way](m, x, P)), P, weights)
            else:
                model = Calling(lambda m, x: x.sin() * m.w * (1 if way == "from_local" else x))
            y = model(given.requires_grad_())
            y.square().sum().backward()
            found.append([y, given.grad, model.w.grad])
        for ours, theirs in zip(*found, strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 2)


@pytest.mark.parametrize(
    "kept", [lambda x: x.to_local(), lambda x: x.to_local() * 2, lambda x: (x * 2).to_local().sin()]
)
@on_workers
def test_a_block_as_an_argument_of_local_map_is_refused_outside_of_a_forward(kept):
    """Each worker has its own gradient of it, which must not be added up as that of a plain tensor is."""
    x = split(x35).detach().requires_grad_()
    block = kept(x)
    with pytest.raises(RuntimeError, match=r"follows from a block of this worker, as x.to_local\(\) gives it"):
        distdl.local_map(lambda one, other: one * other)(x, block)
    assert_close(distdl.local_map(lambda one, other: one + 0 * other.sum())(x, block.detach()), x35)


x = noise(4, 3, 7, 5)


def grid(*extents):
    P = distdl.world().create_partition_inclusive(range(torch.Size(extents).numel()))
    return P.create_cartesian_topology_partition(extents)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h, w)
        return h * w

    @staticmethod
    def backward(ctx, dy):
        h, w = ctx.saved_tensors
        return (dy * w).sum_to_size(h.shape), (dy * h).sum_to_size(w.shape)


@torch.library.custom_op("distdl_tests::times", mutates_args=())
def times(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return h * w


times.register_autograd(Times.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


MIXED = {  # in a forward of a model, of a global tensor of one dim
    "a block and a weight": (lambda m, x, P: x.to_local() * m.w[0], "mul got a block .* beside a weight"),
    "without gradients": (lambda m, x, P: x.detach().to_local() ** 2 * m.w[0], "mul got a block .* beside a weight"),
    "in no_grad": (lambda m, x, P: torch.no_grad()(lambda: x.to_local() * m.w[0])(), "mul got a block .* a weight"),
    "a weight first": (lambda m, x, P: m.w[0] + x.to_local().sum(), "add got a block .* beside a weight"),
    "a global tensor": (lambda m, x, P: x * x.to_local(), "mul got a block .* beside a global tensor"),
    "in front of one": (lambda m, x, P: x.to_local().sum() + x.sum(), "add got a block .* beside a global tensor"),
    "in a list": (lambda m, x, P: torch.cat([x, x.to_local()]), "cat got a block .* beside a global tensor"),
    "a list of weights": (lambda m, x, P: torch.stack([m.w[0], x.to_local().sum()]), "stack got a block .* a weight"),
    "an index": (lambda m, x, P: m.w[x.to_local().long() % 2], "getitem__ got a block .* beside a weight"),
    "written": (lambda m, x, P: m.w.data.add_(x.to_local().sum()), "add_ got a block .* beside a weight"),
    "written there": (lambda m, x, P: x.to_local().mul_(m.w[0]), "mul_ got a block .* beside a weight"),
    "an item": (lambda m, x, P: (x * 1).__setitem__(0, x.to_local().sum()), "setitem__ got a block .* a global tensor"),
    "a dtype": (lambda m, x, P: m.w.to(x.to_local()), "to got a block .* beside a weight"),
    "a torch module": (
        lambda m, x, P: F.linear(x.to_local()[None, :1], m.w[:1, None]),
        "linear got a block .* a weight",
    ),
    "written into a table": (lambda m, x, P: torch.zeros(2).double().add_(x.to_local().sum()) * m.w[0], "mul got a bl"),
    "an autograd function": (lambda m, x, P: Times.apply(x.to_local(), m.w[0]), "function Times got a block"),
    "an operator": (lambda m, x, P: times(x.to_local(), m.w[0]), "got a block .* beside a weight"),
    "of a constant": (lambda m, x, P: Times.apply(noise(1), x.to_local()[:0].sum()) * m.w[0], "mul got a block"),
    "a layer": (lambda m, x, P: nn.DistributedDropout(P, 0.0)(x.to_local()) * m.w[0], "mul got a block .* a weight"),
    "its own data": (lambda m, x, P: nn.Repartition(P, P)(noise(2).requires_grad_()) * m.w[0], "mul got a block"),
    "a loss": (
        lambda m, x, P: nn.DistributedMSELoss(P)(x.to_local(), x.to_local() * 0) * m.w[0].exp(),
        "mul got a block .* beside a weight",
    ),
    "a loss beside a global one": (
        lambda m, x, P: x.sum() + nn.DistributedMSELoss(P)(x.to_local(), x.to_local() * 0),
        "add got a block .* beside a global tensor",
    ),
    "arguments of a loss": (
        lambda m, x, P: nn.DistributedMSELoss(P)(x, x.to_local()),
        "MSELoss got a block .* a global",
    ),
    "weights in a loss": (
        lambda m, x, P: nn.DistributedMSELoss(P)(x.to_local(), m.w),
        "MSELoss got a block .* a weight",
    ),
    "on worker 0": (lambda m, x, P: nn.Repartition(P, P[:1])(x.to_local()).sum() * m.w[0], "mul got a block"),
    "whole on worker 0": (lambda m, x, P: x.full_tensor(on=0).square().sum() * m.w[0], "mul got a block .* a weight"),
    "a sum": (
        lambda m, x, P: nn.AllSumReduce(P, (0,))(x.to_local().sum().reshape(1)) * x,
        "mul got a block .* a global",
    ),
    "a checkpoint": (
        lambda m, x, P: checkpoint(torch.mul, x.to_local(), m.w[0], use_reentrant=False),
        "mul got a block",
    ),
    "re-entry": (
        lambda m, x, P: checkpoint(torch.mul, x.to_local(), m.w[0], use_reentrant=True),
        "Function got a block",
    ),
    "known to re-entry": (
        lambda m, x, P: checkpoint(lambda h: h * m.w[0], x.to_local(), use_reentrant=True),
        "mul got a block",
    ),
}


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("name", MIXED)
@on_workers
def test_blocks_are_refused_beside_weights_and_global_tensors_in_a_forward(name, active, weights):
    """Of a weight each worker has a part of the gradient there, and of a block its own. The error is that of all."""
    use, text = MIXED[name]
    P = grid(active)
    model = distdl.distribute(Calling(lambda m, x: use(m, x, P)), P, weights=weights)
    with pytest.raises(RuntimeError, match=text + ".*distdl.local_map"):
        model(split(noise(6), active).requires_grad_())
