"""``distdl run``: a script on several workers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from distdl.backends import chosen, find, names
from distdl.commands.usage import UsageError, show_examples, workers
from distdl.workers.launch import run_workers


def add_run(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl run``."""
    show_examples(
        parser,
        "distdl run -n 4 train.py --epochs 3",
        "distdl run -n 4 --backend mpi train.py",
        "distdl run -n 4 --backend gloo train.py",
    )
    parser.add_argument("-n", "--workers", type=workers, default=4, help="how many workers (default: 4)")
    known = f"one of {', '.join(names())}, or your own"
    parser.add_argument("--backend", help=f"{known} (default: what DISTDL_BACKEND names, else threads)")
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(command=_run)


def launch_command(backend: str, workers: int, program: Sequence[str]) -> list[str] | None:
    """The command line that starts a Python program on the workers of a back-end; None if it starts them itself.

    Args:
        program: what stands behind ``python``: a script or ``-m`` and a module, and its arguments.
    Raises: ValueError for a back-end that nobody has registered; RuntimeError if its launcher is missing.
    """
    found = find(backend)
    if found.command is not None:
        return found.command(workers, program)
    if found.start is not None:
        return None
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, "--nproc-per-node", str(workers), *program]


def launch_environment(backend: str) -> dict[str, str]:
    """Our variables, with what launchers want set so that users need not know it."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return {"OMP_NUM_THREADS": "1", **allowed, **os.environ, "DISTDL_BACKEND": backend}


def _run(options: argparse.Namespace) -> int:
    if not options.script.is_file():
        raise UsageError(f"there is no script {options.script}")
    sys.path.insert(0, str(options.script.resolve().parent))  # a back-end of the user's may lie beside the script
    program = [str(options.script), *options.arguments]
    try:
        name = chosen() if options.backend is None else options.backend
        command = launch_command(name, options.workers, program)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    if command is None:
        return _execute(options.workers, name, options.script, program)
    sys.stdout.flush()
    sys.stderr.flush()
    # the launcher takes this process's place, and so the signals that are meant for it
    os.execvpe(command[0], command, launch_environment(name))


# names that a script would otherwise find among the builtins, with the values of that module
_UNSET = dict.fromkeys(["__doc__", "__package__", "__spec__"])


def _execute(workers: int, backend: str, script: Path, program: list[str]) -> int:
    """Execute the script once on each worker of this process, each time in a namespace of its own."""
    sys.argv = program
    # without the future statements of this file
    code = compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    begun = False

    def execute() -> None:
        nonlocal begun
        begun = True
        exec(code, {"__name__": "__main__", **_UNSET, "__file__": str(script), "__builtins__": __builtins__})

    try:
        run_workers(execute, workers, backend)
    except (ValueError, RuntimeError) as error:
        if begun:
            raise
        print(error, file=sys.stderr)  # an error of the command, not of the script
        return 1
    return 0
