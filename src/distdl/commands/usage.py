"""What all commands share: their errors, their numbers, and the examples in their help."""

from __future__ import annotations

import argparse

from distdl.workers.worlds import launched, world


class UsageError(ValueError):
    """What was typed cannot be done."""


def count(text: str) -> int:
    """An argument that is a number of things, 1 at least."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"at least one; got {text}")
    return int(text)


def workers(text: str) -> int:
    """An argument that is a number of workers."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"at least one worker is needed; got {text}")
    return int(text)


def show_examples(parser: argparse.ArgumentParser, *examples: str) -> None:
    """Put command lines at the end of the help of a command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n  ".join(["examples:", *examples])


def is_first() -> bool:
    """Whether this process is the one that prints: the first worker of a launched job, or in no job at all."""
    return launched() is None or world().rank == 0
