"""Autograd functions of a user's own, in a distributed model: their code computes with whole tensors."""

import pytest
import torch
from autograd_functions import Clipped, Product, Signs, Sines
from launched import Calling, on_workers, split
from same import noise
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)


def _mapped(function, x):
    return distdl.local_map(function)(x) if type(x) is GlobalTensor else function(x)


def _clipped_view(m, x):
    """What follows from a weight, and does not say so by its type."""
    table = torch.zeros(2, 5, dtype=x.dtype)
    row = table[1]
    table[1] = m.w
    return x * Clipped.apply(row)


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


@on_workers
def test_what_such_functions_must_not_do():
    P = split(x35).layout.partition
    with pytest.raises(RuntimeError, match=r"_Dirty writes into an argument \(ctx.mark_dirty\)"):
        distdl.distribute(Calling(lambda m, x: _Dirty.apply(x * m.w)), P)(split(x35))
    with pytest.raises(NotImplementedError, match="set_output_grad_dtype of an autograd function of global tensors"):
        _Declares.apply(split(x35), [torch.float64])


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


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.contiguous()  # which is x

    @staticmethod
    def backward(ctx, dy):
        return dy.contiguous()


class _Part(_Same):
    @staticmethod
    def forward(ctx, x):
        return x[:]  # a view, which says that it requires a gradient, because x does


USED = {
    "sum": torch.Tensor.sum,
    "beside": lambda y: torch.ones(3, 5) + y,
    "written": lambda y: y.mul_(2),
    "whole": lambda y: y.full_tensor(),
    "on one": lambda y: y.full_tensor(on=0),
    "block": lambda y: y.to_local(),
    "item": lambda y: y.tolist(),
    "cast": lambda y: y.float(),
    "split": lambda y: y.redistribute(split(x35, 1, 2).layout),
    "backward": lambda y: y.backward(x35),
    "backwards": lambda y: torch.autograd.backward(y, x35),
    "grad": lambda y: torch.autograd.grad(y, y, x35),
    "falls back": lambda y: torch.alias_copy(y),
    "asked": lambda y: y.requires_grad,
    "detached": lambda y: y.detach(),
    "list": lambda y: torch._foreach_add([y], 1.0),
}


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("function", [_Double, _Same, _Part])
@pytest.mark.parametrize("use", USED)
@on_workers
def test_a_function_of_a_users_own_never_loses_a_gradient(use, function):
    with pytest.raises(RuntimeError, match=f"{function.__name__} was applied to a global tensor by a reference"):
        USED[use](_older(function)(split(x35).requires_grad_() * 1))


@pytest.mark.parametrize("function", [_Double, _Same, _Part])
@on_workers
def test_a_function_of_a_users_own_never_loses_the_gradient_of_a_leaf(function):
    with pytest.raises(RuntimeError, match=f"{function.__name__} was applied to a global tensor by a reference"):
        _older(function)(split(x35).requires_grad_()).sum()


def _older(function):
    """What applies it and knows nothing of distdl, as ``function.apply`` did before that was imported."""
    return super(torch.autograd.Function, function).apply
