"""Gradients of weights that travel in several messages, each while the backward of the layers in front of it runs."""

import copy
import gc
import math
import weakref

import pytest
import torch
from nets import (
    Checkpointed,
    Net,
    assert_close,
    assert_identical,
    assert_same_state,
    assert_trains_alike,
    backward_thrice,
    batch,
    network,
    partition,
    run,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.backends.threaded.communicator import ThreadCommunicator
from distdl.globals.layouts.context import Context
from distdl.globals.models import buckets
from distdl.globals.tensor import gradient_sums
from distdl.transport.recording import Recording

WEIGHTS = "gradients of replicated tensors"


@pytest.fixture(autouse=True)
def small_messages(monkeypatch):
    """Gradients of some 50 numbers in each message."""
    monkeypatch.setattr(buckets, "BUCKET", 400)


def _events(model, x):
    """What this worker begins and ends to exchange in a backward, in its order."""
    comm, events = x.layout.partition.comm, []

    def note(what):
        return lambda call: events.append((what, str(call.where).partition(" (")[0].rpartition(": ")[2]))

    comm.recorder = Recording(comm, ended=note("ends"), begun=note("begins"))
    loss = model(x).square().sum()
    events.clear()
    loss.backward()
    comm.recorder = None
    return events


@pytest.mark.parametrize("grid", [(1, 1, 2), (1, 1, 3)])
def test_messages_are_under_way_while_the_backward_goes_on(grid):
    def layers():
        return nn.Sequential(*[nn.Conv1d(6, 6, 3, padding=1, bias=False) for _ in range(4)])

    def work():
        P = partition(grid)
        x = distdl.distribute_tensor(torch.ones(2, 6, 13, dtype=torch.float64), P)
        events = _events(distdl.distribute(network(layers), P), x)
        backward = [(what, where) for what, where in events if where in ("conv1d", WEIGHTS)]
        layer = [("begins", "conv1d"), ("ends", "conv1d"), ("begins", WEIGHTS)]
        # (the first layer's input needs no gradient, so it moves no halos)
        assert backward == layer * 3 + [("begins", WEIGHTS)] + [("ends", WEIGHTS)] * 4
        assert not Context.of(P.comm).own(gradient_sums.UnderWay)

    run(work, math.prod(grid))


@pytest.mark.parametrize("workers", [2, 4])
def test_training_in_several_messages(workers):
    def work():
        sequential = network(Net)
        grid = (1, 1, 2) if workers == 2 else (2, 1, 2)
        model = distdl.distribute(copy.deepcopy(sequential), partition(grid))
        assert_trains_alike(model, sequential, "adamw", (True, False, True))
        assert_identical(model)

    run(work, workers)


def test_graphs_that_are_gone_through_again_and_differentiated():
    def work():
        sequential = network(Net)
        model = distdl.distribute(copy.deepcopy(sequential), partition((2, 1, 2)))
        backward_thrice(model)
        backward_thrice(sequential)
        assert_same_state(model, sequential)

    run(work)


def _pair(make=Net):
    """A distributed model, and the sequential one."""
    sequential = network(make)
    return distdl.distribute(copy.deepcopy(sequential), partition((1, 1, 3))), sequential


def _fail(grad):
    raise ZeroDivisionError


def _assert_steps_alike(make):
    """One backward of a distributed model leaves what that of the sequential one does."""
    model, sequential = _pair(make)
    x, target = batch(0)
    for one in (model, sequential):
        (one(x) - target).square().mean().backward()
    assert_same_state(model, sequential)


@pytest.mark.parametrize("by", ["module", "function", "nested"])
def test_checkpoints(by):
    def work():
        _assert_steps_alike(lambda: Checkpointed(by))

    run(work)


class _Reentrant(nn.Module):
    """Backwards inside of a backward, which go through the same weights."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 6, 3, padding=1), nn.Conv1d(6, 6, 3, padding=1)
        self.last = nn.Conv1d(6, 2, 3, padding=1)

    def forward(self, x):
        y = self.first(x)
        y = checkpoint(lambda y: self.second(y).sin(), y, use_reentrant=True)
        return self.last(checkpoint(lambda y: self.second(y).cos() + self.first.bias.sum(), y, use_reentrant=True))


def test_a_backward_inside_a_backward():
    def work():
        _assert_steps_alike(_Reentrant)
        assert not Context.of(partition((1,)).comm).own(gradient_sums.UnderWay)

    run(work)


def test_gradients_of_some_weights():
    def work():
        model, sequential = _pair()
        x, target = batch(0)
        found = []
        for one in (model, sequential):
            loss = (one(x) - target).square().mean()
            found.append(
                torch.autograd.grad(loss, [one.inner[0].bias, one.last.weight, one.unused.bias], allow_unused=True)
            )
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert_close(ours, theirs)

    run(work)


class _ReadWithoutGradients(Net):
    """The weights are first read where nothing is recorded."""

    def forward(self, x):
        with torch.no_grad():
            scale = self.last.weight.abs().max() + self.first.weight.abs().max()
        return super().forward(x) / scale


def test_weights_that_are_read_without_gradients_first():
    def work():
        _assert_steps_alike(_ReadWithoutGradients)

    run(work)


def test_a_backward_that_fails_on_every_worker():
    """What is under way then is kept until it is through, and later backwards are right."""

    def work():
        model, sequential = _pair()
        x, target = batch(0)

        for one in (model, sequential):
            for _ in range(6):
                loss = (one(x) - target).square().mean()
                handle = one.first.weight.register_hook(_fail)
                with pytest.raises(ZeroDivisionError):
                    loss.backward()
                handle.remove()
            one.zero_grad()
            (one(x) - target).square().mean().backward()
        assert_same_state(model, sequential)

    run(work)


def test_a_graph_whose_backward_has_failed_is_gone_through_again(monkeypatch):
    """What the first backward has sent is no gradient of the second one, also where that may send nothing more."""
    monkeypatch.setattr(gradient_sums, "_AHEAD", 900)

    def work():
        model, sequential = _pair()
        x, target = batch(0)

        for one in (model, sequential):
            loss = (one(x) - target).square().mean()
            handle = one.last.weight.register_hook(_fail)
            with pytest.raises(ZeroDivisionError):
                loss.backward(retain_graph=True)
            handle.remove()
            one.zero_grad()
            (loss * 3).backward()
        assert_same_state(model, sequential)

    run(work)


def test_messages_of_a_failed_backward_that_workers_have_sent_in_another_order():
    """Of three workers, each waits for two rounds of a message."""

    def work():
        model, sequential = _pair(lambda: nn.Sequential(_Reading("values"), nn.Conv1d(3, 6, 3, bias=False)))
        model[0].reads = distdl.world().rank == 0

        x, _ = batch(0)
        loss = model(x).square().sum()
        handle = model[1].weight.register_hook(_fail)  # (the first one to be there)
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        handle.remove()
        for one in (model, sequential):
            one.zero_grad()
            one(x).square().sum().backward()
        assert_same_state(model, sequential)

    run(work, 3)


@pytest.mark.parametrize("by", ["module", "function", "nested"])
def test_a_forward_without_gradients_between_forward_and_backward(by):
    """A checkpoint then reads the weights of the forward that had gradients."""

    def work():
        model, sequential = _pair(lambda: Checkpointed(by))
        for step in range(2):
            x, target = batch(step)
            for one in (model, sequential):
                loss = (one(x) - target).square().mean()
                with torch.no_grad():
                    one(target[:, :1].expand(4, 3, 11))
                loss.backward()
        assert_same_state(model, sequential)

    run(work)


def test_copies_of_weights_that_have_moved_are_let_go():
    def work():
        model = distdl.distribute(network(Net), partition((1, 1, 3)))
        x, _ = batch(0)
        model(x).square().sum().backward()
        before = weakref.ref(model.first.weight.data.untyped_storage())
        model.float()
        with torch.no_grad():
            model(x.float())
        gc.collect()
        assert before() is None

    run(work)


def test_a_worker_that_leaves_out_the_backward_is_told_of():
    told = {}

    def work():
        me = distdl.world().comm.rank
        model = distdl.distribute(network(Net), partition((1, 1, 3)))
        x, _ = batch(0)
        loss = model(x).square().sum()
        if me == 1:
            return
        try:
            loss.backward()
        except distdl.CommunicationError as error:
            told[me] = str(error)
            raise

    with pytest.raises(distdl.CommunicationError):
        distdl.run_workers(work, 3)
    assert told and all("backward of" in text for text in told.values())


class _Reading(nn.Module):
    """On one worker alone, weights are read that others read later."""

    def __init__(self, how):
        super().__init__()
        self.first, self.second, self.third = (nn.Conv1d(3, 3, 3, padding=1, bias=False) for _ in range(3))
        self.how, self.reads = how, False

    def forward(self, x):
        if self.reads and self.how == "values":
            with torch.no_grad():
                float(self.third.weight.abs().max())
        elif self.reads and self.how == "shape":
            assert self.third.weight.shape == (3, 3, 3)
        elif self.reads:
            assert "Conv1d(3, 3" in str(self.third)
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))


def test_what_is_sent_ahead_has_no_tag_of_another_exchange(monkeypatch):
    """Or the messages of both could meet, where a worker sends before the others do."""
    tags = {True: set(), False: set()}
    exchange = ThreadCommunicator.exchange

    def noted(self, sends, receives, tag=0):
        tags[WEIGHTS in str(self.where)].add(tag)
        return exchange(self, sends, receives, tag)

    monkeypatch.setattr(ThreadCommunicator, "exchange", noted)

    def work():
        model = distdl.distribute(network(Net), partition((1, 1, 2)))
        for step in range(8):
            x, target = batch(step)
            (model(x) - target).square().mean().backward()

    run(work, 2)
    assert len(tags[True]) > 16 and len(tags[False]) > 16
    assert max(tags[False]) < min(tags[True])


@pytest.mark.parametrize("how", ["values", "shape", "text"])
@pytest.mark.parametrize("workers", [2, 3])
def test_a_worker_that_reads_a_weight_before_the_others(how, workers):
    def work():
        sequential = network(lambda: _Reading(how))
        model = distdl.distribute(copy.deepcopy(sequential), partition((1, 1, workers)))
        model.reads = distdl.world().rank == 0
        for step in range(3):
            x, _ = batch(step)
            for one in (model, sequential):
                one(x).square().sum().backward()
        assert_same_state(model, sequential)

    run(work, workers)
