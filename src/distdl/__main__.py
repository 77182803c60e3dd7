"""The command line: ``distdl run -n 4 [--backend NAME] SCRIPT [ARGS]``, ``distdl summary|suggest|verify MODEL``,
``distdl inspect PATH [--check]``, ``distdl convert SOURCE TARGET`` and ``distdl draw WHAT``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from distdl import __version__
from distdl.backends import chosen, find, names
from distdl.checkpoint.converting import convert
from distdl.checkpoint.inspecting import inspect
from distdl.commands.models import UsageError, add_suggest, add_summary, add_verify
from distdl.drawing import Drawing
from distdl.drawing.command import add_arguments, pictured
from distdl.workers.launch import run_workers


def main(arguments: list[str] | None = None) -> int:
    """Run a script on several workers, tell of a checkpoint or convert one, or draw; returns the exit status."""
    parser = argparse.ArgumentParser(prog="distdl", description=__doc__)
    parser.add_argument("--version", action="version", version=f"distdl {__version__}")
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run a script on several workers")
    run.add_argument("-n", "--workers", type=_count, default=4, help="how many workers (default: 4)")
    known = f"one of {', '.join(names())}, or your own"
    run.add_argument("--backend", help=f"{known} (default: what DISTDL_BACKEND names, else threads)")
    run.add_argument("script", type=Path)
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    add_summary(commands.add_parser("summary", help="tell what a model would need on several workers"))
    add_suggest(commands.add_parser("suggest", help="rank the ways to split a model's input"))
    add_verify(commands.add_parser("verify", help="prove that a model computes the same on several workers"))
    look = commands.add_parser("inspect", help="tell what is in a checkpoint")
    look.add_argument("path", type=Path)
    look.add_argument("--check", action="store_true", help="compare all checksums, too")
    turn = commands.add_parser(
        "convert", help="write a checkpoint as a directory of torch.distributed.checkpoint, or the other way"
    )
    turn.add_argument("source", type=Path)
    turn.add_argument("target", type=Path, help="a folder that is not there, or empty")
    turn.add_argument("--model", help="where the model is in a directory of torch, as app.model (default: model)")
    turn.add_argument("--optimizer", help="where its optimiser is (default: optimizer or optim)")
    picture = commands.add_parser("draw", help="draw where a tensor lies, or who sends what to whom")
    add_arguments(picture)
    options = parser.parse_args(arguments)
    if "command" in options:
        try:
            return int(options.command(options))
        except UsageError as error:
            parser.error(str(error))
    if "picture" in options:
        return _drawn(options, picture)
    if "path" in options:
        return _told(lambda: inspect(options.path, options.check))
    if "source" in options:
        return _told(lambda: convert(options.source, options.target, options.model, options.optimizer))
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")
    sys.path.insert(0, str(options.script.resolve().parent))  # a back-end of the user's may lie beside the script
    try:
        name = chosen() if options.backend is None else options.backend
        backend = find(name)
    except ValueError as error:
        parser.error(str(error))
    program = [str(options.script), *options.arguments]
    if backend.command is not None:
        try:
            command = backend.command(options.workers, program)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
    elif backend.start is None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*torchrun, "--nproc-per-node", str(options.workers), *program]
    else:
        return _execute(options.workers, name, options.script, program)
    sys.stdout.flush()
    sys.stderr.flush()
    # the launcher takes this process's place, and so the signals that are meant for it
    os.execvpe(command[0], command, {**_environment(), "DISTDL_BACKEND": name})


def _drawn(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        drawing = Drawing(pictured(options))
        if options.output is None:
            print(drawing)
        else:
            drawing.save(options.output)
    except ValueError as error:
        parser.error(str(error))
    except (OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _told(tell: Callable[[], str]) -> int:
    try:
        print(tell())
    except (OSError, ValueError, TypeError, ImportError) as error:
        print(error)
        return 1
    return 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"at least one worker is needed; got {text}")
    return int(text)


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


def _environment() -> dict[str, str]:
    """Ours, with what launchers want set so that users need not know it."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
    return {"OMP_NUM_THREADS": "1", **allowed, **os.environ}


if __name__ == "__main__":
    sys.exit(main())
