"""``distdl draw``: a picture, printed or written to a file."""

from __future__ import annotations

import argparse
import sys

from distdl.commands.usage import UsageError
from distdl.drawing import Drawing
from distdl.drawing.command import add_arguments, pictured


def add_draw(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl draw``."""
    add_arguments(parser)
    parser.set_defaults(command=_draw)


def _draw(options: argparse.Namespace) -> int:
    try:
        drawing = Drawing(pictured(options))
        if options.output is None:
            print(drawing)
        else:
            drawing.save(options.output)
    except ValueError as error:
        raise UsageError(str(error)) from error
    except (OSError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0
