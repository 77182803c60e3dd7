"""``distdl.draw``: which picture a thing has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl.drawing.command import described, of_layout
from distdl.drawing.drawing import Drawing
from distdl.drawing.lanes import Movement
from distdl.drawing.layers import of_layer, of_movement
from distdl.drawing.scene import Scene
from distdl.drawing.timeline import of_program, of_step
from distdl.exchange import Operator
from distdl.globals import GlobalTensor
from distdl.nn.layer import Layer
from distdl.partition import Layout, Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import dims
from distdl.plan import Plan
from distdl.programs import CompiledStep
from distdl.programs.program import Program


@checks_arguments
def draw(thing: Any, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None) -> Drawing:
    """Draw where a tensor lies, or who sends what to whom. No message is sent, so a worker may call it alone.

    Args:
        thing: a partition, a layout, a plan, an operator or a global tensor; a primitive, a convolution or a pooling of
            ``distdl.nn``; a step of :func:`distdl.compile`, or one of its programs; or a text as behind
            ``distdl draw`` on the command line, as ``"conv 33x47 --kernel 5 --stride 2 --workers 2x2"``.
        shape: of a layer, the global shape of its input. Without it, the picture is that of its last call. Where each
            worker has a tensor of its own, as for a broadcast, the shape of each. Of a partition, the shape of a
            tensor that is split over it.
        dtype: of the elements, where it is not known. Without one, amounts are in cells, not in bytes.
    Returns: the picture. ``print`` shows it as text, a notebook as SVG, and ``save(path)`` writes SVG or PNG.
    Raises: TypeError for what has no picture; ValueError for shapes that are not known, or do not fit.
    """
    return Drawing(_scene(thing, shape, dtype))


def _scene(thing: Any, shape: Sequence[int] | None, dtype: torch.dtype | None) -> Scene:
    itemsize, kind = None if dtype is None else dtype.itemsize, type(thing).__name__
    if isinstance(thing, Layer):
        return of_layer(thing, shape, dtype)
    if isinstance(thing, Partition):
        if shape is not None:
            return of_layout(Layout.balanced(thing, shape), itemsize)
        cells = [[(place, place + 1) for place in range(places)] for places in thing.workers.shape]
        return of_layout(Layout.along(thing, cells), None, f"Partition {thing}", "one cell for each worker")
    if shape is not None:
        raise ValueError(f"distdl.draw takes a shape for layers and partitions; got one for a {kind}")
    if dtype is not None and isinstance(thing, (str, GlobalTensor, Operator, CompiledStep, Program)):
        raise ValueError(f"distdl.draw takes a dtype for what has none of its own; got one for a {kind}")
    if isinstance(thing, str):
        return described(thing)
    if isinstance(thing, Layout):
        return of_layout(thing, itemsize)
    if isinstance(thing, GlobalTensor):
        title = f"GlobalTensor {dims(thing.shape) or '0-d'}, {thing.dtype}"
        return of_layout(thing.layout, thing.dtype.itemsize, title)
    if isinstance(thing, Plan):
        return of_movement("Plan", Movement(thing), itemsize)
    if isinstance(thing, Operator):
        title = f"{thing.label.kind}: the plan of worker {thing.comm.rank}"
        return of_movement(title, Movement(thing.plan), thing.dtype.itemsize)
    if isinstance(thing, CompiledStep):
        return of_step(thing)
    if isinstance(thing, Program):
        return of_program(thing)
    raise TypeError(
        "distdl.draw shows a Partition, a Layout, a Plan, an Operator, a GlobalTensor, a layer of distdl.nn, a "
        f'compiled step, or a text such as "halo 12x12 --workers 2x2"; got a {kind}'
    )


def _in_a_notebook(x: GlobalTensor) -> str:
    return draw(x)._repr_svg_()


GlobalTensor._repr_svg_ = _in_a_notebook  # type: ignore[attr-defined]  # it must not import this file
