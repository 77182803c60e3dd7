"""No silent wait: a worker that fails, ends or makes another call is an error on the others, and soon."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import exits
import pytest
import torch
from launchers import FOLDER, imported, mpirun, outcome

import distdl
from distdl.backends import threaded
from distdl.nn import AllSumReduce, Broadcast, Repartition
from distdl.transport.communicator import CommunicationError

SCENARIOS = FOLDER / "scenarios.py"
DIFFERS = r"since exchange \d"
OUR_FRAMES = f'File "{Path(distdl.__file__).parent}'
MEETS = rf"another call \(MPI_ERR_TRUNCATE|{DIFFERS}"  # (waits are compared first on a slow machine)


def line(text):
    """Where the one line of the scenarios is that has this text, as errors name it."""
    [number] = [n for n, one in enumerate(SCENARIOS.read_text().splitlines(), 1) if text in one]
    return f"{SCENARIOS.name}:{number}"


ASKS = (
    f"{line('print(loss.item())')} (module 1, called at ", line("model(batch)"), line("# behind it"),
    "the value of a global tensor",
    "Ask on every worker, and print on one: `value = loss.item()`, then `if P.rank == 0: print(value)`",
)  # fmt: skip
LEAVES_OUT = (line("loss.backward()"), "Every worker has to make the same calls, in the same order")


# -- threads


@pytest.mark.fault("threads")
def test_threads_stop_with_the_failing_workers_exception_and_traceback():
    def main():
        P = distdl.world()
        if P.rank == 2:
            raise KeyError("the reason")
        AllSumReduce(P.reshape(4), [0])(torch.ones(2))

    begun = time.monotonic()
    with pytest.raises(KeyError, match="the reason") as error:
        distdl.run_workers(main, 4)
    assert time.monotonic() - begun < 5
    assert [entry.name for entry in error.traceback][-1] == "main"


@pytest.mark.fault(count=2)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_what_failed_first_is_the_cause_of_what_is_raised(backend):
    """The others fail, too, and may be first to end: but they do not know where the user's code has failed."""
    status, shown = outcome([*imported(), exits.__file__, "fails_in_a_hook", backend], EXITS_WORKERS="3")
    raised = r"^\S*CommunicationError: .*a backward that has failed .KeyError: 'the reason'"
    assert status == 1 and re.search(raised, shown, re.MULTILINE), shown
    assert "in hook" in shown and "\nKeyError: 'the reason'" in shown


@pytest.mark.fault("threads")
def test_threads_name_the_package_that_an_import_in_all_of_them_lacks(tmp_path, monkeypatch):
    """As torch.onnx.export does, whose own module it imports first."""
    (tmp_path / "exporting").mkdir()
    (tmp_path / "exporting" / "__init__.py").write_text("")
    (tmp_path / "exporting" / "needy.py").write_text("import time\ntime.sleep(0.2)\nimport package_that_lacks\n")
    monkeypatch.syspath_prepend(tmp_path)

    def main():
        distdl.world().allgather_data(None)
        from exporting import needy  # noqa: F401

    try:
        with pytest.raises(ModuleNotFoundError, match="No module named 'package_that_lacks'"):
            distdl.run_workers(main, 4)
    finally:
        sys.modules.pop("exporting", None)


def test_threads_name_every_wait_for_a_worker_that_returned():
    def main():
        P = distdl.world()
        if P.rank != 1:
            Broadcast(P[:1].reshape(1), P.reshape(4))(torch.ones(2))
        while len(P.comm.hub._waits) < 3:
            time.sleep(0.01)

    with pytest.raises(
        CommunicationError, match=r"workers 0, 2, 3 wait in Broadcast \(P_x: 1 on workers 0; P_y: 4.*worker 1 r"
    ):
        distdl.run_workers(main, 4)


@pytest.mark.fault("threads")
@pytest.mark.parametrize("debug", ["0", "1"])
def test_threads_show_the_line_of_the_worker_that_is_elsewhere_and_no_frame_of_ours_but_under_debug(debug):
    status, output = outcome([*imported(), str(SCENARIOS), "asks_alone", "threads"], DISTDL_DEBUG=debug)
    assert status == 1 and (OUR_FRAMES in output) == (debug == "1"), output
    assert debug == "1" or all(side in output for side in ("    print(loss.item())\n", *ASKS)), output


@pytest.mark.fault("threads")
def test_threads_find_a_ring_of_waits():
    def main():
        P = distdl.world()
        buffer = torch.zeros(1)
        P.comm.exchange([], [((P.rank + 1) % 3, buffer)]).wait()

    with pytest.raises(CommunicationError, match=r"worker 0 waits in an exchange at \S+ for worker 1; worker 1 waits"):
        distdl.run_workers(main, 3)


@pytest.mark.fault("threads")
def test_threads_give_up_at_the_time_limit(monkeypatch):
    monkeypatch.setenv("DISTDL_TIMEOUT", "0.3")

    def main():
        P = distdl.world()
        if P.rank == 1:
            time.sleep(1.5)
            return
        P.allgather_data(1)

    with pytest.raises(CommunicationError, match=r"waited longer than 0.3 s \(DISTDL_TIMEOUT\) in allgather_data"):
        distdl.run_workers(main, 3)


def test_threads_keep_nothing_of_messages_that_were_read():
    def main():
        P = distdl.world()
        layer = Repartition(P.reshape(2, 1), P.reshape(1, 2))
        for _ in range(50):
            layer(torch.ones(2, 2))
        P.allgather_data("all have read")
        return len(P.comm.post.sent) + len(P.comm.post.wanted)

    assert distdl.run_workers(main, 2) == [0, 0]


@pytest.mark.fault("threads")
def test_threads_refuse_a_message_of_another_shape():
    def main():
        P = distdl.world()
        other = 1 - P.rank
        P.comm.exchange([(other, torch.ones(2))], [(other, torch.zeros(2 + P.rank))]).wait()

    with pytest.raises(CommunicationError, match=r"expects \[3\] torch.float32 from worker 0, which sends \[2\]"):
        distdl.run_workers(main, 2)


@pytest.mark.fault("threads")
def test_a_change_under_fixed_shapes_raises_where_it_is_seen_and_ends_the_others():
    raised = {}

    def main():
        P = distdl.world()
        layer = AllSumReduce(P.reshape(4), [0])
        x = torch.ones(2, 3)
        layer(x)
        with distdl.fixed_shapes():
            layer(x)
            try:
                P.allgather_data("all are through")  # ends on worker 2 first, it may be
                layer(x if P.rank != 2 else torch.ones(2, 4))
            except Exception as error:
                raised[P.rank] = error
                raise

    with pytest.raises(
        RuntimeError, match=r"AllSumReduce.*worker 2 had agreed on \[2, 3\] float32 and now has \[2, 4\]"
    ):
        distdl.run_workers(main, 4)
    assert len(raised) == 4 and all(isinstance(raised[w], CommunicationError) for w in (0, 1, 3))


@pytest.mark.fault("threads")
def test_crossed_calls_under_fixed_shapes_do_not_deliver_to_each_other():
    def main():
        P = distdl.world()
        layers = [Repartition(P.reshape(2, 1), P.reshape(1, 2)), Repartition(P.reshape(1, 2), P.reshape(2, 1))]
        x = torch.ones(2, 2)
        for layer in layers:
            layer(x)
        with distdl.fixed_shapes():
            for layer in layers if P.rank == 0 else reversed(layers):
                layer(x)

    with pytest.raises(CommunicationError, match="every worker waits for another one"):
        distdl.run_workers(main, 2)


@pytest.mark.fault("threads")
@pytest.mark.parametrize("call", [
    lambda P, layer, y: layer(torch.ones(2)),
    lambda P, layer, y: y.sum().backward(),
    lambda P, layer, y: P.allgather_data(0),
], ids=["layer", "backward", "data"])  # fmt: skip
def test_a_second_thread_of_a_worker_that_waits_is_refused_and_both_are_named(call):
    def main():
        P = distdl.world()
        first, second = (AllSumReduce(P.reshape(2), [0]) for _ in range(2))
        y = second(torch.ones(2, requires_grad=True))
        if P.rank == 1:
            refused.wait(30)
            first(torch.ones(2))

        def share():
            while P.comm.waiting is None:
                time.sleep(0.001)
            try:
                call(P, second, y)
            except CommunicationError as error:
                texts.append(str(error))
            finally:
                refused.set()

        threading.Thread(target=share, name="of the user").start()
        first(torch.ones(2))

    refused, texts = threading.Event(), []
    with pytest.raises(CommunicationError) as error:
        distdl.run_workers(main, 2)
    [text] = texts
    assert text == str(error.value)
    assert text.startswith("worker 0 is in two calls at once: the thread 'of the user' calls ")
    assert "while the thread 'worker 0' waits in AllSumReduce (P_x: 2 on workers 0, 1; " in text and "layer 0]" in text


def test_another_thread_may_train_while_the_workers_own_does_not():
    def main():
        P = distdl.world()
        layer, gradients = AllSumReduce(P.reshape(3), [0]), []

        def train():
            for step in range(20):
                x = torch.ones(2, requires_grad=True)
                (step * layer(x)).sum().backward()
                gradients.append(x.grad.tolist())
            P.allgather_data(0)

        for _ in range(2):
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()
            train()
        return gradients

    expected = [[3.0 * step] * 2 for step in range(20)]
    assert distdl.run_workers(main, 3) == [4 * expected] * 3


@pytest.mark.fault("threads")
def test_the_layer_of_a_worker_that_waits_is_refused_to_another_one():
    layers = {}

    def main():
        P = distdl.world()
        layers[P.rank] = AllSumReduce(P.reshape(2), [0])
        P.allgather_data("both have built theirs")
        if P.rank == 1:
            while layers[0]._agreement._comm.waiting is None:
                time.sleep(0.001)
        layers[0](torch.ones(2))

    with pytest.raises(CommunicationError, match=r"worker 1 called AllSumReduce .* of worker 0: each worker builds"):
        distdl.run_workers(main, 2)


@pytest.mark.fault("serial")
@pytest.mark.parametrize("change", ["dtype", "gradient"])
def test_fixed_shapes_notice_other_changes_too(change):
    def main():
        layer = AllSumReduce(distdl.world().reshape(1), [0])
        with distdl.fixed_shapes():
            layer(torch.ones(2))
            layer(torch.ones(2).double() if change == "dtype" else torch.ones(2, requires_grad=True))

    with pytest.raises(RuntimeError, match=r"float64" if change == "dtype" else "with gradient"):
        distdl.run_workers(main, 1, "serial")


@pytest.mark.fault("threads")
def test_the_callers_interruption_ends_the_workers():
    hubs = []

    def main():
        hubs.append(distdl.world().comm.hub)
        if distdl.world().rank == 0:
            time.sleep(0.5)
            raise KeyboardInterrupt
        distdl.world().allgather_data(0)

    with pytest.raises(KeyboardInterrupt):
        distdl.run_workers(main, 2)


@pytest.mark.fault("threads")
@pytest.mark.parametrize("twice", [False, True])
def test_ctrl_c_ends_workers_that_compute_on(monkeypatch, twice):
    """Also that one for which ``run_workers`` was waiting; a thread left over would abort the process at its end."""
    monkeypatch.setattr(threaded, "_GRACE", 0.6)
    ended = []

    def main():
        if distdl.world().rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
            if twice:
                os.kill(os.getpid(), signal.SIGINT)
        try:
            until = time.monotonic() + 20
            while time.monotonic() < until:
                time.sleep(0.01)
        finally:
            ended.append(time.monotonic() < until)

    with pytest.raises(KeyboardInterrupt):
        distdl.run_workers(main, 2)
    threaded._join(threaded._stopped)
    assert ended == [True, True]


@pytest.mark.fault("threads")
def test_a_program_that_ctrl_c_ends_says_so_by_its_exit_status():
    """Python forgets that it ends by Ctrl-C if a worker that ends behind it compiles a text, as sympy's import does."""
    text = (
        "import distdl, os, signal, sys, time\n"
        "from distdl.backends import threaded\n"
        "distdl.run_workers(lambda: 0, 1)\n"
        "print('sympy' in sys.modules)\n"
        "threaded._GRACE = 0.4\n"
        "def main():\n"
        "    if distdl.world().rank == 1: os.kill(os.getpid(), signal.SIGINT)\n"
        "    for _ in range(2000): time.sleep(0.01)\n"
        "distdl.run_workers(main, 2)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "False\n" and done.returncode == -signal.SIGINT, done


# -- processes: each scenario is one job, which has to end soon, with an exit status and a reason


JOBS = {
    "gloo": lambda scenario: [*imported(), str(SCENARIOS), scenario, "gloo"],
    "mpi": lambda scenario: mpirun(4, SCENARIOS, scenario, python=imported()),
}


@pytest.mark.fault("mpi")
@pytest.mark.timeout(120)
def test_the_end_of_a_worker_ends_the_job():
    """(For gloo, below; for a worker that raises, in test_exits.)"""
    status, output = outcome(JOBS["mpi"]("dies"), DISTDL_TIMEOUT="300")
    assert status != 0, output


@pytest.mark.fault("mpi")
@pytest.mark.timeout(120)
def test_a_wait_that_is_too_long_names_the_layer_and_the_absent_worker_to_all_that_wait():
    """(For gloo, in test_opening, where the store is stopped, too.)"""
    status, output = outcome(JOBS["mpi"]("is_absent"), DISTDL_TIMEOUT="80")
    texts = sorted(text for one in told(output) for text in one)
    assert status != 0 and len(texts) == 3, output
    first = " waited longer than 3 s (DISTDL_TIMEOUT) in AllSumReduce (P_x: 4 on workers 0..3; P_y: "
    assert "worker 0 gave up in AllSumReduce" in texts[0] and "after another worker had: worker" in texts[0], texts
    assert all(first in text and "for worker 2" in text for text in texts), texts


def told(output):
    """What the workers of a scenario have printed of their errors: one list of texts each."""
    decode = json.JSONDecoder().raw_decode  # (processes may write one behind the other in one line)
    return [decode(rest)[0] for rest in output.split("told ")[1:] if rest.startswith("[")]


@pytest.mark.fault(count=5)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", JOBS)
def test_another_order_on_one_worker_is_one_error_on_all_and_then_the_world_refuses(backend):
    status, output = outcome(JOBS[backend]("differs"), DISTDL_TIMEOUT="300")
    texts = told(output)
    assert len(texts) == 4, output
    assert backend == "gloo" or status != 0  # nobody takes the results of such a run for good ones
    assert all(one[:4] == texts[0][:4] for one in texts)
    order, operations, methods, shapes, backward = texts[0]
    assert "[layer 0] (exchange 0) on 0, 2, 3; " in order and "[layer 1] (exchange 0) on 1" in order
    assert "op='sum' (exchange 0) on 0, 2, 3; " in operations and "op='max' (exchange 0) on 1" in operations
    assert "allreduce_data" in methods and "allgather_data in 4 on workers 0..3 (exchange 0) on 1" in methods
    assert "one shape" in shapes
    if backend == "mpi":  # at the next layer, for MPI's own sums have met
        assert all(one == texts[0] for one in texts)
        assert "since exchange 3 of these workers, which was the backward of exchange 1, AllSumReduce" in backward
        assert "[layer 0] on 0, 2, 3; the backward of exchange 2" in backward and "[layer 1] on 1" in backward
    for *_, backward in texts:
        sides = ("exchange 3", "backward of exchange 1", "backward of exchange 2")
        assert all(side in backward for side in sides), backward


@pytest.mark.fault("gloo")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("scenario", "sides"), [
    ("differs_in_shapes", ("the backward of exchange 2", "the backward of exchange 1")),
    ("drops", ("worker 1", "since exchange 3, which was the backward of exchange")),
    ("asks_alone", ("in distribute_tensor", "which only one of them has called", *ASKS)),
    ("differentiates_alone", ("in distribute_tensor", "which only one of them has called", *LEAVES_OUT)),
    ("freezes", ("parameters 0-3 of the model", "parameters 2-3 of the model")),
    ("freezes_others", ("parameters 0-1 of the model", "parameters 2-3 of the model")),
])  # fmt: skip
def test_gloo_tells_all_workers_of_another_order_of_shapes_long_before_the_limit(scenario, sides):
    status, output = outcome(JOBS["gloo"](scenario), DISTDL_TIMEOUT="300")
    texts = [text for one in told(output) for text in one]
    assert status != 0 and len(texts) == 4, output
    assert all(side in text for text in texts for side in sides), output
    assert "SIGABRT" not in output and OUR_FRAMES not in output, output


@pytest.mark.timeout(120)
def test_messages_in_pieces_may_be_late():
    status, output = outcome(JOBS["mpi"]("sends_pieces_late"), DISTDL_TIMEOUT="60")
    assert status == 0 and output.count("came in pieces") == 4, output


@pytest.mark.timeout(120)
def test_workers_that_meet_by_themselves_are_not_taken_to_wait_in_the_call_before():
    status, output = outcome(JOBS["mpi"]("gathers_between_calls"), DISTDL_TIMEOUT="60")
    assert status == 0 and output.count("gathered between") == 4, output


@pytest.mark.fault
@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", JOBS)
@pytest.mark.parametrize(("scenario", "circle"), [("leaves_out", (2, 3)), ("goes_around", (0, 1, 2))])
def test_workers_that_wait_in_a_circle_are_told_long_before_the_limit(backend, scenario, circle):
    status, output = outcome(JOBS[backend](scenario), DISTDL_TIMEOUT="300")
    texts = [text for one in told(output) for text in one]
    assert status != 0 and texts, output
    named = [text for text in texts if "each for one that has yet to come to that call" in text]
    assert named and (backend == "mpi" or len(named) == len(texts) == 4), output
    for text in named:
        assert all(f"worker {worker} waits in AllSumReduce" in text for worker in circle), output


@pytest.mark.fault
@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", JOBS)
def test_a_second_thread_of_a_worker_that_waits_is_an_error_on_all(backend):
    jobs = {**JOBS, "mpi": lambda scenario: mpirun(2, SCENARIOS, scenario, python=imported())}
    _, output = outcome(jobs[backend]("shares_its_calls"), DISTDL_TIMEOUT="300", SCENARIO_WORKERS="2")
    found = sorted(told(output), key=len)
    assert [len(texts) for texts in found] == [2, 3], output
    (heard, then), (ended, refused, own) = found
    assert own.startswith("worker 0 is in two calls at once: the thread 'of the user' calls AllSumReduce (P_x: 2 on ")
    assert "[layer 1] while the thread 'MainThread' waits in AllSumReduce (P_x: 2" in own and "[layer 0]. Only" in own
    assert ended == own and f"after another worker had: {own}" in heard
    assert all("out of step since an earlier error: worker" in text and own in text for text in (then, refused))


@pytest.mark.fault("mpi")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("scenario", "words", "sides"), [
    ("differs_in_moves", DIFFERS, ("differ since exchange 3", "backward of exchange 1", "backward of exchange 2")),
    ("differs_in_shapes", MEETS, ("backward of exchange 1", "backward of exchange 2")),
    ("drops", MEETS, ("backward of exchange 1", "worker 1 waits in AllSumReduce")),
    ("asks_alone", DIFFERS, ("distribute_tensor", *ASKS[2:])),  # (MPI lets a small value go, and its sender go on)
    ("differentiates_alone", "which only one of them has called", ("in distribute_tensor", *LEAVES_OUT)),
    ("freezes", MEETS, ("parameters 2-3 of the model",)),
    ("freezes_others", DIFFERS, ("parameters 0-1 of the model", "parameters 2-3 of the model")),
])  # fmt: skip
def test_mpi_ends_another_order_of_moves_or_shapes_long_before_the_limit_and_names_both(scenario, words, sides):
    """(For gloo, in test_opening.)"""
    status, output = outcome(JOBS["mpi"](scenario), DISTDL_TIMEOUT="300")
    texts = [text for one in told(output) for text in one]
    assert status != 0 and texts, output
    assert any(re.search(words, text) for text in texts), output
    assert any(all(side in text for side in sides) for text in texts), output
    assert OUR_FRAMES not in output, output


@pytest.mark.fault("gloo")
@pytest.mark.timeout(120)
def test_gloo_names_the_lost_peer_again_and_again():
    status, output = outcome(JOBS["gloo"]("outlives"), DISTDL_TIMEOUT="300")
    texts = told(output)
    assert texts and status != 0, output
    for first, *later in texts:
        assert "lost a connection in AllSumReduce" in first
        assert all("out of step since an earlier error: worker" in text for text in later)
