"""Hooks on the backward of modules: they get, and give, the gradients of whole tensors."""

import copy

import pytest
import torch
from launched import Calling, on_workers, split
from nets import GRIDS, Net, assert_close, assert_same_state, batch, network, partition, run
from same import noise
from torch import nn

import distdl


class _Asked(nn.Module):
    """A module that is called with what follows from a parameter: beside a tensor, and alone."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.ones(1, 3, 1))
        self.scaled = _Scaled()
        self.shifted = _Scaled()

    def forward(self, x):
        return self.scaled(x, self.query * 2) + self.shifted(self.query.exp())


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3, 1))

    def forward(self, *factors):
        y = self.w
        for one in factors:
            y = y * one
        return y


def _gradients(model, x, changes):
    """All that a backward gives, with hooks on each module below the model."""
    seen = []
    for child in [*model.children(), model]:

        def after(module, inputs, outputs):
            seen.extend([*inputs, *outputs])
            return tuple(None if one is None else one * 2 for one in inputs) if changes else None

        def before(module, outputs):
            seen.extend(outputs)
            return tuple(one + 1 for one in outputs) if changes else None

        child.register_full_backward_hook(after)
        child.register_full_backward_pre_hook(before)
    model(x).square().sum().backward()
    return seen


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("make", [Net, _Asked])
def test_hooks_of_modules(weights, changes, make):
    def work():
        for grid in GRIDS:
            sequential = network(make)
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), weights=weights, fallback="error")
            x, _ = batch(0)
            x.requires_grad_()
            y = distdl.distribute_tensor(x, partition(grid))
            expected = _gradients(sequential, x, changes)
            seen = _gradients(model, y, changes)
            assert len(seen) == len(expected)
            for ours, theirs in zip(seen, expected, strict=True):
                assert (ours is None) == (theirs is None)
                if theirs is not None:
                    assert_close(ours, theirs)
            assert_same_state(model, sequential)

    run(work)


def test_a_module_without_inputs_that_are_global():
    def work():
        layer, x = nn.Linear(3, 2).double(), noise(4, 3).requires_grad_()
        layer.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
        layer(x).sum().backward()
        assert_close(x.grad, 2 * layer.weight.sum(0).expand(4, 3))

    run(work)


x35 = noise(3, 5)


@pytest.mark.parametrize("ask", [lambda w: w.register_hook(lambda dw: dw.clamp(-0.5, 0.5)), lambda w: w.retain_grad()])
@on_workers
def test_hooks_of_what_is_computed_from_a_weight_are_refused(ask):
    """They would see this worker's part of the gradient."""

    def forward(m, x):
        w = m.w * 1
        ask(w)
        return x * w

    with pytest.raises(RuntimeError, match="of a tensor computed from weights of a distributed model would see this"):
        distdl.distribute(Calling(forward), split(x35).layout.partition)(split(x35))


@on_workers
def test_a_gradient_edge_is_refused():
    def forward(m, x):
        w = m.w * 2
        edge = torch.autograd.graph.get_gradient_edge(w)
        return x * torch.autograd.grad((x * w).sum(), edge)[0]

    with pytest.raises(TypeError, match="by a gradient edge would be a block of it, or what one worker adds"):
        distdl.distribute(Calling(forward), split(x35).layout.partition)(split(x35))
