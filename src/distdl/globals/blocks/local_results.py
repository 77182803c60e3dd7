"""Layouts of the results of functions of blocks, and arguments on which they depend: workers tell each other once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
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
from distdl.tensors.private_torch import DisableTorchFunctionSubclass


def is_place(value: Any) -> bool:
    """Whether a value says where a result lies: ``"same"``, a layout or a partition."""
    return value == "same" if isinstance(value, str) else isinstance(value, (Layout, Partition))


def _place_for(place: Any, layouts: Sequence[KnownLayout]) -> Any:
    """Return a place as it is; if it is a function, its value for the layouts of the arguments."""
    return place(*layouts) if callable(place) and not is_place(place) else place


def _unfit(y: Any) -> str:
    """Return what a result is if it may not be one: no plain dense tensor, number, text or constant. Else empty."""
    if not isinstance(y, torch.Tensor):
        opaque = opaque_in(y)
        if opaque is not None:
            return f"a {type(opaque).__name__}"
        return f"tensors in a {type(y).__name__}" if tensors_in(y) else ""
    if y.layout is torch.strided:
        return ""
    return "a global tensor" if type(y) is GlobalTensor else f"a tensor that is {y.layout}"


def shapes_of(ys: Sequence[Any]) -> list[Shape | None]:
    """Return the shapes of results; None for one that is no tensor."""
    return [tuple(one.shape) if isinstance(one, torch.Tensor) else None for one in ys]


class Case(NamedTuple):
    """The arguments of a call, as far as layouts of its results depend on them."""

    layouts: tuple[KnownLayout, ...]  # of the global ones
    dtypes: tuple[torch.dtype, ...]  # of the global ones
    curved: tuple[bool, ...]  # of all tensors: whether they require a gradient


class _Told(NamedTuple):
    """What the workers have told each other of the results of a case."""

    shapes: list[list[Shape | None]]  # for each worker, those of its results
    needs: list[list[int]]  # for each result, the arguments on which it depends on any worker
    lacks: list[list[int]]  # for each result, those of them on which it does not depend here
    required: list[bool]  # for each result, whether it requires a gradient on any worker


def results_of(
    context: Context, function: Any, out: Any, case: Case, y: Any, inputs: Sequence[torch.Tensor],
    edges: Sequence[GradientEdge], shapes_on: Callable[[int], list[Shape | None]],
) -> Any:  # fmt: skip
    """Return the results of a function of blocks as global tensors.

    Args:
        out: as of ``local_map``.
        y: the result of the function on this worker: one, or a tuple or list.
        inputs: the arguments that require a gradient, and their gradient edges before the call.
        shapes_on: returns the shapes of the results on another worker, in a rehearsal.
    Raises: TypeError, ValueError or CommunicationError, as ``local_map`` says.
    """
    several = isinstance(y, (tuple, list))
    ys = list(y) if several else [y]
    form = f"a {type(y).__name__} of {len(ys)}" if several else "one result"
    needed = partial(_needed_of, edges=edges, inputs=inputs)
    known = _layouts_of(context, function, out, case, form, ys, needed, shapes_on)
    results = [
        _global_of(block, layout, [inputs[number] for number in others], requires_grad)
        for block, (layout, others, requires_grad) in zip(ys, known, strict=True)
    ]
    if not several:
        return results[0]
    return type(y)(*results) if hasattr(y, "_fields") else type(y)(results)


def _layouts_of(
    context: Context, function: Any, out: Any, case: Case, form: str, ys: list[Any],
    needed: Callable[[Any], list[int]], shapes_on: Callable[[int], list[Shape | None]],
) -> list[tuple[KnownLayout | None, Sequence[int], bool]]:  # fmt: skip
    """Return for each result its layout, the arguments to connect it to, and whether it requires a gradient anywhere.

    A result has to be connected to the arguments on which it depends on other workers, but not on this one. One that is
    no tensor has no layout. In the first call of a case, the workers tell each other of their results.

    Args:
        form: the structure of the results, in words.
        needed: returns the arguments on which a result depends here.
    """
    mine = shapes_of(ys)
    if context.stands_for_torch:
        return [(None if shape is None else context.whole(shape), (), False) for shape in mine]
    out = _place_for(out, case.layouts)
    places = [_place_for(place, case.layouts) for place in (out if isinstance(out, (tuple, list)) else [out])]
    unfit = next(filter(None, map(_unfit, ys)), "")
    form += f" with {unfit}" if unfit else ""
    tokens = tuple(map(_token, places))

    def tell() -> _Told:
        own_needs = list(map(needed, ys))
        if not context.comm.imagined:
            return _tell(context, function, places, tokens, case, form, ys, own_needs)
        shapes = [mine if worker == context.me else shapes_on(worker) for worker in context.everyone]
        return _Told(shapes, own_needs, [[] for _ in ys], list(map(_requires_grad, ys)))

    told = context.keep_told(("local_map", _ByIdentity(function), case, tokens), tell)
    if not isinstance(out, (tuple, list)):
        places *= len(ys)
    _check_places(context, function, places, form if unfit else "", len(ys), len(told.shapes[0]))
    found: list[tuple[KnownLayout | None, Sequence[int], bool]] = []
    for number, place in enumerate(places):
        shapes = [own[number] for own in (*told.shapes, mine)]
        if all(shape is None for shape in shapes):
            found.append((None, (), False))
            continue
        layout = _layout_of(context, function, place, case.layouts[0], shapes)
        # a result may have lost its graph in this call alone, as where a branch looks at values
        others = told.lacks[number] if ys[number].requires_grad else told.needs[number]
        found.append((layout, others, told.required[number]))
    return found


def _requires_grad(y: Any) -> bool:
    return isinstance(y, torch.Tensor) and y.requires_grad


def _tell(
    context: Context, function: Any, places: Sequence[Any], tokens: tuple[Hashable, ...], case: Case, form: str,
    ys: list[Any], own_needs: list[list[int]],
) -> _Told:  # fmt: skip
    """Tell the other workers of this worker's results, and hear of theirs. Raises on all if they differ too much."""
    kinds = [str(one.dtype) if isinstance(one, torch.Tensor) else None for one in ys]
    shown = f"local_map with out={', '.join(map(_shown, places))}"
    call = f"{shown} {crc32(repr(tokens).encode())}"
    own = form, shapes_of(ys), kinds, own_needs, list(map(_requires_grad, ys)), list(case.curved)
    told = gather_values(context.comm, context.everyone, call, own, shown)
    forms, every_shapes, every_kinds, every_needs, every_required, every_curved = zip(*told, strict=True)
    _check_one("as many results on every worker", forms, function)
    for number in range(len(ys)):
        _check_one("blocks of one dtype", [kinds[number] for kinds in every_kinds], function)
    rule = "the same arguments to require gradients (in a call that records them) on every worker"
    _check_one(rule, [f"requires_grad={own}" for own in every_curved], function, "got")
    of_results = zip(zip(*every_needs, strict=True), zip(*every_required, strict=True), strict=True)
    needs = [_on_any_worker(own, flags, sum(case.curved)) for own, flags in of_results]
    lacks = [[each for each in every if each not in own] for every, own in zip(needs, own_needs, strict=True)]
    return _Told(list(every_shapes), needs, lacks, list(map(any, zip(*every_required, strict=True))))


def _check_places(context: Context, function: Any, places: Sequence[Any], unfit: str, count: int, counted: int) -> None:
    """Raise TypeError for a place that is none, and ValueError if results are unfit, or not as many as places.

    ``unfit`` says what unfit results are; ``counted`` is how many there were when the workers told each other.
    """
    for place in places:
        if not is_place(place):
            raise TypeError(
                f"local_map needs a function in out= to give 'same', a layout or a partition; got {brief(place)}"
            )
    if unfit:
        raise ValueError(
            f"local_map needs results to be plain and dense tensors, alone or in one tuple or list; "
            f"{name_of(function)} gave {unfit}"
        )
    if not len(places) == count == counted:
        raise ValueError(
            f"local_map needs as many places as results, of one number in all calls; got {len(places)} and {count}"
        )
    for place in places:
        if isinstance(place, Partition) and not context.has(place):
            raise ValueError(f"local_map needs a partition of its tensors' world in out=; got {place} of another")


def _layout_of(
    context: Context, function: Any, place: Any, first: KnownLayout, shapes: Sequence[Shape | None]
) -> KnownLayout:
    """Return the layout of a result at a place. Raises ValueError if it is no tensor, or no block, on some workers.

    Args:
        first: the layout of the first global argument.
        shapes: those of the result that the workers have told, and at the end that of this worker now.
    """
    workers = [*range(len(shapes) - 1), context.me]
    given = [shape for shape in shapes if shape is not None]
    if len(given) < len(shapes):
        raise ValueError(
            f"local_map needs a result to be a tensor on every worker or on none; on worker "
            f"{workers[shapes.index(None)]}, {name_of(function)} gave none"
        )
    if isinstance(place, Partition):
        layout = _tiled(context, place, given[:-1], function)
    else:
        layout = first if isinstance(place, str) else context.tiling(place, "local_map")
    for worker, shape in zip(workers, given, strict=True):
        expected = layout.shapes[worker] if worker in layout.partition else shape
        if tuple(shape) != tuple(expected):
            raise ValueError(
                f"local_map needs blocks as the layout of the result says ({layout}); on worker {worker}, "
                f"{name_of(function)} gave {dims(shape) or '0-d'} instead of {dims(expected) or '0-d'}. Where results "
                "lie otherwise than the first argument, out= says so"
            )
    return layout


def edge_of(one: torch.Tensor) -> GradientEdge:
    """Return the gradient edge of a tensor of any class."""
    with DisableTorchFunctionSubclass():
        return get_gradient_edge(one)


def _needed_of(y: Any, edges: Sequence[GradientEdge], inputs: Sequence[torch.Tensor]) -> list[int]:
    """Return the places of the arguments on which a result depends in the autograd graph.

    Args:
        edges: the gradient edges of the arguments that require a gradient, before the call of the function.
        inputs: these arguments after the call. If it has written one, that has another edge, and counts for its place.
    """
    if not (isinstance(y, torch.Tensor) and y.requires_grad and edges):
        return []
    places = {tuple(edge[:2]): place for place, edge in enumerate(edges)}
    now = {tuple(edge_of(one)[:2]): place for place, one in enumerate(inputs) if one.requires_grad}
    every, found = set(places.values()), set[int]()
    seen: set[Any] = set()
    rest: deque[Any] = deque([tuple(edge_of(y)[:2])])
    while rest and found != every:
        here = rest.popleft()
        found.update(at[here] for at in (places, now) if here in at)
        if here not in places and here[0] not in seen:
            seen.add(here[0])
            rest += [edge for edge in here[0].next_functions if edge[0] is not None]
    return sorted(found)


def _on_any_worker(needs: Sequence[Sequence[int]], required: Sequence[bool], count: int) -> list[int]:
    """Return those of ``count`` arguments on which a result depends on any worker.

    On a worker where it requires a gradient, but depends on no argument, the function used a tensor from around it. If
    that is so on some workers only, all arguments are returned: the tensor may have been computed from any of them, and
    then all workers have to take part in its backward.
    """
    found = sorted({each for own in needs for each in own})
    around = [flag and not own for own, flag in zip(needs, required, strict=True)]
    return list(range(count)) if any(around) and (found or not all(required)) else found


class _ByIdentity:
    """A key that equals that of the same function, not of an equal one, whose lifetime may differ between workers.

    It does not keep the function, which may hold activations, unless this is an object without weak references.
    """

    def __init__(self, function: Any) -> None:
        parts = (function.__self__, function.__func__) if isinstance(function, MethodType) else (function,)
        self._ids = tuple(map(id, parts))
        self._parts = tuple(ref(one) if type(one).__weakrefoffset__ else lambda one=one: one for one in parts)

    def __hash__(self) -> int:
        return hash(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and self._ids == other._ids and self._is_there and other._is_there

    @property
    def _is_there(self) -> bool:
        return all(part() is not None for part in self._parts)


def _token(place: Any) -> Hashable:
    """Return a key of a place that is the same on every worker."""
    if isinstance(place, Layout):
        return _token(place.partition), place.intervals
    return (place.workers.shape, place.workers.tobytes()) if isinstance(place, Partition) else brief(place)


def _shown(place: Any) -> str:
    return f"a layout {place_of(place)}" if isinstance(place, Layout) else brief(place)


def _tiled(context: Context, P: Partition, shapes: Sequence[Shape], function: Any) -> KnownLayout:
    """Return the layout over P of blocks of these shapes. Raises ValueError if they have too few dims, or no grid."""
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
    """Raise ValueError if two workers have told different texts. A worker that has none tells None."""
    first = next((worker for worker, own in enumerate(told) if own is not None), 0)
    other = next((worker for worker, own in enumerate(told) if own not in (None, told[first])), None)
    if other is not None:
        raise ValueError(
            f"local_map needs {rule}; {name_of(function)} {did} {told[first]} on worker {first} and {told[other]} on "
            f"worker {other}"
        )


def _global_of(y: Any, layout: KnownLayout | None, others: Sequence[torch.Tensor], requires_grad: bool) -> Any:
    """Return the global tensor of a block, connected to others in the autograd graph.

    Args:
        y: the block; a value that is no tensor, without a layout, is returned as it is.
        others: the tensors to connect it to.
        requires_grad: whether the result requires a gradient on any worker.
    """
    if layout is None:
        return y
    if not layout.active:
        with torch.inference_mode(y.is_inference()):
            y = zeros_on(y, layout.local)
    if torch.is_grad_enabled() and (y.is_floating_point() or y.is_complex()):
        for other in others:
            y = y + zeros_on(other, ()).to(y.dtype)
        if requires_grad and not y.requires_grad:
            y = y + torch.zeros((), dtype=y.dtype, device=y.device, requires_grad=True)
    return GlobalTensor._of(y, layout)
