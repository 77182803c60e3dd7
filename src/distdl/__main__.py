"""The command line, ``distdl``."""

from __future__ import annotations

import argparse
import sys

from distdl import __version__
from distdl.commands.checkpoints import add_convert, add_inspect
from distdl.commands.completion import add_completion
from distdl.commands.doctor import add_doctor
from distdl.commands.draw import add_draw
from distdl.commands.models import add_report, add_suggest, add_summary, add_verify
from distdl.commands.run import add_run
from distdl.commands.usage import UsageError, show_examples

# each command with a line on what it does, and the function that adds its arguments and sets what it calls
COMMANDS = {
    "run": ("run a script on several workers", add_run),
    "doctor": ("tell what is installed, what works, and how to install what is missing", add_doctor),
    "summary": ("tell what a model would need on several workers", add_summary),
    "suggest": ("rank the ways to split a model's input", add_suggest),
    "report": ("write a page that shows how a model is distributed", add_report),
    "verify": ("prove that a model computes the same on several workers", add_verify),
    "inspect": ("tell what is in a checkpoint", add_inspect),
    "convert": ("write a checkpoint as a directory of torch.distributed.checkpoint, or the other way", add_convert),
    "draw": ("draw where a tensor lies, or who sends what to whom", add_draw),
    "completion": ("print a script that completes these commands in a shell", add_completion),
}


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    whole = argparse.ArgumentParser(prog="distdl", description="Model-parallel deep learning for PyTorch.")
    show_examples(
        whole,
        "distdl run -n 4 train.py",
        "distdl suggest networks:unet --input 1x1x256x256 -n 4",
        "distdl COMMAND --help",
    )
    whole.add_argument("--version", action="version", version=f"distdl {__version__}")
    commands = whole.add_subparsers(required=True, metavar="COMMAND")
    for name, (words, add) in COMMANDS.items():
        one = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
        one.set_defaults(parser=one, whole=whole)
        add(one)
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Do what a command line asks for; returns the exit status. One that cannot be done ends the program with 2."""
    options = parser().parse_args(arguments)
    try:
        status: int = options.command(options)
    except UsageError as error:
        options.parser.error(str(error))
    return status


if __name__ == "__main__":
    sys.exit(main())
