"""Autograd functions as users write them: each saves, gives or differentiates in another way."""

import numpy
import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from distdl import GlobalTensor


def scaled_sine():
    """A new autograd function: y = sin(x) w."""

    class ScaledSine(Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x.sin() * w

        @staticmethod
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            return dy * w * x.cos(), (dy * x.sin()).sum(0)

    return ScaledSine


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


class Listed(Function):
    """Gets its gradients as a list, and adds to what there is already, where torch (2.15) shows that."""

    boxed_grads_call = True

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w, x + w

    @staticmethod
    def backward(ctx, gradients):
        x, w = ctx.saved_tensors
        of_sum, of_product = gradients.pop(), gradients.pop()
        dx, there = of_product * w + of_sum, getattr(ctx, "input_grad_buffers", (None,))[0]
        return dx if there is None else there.add_(dx) and None, (of_product * x + of_sum).sum(0)


class Newer(Function):
    """Calls its backward by the newer name."""

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def vjp(ctx, dy):
        return dy * ctx.saved_tensors[0].cos()


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


class Rooted(Function):
    """By the names of old."""

    @staticmethod
    def forward(ctx, x, w):
        assert ctx.requires_grad
        ctx.save_for_backward(x, w)
        return torch.sqrt(1 + x * x) * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_variables
        root = torch.sqrt(1 + x * x)
        return dy * w * x / root, (dy * root).sum(0)


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


class Careless(Function):
    """Gives a gradient of another shape for an argument that needs none, as solvers of equations do for times."""

    @staticmethod
    def forward(ctx, x, times):
        ctx.save_for_backward(times)
        return x * times.sum()

    @staticmethod
    def backward(ctx, dy):
        (times,) = ctx.saved_tensors
        return dy * times.sum(), dy.sum().expand(2)


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


class Clipped(Function):
    """Of weights alone. Like those below, its backward is not linear: of parts of a gradient, it gives no parts."""

    @staticmethod
    def forward(ctx, w):
        return w * 1

    @staticmethod
    def backward(ctx, dy):
        return dy.clamp(-0.5, 0.5)


class Tanh(Function):
    """With second derivatives."""

    @staticmethod
    def forward(w, power=2):
        return w**power

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx, dy):
        w, y = ctx.saved_tensors
        return (dy * w).tanh() + y.sin(), None


class Signs(Function):
    """Of several results, of which some are not used or no tensors."""

    @staticmethod
    def forward(ctx, w, v, factor):
        ctx.save_for_backward(w, v)
        ctx.set_materialize_grads(False)
        return w * v * factor, (w + v).sum(), "text", w.argmax(), w.float()

    @staticmethod
    def backward(ctx, dy, d_sum, no_tensor, no_gradient, unused):
        w, v = ctx.saved_tensors
        assert no_gradient is None and unused is None
        dw = torch.zeros_like(w) if d_sum is None else d_sum.sign().expand(w.shape)
        dw = dw if dy is None else dw + v * dy / dy.norm()
        return dw, dw * 2 if ctx.needs_input_grad[1] else None, None


class Around(Function):
    """Of weights alone, with a global tensor from around it, which gets no gradient, as in torch."""

    @staticmethod
    def forward(ctx, w, box):
        ctx.save_for_backward(w)
        ctx.box = box
        return box[0] * w, w.exp()

    @staticmethod
    def backward(ctx, dy, de):
        (w,) = ctx.saved_tensors
        return (dy * ctx.box[0]).sum(0).tanh() + de * w.exp(), None


class Called(Function):
    """Its backward goes through a part of the model, and there is a gradient of that, too."""

    @staticmethod
    def forward(ctx, w, module):
        ctx.save_for_backward(w)
        ctx.module = module
        return module(w)

    @staticmethod
    def backward(ctx, dy):
        w = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(w)
        y.backward(dy.sign())
        return w.grad, None


class Sines(Function):
    """Of values alone, by NumPy."""

    @staticmethod
    def forward(ctx, w):
        ctx.values = w.detach().numpy().copy()
        return torch.from_numpy(numpy.sin(ctx.values))

    @staticmethod
    def backward(ctx, dy):
        return torch.from_numpy(numpy.tanh(dy.numpy()) * numpy.cos(ctx.values))


@torch.library.custom_op("distdl_tests::clipped", mutates_args=())
def clipped(w: torch.Tensor, factors: list[float]) -> torch.Tensor:
    return w * factors[0]


clipped.register_autograd(lambda ctx, dy: (dy.clamp(-0.5, 0.5), None))


class Product(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx, dy):
        x, factor = ctx.saved_tensors
        return dy * factor, (dy * x).sum()
