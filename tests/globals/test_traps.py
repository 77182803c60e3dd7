"""What defeats a tensor subclass in real models: each was met in one."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise
from torch.nn import functional as F

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)


@on_workers
def test_libraries_choose_by_the_module_of_the_class():
    x = split(x35)
    assert type(x).__module__.split(".")[0] == "torch"
    assert isinstance(x, torch.Tensor) and torch.is_tensor(x) and torch.jit.isinstance(x, torch.Tensor)


@on_workers
def test_scripted_functions_never_compute_on_a_block():
    scripted = torch.jit.script(_twice)
    with pytest.raises(RuntimeError):
        scripted(split(x35))


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


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
def test_an_autograd_function_in_a_model_is_an_error_not_a_wrong_gradient():
    model = distdl.distribute(_Own(), split(x35).layout.partition)
    with pytest.raises(RuntimeError, match="_Square was applied to a global tensor"):
        model(x35).sum().backward()


@pytest.mark.parametrize(
    "write",
    [
        lambda target, x: target.copy_(x),
        lambda target, x: target.add_(x),
        lambda target, x: target.__setitem__(slice(0, 3), x),
        lambda target, x: torch.mul(x, 2, out=target),
        lambda target, x: torch._foreach_add_([target], [x]),
    ],
)
@on_workers
def test_a_global_tensor_is_not_written_into_a_plain_one(write):
    target = torch.zeros(3, 5, dtype=torch.float64)
    with pytest.raises(TypeError, match="plain"):
        write(target, split(x35))
    assert not target.any()


@on_workers
def test_a_recomputed_forward_is_intercepted_in_backward():
    x = split(x35).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda a: F.gelu(a).sum(0).exp(), x, use_reentrant=False)
    y.sum().backward()
    plain = x35.clone().requires_grad_()
    F.gelu(plain).sum(0).exp().sum().backward()
    assert_close(x.grad, plain.grad)


@on_workers
def test_values_tables_and_constants():
    """``.item()`` in a forward, ``.data`` of a tensor, ``torch.as_tensor``, NumPy of a tensor."""
    x = split(x35).requires_grad_()
    assert_close(x / x.abs().sum().item(), x35 / x35.abs().sum())
    assert_close(x.data * 2, x35 * 2)
    assert not x.data.requires_grad
    assert type(torch.as_tensor(x)) is GlobalTensor
    assert x.detach().numpy().tolist() == x35.tolist()


@on_workers
def test_an_in_place_write_reaches_what_it_is_a_view_of():
    """Where the view had to move, the tensor itself is not used again in silence."""
    x, plain = split(x35) * 1, x35.clone()
    x[1:].mul_(2)
    plain[1:].mul_(2)
    assert_close(x, plain)
    x.view(-1).add_(1)
    plain.view(-1).add_(1)
    assert_close(x, plain)
