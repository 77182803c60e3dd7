"""Autograd functions of a user's own, in a distributed model: their code computes with whole tensors."""

import numpy
import pytest
import torch
from launched import Calling, assert_close, on_workers, split
from same import noise
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor

x35, row = noise(3, 5), noise(5, seed=1)


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


def _mapped(function, x):
    return distdl.local_map(function)(x) if type(x) is GlobalTensor else function(x)


class Product(Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx, dy):
        x, factor = ctx.saved_tensors
        return dy * factor, (dy * x).sum()


def _of_own_block(m, x, y):
    if type(x) is not GlobalTensor:
        return Product.apply(x * 1, m.w[0]) * Product.apply(y, m.v[0])
    product = distdl.local_map(Product.apply)
    return product(x * 1, m.w[0]) * product(y, m.v[0])


library = torch.library.Library("distdl_tests_written", "DEF")
library.define("add_one_(Tensor(a!) x) -> Tensor(a!)")
library.impl("add_one_", lambda x: x.add_(1), "CompositeImplicitAutograd")


def _written_by_operator(m, x):
    w = m.w * 1
    torch.ops.distdl_tests_written.add_one_(w)
    return x * w


def _clipped_view(m, x):
    """What follows from a weight, and does not say so by its type."""
    table = torch.zeros(2, 5, dtype=x.dtype)
    row = table[1]
    table[1] = m.w
    return x * Clipped.apply(row)


USES = {
    "clipped": lambda m, x: x * Clipped.apply(m.w),
    "clipped twice": lambda m, x: x * Clipped.apply(Tanh.apply(m.w * m.v, power=3)) * m.w,
    "on blocks": lambda m, x: _mapped(Clipped.apply, (x * m.w).sin()) * m.v,
    "on blocks, beside a weight": lambda m, x: _mapped(lambda x: Clipped.apply(x) * m.v.sum(), x * m.w),
    "of its own block": lambda m, x: _of_own_block(m, x, x.detach()) * x,
    "of what is computed from it": lambda m, x: _of_own_block(m, x * m.v, x.detach()) + x,
    "of a block and a weight": lambda m, x: _mapped(lambda x: Scaled.apply(x, m.w[0], m.v[0]) * 2, x.detach()) * x,
    "signs": lambda m, x: x * Signs.apply(m.w, m.v, 3)[0],
    "sign of a sum": lambda m, x: x * Signs.apply(m.w, m.v.detach(), 3)[1],
    "around": lambda m, x: sum(Around.apply(m.w, [x.detach() * 2])) * x,
    "called": lambda m, x: x * Called.apply(m.w, m.inner),
    "sines": lambda m, x: x * Sines.apply(m.w),
    "operator": lambda m, x: x * clipped(m.w * m.v, [2.0]),
    "operator that writes": _written_by_operator,
    "clipped in a checkpoint": lambda m, x: checkpoint(lambda x: x * Clipped.apply(m.w), x, use_reentrant=False),
    "clipped in a reentrant one": lambda m, x: x * checkpoint(lambda w: Tanh.apply(w) * m.v, m.w, use_reentrant=True),
    "clipped without gradients": lambda m, x: x * m.v + x * _without(Clipped.apply, m.w),
    "differentiated": lambda m, x: x * torch.autograd.grad(Tanh.apply(m.w).sum(), m.w, create_graph=True)[0],
    "saved argument": lambda m, x: Swish.apply(x * m.w) + x,
    "saved result": lambda m, x: Softmax.apply(x * m.w, 0) + Softmax.apply(x, -1) * m.v,
    "names of old": lambda m, x: Rooted.apply(x, m.w),
    "a list of gradients": lambda m, x: sum(Listed.apply(x * m.w, m.v)) + x,
    "a list of gradients of weights": lambda m, x: x * sum(Listed.apply(m.w[None], m.v)),
    "newer name": lambda m, x: Newer.apply(x * m.w) * m.v,
    "view": lambda m, x: Reversed.apply(x * m.w),
    "identity": lambda m, x: Identity.apply(x * m.w) * x,
    "part": lambda m, x: Row.apply(x * m.w),
    "straight through": lambda m, x: Rounded.apply(3 * x * m.w),
    "careless": lambda m, x: Careless.apply(x * m.w, x.detach()[:, 0]) + Careless.apply(x, torch.arange(4.0)) * m.v,
    "weights": lambda m, x: Scaled.apply(x, m.w, m.v, power=3) + Scaled.apply(x, m.w * 2, m.v, 1),
    "constant": lambda m, x: Scaled.apply(x.detach(), m.w, m.v) * x,
    "several": lambda m, x: Two.apply(x * m.w)[0] * m.v.sum(),
    "values": lambda m, x: Values.apply(x * m.w),
    "module": lambda m, x: Inner.apply(x * m.w, m.inner),
    "written": lambda m, x: Swish.apply(x * m.w).mul_(m.v),
    "weights alone": lambda m, x: x * Swish.apply(m.w),
    "checkpoint": lambda m, x: checkpoint(lambda x: Swish.apply(x * m.w), x, use_reentrant=False),
    "reentrant checkpoint": lambda m, x: checkpoint(lambda x: (x * m.w).sin() * m.v, x * m.w, use_reentrant=True),
    "reentrant checkpoint that gives a copy": lambda m, x: torch.mul(
        *checkpoint(lambda x: (x.sin() * m.v, m.w * 2), x, use_reentrant=True)
    ),
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
@pytest.mark.filterwarnings("ignore:'saved_variables' is deprecated:DeprecationWarning")
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


class Summed(Function):
    """Of a plain tensor, the sum, which it saves and gives twice; and a global one times it."""

    @staticmethod
    def forward(ctx, x, y):
        total = x.sum()
        ctx.save_for_backward(total)
        return y * total, total, total

    @staticmethod
    def backward(ctx, dy, *_):
        (total,) = ctx.saved_tensors
        return None, dy * total


@on_workers
def test_a_plain_result_beside_a_global_one():
    numbers = torch.tensor([True, False, True])
    for _ in range(
        40
    ):  # (where a result was freed before the next was seen, that took its place in memory, and its cells)
        x = split(x35.clone()).requires_grad_()
        y, *totals = Summed.apply(numbers, x)
        for total in totals:
            assert type(total) is GlobalTensor and total.dtype == torch.int64 and total.shape == ()
            assert total.item() == 2
        assert_close(y, x35 * 2)
        y.sum().backward()
        assert_close(x.grad, torch.full_like(x35, 2))


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


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@on_workers
def test_second_derivatives_by_weights(weights):
    def twice(model, x):
        (dw,) = torch.autograd.grad(model(x).pow(3).sum(), model.w, create_graph=True)
        dw.square().sum().backward()
        return dw, model.w.grad

    x = split(x35)
    model = distdl.distribute(Calling(lambda m, x: x * Tanh.apply(m.w)), x.layout.partition, weights)
    for ours, theirs in zip(twice(model, x), twice(Calling(lambda m, x: x * Tanh.apply(m.w)), x35), strict=True):
        whole = ours.full_tensor() if type(ours) is GlobalTensor else ours
        torch.testing.assert_close(whole, theirs, rtol=1e-11, atol=1e-12)


class Second(Function):
    @staticmethod
    def forward(ctx, x, w):
        return x * w

    @staticmethod
    def backward(ctx, dy):
        return dy, None


class Stopped(Function):
    @staticmethod
    def forward(ctx, w):
        return w * 2

    @staticmethod
    def backward(ctx, dy):
        return None


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("use", [lambda m, x: x * Stopped.apply(m.w) * m.v, lambda m, x: Second.apply(x, m.w) * m.v])
@on_workers
def test_weights_for_which_a_function_gives_no_gradient_have_none(use, weights):
    x = split(x35)
    model = distdl.distribute(Calling(use), x.layout.partition, weights)
    model(x).sum().backward()
    assert model.w.grad is None
    assert model.v.grad is not None


def _of_block_without_gradient(m, x):
    return _mapped(lambda x: Product.apply(x * 1, m.w[0]), x)


def _beside_a_variable(m, x):
    return x * Signs.apply(m.w, torch.ones(5, dtype=x.dtype, requires_grad=True) * 2, 3)[0]


@pytest.mark.parametrize("use", [_of_block_without_gradient, _beside_a_variable])
@on_workers
def test_plain_tensors_beside_weights(use):
    x, model = split(x35), Calling(use)
    distdl.distribute(model, x.layout.partition)(x).square().sum().backward()
    sequential = Calling(use)
    sequential(x35).square().sum().backward()
    torch.testing.assert_close(model.w.grad, sequential.w.grad)


@on_workers
def test_results_of_one_function_of_weights_have_one_message():
    counts = []
    for use in (lambda m, x: x * (m.w + m.v), lambda m, x: x * sum(Signs.apply(m.w, m.v, 3)[:2])):
        model = distdl.distribute(Calling(use), split(x35).layout.partition)
        loss = model(split(x35)).sum()
        with distdl.ledger() as book:
            loss.backward()
        counts.append(sum(one.calls for one in book.entries))
    assert counts[1] == counts[0] + 1


class _Dirty(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.add_(1)


class _Declares(Function):
    @staticmethod
    def forward(ctx, x, dtypes):
        ctx.set_output_grad_dtype(*dtypes)
        return x * 2, "no tensor"


class _Given(Function):
    """What its backward gives is given."""

    @staticmethod
    def forward(ctx, x, gradients):
        ctx.gradients = gradients
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return ctx.gradients(dy)


@on_workers
def test_what_such_functions_must_not_do():
    P = split(x35).layout.partition
    with pytest.raises(RuntimeError, match=r"_Dirty writes into an argument \(ctx.mark_dirty\)"):
        distdl.distribute(Calling(lambda m, x: _Dirty.apply(x * m.w)), P)(split(x35))
    with pytest.raises(NotImplementedError, match="set_output_grad_dtype of an autograd function of global tensors"):
        _Declares.apply(split(x35), [torch.float64])


@pytest.mark.parametrize(
    "gradients",
    [
        lambda dy: dy,
        lambda dy: (dy, None, dy),
        lambda dy: (dy, None, 3.0),
        lambda dy: (dy, dy),
        lambda dy: (3.0, None),
        lambda dy: ([dy], None),
    ],
)
@on_workers
def test_a_backward_gives_a_tensor_or_none_for_each_tensor_and_none_for_what_is_none(gradients):
    told = []
    for x in (x35.clone(), split(x35)):
        with pytest.raises(RuntimeError) as error:
            _Given.apply(x.requires_grad_(), gradients).sum().backward()
        told.append(str(error.value))
    assert told[0] == told[1]


class _Named(Function):
    @staticmethod
    def forward(ctx, x, w=None, scale=2):
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy * w, dy * x


class _NamedOnly(Function):
    @staticmethod
    def forward(x, *, scale=2):
        return x * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


@on_workers
def test_arguments_by_name():
    found = []
    for x, w in ((x35.clone(), noise(3, 5, seed=1)), (split(x35), split(noise(3, 5, seed=1)))):
        y = _Named.apply(x.requires_grad_(), w=w.requires_grad_()) + _Named.apply(w=w, x=x)
        y.square().sum().backward()
        found.append((y, x.grad, w.grad))
    for theirs, ours in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: _Named.apply(x, other=1),
        lambda x: _Named.apply(x, x=1),
        lambda x: _Named.apply(x, scale=3),
        lambda x: _Named.apply(w=x),
        lambda x: _NamedOnly.apply(x, scale=3),
        lambda x: _NamedOnly.apply(x),
    ],
)
@on_workers
def test_arguments_by_name_that_torch_does_not_take(call):
    for x in (x35, split(x35)):
        with pytest.raises(TypeError):
            call(x)


class _Hidden(Function):
    @staticmethod
    def forward(ctx, w, box):
        return box[0] * w


_apply_of_before = super(Function, Clipped).apply  # as by a reference that is older than the import of distdl
_sines_of_before = super(Function, Sines).apply


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@on_workers
def test_what_functions_of_weights_must_not_do(weights):
    P = split(x35).layout.partition
    for use, problem in (
        (lambda m, x: x * _Dirty.apply(m.w * 1), r"_Dirty writes into an argument .*mark_dirty"),
        (_clipped_view, "written in place into a plain tensor of which there are other views"),
        (lambda m, x: x * _apply_of_before(m.w), "Clipped was applied to weights .* older than the import"),
        (lambda m, x: x * _sines_of_before(m.w), "follows from a weight.* the autograd function Sines .* older than"),
        (lambda m, x: _sines_of_before(m.w), "follows from a weight.* the autograd function Sines .* older than"),
        (lambda m, x: Clipped.apply(x.to_local() * m.w), "mul got a block of this worker.* beside a weight"),
        (lambda m, x: Product.apply(x.to_local(), m.w[0]), "function Product got a block .* beside a weight"),
        (lambda m, x: Product.apply(x.to_local(), x), "function Product got a block .* beside a global tensor"),
        (lambda m, x: _Hidden.apply(m.w, [x.to_local().sum()]), "function _Hidden got a block .* beside a weight"),
    ):
        with pytest.raises(RuntimeError, match=problem):
            distdl.distribute(Calling(use), P, weights)(split(x35))


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
@on_workers
def test_outside_of_a_model(grid):
    x, alone = split(x35, *grid).requires_grad_(), x35.clone().requires_grad_()
    w, w_alone = (noise(5, seed=1).requires_grad_() for _ in range(2))
    for one, weight in ((x, w), (alone, w_alone)):
        Scaled.apply(Swish.apply(one), weight, w_alone.detach(), power=2).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), alone.grad)
    torch.testing.assert_close(w.grad, w_alone.grad)


class Implicit(Function):
    """Differentiates a function of a user's by what it was given of the tensors on which that depends."""

    @staticmethod
    def forward(ctx, function, x, *depends_on):
        ctx.function = function
        ctx.save_for_backward(x, *depends_on)
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, *depends_on = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.function(x)
        return None, *torch.autograd.grad(y, (x, *depends_on), dy)


class Solved(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(noise(10, 5))

    def forward(self, x):
        scale = torch.nn.functional.linear(x, self.weight).view(3, 5, 2)
        return Implicit.apply(lambda x: x * scale[..., 0].exp() + x.sin(), x, scale)


@on_workers
def test_a_function_differentiates_by_views_that_it_has_saved():
    alone, plain = Solved(), x35.clone().requires_grad_()
    alone(plain).square().sum().backward()
    for grid in [(2, 1), (1, 2), (1, 1)]:  # (others have no cells)
        x = split(x35, *grid).requires_grad_()
        model = distdl.distribute(Solved(), x.layout.partition, fallback="error")
        model(x).square().sum().backward()
        assert torch.allclose(x.grad.full_tensor(), plain.grad)
        assert torch.allclose(model.weight.grad, alone.weight.grad)


class _Entering(Function):
    """Makes a global tensor of a plain one, and computes with it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        P = distdl.world().create_partition_inclusive(range(2)).create_cartesian_topology_partition([1, 2])
        return 2 * distdl.distribute_tensor(x, P)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * dy + 0 * x


def _checkpointed(call):
    def run(model, x):
        return checkpoint(lambda x, y: call(model, x + y), 2 * x, x.sin(), use_reentrant=True)

    return run


MADE_OF_PLAIN = {
    "model": _checkpointed(lambda model, x: model(x)),
    "beside what is no tensor": lambda model, x: checkpoint(lambda x: (None, model(x), 3), x, use_reentrant=True),
    "in another": lambda model, x: checkpoint(
        lambda x: checkpoint(model, x, use_reentrant=True).sin(), 3 * x, use_reentrant=False
    ),
    "own": lambda model, x: model(_Entering.apply(x)),
    "plain and global": lambda model, x: checkpoint(lambda x: (x * 2, _Entering.apply(x)), x, use_reentrant=True),
}


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("call", MADE_OF_PLAIN.values(), ids=MADE_OF_PLAIN)
@on_workers
def test_functions_that_make_global_tensors_of_plain_ones_are_refused(call, weights):
    """As checkpoints with re-entry do of a distributed model that takes a plain tensor."""
    P = distdl.world().create_partition_inclusive(range(2)).create_cartesian_topology_partition([1, 2])
    model = distdl.distribute(Calling(lambda model, x: model.inner(x) * model.w), P, weights=weights, fallback="error")
    with pytest.raises(RuntimeError, match=r"takes plain tensors and gives global ones, .* take use_reentrant=False"):
        call(model, x35.clone().requires_grad_())


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3, x.permute(2, 1, 0) * 3

    @staticmethod
    def backward(ctx, dy, dz):
        return 3 * dy + 3 * dz.permute(2, 1, 0)


class _Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        return x * 3, y * 3

    @staticmethod
    def backward(ctx, dx, dy):
        return 3 * dx, 3 * dy


@pytest.mark.parametrize(
    "apply", [_Permuted.apply, lambda x: _Tripled.apply(x, x.permute(2, 1, 0))], ids=["inside", "given"]
)
@on_workers
def test_the_strides_of_what_a_function_gives(apply):
    found = []
    for place in (split, torch.clone):
        x = place(noise(2, 3, 6)).requires_grad_()
        results = apply(x)
        strides = [one.stride() for one in results]
        with torch.no_grad():
            results[1].as_strided((2,), (1,)).add_(2)
        try:
            (results[0].sum() + results[1].square().sum()).backward()
        except RuntimeError as error:
            assert "has written in place into" in str(error)
            found.append((strides, None))
        else:
            found.append((strides, x.grad))
    (ours, dx), (theirs, expected) = found
    assert ours == theirs
    if dx is not None:
        assert_close(dx, expected)


class Assigned(Function):
    """Writes behind autograd's back into what it is given, as torchdiffeq's steps of several stages do."""

    @staticmethod
    def forward(ctx, into, value, index):
        ctx.index = index
        into.data[index] = value
        return into

    @staticmethod
    def backward(ctx, dy):
        return dy, dy[ctx.index], None


def stages(x, w):
    into = torch.empty(*x.shape, 3, dtype=x.dtype)
    stage = Assigned.apply(into, x * w, (..., 0))
    stage = Assigned.apply(stage, stage[..., 0].sin(), (..., 1))
    stage = Assigned.apply(stage, stage[..., 1] * stage[..., 0], (..., 2))
    return (stage * torch.arange(1, 4)).sum(-1)


@on_workers
def test_plain_tensors_that_are_written_by_another_name():
    results = []
    for make in (lambda x: x.clone(), split, lambda x: split(x, 1, 3)):
        x, w = make(x35).requires_grad_(), row.clone().requires_grad_()
        y = stages(x, w)
        y.square().sum().backward()
        results.append([one.full_tensor() if type(one) is GlobalTensor else one for one in (y, x.grad, w.grad)])
    for found in results[1:]:
        for one, expected in zip(found, results[0], strict=True):
            assert_close(one, expected)
    other = torch.zeros(3, 5, dtype=torch.float64)
    known = other.view(5, 3)
    with pytest.raises(RuntimeError, match=r"would write what a global tensor says into a plain tensor.* shares its"):
        Assigned.apply(other, split(x35), ...)
    assert known.eq(0).all()


class Counted(Function):
    """Writes into one argument, and then into another by another name."""

    @staticmethod
    def forward(ctx, x, count, into, write):
        write(x, count, into)
        into.data[0] = x.sum(0)
        return x + into.sum(0) * count

    @staticmethod
    def backward(ctx, dy):
        return dy, None, None, None


def set_data(x, count, into):
    count.data = count.data + 1


FIRST = {
    "plain": lambda x, count, into: count.data.add_(1),
    "global": lambda x, count, into: x.data.add_(1),
    "the same": lambda x, count, into: into.data[1:].data.add_(1),
    "in a list": lambda x, count, into: torch._foreach_add_([count.data], 1),
    "global in a list": lambda x, count, into: torch._foreach_add_([x.data], 1),
    "by keyword": lambda x, count, into: torch.nn.init.constant_(tensor=count, val=count.mean() + 1),
    "statistics": lambda x, count, into: torch.nn.functional.batch_norm(x, count, count.clone(), training=True),
    "other memory": set_data,
}


@pytest.mark.parametrize("name", FIRST)
@on_workers
def test_functions_write_once_into_what_they_are_given(name):
    found = []
    for x in (split(x35), x35.clone()):
        count, into = torch.ones(5, dtype=x35.dtype), torch.zeros(2, 5, dtype=x35.dtype)
        found.append((Counted.apply(x, count, into, FIRST[name]), x, count, into))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


class Mapped(Function):
    @staticmethod
    def forward(ctx, x, scale):
        return x * torch.vmap(lambda one: one.clone().mul_(2))(scale)

    @staticmethod
    def backward(ctx, dy):
        return dy, None


@on_workers
def test_functions_that_map_plain_tensors():
    assert_close(Mapped.apply(split(x35), row), Mapped.apply(x35, row))


@on_workers
def test_a_first_derivative_of_a_function_that_is_differentiable_once():
    """Made to be differentiated again, it is there; its own derivative is torch's error."""

    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * x * w

        @staticmethod
        @once_differentiable
        def backward(ctx, dy):
            x, w = ctx.saved_tensors
            return 2 * x * w * dy, (x * x * dy).sum(0)

    found = []
    for x in (split(noise(3, 5)), noise(3, 5)):
        x, w = x.requires_grad_(), noise(5, seed=2).requires_grad_()
        first = torch.autograd.grad(Squared.apply(x, w).square().sum(), (x, w), create_graph=True)
        found.append(first)
        for one in first:
            with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once"):
                one.sum().backward()
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy


class _Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x):
        return _Square.apply(x * self.w) + x


@on_workers
def test_an_autograd_function_in_a_model_has_its_gradient():
    model, alone = distdl.distribute(_Own(), split(x35).layout.partition), _Own()
    model(x35).sum().backward()
    alone(x35).sum().backward()
    assert_close(model.w.grad, alone.w.grad)
