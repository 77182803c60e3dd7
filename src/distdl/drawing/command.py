"""``distdl draw``: pictures of what is described in words, without workers."""

from __future__ import annotations

import argparse
import shlex
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from distdl.drawing.layers import of_layer, of_sliding, of_windows
from distdl.drawing.scene import Scene, composed
from distdl.drawing.tiles import tiles
from distdl.geometry.boxes import Shape
from distdl.geometry.windows import PoolSliding, Sliding
from distdl.globals.summary.rehearsal import Imagined
from distdl.nn import AllGather, AllSumReduce, Broadcast, ReduceScatter, Repartition, SumReduce
from distdl.ops.pooling import Maximum, Pooling
from distdl.partition import CartesianPartition, Layout
from distdl.partition.groups import dims

EXAMPLES = """examples:
  distdl draw broadcast 1x3 4x3
  distdl draw repartition 4x1 1x4 --shape 8x8
  distdl draw halo 12x12 --workers 2x2 --dtype float32
  distdl draw conv 33x47 --kernel 5 --stride 2 --workers 2x2 -o conv.svg
  distdl draw layout 64x64x48 --workers 2x2x2 -o layout.png
"""
_SPREADS = {"broadcast": Broadcast, "sum-reduce": SumReduce, "repartition": Repartition}
_ALONG = {"all-sum-reduce": AllSumReduce, "all-gather": AllGather, "reduce-scatter": ReduceScatter}
_WORDS = {
    "broadcast": "copy the tensors of P_x to the workers of P_y",
    "sum-reduce": "add up the tensors of P_x on the workers of P_y",
    "repartition": "split a tensor over P_y that is split over P_x",
    "all-sum-reduce": "add up tensors along axes, and leave the sum on every worker",
    "all-gather": "bring the blocks along axes together, on every worker",
    "reduce-scatter": "add up tensors along axes, each worker keeping a block",
    "halo": "what blocks read around them",
    "conv": "a convolution: windows, padding, and who sends which cells",
    "pool": "a pooling: windows, padding, and who sends which cells",
    "layout": "which worker holds which block",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    kinds = parser.add_subparsers(dest="picture", required=True, metavar="WHAT")
    for kind, words in _WORDS.items():
        one = kinds.add_parser(kind, help=words, description=words, add_help=parser.add_help)
        if kind in _SPREADS or kind in _ALONG:
            one.add_argument("P_x", type=places, help="workers along each axis, as 2x2")
            if kind in _SPREADS:
                one.add_argument("P_y", type=places, help="those of the result, as 1x4")
            else:
                one.add_argument("--axes", type=numbers, default=(0,), help="axes of P_x, as 0 or 0x1 (default: 0)")
            own = kind in ("broadcast", "sum-reduce", "all-sum-reduce")
            what = "of each worker's tensor" if own else "of the whole tensor"
            one.add_argument("--shape", type=numbers, required=not own, help=f"shape {what}, as 8x8")
        else:
            space = ": dims of space alone" if kind in ("conv", "pool") else ""
            one.add_argument("shape", type=numbers, help=f"shape of the whole tensor, as 33x47{space}")
            one.add_argument("--workers", type=places, required=True, help="workers along each dim, as 2x2")
        if kind == "halo":
            one.add_argument(
                "--width",
                type=numbers,
                default=(1,),
                help="cells around a block: one number, or one for each dim, as 1x2 (default: 1)",
            )
        if kind in ("conv", "pool"):
            one.add_argument("--kernel", type=numbers, required=True, help="one number, or one for each dim, as 3x5")
            one.add_argument("--stride", type=numbers, default=None, help="default: 1, of a pooling the kernel")
            for option, default in (("--padding", 0), ("--dilation", 1)):
                one.add_argument(option, type=numbers, default=(default,), help=f"default: {default}")
        one.add_argument("--dtype", type=dtype_of, help="as float32: amounts are then in bytes, not in cells")
        one.add_argument("-o", "--output", type=Path, help="where to write it: .svg or .png (without: as text)")


def pictured(options: argparse.Namespace) -> Scene:
    """The picture that arguments ask for.

    Raises: ValueError for shapes that do not fit.
    """
    kind, dtype = options.picture, options.dtype
    if kind in _SPREADS or kind in _ALONG:
        world = Imagined(0, max(prod(options.P_x), prod(getattr(options, "P_y", ()))))
        P_x = _partition(world, options.P_x)
        if kind in _SPREADS:
            layer: Any = _SPREADS[kind](P_x, _partition(world, options.P_y))
        else:
            make: Any = _ALONG[kind]
            layer = make(P_x, options.axes)
        return of_layer(layer, options.shape, dtype)
    itemsize, rank = None if dtype is None else dtype.itemsize, len(options.shape)
    owned = Layout.balanced(_partition(Imagined(0, prod(options.workers)), options.workers), options.shape)
    if kind == "layout":
        return of_layout(owned, itemsize)
    if kind == "halo":
        if len(options.width) not in (1, rank):
            raise ValueError(f"a halo has one width, or one for each of {rank} dims; got {dims(options.width)}")
        widths = options.width * (rank if len(options.width) == 1 else 1)
        wide = [[(i - n, j + n) for i, j in along] for along, n in zip(owned.intervals, widths, strict=True)]
        title = f"Halo of {dims(options.shape)}, {dims(options.workers)} workers"
        return of_windows(title, owned, Layout.along(owned.partition, wide), itemsize)
    name, windows = ("Convolution", Sliding) if kind == "conv" else ("Pooling", PoolSliding)
    stride = options.stride or ((1,) if kind == "conv" else options.kernel)
    numbers = [one[0] if len(one) == 1 else one for one in (options.kernel, stride, options.padding, options.dilation)]
    sliding: Any = windows.of(name, rank, *numbers)
    if kind == "pool":
        Pooling(Maximum(), sliding).check(name)
    return of_sliding(name, owned, sliding, 0, itemsize)


def of_layout(layout: Layout, itemsize: int | None, title: str = "", caption: str = "") -> Scene:
    """The picture of a layout."""
    split = dims(layout.partition.workers.shape)
    panel, notes = tiles(layout, caption or (f"over {split} workers" if split else "on one worker"), itemsize)
    return composed(title or f"Layout of {dims(layout.extents)}", [panel], notes)


def described(text: str) -> Scene:
    """The picture of what a text describes, as on the command line.

    Raises: ValueError for a text that describes none.
    """
    parser = _Parser(prog="distdl draw", add_help=False)
    add_arguments(parser)
    options = parser.parse_args(shlex.split(text))
    if options.output is not None:
        raise ValueError("distdl.draw returns the picture; write it by its method save(path)")
    return pictured(options)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are ValueErrors."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{self.prog}: {message}")


def _partition(world: Imagined, shape: Shape) -> CartesianPartition:
    return CartesianPartition(world, np.arange(prod(shape)).reshape(shape))


def numbers(text: str) -> Shape:
    """An argument such as ``8x8``."""
    numbers = text.lower().split("x")
    if not all(number.isdecimal() for number in numbers):
        raise argparse.ArgumentTypeError(f"whole numbers are needed, with x between them, as 2x2; got {text}")
    return tuple(map(int, numbers))


def places(text: str) -> Shape:
    """The shape of a partition: an argument such as ``2x2``, without a zero."""
    if 0 in numbers(text):
        raise argparse.ArgumentTypeError(f"at least one worker along each axis is needed; got {text}")
    return numbers(text)


def dtype_of(text: str) -> torch.dtype:
    """A dtype of torch by its name."""
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype):
        raise argparse.ArgumentTypeError(f"a dtype of torch is needed, as float32; got {text}")
    return found
