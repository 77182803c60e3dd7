"""One warning, where a tensor is split, of workers that get no cell though the tensor has enough cells for all."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod

from distdl.globals.layouts.context import KnownLayout
from distdl.partition import dims
from distdl.transport.callsite import users_call


class _Warned(set[tuple[int, int]]):
    """The dims, with the number of workers along each, of which a world was warned."""


def warn_of_idle(name: str, layout: KnownLayout, axes: Sequence[int | None] | None = None, also: str = "") -> None:
    """Warn on worker 0 if some workers get no cell of a tensor that has at least as many cells as there are workers.

    It warns once for each dim and number of workers along it. It is called where users split a tensor, not inside of a
    model, where tensors are often smaller than the axes that split them.

    Args:
        name: the function that has split the tensor.
        axes: for each dim, the axis of the user's partition that splits it; if not given, the axis of the same number.
        also: another cure to name where dim 0 has too few cells.
    """
    context, extents, places = layout.context, layout.extents, layout.partition.workers.shape
    workers, busy = prod(places), prod(map(min, extents, places))
    if context.me or context.comm.imagined or not busy < workers <= prod(extents):
        return
    short = [dim for dim, (n, p) in enumerate(zip(extents, places, strict=True)) if n < p]
    told, warned = {(dim, places[dim]) for dim in short}, context.own(_Warned)
    if told <= warned:
        return
    warned |= told
    along = range(len(extents)) if axes is None else axes
    listed = ", ".join(
        f"dim {dim} has extent {extents[dim]} for the {places[dim]} workers of axis {along[dim]}" for dim in short
    )
    if axes is None:
        cure = "Split longer dims, or take fewer workers: distdl.suggest(model, workers, shape) ranks splits"
    else:
        kept = tuple(None if dim in short else axis for dim, axis in enumerate(axes))
        cure = f"axes={kept} leaves {'these dims' if len(short) > 1 else 'this dim'} whole"
    _, level = users_call()
    warnings.warn(
        f"{name} leaves {workers - busy} of {workers} workers without a cell of a tensor of {dims(extents)}: {listed}. "
        f"{cure}{also if 0 in short else ''}",
        stacklevel=level,
    )
