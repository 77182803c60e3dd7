"""A worker that leaves is named, workers end with their launcher, and no error that is known gets lost."""

import atexit
import importlib.util
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from types import ModuleType

import exits
import pytest
import torch
from launchers import FOLDER, imported, mpirun, outcome, python_path, torchrun

import distdl
from distdl import environment
from distdl.__main__ import main as command_line
from distdl.globals import patches
from distdl.nn import AllSumReduce
from distdl.transport.communicator import CommunicationError
from distdl.workers import launchers

SCRIPT = str(FOLDER / "exits.py")


# -- a worker that leaves while others wait


@pytest.mark.fault("threads")
@pytest.mark.parametrize(("scenario", "how"), [(exits.leaves, "called sys.exit"), (exits.returns, "returned")])
def test_threads_name_the_worker_that_left(scenario, how):
    with pytest.raises(CommunicationError, match=rf"worker 1 ended while others wait for it: .*\(worker 1 {how}\)"):
        distdl.run_workers(scenario, 3)


@pytest.mark.fault("threads")
def test_threads_wait_for_one_that_has_left_no_longer_than_it_takes_to_see_it():
    computing = threading.Event()

    def main():
        P = distdl.world()
        if P.rank == 0:
            try:
                AllSumReduce(P[:2].reshape(2), [0])(torch.ones(2))
            finally:
                computing.set()
        if P.rank == 2:
            assert computing.wait(30)  # worker 0 is told before this one waits for anybody
            return True

    with pytest.raises(CommunicationError, match=r"worker 1 ended while others wait for it: worker 0 waits"):
        distdl.run_workers(main, 3)


@pytest.mark.fault("threads")
@pytest.mark.parametrize("code", [None, 0])
def test_all_workers_may_call_exit(code):
    with pytest.raises(SystemExit) as ended:
        distdl.run_workers(lambda: sys.exit(code), 3)
    assert ended.value.code == code


@pytest.mark.fault("threads")
def test_another_exit_code_is_kept_and_its_worker_is_named(capsys):
    def main():
        P = distdl.world()
        if P.rank == 1:
            sys.exit(7)
        P.allgather_data(0)

    with pytest.raises(SystemExit) as ended:
        distdl.run_workers(main, 3)
    assert ended.value.code == 7 and "worker 1 called sys.exit(7)" in capsys.readouterr().err


@pytest.mark.fault("gloo")
@pytest.mark.timeout(90)
def test_gloo_processes_name_the_worker_that_left():
    *_, error, note, hint = failed("leaves")
    assert re.match(r"\S*CommunicationError: .*AllSumReduce.*worker 1 had come to the end.*make the same calls", error)
    assert note == "worker 1 called sys.exit" and hint.startswith("(DISTDL_DEBUG=1 shows")


def failed(scenario, **variables):
    """The lines that are printed where workers in gloo processes run a scenario and ``run_workers`` raises."""
    status, output = outcome([*imported(), SCRIPT, scenario, "gloo"], **variables)
    assert status == 1, output
    return output.splitlines()


@pytest.mark.fault("gloo")
@pytest.mark.timeout(90)
def test_gloo_processes_that_lose_another_say_why():
    *before, error, note, hint = failed("raises")
    cause = "\n".join(before).partition("the direct cause of the following exception")[0]
    assert "WorkerTraceback" in cause and "in worker 1" in cause and "exits.py" in cause and "in raises" in cause
    assert error == "KeyError: 'the reason'"
    assert note.startswith("worker 0 raised CommunicationError: worker 0 lost a connection in AllSumReduce")
    assert "worker 1 failed with KeyError: 'the reason'" in note and hint.startswith("(DISTDL_DEBUG=1 shows")


@pytest.mark.fault("gloo")
@pytest.mark.timeout(120)
def test_a_gloo_process_ends_well_while_its_watch_asks_the_store():
    """(A thread that comes back from C++ while the interpreter ends is unwound, and C++ aborts the process.)"""
    status, output = outcome(torchrun(2, SCRIPT, "ends_beside_its_watch", "alone"))
    assert status == 0 and "terminate" not in output, output


@pytest.mark.fault("mpi")
@pytest.mark.timeout(120)
def test_mpi_names_the_worker_that_left_and_prints_one_traceback():
    begun = time.monotonic()
    status, output = outcome(mpirun(3, SCRIPT, "leaves", "alone", python=imported()), DISTDL_TIMEOUT="200")
    assert status != 0 and time.monotonic() - begun < 100
    assert "waits in AllSumReduce (P_x: 3" in output and "for worker 1, which had come to the end" in output, output
    assert output.count("Traceback") == 1 and " of 3 on " in output.partition("Traceback")[0], output


@pytest.mark.fault("mpi")
@pytest.mark.timeout(120)
def test_mpi_names_the_worker_that_left_where_messages_go_in_pieces():
    status, output = outcome(mpirun(3, SCRIPT, "leaves_pieces_out", "alone", python=imported()), DISTDL_TIMEOUT="200")
    assert status != 0 and "for worker 2, which had come to the end" in output, output


@pytest.mark.fault("mpi")
@pytest.mark.timeout(120)
def test_mpi_prints_the_traceback_though_torch_distributed_has_a_hook_of_its_own():
    status, output = outcome(mpirun(2, SCRIPT, "raises_beside_torch_distributed", "alone", python=imported()))
    assert status != 0 and "KeyError: 'the reason'" in output and output.count("Traceback") == 1, output


# -- errors that are known, whatever the others do


@pytest.mark.fault("threads")
def test_the_traceback_says_which_thread_raised():
    with pytest.raises(ZeroDivisionError) as error:
        distdl.run_workers(lambda: 1 // (2 - distdl.world().rank), 3)
    assert error.value.__notes__ == ["(raised on worker 2 of 3)"]


@pytest.mark.fault("threads")
@pytest.mark.timeout(90)
def test_the_traceback_of_distdl_run_begins_in_the_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import distdl\nif distdl.world().rank == 1:\n    raise KeyError('the reason')")
    status, output = outcome([*imported(), "-m", "distdl", "run", "-n", "2", str(script)])
    shown = f"""Traceback (most recent call last):\n  File "{script}", line 3, in <module>\n"""
    assert status == 1 and shown in output and output.count("  File ") == 1, output


@pytest.mark.fault("threads")
@pytest.mark.timeout(90)
def test_a_thread_that_computes_on_does_not_abort_the_process():
    status, output = outcome([*imported(), SCRIPT, "computes_on", "threads"])
    assert status == 1 and "terminate called" not in output, output
    assert "KeyError: 'the reason'\n(raised on worker 1 of 2)" in output, output


@pytest.mark.fault("threads")
@pytest.mark.timeout(90)
def test_threads_that_ask_for_the_state_of_the_generator_do_not_wait_for_ever():
    status, output = outcome([*imported(), SCRIPT, "asks_for_states", "threads"])
    assert status == 0 and output.count("asked") == 2, output


@pytest.mark.fault("threads")
@pytest.mark.timeout(150)
def test_processes_that_a_worker_forks_do_not_find_the_generator_taken_by_another_worker():
    status, output = outcome([*imported(), SCRIPT, "forks_beside_one_that_asks", "threads"])
    assert status == 0 and "40 ended" in output, output


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="Python does not collect garbage within calls, so all is torch's"
)
def test_the_functions_of_torchs_generator_wait_for_each_other_and_a_signal_may_call_them_within_a_call():
    distdl.run_workers(lambda: None, 2)
    state, found = torch.get_rng_state(), []
    other = threading.Thread(target=lambda: found.append(torch.get_rng_state()))
    with vars(torch.random)["default_generator"]._lock:  # (as a signal's handler finds it)
        other.start()
        torch.manual_seed(5)
        first = torch.rand(1, generator=torch.random.default_generator)
        torch.manual_seed(5)
        assert torch.equal(torch.rand(1), first) and torch.initial_seed() == 5
        other.join(0.2)
        assert other.is_alive() and not found
        torch.set_rng_state(state)
    other.join()
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(found[0], state)


def test_torchs_module_of_random_numbers_is_for_its_users_what_it_was(monkeypatch):
    """Also where another copy of ours is there: after a second import."""
    twin = importlib.util.module_from_spec(patches.__spec__)
    patches.__spec__.loader.exec_module(twin)
    for one in (patches, twin):
        one.install(one.WITH_THREADS)
        assert torch.random.default_generator is torch.default_generator
        assert type(torch.random) is ModuleType or pickle.loads(pickle.dumps(torch.random)) is torch.random
    other = torch.Generator().manual_seed(3)
    monkeypatch.setattr(torch.random, "default_generator", other)
    assert torch.random.default_generator is other and torch.initial_seed() == 3
    before = type(torch.random) is not ModuleType
    monkeypatch.undo()
    assert torch.random.default_generator is torch.default_generator
    assert (type(vars(torch.random)["default_generator"]) is torch.Generator) != before  # (it is locked as before)


@pytest.mark.fault("gloo")
@pytest.mark.timeout(90)
def test_a_process_that_does_not_hear_sigterm_does_not_hide_the_error():
    lines = failed("fails_beside_a_deaf_one", EXITS_GRACE="2")
    assert "(in worker 0)" in lines and "KeyError: 'the reason'" in lines


# -- launchers


STARTS = {
    "run_workers": [sys.executable, SCRIPT, "trains_on", "gloo"],
    "gloo": [sys.executable, "-m", "distdl", "run", "-n", "2", "--backend", "gloo", SCRIPT, "trains_on", "alone"],
    "mpi": [sys.executable, "-m", "distdl", "run", "-n", "2", "--backend", "mpi", SCRIPT, "trains_on", "alone"],
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("start", "number"), [
    pytest.param("run_workers", signal.SIGTERM, marks=pytest.mark.fault("gloo")),
    pytest.param("run_workers", signal.SIGKILL, marks=pytest.mark.fault("gloo")),
    pytest.param("gloo", signal.SIGKILL, marks=pytest.mark.fault("gloo")),
    pytest.param("mpi", signal.SIGKILL, marks=pytest.mark.fault("mpi")),
])  # fmt: skip
def test_workers_end_with_the_one_that_started_them(start, number, tmp_path):
    """Though one of them is stopped, and the other does not hear SIGTERM."""
    environment = python_path(EXITS_FOLDER=str(tmp_path), DISTDL_GRACE="1")
    parent = subprocess.Popen(STARTS[start], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    files = [tmp_path / "0", tmp_path / "1"]
    until(lambda: all(file.exists() for file in files), 80)
    workers = [int(file.read_text()) for file in files]
    assert all(alive(worker) for worker in workers)
    parent.send_signal(number)
    assert parent.wait(20) == (143 if number == signal.SIGTERM else -number)
    until(lambda: not any(alive(worker) for worker in workers), 20)


def until(claim, seconds):
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"  # (nobody may be there to ask for how it ended)
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_run_gives_its_place_to_the_launcher(monkeypatch, backend):
    called = []
    monkeypatch.setattr(os, "execvpe", lambda *arguments: called.append(arguments))
    command_line(["run", "-n", "2", "--backend", backend, SCRIPT, "leaves"])
    [(file, command, environment)] = called
    assert file == command[0] and command[-2:] == [SCRIPT, "leaves"] and environment["DISTDL_BACKEND"] == backend


@pytest.mark.parametrize("text", ["abc", "", "-1", "nan", "inf"])
def test_the_grace_period_is_a_number(monkeypatch, text):
    monkeypatch.setenv("DISTDL_GRACE", text)
    with pytest.raises(ValueError, match="DISTDL_GRACE has to be a number of seconds from 0 to"):
        environment.grace()


@pytest.mark.fault("gloo")
@pytest.mark.timeout(120)
def test_torchrun_restarts_a_job_and_it_ends_without_open_groups():
    command = torchrun(2, SCRIPT, "recovers", "alone", options=["--max-restarts", "1"])
    status, output = outcome(command, DISTDL_TIMEOUT="20")
    assert status == 0 and "KeyError: 'the reason'" in output, output
    assert "groups open at exit: 0" in output, output


def test_torchrun_is_told_of_the_error_and_takes_the_cause_for_the_first(monkeypatch, tmp_path, capsys):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failures = {}
    for error in (CommunicationError("lost"), KeyError("the reason")):
        file = tmp_path / f"{type(error).__name__}.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
        monkeypatch.setattr(time, "time", lambda: 100.5)
        launchers.serve_launcher()
        sys.excepthook(type(error), error, None)
        failures[type(error)] = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(file))
        assert json.loads(file.read_text())["message"]["message"] == f"{type(error).__name__}: {error}"
    atexit.unregister(launchers._remove_empty)
    assert min(failures, key=lambda kind: failures[kind].timestamp) is KeyError
    assert "the reason" in failures[KeyError].message["message"] and "KeyError" in capsys.readouterr().err


def test_the_empty_folders_of_torchrun_are_removed_and_no_others(tmp_path):
    files = [tmp_path / "torchelastic_x" / "none_y" / "attempt_0" / worker / "error.json" for worker in "01"]
    for file in files:
        file.parent.mkdir(parents=True)
    files[1].touch()
    launchers._remove_empty(files[0])
    assert not files[0].parent.exists() and files[1].exists()
    files[1].unlink()
    launchers._remove_empty(files[1])
    assert tmp_path.exists() and not any(tmp_path.iterdir())
    own = tmp_path / "logs" / "none_y" / "attempt_0" / "0" / "error.json"  # of --log-dir
    own.parent.mkdir(parents=True)
    launchers._remove_empty(own)
    assert own.parent.exists()


# -- a last checkpoint


@pytest.mark.fault
@pytest.mark.timeout(90)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_all_workers_save_at_the_same_step_when_one_gets_sigterm(backend, tmp_path):
    assert saves_and_ends([*imported(), SCRIPT, "saves_when_asked", backend], tmp_path) < 10


@pytest.mark.fault("mpi")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("scenario", ["saves_when_asked", "saves_when_its_parent_is_asked"])
def test_all_mpi_workers_save_at_the_same_step_when_one_or_mpirun_gets_a_signal(scenario, tmp_path):
    python = [sys.executable] if "parent" in scenario else imported()  # (whose parent is not mpirun)
    saves_and_ends(mpirun(2, SCRIPT, scenario, "alone", python=python), tmp_path)


def saves_and_ends(command, folder):
    status, output = outcome(command, EXITS_FOLDER=str(folder))
    assert status == 143, output
    saved = [json.loads((folder / name).read_text()) for name in "01"]
    assert saved[0] == saved[1] and saved[0][0] == saved[0][1]
    return saved[0][0]


def test_a_thread_of_the_users_cannot_catch_signals():
    raised = []

    def attempt():
        try:
            distdl.on_terminate(lambda: None)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=attempt, name="of the user")
    thread.start()
    thread.join()
    assert len(raised) == 1 and "main thread" in raised[0] and "of the user" in raised[0]
