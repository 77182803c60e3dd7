"""The ledger counts what the plans say, and leaves nothing behind."""

import copy
import json
import time

import pytest
import torch
from torch import nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.nn import AllSumReduce, Broadcast, DistributedConv2d, Repartition, SumReduce


def on_threads(main, workers=4):
    return distdl.run_workers(lambda: main(distdl.world()), workers)


def test_messages_and_bytes_of_a_repartition():
    def main(P):
        layer = Repartition(P.reshape(4, 1), P.reshape(1, 4))
        x = torch.ones(2, 8, requires_grad=True)
        with distdl.ledger() as book:
            for _ in range(3):
                layer(x).sum().backward()
        agreement, exchange = book.entries
        assert (exchange.operation, exchange.calls, exchange.messages) == ("exchange", 6, 18)
        assert exchange.sent == 18 * 2 * 2 * 4 and exchange.collective == 0 and exchange.waited > 0
        assert agreement.operation == "agreement" and agreement.calls == 4  # three calls, and headers once
        assert json.loads(book.json())[1]["messages"] == 18
        assert "Repartition" in exchange.layer and str(book).count("\n") == 2

    on_threads(main)


def test_layers_are_told_apart_by_their_path():
    def main(P):
        grid = P.reshape(1, 1, 2, 2)
        net = torch.nn.Sequential(
            *(DistributedConv2d(grid, in_channels=2, out_channels=2, kernel_size=3, padding=1) for _ in range(2))
        )
        with distdl.ledger(net) as book:
            net(torch.ones(1, 2, 4, 4)).sum().backward()
        exchanges = {entry.layer.split(":")[0]: entry for entry in book.entries if entry.operation == "exchange"}
        # the input needs no gradient, so the first layer's halo goes one way only
        assert {path: entry.messages for path, entry in exchanges.items()} == {"0": 3, "1": 6}
        (total,) = (e for e in book.entries if e.operation == "sum" and e.layer.startswith("1"))
        assert total.calls == 1

    on_threads(main)


def test_a_collective_made_of_messages_is_one_call():
    def main(P):
        x = torch.ones(100_000)
        with distdl.ledger() as book:
            AllSumReduce(P.reshape(4), [0])(x)
        (entry,) = (entry for entry in book.entries if entry.operation == "all_sum")
        assert entry.calls == 1 and entry.messages == 6 and entry.sent == 6 * 25_000 * 4 and entry.collective == 0
        with distdl.ledger() as book:  # (those that only receive, too)
            Broadcast(P[:1].reshape(1), P.reshape(4))(x if P.rank == 0 else torch.empty(0))
            SumReduce(P.reshape(4), P[:1].reshape(1))(x)
        found = {entry.operation: entry for entry in book.entries}
        assert found["broadcast"].collective == found["sum"].collective == 0
        assert (found["broadcast"].messages, found["sum"].messages) == ((3, 0) if P.rank == 0 else (0, 1))

    on_threads(main)


def test_what_has_the_same_name_is_one_entry_unless_the_model_tells_it_apart():
    def main(P):
        layers = [Repartition(P.reshape(4, 1), P.reshape(1, 4)) for _ in range(2)]
        with distdl.ledger() as book:
            for layer in layers:
                layer(torch.ones(1, 4))
            for value in range(50):  # each call names itself by a new text
                assert P.allreduce_data(value) == 4 * value
        assert [(entry.operation, entry.calls) for entry in book.entries if "Repartition" in entry.layer] == [
            ("agreement", 4),
            ("exchange", 2),
        ]
        (values,) = (entry for entry in book.entries if "allreduce_data" in entry.layer)
        assert values.operation == "agreement" and values.calls == 100  # lengths, then values

    on_threads(main)


def test_it_records_inside_only_and_may_be_nested():
    def main(P):
        layer = Broadcast(P[:1].reshape(1), P.reshape(4))
        x = torch.ones(3) if P.rank == 0 else torch.zeros(0)
        with distdl.ledger() as outer:
            layer(x)
            with distdl.ledger() as inner:
                layer(x)
        layer(x)
        assert P.comm.recorder is None
        counts = [sum(e.calls for e in book.entries if e.operation == "broadcast") for book in (outer, inner)]
        assert counts == [2, 1]

    on_threads(main)


def test_a_profile_shows_primitives_by_name():
    P = distdl.world()
    layer = Repartition(P.reshape(1, 1), P.reshape(1, 1))
    with profile() as trace:
        layer(torch.ones(2, 2, requires_grad=True)).sum().backward()
    (event,) = (event for event in trace.key_averages() if event.key.startswith("Repartition"))
    assert event.count == 2


class Sleep(torch.autograd.Function):
    """The identity, which takes its time forward and backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        time.sleep(2 * ctx.seconds)
        return dy.clone(), None


class Slow(nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def forward(self, x):
        return Sleep.apply(x, self.seconds)


class Residual(nn.Module):
    """Modules that wait, and between them a function of the module around that does, too."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Slow(0.02)), Slow(0.04)
        self.recomputed = nn.Sequential(Slow(0.01), nn.Conv2d(4, 4, 3, padding=1))

    def forward(self, x):
        x = self.first(x)
        x = Sleep.apply(x.relu(), 0.03) + x
        x = x + checkpoint(self.recomputed, x, use_reentrant=False)
        return self.last(x)


def distributed(model, P, weights="replicated"):
    model = distdl.distribute(copy.deepcopy(model), P.reshape(1, 1, 2, 2), weights=weights)
    return model, distdl.distribute_tensor(torch.ones(1, 2, 8, 8), P.reshape(1, 1, 2, 2))


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_modules_of_a_distributed_model_are_told_apart_by_their_path(weights):
    """And each of them has sent what ``summary`` says."""
    net = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(2)), nn.BatchNorm2d(2), nn.MaxPool2d(3, 2))

    def main(P):
        model, x = distributed(net, P, weights)
        with distdl.ledger(model) as book:
            model(x).to_local().sum().backward()
        halos = {one.layer: (one.messages, one.sent) for one in book.entries if "conv2d" in one.layer}
        # the input needs no gradient, so the first layer's halo goes one way only
        assert halos == {"0: conv2d": (3, 3 * 3 * 2 * 4), "1: conv2d": (6, 2 * 3 * 3 * 2 * 4)}
        sent = {}
        for one in book.entries:
            path = one.layer.partition(": ")[0] if ": " in one.layer else "(gradients of weights)"
            messages, nbytes = sent.get(path, (0, 0))
            sent[path] = messages + one.messages, nbytes + one.sent
        rows = distdl.summary(net, P.reshape(1, 1, 2, 2), (1, 2, 8, 8), weights=weights).rows
        told = {row.path: tuple(a + b for a, b in zip(row.forward, row.backward, strict=True)) for row in rows}
        if weights == "sharded":  # (each module gets its own gradients, of which the summary says the sum)
            assert set(sent) == {"0", "1", "2", "3"}
            assert sum(nbytes for _, nbytes in sent.values()) == sum(nbytes for _, nbytes in told.values())
        else:
            assert sent == {path: n for path, n in told.items() if n[0]}

    on_threads(main)


def test_gradients_have_the_path_of_the_module_that_has_their_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.ModuleDict({"conv": nn.Conv2d(2, 2, 3, padding=1), "norm": nn.BatchNorm2d(2)})

        def forward(self, x):
            return self.head["norm"](self.head["conv"](x))

    def main(P):
        model, x = distributed(Net(), P)
        found = []
        for frozen in (None, "norm"):
            if frozen:
                model.head[frozen].requires_grad_(False)
            with distdl.ledger(model) as book:
                model(x).to_local().sum().backward()
            found += [one.layer.partition(": ")[0] for one in book.entries if "gradients of replicated" in one.layer]
        assert found == ["head", "head.conv"]

    on_threads(main)


def test_a_module_has_the_time_in_which_it_has_computed():
    """In forward, in backward, and where it is computed again; without waits, and without the modules inside it."""

    def main(P):
        model, x = distributed(Residual(), P)
        y = model(x)
        begun = time.perf_counter()
        with distdl.ledger(model) as book:
            y = model(x)
            time.sleep(0.05)
            y.to_local().sum().backward()
        elapsed = time.perf_counter() - begun
        slept = {
            "first.1: Slow": 0.06, "last: Slow": 0.12, "recomputed.0: Slow": 0.04, "Residual": 0.09,
            "outside of the model": 0.05,
        }  # fmt: skip
        computed = {one.layer: one.computed for one in book.modules}
        assert list(computed)[:4] == ["Residual", "first: Sequential", "first.0: Conv2d", "first.1: Slow"]
        for layer, seconds in slept.items():
            assert computed[layer] >= seconds, str(book)
        # each sleep is in one line alone, and all lines are all of the time
        waited = sum(one.waited for one in book.entries)
        assert sum(computed.values()) + waited == pytest.approx(elapsed, abs=0.05), str(book)
        others = sum(seconds for layer, seconds in computed.items() if layer not in slept)
        assert others <= elapsed - waited - sum(slept.values()), str(book)
        assert {one.layer: one.calls for one in book.modules}["recomputed.1: Conv2d"] == 2
        assert sum(one["computed"] for one in json.loads(book.json())) == pytest.approx(sum(computed.values()))
        again = copy.deepcopy(book.modules)
        model(x).to_local().sum().backward()
        y = None
        assert book.modules == again and len(str(book).splitlines()) == 1 + len(book.entries) + len(again)

    on_threads(main)


def test_a_forward_that_raises_ends():
    class Raises(nn.Module):
        def forward(self, x):
            raise RuntimeError("no")

    def main(P):
        model, x = distributed(nn.Sequential(nn.Sequential(Raises())), P)
        with distdl.ledger(model) as book:
            with pytest.raises(RuntimeError, match="no"):
                model(x)
            time.sleep(0.02)
        assert book.modules[-1].computed >= 0.02

    on_threads(main)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_one_worker_may_have_a_ledger_alone(weights):
    """Nothing that is exchanged depends on it. (What a table sends in backward depends on the hooks that it has.)"""
    net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))

    def main(P):
        model = distdl.distribute(copy.deepcopy(net), P.reshape(2, 2), weights=weights)
        x = distdl.distribute_tensor(torch.arange(8).reshape(2, 4), P.reshape(2, 2))
        counts = []
        for mine in (False, P.rank == 0):
            for _ in range(2):
                with distdl.ledger(model if mine else None) as book:
                    model(x).square().mean().backward()
            counts.append(sum(one.messages for one in book.entries))
        assert counts[0] == counts[1]

    on_threads(main)
