"""Functions of blocks, where the user knows that they are right for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.context import Context, KnownLayout
from distdl.globals.nested import map_tensors, tensors_in
from distdl.globals.operands import block_of
from distdl.globals.replicas import Replica, entered, tied_of
from distdl.globals.running import on_blocks
from distdl.globals.tensor import GlobalTensor
from distdl.partition import Layout, Partition, dims
from distdl.partition.arguments import checks_arguments
from distdl.partition.sharing import gather_values
from distdl.tensors.connection import zeros_on


@checks_arguments
def local_map(function: Callable[..., Any], out: Any = "same") -> Callable[..., Any]:
    """The function of global tensors that applies a function to each worker's blocks. Differentiable.

    Every worker calls it, and the function gets plain tensors: this worker's blocks, which are empty where it holds
    no cells, and other tensors as they are. Nothing moves. A tensor that is the same everywhere gets a gradient that is
    added up over all workers. Whether blocks are what the function needs (no neighbours, no sums over split dims), the
    caller knows.

    Args:
        function: of the arguments.
        out: where the results lie. ``"same"``: as the first global argument does. A layout. A partition: the blocks
            tile a tensor over it, of sizes that the workers tell each other once for each combination of layouts. Or a
            function from the layouts of the global arguments to one of these; for several results, a tuple of them.
    Raises: TypeError for another ``out``; ValueError if a block has another shape than its layout says: the same on
        every worker in the first call with given layouts.
    """
    for place in out if isinstance(out, (tuple, list)) else (out,):
        known = place == "same" if isinstance(place, str) else isinstance(place, (Layout, Partition))
        if not known and not callable(place):
            raise TypeError(
                f"local_map needs out to be 'same', a layout, a partition, a function of layouts, or a tuple of these; "
                f"got {out!r}"
            )

    @wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        found: list[GlobalTensor] = []
        inputs: list[torch.Tensor] = []

        def plain(one: torch.Tensor) -> torch.Tensor:
            if type(one) is GlobalTensor:
                found.append(one)
                own = _block(one)
            elif found_context is not None and (type(one) is Replica or one.requires_grad):
                own = entered(one, found_context)
            else:
                own = one
            if own.requires_grad:
                inputs.append(own)
            return own

        found_context = next((one._context for one in tensors_in((args, kwargs)) if type(one) is GlobalTensor), None)
        given, named = map_tensors((args, kwargs), plain)
        with on_blocks():
            y = map_tensors(function(*given, **named), tied_of)
        if found_context is None:
            return y
        layouts = tuple(one._layout for one in found)
        several = isinstance(y, (tuple, list))
        ys = list(y) if several else [y]
        wanted = out(*layouts) if callable(out) and not isinstance(out, (Layout, Partition)) else out
        places = list(wanted) if isinstance(wanted, (tuple, list)) else [wanted] * len(ys)
        if len(places) != len(ys):
            raise ValueError(f"local_map needs as many places as results; got {len(places)} and {len(ys)}")
        known = _layouts(found_context, function, layouts, ys, places)
        results = [_global(block, layout, inputs) for block, layout in zip(ys, known, strict=True)]
        if not several:
            return results[0]
        return type(y)(*results) if hasattr(y, "_fields") else type(y)(results)

    return mapped


def _block(x: GlobalTensor) -> torch.Tensor:
    """This worker's block; outside the partition one without cells, of the first worker's extents along other dims."""
    block, layout = block_of(x), x._layout
    if layout.active or not layout.rulers:
        return block
    _, *rest = layout.shapes[int(layout.partition.workers.flat[0])]
    return zeros_on(block, (0, *rest))


def _layouts(
    context: Context, function: Any, layouts: tuple[KnownLayout, ...], ys: list[Any], places: list[Any]
) -> list[KnownLayout | None]:
    """Where results lie. The workers compare the shapes of their blocks once."""
    mine = [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in ys]
    key = ("local_map", function, layouts, tuple(map(_token, places)))
    told: list[list[Shape | None]] = context.keep_told(
        key, lambda: gather_values(context.comm, context.everyone, "local_map", mine)
    )
    found: list[KnownLayout | None] = []
    for number, place in enumerate(places):
        shapes = [own[number] for own in told]
        if mine[number] is None:
            found.append(None)
            continue
        if isinstance(place, Partition):
            layout = _tiled(context, place, shapes)
        else:
            layout = layouts[0] if isinstance(place, str) and place == "same" else context.known(place)
        for worker, shape in enumerate(shapes):
            _check(layout, worker, shape, function)
        _check(layout, context.me, mine[number], function)
        found.append(layout)
    return found


def _token(place: Any) -> Any:
    return (place.workers.shape, place.workers.tobytes()) if isinstance(place, Partition) else place


def _tiled(context: Context, P: Partition, shapes: list[Any]) -> KnownLayout:
    return context.keep(("tiled", _token(P), tuple(shapes)), lambda: context.tiled(P.workers, shapes, "a result"))


def _check(layout: KnownLayout, worker: int, shape: Shape | None, function: Any) -> None:
    if worker not in layout.partition:
        return
    expected = layout.shapes[worker]
    if shape is None or tuple(shape) != tuple(expected):
        raise ValueError(
            f"local_map needs blocks as the layout of the result says ({layout}); on worker {worker}, "
            f"{getattr(function, '__name__', function)} gave {'no tensor' if shape is None else dims(shape)} instead "
            f"of {dims(expected)}. Where results lie otherwise than the first argument, out= says so"
        )


def _global(y: Any, layout: KnownLayout | None, inputs: list[torch.Tensor]) -> Any:
    if layout is None:
        return y
    if not layout.active:
        y = zeros_on(y, layout.local)
    differentiable = torch.is_grad_enabled() and (y.is_floating_point() or y.is_complex())
    if differentiable and not (y.requires_grad and y.numel()):  # (a function of nothing may have lost its graph)
        y = _connected(y, *inputs)
    return GlobalTensor._of(y, layout)


def _connected(block: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """A block that depends on others, too, in the autograd graph."""
    for other in others:
        block = block + zeros_on(other, ()).to(block.dtype)
    return block
