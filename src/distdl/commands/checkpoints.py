"""``distdl inspect`` and ``distdl convert``: what is in a checkpoint, and the same for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from distdl.checkpoint.converting import convert
from distdl.checkpoint.inspecting import inspect
from distdl.commands.usage import show_examples


def add_inspect(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl inspect``."""
    show_examples(parser, "distdl inspect checkpoints/last", "distdl inspect checkpoints/last --check")
    parser.add_argument("path", type=Path, help="the folder of a checkpoint")
    parser.add_argument("--check", action="store_true", help="compare all checksums, too")
    parser.set_defaults(command=lambda options: _told(lambda: inspect(options.path, options.check)))


def add_convert(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl convert``."""
    show_examples(
        parser,
        "distdl convert checkpoints/last for-torch",
        "distdl convert from-torch checkpoints/first --model app.model --optimizer app.optim",
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, help="a folder that is not there, or empty")
    parser.add_argument("--model", help="where the model is in a directory of torch, as app.model (default: model)")
    parser.add_argument("--optimizer", help="where its optimiser is (default: optimizer or optim)")
    parser.set_defaults(command=_convert)


def _convert(options: argparse.Namespace) -> int:
    return _told(lambda: convert(options.source, options.target, options.model, options.optimizer))


def _told(tell: Callable[[], str]) -> int:
    try:
        print(tell())
    except (OSError, ValueError, TypeError, ImportError) as error:
        print(error)
        return 1
    return 0
