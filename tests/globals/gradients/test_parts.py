"""Derivatives by weights inside of a model: each worker has a part of them, and the model's code sees the whole."""

import numpy
import pytest
import torch
from launched import Calling, on_workers, split
from same import noise
from torch.nn import functional as F

import distdl
from distdl import GlobalTensor
from distdl.globals.layouts.context import Context
from distdl.globals.tensor.provenance import _SEEN, check_origin

x35 = noise(3, 5)


class _Sine(torch.autograd.Function):
    """Of values alone, as of a library that knows nothing of torch."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(numpy.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, dy):
        return dy * torch.cos(ctx.saved_tensors[0])


class _Tied(torch.autograd.Function):
    """What it returns has a graph of its own before it is tied to this node."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 7


def _learned(m, x, create_graph=True):
    """A step of gradient descent on the task of this input, as in meta-learning."""
    (step,) = torch.autograd.grad(((x * m.w).sum(1) - 1).square().mean(), m.w, create_graph=create_graph)
    return x * (m.w - 0.1 * step)


def _learned_call(m, x):
    weights = {"weight": m.inner.weight * 1, "bias": m.inner.bias * 1}
    loss = torch.func.functional_call(m.inner, weights, (x,)).square().mean()
    steps = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    moved = {name: one - 0.1 * step for (name, one), step in zip(weights.items(), steps, strict=True)}
    return torch.func.functional_call(m.inner, moved, (x,))


def _regularised(m, x):
    """The parameter is read by a submodule, by itself, and as one of all."""
    own = sum(one.square().sum() for one in m.inner.parameters())
    loss = m.inner(x).square().mean() + m.inner.weight.square().sum() + own
    (step,) = torch.autograd.grad(loss, m.inner.weight, create_graph=True)
    return x @ (m.inner.weight - 0.1 * step)


def _product(m, x):
    products = torch.autograd.functional.hvp(lambda w: (w**3 * x).sum(), m.w, m.v, create_graph=True)
    return x * products[1]


def _jacobian(m, x):
    return x @ torch.autograd.functional.jacobian(lambda w: w**2 * m.v, m.w, create_graph=True)


def _of_a_leaf(m, x):
    u = torch.ones(5, dtype=x.dtype, requires_grad=True)
    (du,) = torch.autograd.grad((u * m.w * x).sum() + (u**2 * m.w).sum(), u, create_graph=True)
    return x * du


def _clamped_parameter(m, x):
    m.w.register_hook(lambda dw: dw.clamp(-0.5, 0.5))
    return x * m.w


def _clamp(w):
    w.grad.clamp_(-0.5, 0.5)


def _clamped_at_last(m, x):
    if not m.seen:
        m.seen.append(torch.ones(1))
        m.w.register_post_accumulate_grad_hook(_clamp)
    return x * m.w


def _trained(m, x):
    """Its own backward before that of the loss: gradients of both add up."""
    (x * m.w * m.v).sum().backward(inputs=[m.w], retain_graph=True)
    assert m.w.grad is not None
    (x * m.w).sum().backward()
    return x * m.v


def _table(m, x):
    """A plain table, into which parameters are written; and views of it that are taken later."""
    table = torch.zeros(3, 5, dtype=x.dtype)
    table[0] = m.w
    table[1:][0] = m.v
    first, rest = table[0], table[1:]
    return x * (first * 2) * table.sum(0) * F.relu(rest[0])


def _list(m, x):
    table = torch.zeros(5, dtype=x.dtype)
    torch._foreach_add_([table], [m.w])
    return x * table


FORWARDS = {
    "learned": _learned,
    "first order": lambda m, x: _learned(m, x, False),
    "functional": _learned_call,
    "regularised": _regularised,
    "product": _product,
    "jacobian": _jacobian,
    "of a leaf": _of_a_leaf,
    "clamped parameter": _clamped_parameter,
    "clamped at last": _clamped_at_last,
    "trained": _trained,
    "table": _table,
    "list": _list,
    "values alone": lambda m, x: x * _Sine.apply(m.w),
    "tied": lambda m, x: x * _Tied.apply(m.w),
    "plain result": lambda m, x: {"a": [_view(m) * 2, x]},
}


def _view(m):
    table = torch.zeros(2, 5, dtype=torch.float64)
    row = table[1]
    row.copy_(m.w)
    return row


def _trained_twice(model, x):
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimiser.zero_grad()
        y = model(x)
        (y["a"][0].square().sum() if isinstance(y, dict) else y.square().sum()).backward()
        optimiser.step()
    return [*model.state_dict().values(), *model.seen]


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("forward", FORWARDS)
@on_workers
def test_derivatives_by_weights_in_a_forward(forward, weights):
    x = split(x35)
    model = distdl.distribute(Calling(FORWARDS[forward]), x.layout.partition, weights, fallback="error")
    kept = list(model.parameters())
    found, expected = _trained_twice(model, x), _trained_twice(Calling(FORWARDS[forward]), x35)
    assert all(one is other for one, other in zip(model.parameters(), kept, strict=True))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        ours = ours.full_tensor() if type(ours) is GlobalTensor else ours.as_subclass(torch.Tensor)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def _seen_by_a_view(m, x):
    table = torch.zeros(2, 5, dtype=torch.float64)
    row = table[1]
    table[1] = m.w
    return x * row


def _seen_by_a_detached_one(m, x):
    table = torch.zeros(2, 5, dtype=torch.float64)
    same = table.detach()
    table[1:].add_(m.w)
    return x * same[1]


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("forward", [_seen_by_a_view, _seen_by_a_detached_one])
@on_workers
def test_views_that_were_taken_before_a_weight_is_written_are_refused(forward, weights):
    """They would follow from the weight, and not say so."""
    x = split(x35)
    with pytest.raises(RuntimeError, match="written in place into a plain tensor of which there are other views"):
        distdl.distribute(Calling(forward), x.layout.partition, weights)(x)


@on_workers
def test_gradients_by_weights_that_nobody_has_used_are_none():
    def forward(m, x):
        used, unused = torch.autograd.grad((m.w**2).sum(), [m.w, m.v], create_graph=True, allow_unused=True)
        assert unused is None
        return x * used

    model = distdl.distribute(Calling(forward), split(x35).layout.partition)
    torch.testing.assert_close(model(split(x35)).full_tensor(), x35 * 2 * model.w)


def test_each_node_of_a_long_history_is_looked_at_once():
    """From a tensor that nothing follows from, as in a loop that uses each state of a recurrent network."""

    def work():
        context = Context.of(distdl.world().comm)
        h = torch.tensor(0.5, requires_grad=True)
        for _ in range(50):
            h = h.sin().cos()
            check_origin(h * 2, context)
            assert all(_SEEN in node.metadata for node in (h.grad_fn, h.grad_fn.next_functions[0][0]))

    distdl.run_workers(work, 2)
