"""``distdl.trace``: what is in its file, what its table says, and that it leaves nothing behind."""

import copy
import gzip
import json
import time
from collections import Counter
from itertools import pairwise

import pytest
import torch
import traced
from torch import nn

import distdl
from distdl.tracing.log import Log, Message, Slice
from distdl.tracing.table import exchanges, times, waits
from distdl.tracing.trace import _shifted


def build():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))


def step(model, grid=(1, 1, 2, 2)):
    x = distdl.distribute_tensor(torch.ones(1, 1, 17, 13), grid)
    model(x).square().mean().backward()


def traced_step(path, workers=4):
    """The trace on each worker, the ledger of the same step, and what the file has."""
    source = build()

    def work():
        model = distdl.distribute(copy.deepcopy(source), (1, 1, 2, workers // 2))
        for _ in range(2):
            step(model, (1, 1, 2, workers // 2))
        with distdl.trace(path, model) as found, distdl.ledger(model) as book:
            step(model, (1, 1, 2, workers // 2))
        return found, book

    results = distdl.run_workers(work, workers)
    content = path.read_bytes()
    events = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)["traceEvents"]
    return [found for found, _ in results], [book for _, book in results], events


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return traced_step(tmp_path_factory.mktemp("trace") / "step.json")


def test_each_worker_is_a_process_with_three_rows(of_four):
    names = [
        (event["pid"], event["args"]["name"]) for event in of_four[2] if event["ph"] == "M" and "name" in event["args"]
    ]
    assert names == [
        (worker, name) for worker in range(4) for name in (f"worker {worker}", "modules", "operators", "messages")
    ]


def test_operators_of_forward_and_backward_are_logged_on_each_worker(of_four):
    for worker in range(4):
        called = Counter(e["name"] for e in of_four[2] if e.get("cat") == "operators" and e["pid"] == worker)
        assert called["convolution"] == 2
        assert called["convolution_backward"] == 2


def test_modules_are_logged_by_path_in_forward_and_backward(of_four):
    for worker in range(4):
        rows = [e for e in of_four[2] if e.get("cat") == "modules" and e["pid"] == worker]
        assert {"0", "1", "2", "3", "Sequential"} >= {e["name"] for e in rows} >= {"0", "1", "3"}
        first = next(e for e in rows if e["name"] == "3")
        assert any(e["name"] == "0" and e["ts"] > first["ts"] for e in rows)  # its backward


def test_an_arrow_for_each_message_that_the_ledger_counts(of_four):
    _, books, events = of_four
    begins = [event for event in events if event["ph"] == "s"]
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    for worker, book in enumerate(books):
        own = [event for event in begins if event["pid"] == worker]
        assert len(own) == sum(entry.messages for entry in book.entries) > 0
        assert sum(event["args"]["bytes"] for event in own) == sum(entry.sent for entry in book.entries)
    assert len(begins) == len(ends)
    assert all(ends[event["id"]]["ts"] >= event["ts"] for event in begins)
    assert all(ends[event["id"]]["pid"] != event["pid"] for event in begins)


def test_messages_say_for_which_module_they_are(of_four):
    names = {event["name"] for event in of_four[2] if event.get("cat") == "messages"}
    assert {"wait: 0: conv2d", "send: 3: conv2d", "pack: 1: batch_norm"} <= names


def test_slices_of_a_row_do_not_overlap(of_four):
    rows = {}
    for event in of_four[2]:
        if event["ph"] == "X" and event["cat"] != "operators":  # an operator may call others
            rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for slices in rows.values():
        slices.sort()
        assert all(stop <= start for (_, stop), (start, _) in pairwise(slices))


def test_every_worker_gets_the_same_table(of_four):
    texts = [str(found) for found in of_four[0]]
    assert texts == texts[:1] * 4
    lines = texts[0].splitlines()
    assert lines[0].split() == ["worker", "total", "computing", "packing", "sending", "waiting", "load"]
    assert [line.split()[0] for line in lines[1:5]] == ["0", "1", "2", "3"]
    assert "who waited for whom" in lines
    assert any(line.endswith("0: conv2d") for line in lines)
    assert lines[-1] == "clocks are aligned to 0 us"  # threads have one clock


def test_a_file_that_ends_with_gz_is_compressed(tmp_path):
    _, _, events = traced_step(tmp_path / "step.json.gz", 2)
    assert {event["pid"] for event in events} == {0, 1}


def test_the_worker_that_is_late_is_the_one_waited_for(tmp_path):
    def work():
        P = distdl.world()
        x = distdl.distribute_tensor(torch.ones(6), (3,))
        x.sum().item()
        with distdl.trace(tmp_path / "late.json") as found:
            if P.rank == 1:
                time.sleep(0.3)
            x.sum().item()
        return waits(found.logs), [times(log) for log in found.logs]

    waited, spent = distdl.run_workers(work, 3)[0]
    assert waited[0, 1] > 0.25  # the others wait for worker 0, which adds up
    assert spent[1].computing > 0.25 > spent[1].waiting


def test_a_trace_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")

    def work():
        comm = distdl.world().comm
        x = distdl.distribute_tensor(torch.ones(6), (2,))
        x.sum().item()
        before = comm.recorder, comm.watch
        assert before[1] is not None  # the debugging mode, which goes on beside it
        with distdl.trace(tmp_path / "one.json"):
            x.sum().item()
        assert (comm.recorder, comm.watch) == before
        with pytest.raises(RuntimeError, match="mine"), distdl.trace(tmp_path / "two.json"):
            raise RuntimeError("mine")
        return (comm.recorder, comm.watch) == before, torch._C._len_torch_dispatch_stack()

    assert distdl.run_workers(work, 2) == [(True, 0)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["one.json"]


def test_processes_have_clocks_that_are_aligned(tmp_path, monkeypatch):
    monkeypatch.setenv("DISTDL_TRACED", str(tmp_path / "step.json"))
    found = distdl.run_workers(traced.work, 2, backend="gloo")
    assert found == found[:1] * 2
    accuracy, early, messages = found[0]
    assert 0 < accuracy < 0.1
    assert messages > 0
    assert early <= accuracy * 2  # no message arrives before it was sent, but for that
    assert (tmp_path / "step.json").exists()


def test_a_file_that_cannot_be_written_is_an_error_of_every_worker(tmp_path):
    def work():
        text = r"worker 0 cannot write the trace '.*nowhere.*': No such file"
        with pytest.raises(OSError, match=text), distdl.trace(tmp_path / "nowhere" / "step.json"):
            raise AssertionError("the block runs")

    distdl.run_workers(work, 2)


def test_a_folder_that_vanishes_in_the_block_is_an_error_of_every_worker(tmp_path):
    folder = tmp_path / "soon gone"
    folder.mkdir()

    def work():
        with pytest.raises(OSError, match="worker 0 cannot write the trace"), distdl.trace(folder / "step.json"):
            if distdl.world().rank == 0:
                (folder / "step.json").unlink()
                folder.rmdir()

    distdl.run_workers(work, 2)


@pytest.mark.parametrize("deletes", [False, True])
def test_an_error_of_one_worker_ends_the_others_and_leaves_no_file(tmp_path, deletes):
    def work():
        with distdl.trace(tmp_path / "step.json"):
            if deletes and distdl.world().rank == 0:
                (tmp_path / "step.json").unlink()
            if distdl.world().rank == 1:
                raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        distdl.run_workers(work, 2)
    assert not list(tmp_path.iterdir())


def test_a_log_is_sent_in_no_time():
    """A hundred thousand operators are some minutes of training on each worker."""
    log = Log(0, 0.0, 1.0, [Slice("operators", "add", 0.25, 0.1 + 0.2)] * 100_000, [Message(0, 1, 0, 8, 2.5, 0.0, "c")])
    begun = time.process_time()
    assert Log.decoded(log.encoded()) == log
    assert time.process_time() - begun < 3


# -- the table, by hand

LOGS = [
    Log(0, 0.0, 10.0, [
        Slice("messages", "pack", 1, 2, "conv"), Slice("messages", "send", 2, 2.5, "conv", 8),
        Slice("messages", "wait", 3, 6, "conv", 8), Slice("operators", "add", 7, 8),
    ], [Message(0, 1, 0, 8, 2.5, 0.0, "conv")], [
        Message(1, 0, 0, 8, 6, 3.0, "conv"), Message(2, 0, 0, 8, 6, 3.0, "conv"),
    ]),
    Log(1, 0.0, 10.0, [], [Message(1, 0, 0, 8, 1, 0.0, "conv")], [Message(0, 1, 0, 8, 9, 1.0, "conv")]),
    Log(2, 0.0, 8.0, [], [Message(2, 0, 0, 8, 5.5, 0.0, "conv")], []),
]  # fmt: skip


def test_times_add_up_to_the_total():
    one = times(LOGS[0])
    assert (one.total, one.packing, one.sending, one.waiting, one.computing) == (10, 1, 0.5, 3, 5.5)


def test_the_last_of_several_senders_is_waited_for():
    assert waits(LOGS) == {(0, 2): 3.0, (1, 0): 1.0}


def test_exchanges_are_counted_by_their_waits():
    assert exchanges(LOGS) == [("conv", 1, 8, 4.5)]


def test_a_clock_that_runs_faster_is_corrected():
    log = _shifted(LOGS[0], (0.0, 5.0, 0.1, 10.0, 6.0, 0.1))  # 5 seconds behind at first, 6 at the end
    assert (log.begin, log.end) == (5.0, 16.0)
    assert log.slices[0][2:4] == pytest.approx((6.1, 7.2))
    assert log.received[0].moment == pytest.approx(11.6)
