"""The ledger counts what the plans say, and leaves nothing behind."""

import json

import torch
from torch.profiler import profile

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
