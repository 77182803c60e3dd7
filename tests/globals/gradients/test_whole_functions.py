"""Autograd functions of a user's own, in a distributed model: their code computes with whole tensors."""

import pytest
import torch
from autograd_functions import (
    Around,
    Called,
    Careless,
    Clipped,
    Identity,
    Inner,
    Listed,
    Newer,
    Product,
    Reversed,
    Rooted,
    Rounded,
    Row,
    Scaled,
    Signs,
    Sines,
    Softmax,
    Swish,
    Tanh,
    Two,
    Values,
    clipped,
)
from launched import Calling, assert_close, on_workers, split
from same import noise
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)


row = noise(5, seed=1)


def _mapped(function, x):
    return distdl.local_map(function)(x) if type(x) is GlobalTensor else function(x)


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


class _Given(Function):
    """What its backward gives is given."""

    @staticmethod
    def forward(ctx, x, gradients):
        ctx.gradients = gradients
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return ctx.gradients(dy)


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
    with pytest.raises(RuntimeError, match=r"would write values of a global tensor into a plain tensor.* shares its"):
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
