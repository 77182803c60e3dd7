"""Where results of functions of blocks lie, and on which arguments they depend: the workers tell each other once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import MethodType
from typing import Any
from weakref import ref
from zlib import crc32

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distdl.environment.arguments import brief
from distdl.geometry.boxes import Shape
from distdl.globals.consistency.debug import place_of
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import opaque_in, tensors_in
from distdl.globals.tensor.table import name_of
from distdl.partition import Layout, Partition, dims
from distdl.partition.sharing import gather_values
from distdl.tensors.connection import zeros_on


def is_place(value: Any) -> bool:
    return value == "same" if isinstance(value, str) else isinstance(value, (Layout, Partition))


def _asked(place: Any, layouts: Sequence[KnownLayout]) -> Any:
    """A place; of a function, what it gives for the layouts of the arguments."""
    return place(*layouts) if callable(place) and not is_place(place) else place


def _odd(y: Any) -> str:
    """What no result may be, if it is that: a tensor that is no block, a structure with tensors, or another object."""
    if not isinstance(y, torch.Tensor):
        opaque = opaque_in(y)
        if opaque is not None:
            return f"a {type(opaque).__name__}"
        return f"tensors in a {type(y).__name__}" if tensors_in(y) else ""
    if y.layout is torch.strided:
        return ""
    return "a global tensor" if type(y) is GlobalTensor else f"a tensor that is {y.layout}"


def shapes_of(ys: Sequence[Any]) -> list[Shape | None]:
    return [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in ys]


def layouts_of(
    context: Context,
    function: Any,
    out: Any,
    case: tuple[tuple[KnownLayout, ...], tuple[torch.dtype, ...], tuple[bool, ...]],
    form: str,
    ys: list[Any],
    needed: Callable[[Any], list[int]],
    shapes_on: Callable[[int], list[Shape | None]],
) -> list[tuple[KnownLayout | None, Sequence[int], bool]]:
    """Where results lie, and on which arguments they have to depend that this worker's do not depend on by themselves.

    And whether they require a gradient on any worker, also of something else that the function takes from around it.
    The workers compare the shapes of their blocks once, and then their dtypes, and what they depend on, too.
    """
    if context.stands_for_torch:
        return [(None if shape is None else context.whole(shape), (), False) for shape in shapes_of(ys)]
    layouts, _, curved = case
    out = _asked(out, layouts)
    places = [_asked(place, layouts) for place in (out if isinstance(out, (tuple, list)) else [out])]
    mine, tokens = shapes_of(ys), tuple(map(_token, places))
    odd = next(filter(None, map(_odd, ys)), "")
    if odd:
        form += f" with {odd}"

    def tell() -> tuple[list[list[Shape | None]], list[list[int]], list[list[int]], list[bool]]:
        """The shapes on each worker; for each result, arguments, those it lacks here, and if it requires a gradient."""
        own_needs = list(map(needed, ys))
        required = [isinstance(one, torch.Tensor) and one.requires_grad for one in ys]
        if context.comm.imagined:
            shapes = [mine if worker == context.me else shapes_on(worker) for worker in context.everyone]
            return shapes, own_needs, [[] for _ in ys], required
        kinds = [str(one.dtype) if isinstance(one, torch.Tensor) else None for one in ys]
        shown = f"local_map with out={', '.join(map(_shown, places))}"
        call = f"{shown} {crc32(repr(tokens).encode())}"
        own = form, mine, kinds, own_needs, required, list(curved)
        told = gather_values(context.comm, context.everyone, call, own, shown)
        forms, every_shapes, every_kinds, every_needs, every_required, every_curved = zip(*told, strict=True)
        _check_one("as many results on every worker", forms, function)
        for number in range(len(ys)):
            _check_one("blocks of one dtype", [own[number] for own in every_kinds], function)
        rule = "the same arguments to require gradients (in a call that records them) on every worker"
        _check_one(rule, [f"requires_grad={own}" for own in every_curved], function, "got")
        of_results = zip(zip(*every_needs, strict=True), zip(*every_required, strict=True), strict=True)
        needs = [_on_any_worker(own, flags, sum(curved)) for own, flags in of_results]
        lacks = [[each for each in every if each not in own] for every, own in zip(needs, own_needs, strict=True)]
        return list(every_shapes), needs, lacks, list(map(any, zip(*every_required, strict=True)))

    told, needs, lacks, required = context.keep_told(("local_map", _Same(function), case, tokens), tell)
    if not isinstance(out, (tuple, list)):
        places *= len(ys)
    wrong = [place for place in places if not is_place(place)]
    if wrong:
        raise TypeError(
            f"local_map needs a function in out= to give 'same', a layout or a partition; got {brief(wrong[0])}"
        )
    if odd:
        raise ValueError(
            f"local_map needs results to be plain and dense tensors, alone or in one tuple or list; "
            f"{name_of(function)} gave {form}"
        )
    if not len(places) == len(ys) == len(told[0]):
        raise ValueError(
            f"local_map needs as many places as results, of one number in all calls; got {len(places)} and {len(ys)}"
        )
    for place in places:
        if isinstance(place, Partition) and not context.has(place):
            raise ValueError(f"local_map needs a partition of its tensors' world in out=; got {place} of another")
    found: list[tuple[KnownLayout | None, Sequence[int], bool]] = []
    for number, place in enumerate(places):
        shapes = [own[number] for own in told]
        if mine[number] is None and not any(shape is not None for shape in shapes):
            found.append((None, (), False))
            continue
        *given, own_now = _all_given([*shapes, mine[number]], context.me, function)
        if isinstance(place, Partition):
            layout = _tiled(context, place, given, function)
        else:
            layout = layouts[0] if isinstance(place, str) else context.tiling(place, "local_map")
        for worker, shape in enumerate(given):
            _check(layout, worker, shape, function)
        _check(layout, context.me, own_now, function)
        # (what has no graph may have lost it in this call, as where a branch looks at the numbers)
        found.append((layout, lacks[number] if ys[number].requires_grad else needs[number], required[number]))
    return found


def edge_of(one: torch.Tensor) -> GradientEdge:
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(one)


def needed_of(y: Any, edges: list[GradientEdge], inputs: list[torch.Tensor]) -> list[int]:
    """The arguments on which a result depends in autograd's graph: their places among those that require a gradient.

    Args:
        edges: of the arguments, before the function was called.
        inputs: the arguments. What the function has written into one stands behind what it was, and what was written.
    """
    if not (isinstance(y, torch.Tensor) and y.requires_grad and edges):
        return []
    places = {tuple(edge[:2]): place for place, edge in enumerate(edges)}
    now = {tuple(edge_of(one)[:2]): place for place, one in enumerate(inputs) if one.requires_grad}
    every, found = set(places.values()), set[int]()
    seen: set[Any] = set()
    rest: deque[Any] = deque([tuple(edge_of(y)[:2])])
    while rest and found != every:
        here = rest.popleft()  # (the nearest first)
        found.update(at[here] for at in (places, now) if here in at)
        if here not in places and here[0] not in seen:
            seen.add(here[0])
            rest += [edge for edge in here[0].next_functions if edge[0] is not None]
    return sorted(found)


def _on_any_worker(needs: Sequence[Sequence[int]], required: Sequence[bool], count: int) -> list[int]:
    """The arguments on which a result depends on any worker.

    Where on some workers it depends on none, but on what the function takes from around it, and on others not, these
    are all arguments: that may follow from them, and then the others have to take part in its backward.

    Args:
        needs: those on which it depends on each worker.
        required: whether it requires a gradient there.
        count: how many there are.
    """
    found = sorted({each for own in needs for each in own})
    around = [flag and not own for own, flag in zip(needs, required, strict=True)]
    return list(range(count)) if any(around) and (found or not all(required)) else found


class _Same:
    """Equals that of the same function, and does not keep it: one that a forward makes may hold activations.

    (Not that of an equal function: workers may not agree on whether that is still there. What cannot be referred to
    weakly, as some objects of C and those with slots, is kept.)
    """

    def __init__(self, function: Any) -> None:
        parts = (function.__self__, function.__func__) if isinstance(function, MethodType) else (function,)
        self._ids = tuple(map(id, parts))
        self._parts = tuple(ref(one) if type(one).__weakrefoffset__ else partial(_itself, one) for one in parts)

    def __hash__(self) -> int:
        return hash(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._ids == other._ids and self._is_there and other._is_there

    @property
    def _is_there(self) -> bool:
        return all(part() is not None for part in self._parts)


def _itself(function: Any) -> Any:
    return function


def _token(place: Any) -> Hashable:
    """What tells a place from others: the same on every worker."""
    if isinstance(place, Layout):
        return _token(place.partition), place.intervals
    return (place.workers.shape, place.workers.tobytes()) if isinstance(place, Partition) else brief(place)


def _shown(place: Any) -> str:
    return f"a layout {place_of(place)}" if isinstance(place, Layout) else brief(place)


def _tiled(context: Context, P: Partition, shapes: Sequence[Shape], function: Any) -> KnownLayout:
    gave = {worker: shapes[worker] for worker in P.workers.ravel().tolist()}
    ranks = {len(shape) for shape in gave.values()}
    if len(ranks) > 1 or min(ranks) < P.workers.ndim:
        listed = ", ".join(f"{list(shape)} on {worker}" for worker, shape in gave.items())
        raise ValueError(
            f"local_map needs blocks of as many dims as the partition of out= has axes ({P}), or of more, and of one "
            f"number of them; {name_of(function)} gave {listed}"
        )
    return context.keep(("tiled", _token(P), tuple(shapes)), lambda: context.tiled(P.workers, gave, "a result"))


def _check_one(rule: str, told: Sequence[str | None], function: Any, did: str = "gave") -> None:
    """Check that all workers that have something have the same."""
    first = next((worker for worker, own in enumerate(told) if own is not None), 0)
    other = next((worker for worker, own in enumerate(told) if own not in (None, told[first])), None)
    if other is not None:
        raise ValueError(
            f"local_map needs {rule}; {name_of(function)} {did} {told[first]} on worker {first} and {told[other]} on "
            f"worker {other}"
        )


def _all_given(shapes: Sequence[Shape | None], me: int, function: Any) -> list[Shape]:
    """The shapes of a result, which is a tensor on every worker.

    Args:
        shapes: of the workers' results when they told each other, and of this worker's now.
    Raises: ValueError where it is no tensor.
    """
    given = [shape for shape in shapes if shape is not None]
    if len(given) < len(shapes):
        worker = [*range(len(shapes) - 1), me][shapes.index(None)]
        raise ValueError(
            f"local_map needs a result to be a tensor on every worker or on none; on worker {worker}, "
            f"{name_of(function)} gave none"
        )
    return given


def _check(layout: KnownLayout, worker: int, shape: Shape, function: Any) -> None:
    if worker not in layout.partition:
        return
    expected = layout.shapes[worker]
    if tuple(shape) != tuple(expected):
        raise ValueError(
            f"local_map needs blocks as the layout of the result says ({layout}); on worker {worker}, "
            f"{name_of(function)} gave {dims(shape) or '0-d'} instead of {dims(expected) or '0-d'}. Where results lie "
            "otherwise than the first argument, out= says so"
        )


def global_of(y: Any, layout: KnownLayout | None, others: Sequence[torch.Tensor], requires_grad: bool) -> Any:
    """The global tensor of a block, which depends on others in the autograd graph, too.

    Args:
        requires_grad: whether it requires a gradient on any worker.
    """
    if layout is None:
        return y
    if not layout.active:
        with torch.inference_mode(y.is_inference()):  # (in any mode, as for a block)
            y = zeros_on(y, layout.local)
    if torch.is_grad_enabled() and (y.is_floating_point() or y.is_complex()):
        for other in others:
            y = y + zeros_on(other, ()).to(y.dtype)
        if requires_grad and not y.requires_grad:
            y = y + torch.zeros((), dtype=y.dtype, device=y.device, requires_grad=True)
    return GlobalTensor._of(y, layout)
