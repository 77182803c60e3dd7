"""What layers do: from what their workers have agreed on, or from a shape that is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distdl.agreement import Headers
from distdl.agreement.rows import Listed
from distdl.drawing.lanes import Movement, lanes
from distdl.drawing.scene import Scene, composed
from distdl.drawing.tiles import tiles
from distdl.geometry.borders import Border
from distdl.geometry.boxes import Shape
from distdl.geometry.windows import Sliding
from distdl.nn import AllGather, AllSumReduce, Broadcast, HaloExchange, ReduceScatter, Repartition, SumReduce
from distdl.nn.layer import Application, Layer
from distdl.nn.primitive import Movement as Primitive
from distdl.ops.convolution import Convolution
from distdl.ops.pooling import Pooling
from distdl.partition import Layout, Partition
from distdl.partition.groups import dims
from distdl.plan import Plan
from distdl.tensors.dtypes import dtype_code

_LEGEND = {
    "halo": "hatched: cells of other workers, in their colours",
    "padding": "dotted: padding",
    "window": "dashed: what a worker reads",
}


def of_layer(layer: Layer, shape: Sequence[int] | None, dtype: torch.dtype | None) -> Scene:
    """The picture of a layer.

    Args:
        shape: the global shape of x; where each worker has a tensor of its own, the shape of each.
    Raises: ValueError where no shapes are known; TypeError for a layer that has no picture.
    """
    derive: Any = layer._derive
    op, kind = getattr(derive, "op", None), layer.label.kind
    is_sliding = isinstance(derive, Application) and isinstance(op, (Convolution, Pooling))
    if not (isinstance(derive, Primitive) or is_sliding):
        raise TypeError(f"distdl.draw shows primitives, convolutions and poolings, and layouts; got a {kind}")
    if isinstance(layer, HaloExchange) and shape is not None:
        raise ValueError(f"a {kind} takes no shape, as its x has its halos: call it, then draw it")
    headers = layer._agreement.headers if shape is None else None
    own = isinstance(layer, (Broadcast, SumReduce, AllSumReduce))
    if headers is None and shape is None and not own:
        raise ValueError(
            f"the shapes of {kind} are not known, as this worker has not called it"
            + ("" if isinstance(layer, HaloExchange) else "; give the global shape of x: draw(layer, shape=...)")
        )
    P_x = derive.P_x if isinstance(derive, Primitive) else derive.places[0]
    if headers is not None:
        dtype = dtype or headers.dtype(P_x, kind)
    itemsize = None if dtype is None else dtype.itemsize
    if is_sliding:
        reported = None if headers is None else headers.shapes(P_x, kind, P_x.workers.ndim)
        x = Layout.balanced(P_x, shape or ()) if reported is None else Layout.tiled(P_x, reported)
        return _of_sliding(kind, x, derive, itemsize)
    if headers is not None and isinstance(layer, HaloExchange):
        return of_windows(f"{kind} over {dims(P_x.workers.shape)} workers", *_halo(P_x, headers), itemsize)
    reports = _reports(layer, P_x, (1,) if shape is None else shape, own) if headers is None else headers
    movement = _movement(layer, derive, reports, headers is not None or shape is not None)
    name = f"{kind} over {dims(P_x.workers.shape)} workers"
    if isinstance(layer, (AllSumReduce, AllGather, ReduceScatter)):
        name += f", along {'axis' if len(layer.axes) == 1 else 'axes'} {', '.join(map(str, layer.axes))}"
    elif derive.P_y is not P_x:
        name = f"{kind} from {dims(P_x.workers.shape)} workers to {dims(derive.P_y.workers.shape)}"
    return of_movement(name, movement, itemsize)


# -- primitives


def of_movement(title: str, movement: Movement, itemsize: int | None) -> Scene:
    """A movement, and its adjoint beside it."""
    (forward, notes), (adjoint, more) = lanes(movement, "forward", itemsize), lanes(movement.T, "adjoint", itemsize)
    tensor = [] if movement.source is None else [f"the whole tensor has {dims(movement.source.extents)} cells"]
    return composed(title, [forward, adjoint], [*tensor, *notes, *more])


def _movement(layer: Layer, derive: Primitive, headers: Headers, known: bool) -> Movement:
    """The plan of all workers, from the plan of each, which has only the moves that touch it."""
    plans = {worker: derive.plan(headers, worker) for worker in headers.members}
    inputs = {worker: plan.inputs[worker] for worker, plan in plans.items() if worker in plan.inputs}
    outputs = {worker: plan.outputs[worker] for worker, plan in plans.items() if worker in plan.outputs}
    moves = tuple(move for worker, plan in plans.items() for move in plan.moves if move.target == worker)
    teams = {team.root: team for plan in plans.values() for team in plan.teams}
    plan = Plan(inputs, outputs, moves, next(iter(plans.values())).pattern, tuple(teams.values()))
    source = target = None
    if isinstance(layer, Repartition):
        source, target = _tiled(derive.P_x, inputs), _tiled(derive.P_y, outputs)
    elif isinstance(layer, AllGather):
        source = _tiled(derive.P_x, inputs)
        target = source.gathered(layer.axes)
    elif isinstance(layer, ReduceScatter):
        target = _tiled(derive.P_x, outputs)
        source = target.gathered(layer.axes)
    return Movement(plan, source, target, known)


def _tiled(P: Partition, shapes: Mapping[int, Shape]) -> Layout:
    blocks = np.array([shapes[worker] for worker in P.workers.ravel().tolist()], dtype=np.int64)
    return Layout.tiled(P, blocks.reshape(*P.workers.shape, P.workers.ndim))


def _reports(layer: Layer, P_x: Partition, extents: Sequence[int], own: bool) -> Headers:
    """What the members would report of a tensor of this shape, split as evenly as possible."""
    members, local = layer._agreement._members, dict.fromkeys(P_x.workers.ravel().tolist(), tuple(extents))
    if not own:
        layout = Layout.balanced(P_x, extents)
        local = dict((layout.gathered(layer.axes) if isinstance(layer, ReduceScatter) else layout).shapes)
    nothing = (0,) * len(extents)
    rows = [[dtype_code(torch.float32), len(extents), *local.get(worker, nothing)] for worker in members]
    return Headers(members, Listed(members, np.array(rows, dtype=np.int64)), 1, len(extents))


def _halo(P_x: Partition, headers: Headers) -> tuple[Layout, Layout]:
    """What workers own of a tensor whose blocks have their halos, and what they have with these."""
    rank = P_x.workers.ndim
    halos = headers.extras(P_x).reshape(*P_x.workers.shape, 3, rank, 2)[..., 0, :, :]
    owned = Layout.tiled(P_x, headers.shapes(P_x, "HaloExchange", rank) - halos.sum(axis=-1))
    wide = []
    for dim, along in enumerate(owned.intervals):
        widths = np.moveaxis(halos[..., dim, :], dim, 0).reshape(len(along), -1, 2)[:, 0].tolist()
        wide.append([(i - before, j + behind) for (i, j), (before, behind) in zip(along, widths, strict=True)])
    return owned, Layout.along(P_x, wide)


# -- windows


def of_windows(
    title: str,
    owned: Layout,
    needed: Layout,
    itemsize: int | None,
    border: Border | None = None,
    computed: Layout | None = None,
    notes: Sequence[str] = (),
) -> Scene:
    """What workers read of x beside their blocks, the adjoint beside it, and the blocks of y."""
    forward, said = tiles(owned, "forward: what each worker reads of x", itemsize, needed, border)
    adjoint, _ = tiles(owned, "adjoint: gradients go back, and are added", itemsize, needed, border, adjoint=True)
    panels = [forward, adjoint]
    if computed is not None:
        result, more = tiles(computed, "y: what each worker computes", itemsize)
        panels, said = [*panels, result], [*said, *(f"y: {note}" for note in more)]
    shown = {rect.kind for panel in panels for rect in panel.rects}
    legend = "; ".join(words for kind, words in _LEGEND.items() if kind in shown)
    return composed(title, panels, [*([legend] if legend else []), *notes, *said])


def of_sliding(
    name: str,
    x: Layout,
    sliding: Sliding,
    lead: int,
    itemsize: int | None,
    y: Layout | None = None,
    mode: str = "zeros",
    notes: Sequence[str] = (),
) -> Scene:
    """Windows that slide over the last dims of a tensor.

    Args:
        lead: how many dims stand before those.
        y: how the result is split in the dims before them, if not as x is.
        mode: what the tensor is padded with.
    """
    read, computed = sliding.windows(name, x.extents[lead:], x.partition.workers.shape[lead:])
    result = x if y is None else y
    title = f"{name} of {dims(x.extents)}, kernel {dims(sliding.kernel)}, stride {dims(sliding.stride)}"
    return of_windows(
        title,
        x,
        Layout.along(x.partition, [*x.intervals[:lead], *read]),
        itemsize,
        Border(mode, ((0, 0),) * lead + sliding.widths) if mode == "circular" else None,
        Layout.along(result.partition, [*result.intervals[:lead], *computed]),
        notes,
    )


def _of_sliding(name: str, x: Layout, derive: Application, itemsize: int | None) -> Scene:
    op: Any = derive.op
    if isinstance(op, Pooling):
        return of_sliding(name, x, op.sliding, 2, itemsize)
    if x.extents[1] != op.channels.inputs:
        raise ValueError(f"{name} needs x of {op.channels.inputs} channels; got a shape of {dims(x.extents)}")
    _, _, inner, *space = derive.work.workers.shape
    if tuple(space) != x.partition.workers.shape[2:]:
        raise TypeError(f"distdl.draw needs x and the work of a {name} to be split alike in space")
    y = Layout.balanced(op.target, (x.extents[0], op.channels.outputs, *x.extents[2:]))
    y = Layout.along(op.target, [x.intervals[0], *y.intervals[1:]])
    notes = ["what moves along channels is not drawn"] if inner > 1 else []
    if op.padding_mode in ("reflect", "replicate"):
        notes.append(f"the cells that padding by {op.padding_mode} repeats are not drawn")
    stored = derive.places[1]
    if isinstance(stored, Layout):
        homes = ", ".join(map(str, stored.partition.workers.ravel().tolist()))
        notes.append(f"the weight, {dims(stored.extents)}, lies on worker {homes}; each worker gets what it uses")
    return of_sliding(name, x, op.sliding, 2, itemsize, y, op.padding_mode, notes)
