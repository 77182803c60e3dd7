"""How tests start jobs of several processes."""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent
LIMIT = 480  # seconds for the job of all suites
# what every launch of workers needs that a test starts
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
NOT_STARTED = "The PMIx server's listener thread failed to start"  # what mpirun prints then, of itself


def mpirun(workers, script, *arguments, python=(sys.executable,)):
    """The command that runs a script on so many MPI processes, with the mpirun of this environment.

    Args:
        python: how the command begins that runs a script in one process, see ``imported``.
    """
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("mpirun", path=beside)
    assert program is not None, "the tests need mpirun: pip install 'distdl[test]'"
    return [program, "--oversubscribe", "-n", str(workers), *python, str(script), *arguments]


def torchrun(workers, script, *arguments, options=()):
    """The command that runs a script on so many processes of torchrun, all of them forks, and torchrun itself, too."""
    launcher = [*imported(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    return [*launcher, *options, "--no-python", *imported(), str(script), *arguments]


@functools.cache
def imported():
    """In the place of ``[sys.executable]``: a fork of a process that has imported torch runs a script (imported.py).

    ``[*imported(), SCRIPT, ARGUMENT, ...]`` or ``[*imported(), "-m", MODULE, ARGUMENT, ...]``. The process is started
    at the first call, and ends with this one.
    """
    server = str(FOLDER / "imported.py")
    folder = tempfile.mkdtemp(prefix="distdl-imported-")  # (a TemporaryDirectory goes with a fork that forgets ``end``)
    path = str(Path(folder, "socket"))
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": python_path()}
    process = subprocess.Popen([sys.executable, server, "server", path], **pipes)

    def end():
        process.communicate()
        shutil.rmtree(folder)

    atexit.register(end)
    assert process.stdout.readline() == b"listening\n"
    return [sys.executable, "-I", "-S", server, path]


def python_path(**variables):
    """The environment for a job: with what launches need, and the folders of the tests on Python's path."""
    tests = FOLDER.parent
    folders = [str(FOLDER), str(tests), str(tests / "layers"), str(tests / "models"), os.environ.get("PYTHONPATH", "")]
    return {**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), **variables}


def ended(command, limit=100, **variables):
    """A job that has come to its end, with what it printed.

    It is started once more where mpirun itself could not start, before any worker: seldom, on a busy machine.

    Raises: TimeoutExpired if it does not end soon; on a busy machine it takes a minute to start.
    """
    options = {"capture_output": True, "text": True, "timeout": limit, "env": python_path(**variables)}
    done = subprocess.run(command, **options)
    if done.returncode and NOT_STARTED in done.stderr:
        done = subprocess.run(command, **options)
    return done


def forked(function, workers, backend="gloo"):
    """What ``run_workers`` returns for a function of a module, by workers that are forks, see ``imported``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "function")
        file.write_bytes(pickle.dumps(function))
        command = [*imported(), str(FOLDER / "run_function.py"), str(file), str(workers), backend]
        done = ended(command, PYTHONPATH=os.pathsep.join(sys.path))
        assert done.returncode == 0, done.stdout + done.stderr
        return pickle.loads(file.read_bytes())


def open_torch_group(P):
    """The default group of torch.distributed over the workers of a world, as users open it; at a port that is free."""
    import torch.distributed as dist

    def store(port):
        return dist.TCPStore("127.0.0.1", port, is_master=port == 0, wait_for_workers=False)

    own = store(0) if P.rank == 0 else None
    port = P.broadcast_data(own and own.port)
    dist.init_process_group("gloo", store=own or store(port), rank=P.rank, world_size=P.size)


def outcome(command, **variables):
    """The exit status of a job, and all that it printed."""
    done = ended(command, **variables)
    return done.returncode, done.stdout + done.stderr


def run_suites(backend, folder):
    """Run ``run_suites.py`` on four processes; what it printed."""
    script = str(FOLDER / "run_suites.py")
    started = [*imported(), script, str(folder), backend]
    command = mpirun(4, script, str(folder), python=imported()) if backend == "mpi" else started
    try:
        done = ended(command, LIMIT, DISTDL_TIMEOUT="60")
        return f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    except subprocess.TimeoutExpired as error:
        return f"not ended after {LIMIT} s\n{error.stdout}\n{error.stderr}"
