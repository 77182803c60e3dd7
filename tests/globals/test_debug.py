"""What workers compare under DISTDL_DEBUG=1."""

import pytest
import torch
from launched import split
from same import noise

import distdl

x35 = noise(3, 5)


class Branching(torch.nn.Module):
    def __init__(self, differs):
        super().__init__()
        self.inner = torch.nn.Identity()
        self.differs = differs

    def forward(self, x):
        y = self.inner(x.exp())
        return y.mean(0) if self.differs and distdl.world().comm.rank == 1 else y.sum(0)


def model(differs):
    module = torch.nn.Sequential(torch.nn.ReLU(), Branching(differs))
    return distdl.distribute(module, split(x35).layout.partition)(x35)


# what workers do, and what worker 1 does otherwise
DIFFERENCES = {
    "functions": (lambda x: x.sum(0), lambda x: x.mean(0), "sum(3x5 torch.float64", "mean(3x5"),
    "dtypes": (lambda x: x.sum(0), lambda x: x.float().sum(0), "torch.float64", "torch.float32"),
    "layouts": (lambda x: x.sum(), lambda x: x[1:].sum(), "in blocks 2+1, 5", "in blocks 1+1, 5"),
    "gradients": (
        lambda x: x.sum(0),
        lambda x: x.clone().requires_grad_().sum(0),
        "over 2x1 on workers 0, 1",
        " with gradient",
    ),
    "calls": (lambda x: x.sum(0), lambda x: x.full_tensor(), "sum(", "full_tensor"),
    "data": (lambda x: x.sum(0), lambda x: split(x35), "sum(", "distribute_tensor"),
    "modules": (lambda x: model(False), lambda x: model(True), "in module 1", "mean("),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_workers_that_do_not_do_the_same_learn_it(monkeypatch, what):
    monkeypatch.setenv("DISTDL_DEBUG", "1")
    told = {}
    expected, other, *texts = DIFFERENCES[what]

    def work():
        me, x = distdl.world().comm.rank, split(x35)
        with pytest.raises(RuntimeError) as error:
            (other if me == 1 else expected)(x)
        told[me] = str(error.value)

    distdl.run_workers(work, 3)
    assert told[0] == told[1] == told[2]
    for text in ("worker 0 is in", "and worker 1 in", *texts):
        assert text in told[0]


def test_workers_that_do_the_same_compute_the_same(monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        x = split(x35).requires_grad_()
        if distdl.world().comm.rank == 0:
            assert x.is_leaf and x.shape == (3, 5)  # what needs no exchange, one worker may ask by itself
        y = (x * x[:, :1]).sum(0).pow(2).sum()
        y.backward()
        (gradient,) = torch.autograd.grad((plain * plain[:, :1]).sum(0).pow(2).sum(), plain)
        assert torch.allclose(x.grad.full_tensor(), gradient)

    plain = x35.clone().requires_grad_()
    distdl.run_workers(work, 3)


@pytest.mark.parametrize("debug", ["0", "1"])
def test_weights_that_entered_once_more_on_one_worker_are_told_apart_in_backward(monkeypatch, debug):
    """A forward that sends nothing, which the others have not made: its node is counted, and the counts are named.

    Where workers compare, they meet in the forward already.
    """
    monkeypatch.setenv("DISTDL_DEBUG", debug)
    told = {}

    def work():
        me, x = distdl.world().comm.rank, split(x35)
        layer = distdl.distribute(torch.nn.Linear(5, 5, dtype=torch.float64), x.layout.partition)
        if me == 0:
            layer(x)
        try:
            layer(x).sum().backward()
        except distdl.CommunicationError as error:
            told[me] = str(error)
            raise

    with pytest.raises(distdl.CommunicationError):
        distdl.run_workers(work, 3)
    assert told[0] == told[1] == told[2]
    if debug == "1":
        assert "comparing weights" in told[0] and "on 0; sum(" in told[0]
        return
    for text in ("recorded node 2, gradients of replicated", "recorded node 1, gradients of replicated"):
        assert f"in the backward of {text}" in told[0]


@pytest.mark.filterwarnings("ignore:.*has no op for global tensors")
def test_nested_tensors_beside_global_ones(monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        with pytest.raises(TypeError, match="no worker can have a block"):
            torch.nested.nested_tensor_from_jagged(split(x35), torch.tensor([0, 1, 3]))


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_weights_that_became_different_are_named(monkeypatch, weights):
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        me, x = distdl.world().comm.rank, split(x35)
        layers = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.BatchNorm1d(5)).double()
        model = distdl.distribute(layers, x.layout.partition, weights=weights)
        model(x).sum().backward()
        with torch.no_grad():
            one = model[1].running_mean if weights == "sharded" else model[0].bias
            one.copy_(torch.full((5,), float(me)))
        with pytest.raises(ValueError, match=r"(0\.bias|1\.running_mean) of worker 0 differs from .* of worker 1"):
            model(x)

    torch.nested.nested_tensor_from_jagged(x35, torch.tensor([0, 1, 3]))  # (which torch imports then)
    distdl.run_workers(work, 3)
