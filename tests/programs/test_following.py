"""A trace, a ledger and a profile of a replay name the modules as those of the step."""

import warnings

import pytest
from compiled_nets import UNet, noise, weighted
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

import distdl
from distdl.tracing.log import MESSAGES, MODULES

CALLS = 6
COMPARED = ["a forward"]  # while a trace is open, a forward that is called compares weights first


def called(wrap, follow, workers=2, make=UNet):
    """What a function finds of a late step of each worker. Also, how many replays there were."""

    def work():
        P = distdl.world()
        grid = (1, 1, P.comm.size, 1)
        model = distdl.distribute(weighted(make()), grid)

        @wrap
        def step(x, y):
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        x, y = (distdl.distribute_tensor(noise((2, 1, 16, 16), seed), grid) for seed in (1, 2))

        def once():
            model.zero_grad()
            step(x, y)

        for _ in range(CALLS):
            once()
        found = follow(model, once)
        replays = sum(program.replays for program in getattr(step, "programs", ()))
        once()
        return found, replays

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return distdl.run_workers(work, workers)


@pytest.mark.parametrize("operators", [True, False])
def test_a_trace_of_a_replay_has_the_messages_of_the_step(operators, tmp_path):
    def follow(model, once):
        with distdl.trace(tmp_path / "trace.json", model, operators=operators) as found:
            once()
        return found.logs

    (theirs, _), *_ = called(lambda step: step, follow)
    (mine, replays), *_ = called(distdl.compile, follow)
    assert replays == CALLS - 2
    for worker in range(2):
        told = [
            [
                (one.name, one.where, one.nbytes)
                for one in logs[worker].slices
                if one.row == MESSAGES and one.where not in COMPARED
            ]
            for logs in (mine, theirs)
        ]
        agreed = [one for one in told[0] if one[1].startswith("distdl.compile: ")]
        assert len(agreed) == 1  # whether all workers replay
        assert sorted(one for one in told[0] if one not in agreed) == sorted(told[1])
        paths = [{one.name for one in logs[worker].slices if one.row == MODULES} for logs in (mine, theirs)]
        assert {path for path in paths[0] if path} and paths[0] <= paths[1]
        assert {"down.0", "down.1", "up", "head"} <= paths[0]
        sent = [
            sorted((one.receiver, one.nbytes, one.where) for one in logs[worker].sent if one.where not in COMPARED)
            for logs in (mine, theirs)
        ]
        assert [one for one in sent[0] if not one[2].startswith("distdl.compile: ")] == sent[1]


def assert_same_ledger(wrap, **options):
    """Check what a replay's ledger has, but for the agreement on it, and that it has times of convolutions."""

    def follow(model, once):
        with distdl.ledger(model) as book:
            once()
        return book

    for (mine, replays), (theirs, _) in zip(
        called(wrap, follow, **options), called(lambda step: step, follow, **options), strict=True
    ):
        assert replays == CALLS - 2
        told = [
            {(one.layer, one.operation): (one.calls, one.messages, one.sent, one.collective) for one in book.entries}
            for book in (mine, theirs)
        ]
        agreed = [key for key in told[0] if key not in told[1]]
        assert [key[1] for key in agreed] == ["agreement"]
        assert {key: one for key, one in told[0].items() if key not in agreed} == told[1]
        assert sum(one.computed for one in mine.modules if "Conv2d" in one.layer) > 0


def test_a_ledger_of_a_replay_has_the_entries_of_the_step():
    assert_same_ledger(distdl.compile)


def test_a_profile_of_a_replay_names_the_layers():
    def follow(model, once):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            once()
        return {one.key for one in found.key_averages()}

    (found, replays), *_ = called(distdl.compile, follow, 1)
    assert replays == CALLS - 2 and "aten::convolution" in found
