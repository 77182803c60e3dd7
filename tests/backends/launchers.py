"""How tests start jobs of several processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LIMIT = 480  # seconds for the job of all suites
NOT_STARTED = "The PMIx server's listener thread failed to start"  # what mpirun prints then, of itself


def mpirun(workers, script, *arguments):
    """The command that runs a script on so many MPI processes, with the mpirun of this environment."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("mpirun", path=beside)
    assert program is not None, "the tests need mpirun: pip install 'distdl[test]'"
    return [program, "--oversubscribe", "-n", str(workers), sys.executable, str(script), *arguments]


def python_path(**variables):
    """The environment for a job: with the folders of the tests on Python's path."""
    tests = FOLDER.parent
    folders = [str(FOLDER), str(tests), str(tests / "layers"), str(tests / "models"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), **variables}


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


def outcome(command, **variables):
    """The exit status of a job, and all that it printed."""
    done = ended(command, **variables)
    return done.returncode, done.stdout + done.stderr


def run_suites(backend, folder):
    """Run ``run_suites.py`` on four processes; what it printed."""
    script = str(FOLDER / "run_suites.py")
    started = [sys.executable, script, str(folder), backend]
    command = mpirun(4, script, str(folder)) if backend == "mpi" else started
    try:
        done = ended(command, LIMIT, DISTDL_TIMEOUT="60")
        return f"exit status {done.returncode}\n{done.stdout}{done.stderr}"
    except subprocess.TimeoutExpired as error:
        return f"not ended after {LIMIT} s\n{error.stdout}\n{error.stderr}"
