"""Autograd functions of a user's own, in a distributed model: their code computes with whole tensors."""

import numpy
import pytest
import torch
from launched import Calling, on_workers, split
from same import noise
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)


class Swish(Function):
    """Saves its argument alone, as libraries do to save memory."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return dy * (s * (1 + x * (1 - s)))


class Softmax(Function):
    """Saves its result, and mixes a dim that is split."""

    @staticmethod
    def forward(ctx, x, dim):
        y = torch.softmax(x, dim)
        ctx.save_for_backward(y)
        ctx.dim = dim
        return y

    @staticmethod
    def backward(ctx, dy):
        (y,) = ctx.saved_tensors
        return y * (dy - (dy * y).sum(ctx.dim, keepdim=True)), None


class Reversed(Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return -0.3 * dy


class Identity(Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return dy.clamp(-0.1, 0.1)


class Row(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x[1:]

    @staticmethod
    def backward(ctx, dy):
        dx = dy.new_zeros(ctx.shape)
        dx[1:] = dy
        return dx


class Rounded(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x)

    @staticmethod
    def backward(ctx, dy):
        return dy


class Scaled(Function):
    """Of a global tensor and of weights, of whose gradients one is global and one plain; with another style of ctx."""

    @staticmethod
    def forward(x, w, v, power=1):
        return x**power * w * v

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[:3], x_scaled := inputs[0] * inputs[1])
        ctx.power, ctx.shape = inputs[3], x_scaled.shape

    @staticmethod
    def backward(ctx, dy):
        x, w, v, _ = ctx.saved_tensors
        p = ctx.power
        dv = (dy * x**p * w).sum(0)
        return (
            dy * p * x ** (p - 1) * w * v,
            (dy * x**p * v).sum(0),
            dv.full_tensor() if type(dv) is GlobalTensor else dv,
            None,
        )


class Two(Function):
    """Of several results one is not differentiable, and one is not used."""

    @staticmethod
    def forward(ctx, x):
        largest, where = x.max(1)
        ctx.save_for_backward(where, None)
        ctx.mark_non_differentiable(where)
        ctx.set_materialize_grads(False)
        ctx.shape = x.shape
        return largest, where, x.sum(), "text"

    @staticmethod
    def backward(ctx, dy, no_gradient, d_sum, no_tensor):
        where, nothing = ctx.saved_tensors
        assert no_gradient is None and d_sum is None and nothing is None
        return torch.zeros(ctx.shape, dtype=dy.dtype).scatter(1, where.unsqueeze(1), dy.unsqueeze(1))


class Values(Function):
    """Of values alone, by NumPy."""

    @staticmethod
    def forward(ctx, x):
        ctx.values = x.detach().numpy()
        return torch.from_numpy(numpy.cumsum(ctx.values, 0))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return torch.from_numpy(numpy.flip(numpy.cumsum(numpy.flip(dy.numpy(), 0), 0), 0).copy())


class Inner(Function):
    """Its backward differentiates again what it computed, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        y.backward(dy)
        return x.grad, None


USES = {
    "saved argument": lambda m, x: Swish.apply(x * m.w) + x,
    "saved result": lambda m, x: Softmax.apply(x * m.w, 0) + Softmax.apply(x, -1) * m.v,
    "view": lambda m, x: Reversed.apply(x * m.w),
    "identity": lambda m, x: Identity.apply(x * m.w) * x,
    "part": lambda m, x: Row.apply(x * m.w),
    "straight through": lambda m, x: Rounded.apply(3 * x * m.w),
    "weights": lambda m, x: Scaled.apply(x, m.w, m.v, power=3) + Scaled.apply(x, m.w * 2, m.v, 1),
    "constant": lambda m, x: Scaled.apply(x.detach(), m.w, m.v) * x,
    "several": lambda m, x: Two.apply(x * m.w)[0] * m.v.sum(),
    "values": lambda m, x: Values.apply(x * m.w),
    "module": lambda m, x: Inner.apply(x * m.w, m.inner),
    "written": lambda m, x: Swish.apply(x * m.w).mul_(m.v),
    "weights alone": lambda m, x: x * Swish.apply(m.w),
    "checkpoint": lambda m, x: checkpoint(lambda x: Swish.apply(x * m.w), x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(lambda x: (x * m.w).sin() * m.v, x * m.w, use_reentrant=True),
    "without gradients": lambda m, x: x * m.w + _without(Swish.apply, x),
}


def _without(function, x):
    with torch.no_grad():
        return function(x)


def _trained(model, x):
    optimiser, gradients = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for _ in range(2):
        optimiser.zero_grad()
        own = x.detach().requires_grad_()
        model(own).square().sum().backward()
        gradients.append(own.grad)
        optimiser.step()
    return [*gradients, *model.state_dict().values()]


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
@pytest.mark.parametrize("use", USES)
@on_workers
def test_an_autograd_function_in_a_model(use, grid, weights):
    x = split(x35, *grid)
    found = _trained(distdl.distribute(Calling(USES[use]), x.layout.partition, weights, fallback="error"), x)
    for ours, theirs in zip(found, _trained(Calling(USES[use]), x35), strict=True):
        whole = ours.full_tensor() if type(ours) is GlobalTensor else ours
        assert (whole is None) == (theirs is None)
        if whole is not None:
            torch.testing.assert_close(whole, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("function", [Swish, lambda x: Softmax.apply(x, 0), Reversed])
@on_workers
def test_second_derivatives(function):
    def twice(model, x):
        x = x.detach().requires_grad_()
        (dx,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
        dx.square().sum().backward()
        return x.grad, model.w.grad

    apply = getattr(function, "apply", function)
    x = split(x35)
    model = distdl.distribute(Calling(lambda m, x: apply(x * m.w)), x.layout.partition)
    for ours, theirs in zip(twice(model, x), twice(Calling(lambda m, x: apply(x * m.w)), x35), strict=True):
        whole = ours.full_tensor() if type(ours) is GlobalTensor else ours
        torch.testing.assert_close(whole, theirs, rtol=1e-11, atol=1e-12)


class _Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)


class _Short(Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x * scale

    @staticmethod
    def backward(ctx, dy):
        return dy


@on_workers
def test_what_such_functions_must_not_do():
    P = split(x35).layout.partition
    with pytest.raises(RuntimeError, match=r"_Dirty writes into a global tensor \(ctx.mark_dirty\)"):
        distdl.distribute(Calling(lambda m, x: _Dirty.apply(x * m.w)), P)(split(x35))
    with pytest.raises(RuntimeError, match="_ShortBackward returned an incorrect number of gradients"):
        distdl.distribute(Calling(lambda m, x: _Short.apply(x * m.w, 2)), P)(split(x35)).sum().backward()


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
@on_workers
def test_outside_of_a_model(grid):
    x, alone = split(x35, *grid).requires_grad_(), x35.clone().requires_grad_()
    w, w_alone = (noise(5, seed=1).requires_grad_() for _ in range(2))
    for one, weight in ((x, w), (alone, w_alone)):
        Scaled.apply(Swish.apply(one), weight, w_alone.detach(), power=2).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), alone.grad)
    torch.testing.assert_close(w.grad, w_alone.grad)
