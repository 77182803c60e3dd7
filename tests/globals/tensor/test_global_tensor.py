"""The type of a global tensor, as libraries see it that look at types."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise

import distdl
from distdl import GlobalTensor
from distdl.testing import Counting

x35 = noise(3, 5)


@on_workers
def test_libraries_choose_by_the_module_of_the_class():
    x = split(x35)
    assert type(x).__module__.split(".")[0] == "torch"
    assert isinstance(x, torch.Tensor) and torch.is_tensor(x) and torch.jit.isinstance(x, torch.Tensor)


@on_workers
def test_another_class_of_tensors_is_shed_but_never_taken_on():
    x = split(x35)
    assert x.as_subclass(torch.Tensor) is x
    with pytest.raises(TypeError, match="a global tensor cannot be a Parameter"):
        x.as_subclass(torch.nn.Parameter)


@on_workers
def test_scripted_functions_never_compute_on_a_block():
    scripted = torch.jit.script(_twice)
    with pytest.raises(RuntimeError):
        scripted(split(x35))


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def another(P):
    """The same partition of another world."""
    return distdl.Partition(Counting(P.comm)).create_partition_inclusive([0, 1]).reshape(2, 1)


OF_TWO_WORLDS = {
    "a sum": lambda x, y: x + y,
    "a product": lambda x, y: x @ y.T,
    "a list": lambda x, y: torch.cat([x, y]),
    "an argument by name": lambda x, y: torch.nn.functional.mse_loss(x, target=y),
    "a write": lambda x, y: x.copy_(y),
    "an index": lambda x, y: x[y[:, 0] > 0],
    "a function of blocks": lambda x, y: distdl.local_map(torch.add)(x, y),
    "a gradient": lambda x, y: (leaf_of(x) * 2).backward(y),
    "a gradient by grad": lambda x, y: torch.autograd.grad([leaf_of(x) * 2], [leaf_of(x)], [y]),
    "a sum of lists": lambda x, y: torch._foreach_add_([x], [y]),
    "a hook": lambda x, y: hooked(leaf_of(x), lambda dx: y).square().sum().backward(),
    "a function with a derivative": lambda x, y: Derived.apply(leaf_of(x), y).sum().backward(),
}


def leaf_of(x):
    return x.detach().requires_grad_()


def hooked(x, hook):
    x.register_hook(hook)
    return x


class Derived(torch.autograd.Function):
    """Gives for a derivative what it was told to."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.y = y
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return ctx.y, None


@pytest.mark.parametrize("what", OF_TWO_WORLDS)
@on_workers
def test_tensors_of_two_worlds(what):
    """The same numbers are other workers there. What does each by itself takes tensors of several."""
    P = distdl.world().create_partition_inclusive([0, 1]).reshape(2, 1)
    x, y = split(x35), distdl.distribute_tensor(x35, another(P))
    with pytest.raises(ValueError, match="needs tensors of one world; got some of worlds of 3 and of 3 workers"):
        OF_TWO_WORLDS[what](x, y)
    torch._foreach_add_([x, y], 1)
    x.requires_grad_(), y.requires_grad_()
    torch.autograd.backward([(x * x).sum(), (y * y).sum()])
    assert_close(x.grad, 2 * (x35 + 1))
    assert_close(y.grad, 2 * (x35 + 1))


class Nested(torch.nn.Module):
    """Gives its own weight to another model."""

    def __init__(self, other):
        super().__init__()
        self.own, self.others = torch.nn.Linear(5, 5, dtype=torch.float64), [other]

    def forward(self, x):
        return x @ self.others[0](self.own.weight)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@on_workers
def test_weights_of_two_worlds(weights):
    P = distdl.world().create_partition_inclusive([0, 1]).reshape(2, 1)
    inner = distdl.distribute(torch.nn.Linear(5, 5, dtype=torch.float64), another(P), weights)
    outer = distdl.distribute(Nested(inner), P, weights)
    with pytest.raises(ValueError, match="linear needs tensors of one world; got some of worlds of 3 and of 3 workers"):
        outer(split(x35))


@on_workers
def test_shares_of_two_worlds():
    """Their gradients would add up over the workers of one, beside inputs that are split over those of the other."""
    P = distdl.world().create_partition_inclusive([0, 1]).reshape(2, 1)

    def layer():
        return torch.nn.Linear(5, 5, dtype=torch.float64)

    theirs, ours = distdl.distribute(layer(), another(P), "sharded"), distdl.distribute(layer(), P, "sharded")
    refused = pytest.raises(ValueError, match="needs tensors of one world; got some of worlds of 3 and of 3 workers")
    with refused:
        torch.func.functional_call(ours, dict(theirs.named_parameters()), (split(x35),))
    with refused, torch.no_grad():
        torch.func.functional_call(ours, {"bias": theirs.bias}, (split(x35),))
    tied = layer()
    tied.weight = theirs.weight
    with refused:
        distdl.distribute(tied, P, "sharded")
    ours.weight = theirs.weight
    with refused:
        ours(split(x35))


@pytest.mark.parametrize(("first", "second"), [("replicated", "sharded"), ("sharded", "replicated")])
@on_workers
def test_a_weight_whole_in_one_world_and_in_shares_in_another(first, second):
    P = distdl.world().create_partition_inclusive([0, 1]).reshape(2, 1)
    one, other = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
    other.weight = one.weight
    distdl.distribute(one, another(P), first)
    with pytest.raises(ValueError, match="weight is a parameter of another distributed model, too"):
        distdl.distribute(other, P, second)
    assert type(one.weight) is (GlobalTensor if first == "sharded" else torch.nn.Parameter)
