"""``distdl summary``, ``suggest``, ``report`` and ``verify``: what a model would need, and the proof of it."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib import import_module
from math import prod
from typing import Any

import torch

from distdl.backends import find
from distdl.commands.usage import UsageError, count, is_first, show_examples
from distdl.drawing.command import dtype_of, numbers, places
from distdl.geometry.boxes import Shape
from distdl.globals.summary import suggest, summary
from distdl.reporting import report
from distdl.verification import Certificate, Mismatch, verify
from distdl.workers.launch import run_workers
from distdl.workers.worlds import launched, world


def add_summary(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl summary``."""
    _add_model(parser, "distdl summary networks:unet --input 1x1x256x256x256 --partition 1x1x2x2x2")
    parser.add_argument(
        "--partition", type=places, required=True, help="over how many workers each dim is split, as 1x1x2x2"
    )
    parser.add_argument("--worker", type=int, help="which worker to look at (default: the first)")
    _add_weights(parser)
    parser.set_defaults(command=_summary)


def add_suggest(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl suggest``."""
    _add_model(parser, "distdl suggest networks:unet --input 1x1x256x256x256 -n 8")
    parser.add_argument("-n", "--workers", type=count, default=4, help="how many workers (default: 4)")
    _add_weights(parser)
    parser.set_defaults(command=_suggest)


def add_report(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl report``."""
    _add_model(parser, "distdl report networks:unet --input 1x1x64x64 --partition 1x1x2x2 -o report.html")
    parser.add_argument(
        "--partition", type=places, required=True, help="over how many workers each dim is split, as 1x1x2x2"
    )
    parser.add_argument("--trace", help="a file of distdl.trace: measured times stand beside predicted bytes")
    parser.add_argument("-o", "--output", default="report.html", help="where to write it (default: report.html)")
    _add_weights(parser)
    parser.set_defaults(command=_report)


def add_verify(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``distdl verify``."""
    example = "distdl verify networks:unet --input 1x1x64x64"
    _add_model(parser, f"{example} -n 4", f"{example} --partition 1x1x2x2 --backend gloo --json")
    parser.add_argument(
        "-n", "--workers", type=count, help="how many workers (default: those of the partition, or of the job, or 4)"
    )
    parser.add_argument("--partition", type=places, help="as 1x1x2x2 (default: the longest dim of the input is split)")
    parser.add_argument("--backend", help="threads, gloo, or your own (default: threads)")
    parser.add_argument("--steps", type=count, default=2, help="steps of training (default: 2)")
    parser.add_argument("--json", action="store_true", help="print the certificate, or the difference, as JSON")
    _add_weights(parser)
    parser.set_defaults(command=_verify)


def _add_model(parser: argparse.ArgumentParser, *examples: str) -> None:
    show_examples(parser, *examples)
    parser.add_argument("model", help="a module and the function or class that builds the model, as networks:unet")
    parser.add_argument(
        "--input",
        type=numbers,
        action="append",
        required=True,
        help="global shape of an input, as 1x1x64x64; may be repeated",
    )
    parser.add_argument(
        "--dtype",
        type=dtype_of,
        help="of model and inputs, as float32 (default: summary: the model's; verify: float64)",
    )


def _add_weights(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--weights", choices=("replicated", "sharded"), default="replicated", help="where weights live")


def _summary(options: argparse.Namespace) -> int:
    model = built(options.model)
    given = {"worker": options.worker, "dtype": options.dtype, "weights": options.weights}
    return _told(lambda: summary(model, options.partition, _shapes(options), **given))


def _suggest(options: argparse.Namespace) -> int:
    model, given = built(options.model), {"dtype": options.dtype, "weights": options.weights}
    return _told(lambda: suggest(model, options.workers, _shapes(options), **given))


def _report(options: argparse.Namespace) -> int:
    model, given = built(options.model), {"dtype": options.dtype, "weights": options.weights}
    try:
        report(model, options.partition, _shapes(options), options.output, options.trace, **given)
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0


def _told(tell: Callable[[], object]) -> int:
    try:
        print(tell())
    except ValueError as error:
        raise UsageError(str(error)) from error
    return 0


def _verify(options: argparse.Namespace) -> int:
    built(options.model)  # what is wrong with its name is said once, and not by each worker
    first = options.input[0]
    if options.workers and options.partition and prod(options.partition) != options.workers:
        raise UsageError(f"a partition of {prod(options.partition)} workers is not one of {options.workers}")
    if options.backend is not None:
        try:
            find(options.backend)
        except ValueError as error:
            raise UsageError(str(error)) from error
    here = 4 if launched() is None else world().size
    workers = options.workers or (prod(options.partition) if options.partition else here)
    if launched() is not None and options.backend in (None, launched()) and workers != here:
        raise UsageError(f"this job was launched with {here} workers; launch it with {workers}, or verify on {here}")
    grid = options.partition or tuple(workers if dim == _longest(first) else 1 for dim in range(len(first)))
    work = partial(
        _verified, options.model, grid, options.input, options.dtype or torch.float64, options.steps, options.weights
    )
    try:
        found = Certificate(**run_workers(work, workers, options.backend)[0])
    except AssertionError as error:
        if is_first():
            print(error.to_json() if options.json and isinstance(error, Mismatch) else error)
        return 1
    if is_first():
        print(found.to_json() if options.json else found)
    return 0


def _verified(
    name: str, grid: Shape, shapes: list[Shape], dtype: torch.dtype, steps: int, weights: str
) -> dict[str, Any]:
    """What one worker does. Inputs of whole numbers are zeros and ones; the model then computes in float64."""
    inputs = []
    for number, shape in enumerate(shapes):
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randn if dtype.is_floating_point or dtype.is_complex else partial(torch.randint, 2)
        inputs.append(drawn(shape, generator=generator, dtype=dtype))
    own = dtype if dtype.is_floating_point or dtype.is_complex else torch.float64
    return asdict(verify(built(name).to(own), grid, tuple(inputs), steps=steps, weights=weights))


def built(name: str) -> torch.nn.Module:
    """The model that ``module:factory`` builds. Modules in the current folder are found.

    Raises: UsageError if there is no such module or factory, or if it builds no module of torch.
    """
    module, _, factory = name.partition(":")
    if not factory:
        raise UsageError(f"a model is named as module:factory, such as networks:unet; got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"there is no module {error.name!r}") from None
    for part in factory.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{module} has no {factory}")
        found = getattr(found, part)
    if callable(found) and not isinstance(found, torch.nn.Module):
        try:
            inspect.signature(found).bind()
        except TypeError as error:
            raise UsageError(f"{name} has to build a model without arguments: {error}") from None
        except ValueError:
            pass  # some builtins tell no signature
        found = found()
    model = found
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{name} has to build a torch.nn.Module; it gives a {type(model).__name__}")
    return model


def _shapes(options: argparse.Namespace) -> Any:
    return options.input[0] if len(options.input) == 1 else list(options.input)


def _longest(shape: Shape) -> int:
    return max(range(len(shape)), key=lambda dim: (shape[dim], dim))
