"""What workers compare under DISTDL_DEBUG=1."""

from functools import partial

import pytest
import torch
from launched import split
from same import noise
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import distdl

x35 = noise(3, 5)


class Branching(torch.nn.Module):
    def __init__(self, differs, doubles):
        super().__init__()
        self.inner = torch.nn.Identity()
        self.differs, self.doubles = differs, doubles

    def forward(self, x):
        y = self.inner(x.exp())
        if self.doubles:
            y = y * 2
        return y.mean(0) if self.differs and distdl.world().comm.rank == 1 else y.sum(0)


def model(differs, doubles=False):
    module = torch.nn.Sequential(torch.nn.ReLU(), Branching(differs, doubles))
    return distdl.distribute(module, split(x35).layout.partition)(x35)


def fed(seed):
    return distdl.distribute(torch.nn.ReLU(), split(x35).layout.partition)(noise(3, 5, seed=seed))


def seeded(seed):
    return torch.Generator().manual_seed(seed)


# what workers do, and what worker 1 does otherwise
DIFFERENCES = {
    "functions": (lambda x: x.sum(0), lambda x: x.mean(0), "sum(3x5 torch.float64", "mean(3x5"),
    "dtypes": (lambda x: x.sum(0), lambda x: x.float().sum(0), "is in sum(", "worker 1 has called float("),
    "layouts": (lambda x: x.sum(), lambda x: x[1:].sum(), "in blocks 2+1, 5", "worker 1 has called __getitem__("),
    "gradients": (
        lambda x: x.sum(0),
        lambda x: x.clone().requires_grad_().sum(0),
        "over 2x1 on workers 0, 1",
        "worker 1 has called clone(",
    ),
    "calls": (lambda x: x.sum(0), lambda x: x.full_tensor(), "sum(", "full_tensor"),
    "data": (lambda x: x.sum(0), lambda x: split(x35), "sum(", "distribute_tensor"),
    "modules": (lambda x: model(False), lambda x: model(True), "in module 1", "mean("),
    "partitions": (
        lambda x: x.redistribute(x.layout.partition.T),
        lambda x: x.redistribute(x.layout.partition[::-1]),
        "to lie over 1x2 on workers 0, 1 in blocks 3, 3+2",
        "to lie over 2x1 on workers 1, 0 in blocks 2+1, 5",
    ),
    "owners": (
        lambda x: x.full_tensor(on=1),
        lambda x: x.full_tensor(on=0),
        "to lie on worker 1",
        "to lie on worker 0",
    ),
}


# the same of functions that exchange nothing, and of what functions are called with
UNHEARD = {
    "elements": (lambda x: x.relu(), lambda x: x.tanh(), "has called relu(3x5", "worker 1 has called tanh(3x5"),
    "one more": (lambda x: x.exp(), lambda x: (x * 2).exp(), "has called exp(3x5", "worker 1 has called mul(3x5"),
    "nothing": (lambda x: x.exp(), lambda x: x, "has called exp(3x5", "worker 1 is in sum(3x5"),
    "the partition where it is": (
        lambda x: x.redistribute(x.layout.partition),
        lambda x: x.redistribute(x.layout.partition.T),
        "worker 0 has called redistribute(3x5",
        "worker 1 is in redistribute(3x5",
    ),
    "numbers": (lambda x: x * 2.5, lambda x: x * 2.25, "; 2.5)", "; 2.25)"),
    "generators": (
        lambda x: torch.rand_like(x, generator=seeded(0)),
        lambda x: torch.rand_like(x, generator=seeded(1)),
        "a generator with checksum",
        "a generator with checksum",
    ),
    "named numbers": (lambda x: x.clamp(min=0), lambda x: x.clamp(max=0), "min=0)", "max=0)"),
    "plain tensors": (lambda x: x + noise(5), lambda x: x + noise(5, seed=1), "a plain 5 torch.float64 with checksum"),
    "weights beside a number": (
        lambda x: x + x.mean() * torch.nn.Parameter(noise(5), False),
        lambda x: x + x.mean() * torch.nn.Parameter(noise(5, seed=1), False),
        "mul(a number, torch.float64, on worker",
        "a plain 5 torch.float64 with checksum",
    ),
    "a weight beside a number": (
        lambda x: x + x.mean() * torch.nn.Parameter(noise(1), False),
        lambda x: x + x.mean() * torch.nn.Parameter(noise(1, seed=1), False),
        "mul(a number, torch.float64, on worker",
        "a plain 1 torch.float64 with checksum",
    ),
    "weights": (
        lambda x: x + torch.nn.Parameter(noise(5), False),
        lambda x: x + torch.nn.Parameter(noise(5, seed=1), False),
        "a plain 5 torch.float64 with checksum",
    ),
    "numbers of a sum": (
        lambda x: x + x.sum() * 2,
        lambda x: x + x.sum() * 3,
        "mul(a number, torch.float64, on worker",
    ),
    "places": (lambda x: x[torch.tensor([0, 2])], lambda x: x[torch.tensor([2, 0])], "2 torch.int64 with checksum"),
    "inputs": (lambda x: fed(0), lambda x: fed(1), "called a distributed model with a plain 3x5 torch.float64 with"),
    "inside": (lambda x: model(False, False), lambda x: model(False, True), "in module 1", "has called mul("),
}


@pytest.mark.parametrize("what", UNHEARD)
def test_workers_learn_what_they_have_not_done_alike_before_an_exchange(monkeypatch, what):
    monkeypatch.setenv("DISTDL_DEBUG", "1")
    told = {}
    expected, other, *texts = UNHEARD[what]

    def work():
        me, x = distdl.world().comm.rank, split(x35)
        with pytest.raises(distdl.CommunicationError) as error:
            (other if me == 1 else expected)(x).sum()
        told[me] = str(error.value)

    distdl.run_workers(work, 3)
    assert told[0] == told[1] == told[2]
    for text in ("workers differ before an exchange", *texts):
        assert text in told[0]


def test_what_one_worker_may_ask_by_itself(monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        x = split(x35)
        if distdl.world().comm.rank == 1:
            assert repr(x) and len(x) == 3 and x.is_leaf and x.shape == (3, 5) and x.stride() == (5, 1)
        x.sum()

    distdl.run_workers(work, 3)


def test_a_summary(monkeypatch):
    """Its workers are imagined, and its weights have no values: nothing is compared."""

    def work():
        model, P = torch.nn.Linear(3, 2), distdl.world().reshape(4, 1)
        return str(distdl.summary(model, P, torch.ones(6, 3)))

    plain = distdl.run_workers(work, 4)
    monkeypatch.setenv("DISTDL_DEBUG", "1")
    assert distdl.run_workers(work, 4) == plain


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
    for text in ("worker 0 is in", "and worker 1 ", *texts):
        assert text in told[0]


@pytest.mark.fault("threads")
def test_other_partitions_are_named_without_it_too():
    """By the name of the exchange, so no message is needed. The error says how to learn more."""
    told = {}

    def work():
        me, x = distdl.world().comm.rank, split(x35)
        P = x.layout.partition
        with pytest.raises(distdl.CommunicationError) as error:
            x.redistribute(P[::-1] if me else P.T)
        told[me] = str(error.value)

    with pytest.raises(distdl.CommunicationError):
        distdl.run_workers(work, 2)
    assert told[0] == told[1]
    for text in ("DISTDL_DEBUG=1", "redistribute to 1x2 on workers 0, 1", "redistribute to 2x1 on workers 1, 0"):
        assert text in told[0]


def test_what_a_layer_gives_as_it_is_requires_a_gradient_on_every_worker(monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        layer = distdl.nn.DistributedDropout(distdl.world()[:2].reshape(2, 1)).eval()
        x = split(x35).requires_grad_()
        with torch.no_grad():
            assert layer(x).requires_grad
            assert torch.equal((layer(x) * 2).full_tensor(), x35 * 2)

    distdl.run_workers(work, 3)


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

    distdl.run_workers(work, 3)


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
        with pytest.raises(ValueError, match=r"on worker 0 (0\.bias|1\.running_mean) has .*, and on worker 1 \1"):
            model(x)

    torch.nested.nested_tensor_from_jagged(x35, torch.tensor([0, 1, 3]))  # (which torch imports then)
    distdl.run_workers(work, 3)


def test_a_block_is_no_factor_of_a_global_number(monkeypatch):
    """What has more cells there is taken for a tensor that is the same on every worker: only worker 0's would count."""
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        x = split(torch.cat([x35, x35 + 1]))
        with pytest.raises(distdl.CommunicationError, match=r"workers differ .* has called mul\("):
            (x.to_local() * x.mean()).sum().item()

    distdl.run_workers(work, 2)


@pytest.mark.parametrize("add", [lambda loss, y: loss + y, lambda loss, y: torch.stack([y, loss]).mean()])
def test_losses_of_blocks_may_stand_beside_a_global_loss(add, monkeypatch):
    """Each worker has a number of its own."""
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        x = split(x35).requires_grad_()
        layer = distdl.nn.DistributedDropout(x.layout.partition).eval()
        y = x35.clone().requires_grad_()
        add(x.sum(), layer(x.to_local()).square().sum()).backward()
        add(y.sum(), y.square().sum()).backward()
        assert torch.equal(x.grad.full_tensor(), y.grad)

    distdl.run_workers(work, 3)


def test_what_is_not_read_may_differ(monkeypatch):
    """Memory that has not been filled yet: what is all written, and tangents by which torch traces."""
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        P = distdl.world()
        x, rank = split(x35), torch.tensor(float(P.rank), dtype=torch.float64)
        copied, filled = rank.repeat(3, 5), rank.repeat(3, 5)
        copied.copy_(x)
        filled.fill_(x.sum())
        assert rank.expand_as(x)[0, 0] == P.rank
        assert torch.equal(copied.full_tensor(), x35)
        torch.testing.assert_close(filled, x35.sum().expand(3, 5).clone())
        torch.testing.assert_close(torch.func.linearize(torch.sin, x)[1](x).full_tensor(), x35.cos() * x35)
        with pytest.raises(distdl.CommunicationError, match=r"workers differ .* has called mul\("):
            (x * rank.expand_as(x)).sum().item()

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("fill", [
    lambda x, empty: empty(3, 5).__setitem__(slice(None), x),
    lambda x, empty: empty(3, 5).__setitem__(..., x),
    lambda x, empty: torch.add(x, 1, out=empty(3, 5)), lambda x, empty: torch.stack([x, x], out=empty(2, 3, 5)),
    lambda x, empty: x.expand_as(empty(2, 3, 5)),
    lambda x, empty: x.type_as(empty(1).float()), lambda x, empty: x.to(tensor=empty(1).float()),
])  # fmt: skip
def test_memory_that_is_written_whole_or_asked_for_its_shape_may_differ(fill, monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        x, rank = split(x35), float(distdl.world().rank)
        fill(x, lambda *shape: torch.full(shape, rank, dtype=torch.float64))
        assert torch.isfinite(x.sum()).item()

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("read", [
    lambda x, rank: torch.add(x, rank, out=rank), lambda x, rank: torch.add(x, other=rank, out=rank),
    lambda x, rank: rank.__setitem__(slice(2), x[:2]),
    lambda x, rank: rank.__setitem__(x > 0, 1.0),
])  # fmt: skip
def test_memory_of_which_something_is_read_is_compared(read, monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        x = split(x35)
        read(x, torch.full((3, 5), float(distdl.world().rank), dtype=torch.float64))
        x.sum().item()

    with pytest.raises(distdl.CommunicationError, match=r"workers differ .*a plain 3x5 torch.float64 with checksum"):
        distdl.run_workers(work, 3)


def test_a_selective_checkpoint_sees_nothing_of_what_is_compared(monkeypatch):
    """It hands out the results of the operators of its forward in their order."""
    monkeypatch.setenv("DISTDL_DEBUG", "1")
    saving = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)

    class Layer(torch.nn.Conv1d):
        def forward(self, x):
            return checkpoint(lambda x: super(Layer, self).forward(x).sin(), x, use_reentrant=False, context_fn=saving)

    def work():
        made, x = Layer(2, 2, 3, padding=1, dtype=torch.float64), noise(1, 2, 7)
        made.weight.data, made.bias.data = noise(2, 2, 3), noise(2)
        alone = torch.autograd.grad(torch.nn.Conv1d.forward(made, x).sin().sum(), made.weight)[0]
        P = distdl.world()[:2].reshape(1, 1, 2)
        distdl.distribute(made, P)(distdl.distribute_tensor(x, P)).sum().backward()
        assert torch.allclose(made.weight.grad, alone)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("step", [
    lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True).step(),
    lambda p: torch.optim.Adam(p, 0.1, fused=True).step(),
    lambda p: distdl.nn.utils.clip_grad_norm_(p, 0.5),
    lambda p: torch._amp_foreach_non_finite_check_and_unscale_([w.grad for w in p], torch.zeros(1), torch.ones(1)),
])  # fmt: skip
def test_lists_of_optimisers_hold_blocks_of_layers(step, monkeypatch):
    """Which stand beside no global tensor, but beside other blocks at their place."""
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        P = distdl.world().reshape(1, 1, 3)
        layer = distdl.nn.DistributedConv1d(P, in_channels=2, out_channels=2, kernel_size=3, padding=1).double()
        ours = torch.nn.Conv1d(2, 2, 1).double()
        for one in ours.parameters():
            torch.nn.init.ones_(one)
        model = distdl.distribute(torch.nn.Sequential(layer, ours), P, weights="sharded")
        model(distdl.distribute_tensor(noise(1, 2, 7), P)).square().sum().backward()
        step(list(model.parameters()))
        assert torch.isfinite(model[1].weight.full_tensor()).all()

    distdl.run_workers(work, 3)


def test_a_leaf_enters_without_grad_mode(monkeypatch):
    """As in an evaluation, or in the forward of an autograd function. One worker alone has it."""
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        with torch.no_grad():
            x = split(x35.clone().requires_grad_())
        assert not x.requires_grad and torch.equal(x.full_tensor(), x35)

    distdl.run_workers(work, 3)
