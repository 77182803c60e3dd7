"""How tests start jobs of several processes."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def mpirun(workers, script, *arguments):
    """The command that runs a script on so many MPI processes, with the mpirun of this environment."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("mpirun", path=beside)
    assert program is not None, "the tests need mpirun: pip install 'distdl[test]'"
    return [program, "--oversubscribe", "-n", str(workers), sys.executable, str(script), *arguments]


def python_path(**variables):
    """The environment for a job: with the folders of the tests on Python's path."""
    folders = [str(FOLDER), str(FOLDER.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)), **variables}
