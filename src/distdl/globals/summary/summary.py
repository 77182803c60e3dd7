"""``summary``: what a model will need and send over a partition; ``suggest``: which partition suits it best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import numpy as np
import torch

from distdl.environment.progress import progress
from distdl.environment.types import Count, judge
from distdl.globals.models.parameters import Parameters
from distdl.globals.summary.rehearsal import rehearse
from distdl.globals.summary.results import Suggestion, Suggestions, Summary, Totals, shown
from distdl.nn.module import Module
from distdl.partition import Partition
from distdl.partition.arguments import Split, checks_arguments
from distdl.workers.worlds import opened

Shape = Sequence[int]


@checks_arguments
def summary(
    model: torch.nn.Module,
    P: Split,
    input_shape: Any,
    *,
    worker: int | None = None,
    dtype: torch.dtype | None = None,
    backward: bool = True,
    **options: Any,
) -> Summary:
    """Say what a model will need and send when it is distributed, without memory or messages.

    The model's own code runs on meta tensors, through the ops that will really run. So it must not depend on values of
    tensors. Any worker may call it by itself, and so may a process that was started alone.

    Args:
        model: any torch module; it is not changed. Whether it trains or evaluates counts.
        P: the partition of its inputs, or the shape of a grid of workers. The workers of a shape are those of
            :func:`distdl.world` if it has been opened and has as many; else they need not exist.
        input_shape: the global shape of its input; or a tensor of that shape and dtype, whose values are not read; or a
            list of shapes and tensors, if it takes several.
        worker: which worker to look at; by default this one, or the first of P if this one is not in P.
        dtype: of inputs that are given as shapes; by default that of the model's parameters.
        backward: whether a backward follows the forward, if parameters require gradients.
        options: those of ``distribute``.
    Returns: a value; print it for a table.
    Raises: ValueError for a worker that does not exist, and for a model that is distributed already or has modules of
        ``distdl.nn``, which exchange messages; what the model raises on tensors of such shapes.
    """
    check_model(model, "summary")
    workers, size, me = workers_of(P)
    if isinstance(worker, bool) or (worker is not None and not 0 <= worker < size):
        raise ValueError(f"summary needs a worker from 0 to {size - 1}; got {worker}")
    if worker is None:
        worker = me if me in workers else int(workers.flat[0])
    inputs = inputs_of(model, input_shape, dtype)
    rehearsal = rehearse(model, workers, size, worker, inputs, backward, **options)
    rows = tuple(row for row in rehearsal.rows if row.works)
    alone = Totals.of(rehearse(model, np.zeros((1,), dtype=int), 1, 0, inputs, backward))
    return Summary(worker, tuple(workers.shape), rows, Totals.of(rehearsal), alone)


@checks_arguments
def suggest(
    model: torch.nn.Module,
    workers: int | Split,
    input_shape: Any,
    *,
    dtype: torch.dtype | None = None,
    backward: bool = True,
    **options: Any,
) -> Suggestions:
    """Try every way to split a model's first input over a number of workers, without running the model.

    Two workers of each grid are rehearsed: the first, which has the largest block and all fallbacks, and the one in the
    middle, which has most neighbours. A dim is not split over more workers than it has cells.

    Args:
        workers: their number; or a partition or a shape with that number of workers, whose own shape does not matter.
        model, input_shape, dtype, backward, options: as in :func:`summary`.
    Returns: the grids, least memory first; for equal memory, fewest bytes sent first. Grids with an error come last.
    Raises: ValueError if no grid fits the input, and for models that :func:`summary` refuses.
    """
    check_model(model, "suggest")
    count: Any = workers if judge(int)(workers) else workers_of(workers)[0].size
    if count < 1:
        raise ValueError(f"suggest needs at least 1 worker; got {count}")
    inputs = inputs_of(model, input_shape, dtype)
    extents = tuple(inputs[0].shape)
    grids = list(_factorisations(count, extents))
    if not grids:
        raise ValueError(f"suggest finds no grid of {count} workers for an input of {shown(extents)}")
    known = opened()
    listed = progress(grids, "distdl.suggest: grids", known is None or known.comm.rank == 0)
    found = [_suggestion(model, grid, inputs, backward, options) for grid in listed]
    return Suggestions(sorted(found, key=lambda one: (bool(one.error), one.peak, one.sent, one.grid)))


def check_model(model: torch.nn.Module, asked: str) -> None:
    """Raises: ValueError for a model that is distributed, or that has modules of ``distdl.nn``."""
    for path, child in model.named_modules():
        if isinstance(child._parameters, Parameters):
            raise ValueError(
                f"{asked} needs a model that is not distributed yet, and distributes a copy; this "
                f"{type(model).__name__} is. Ask before distribute, or of another model of its kind; for its weights, "
                "pass weights= as there"
            )
        if isinstance(child, Module):
            raise ValueError(
                f"{asked} needs a model of torch's own modules, as it sends no message; "
                f"{f'its {path}' if path else 'this'} is a {type(child).__name__} of distdl.nn, which works on workers "
                "that are there"
            )


def _suggestion(
    model: torch.nn.Module,
    grid: tuple[int, ...],
    inputs: Sequence[torch.Tensor],
    backward: bool,
    options: dict[str, Any],
) -> Suggestion:
    workers = np.arange(prod(grid)).reshape(grid)
    middle = int(workers[tuple(n // 2 for n in grid)])
    try:
        seen = [
            rehearse(model, workers, workers.size, worker, inputs, backward, **options)
            for worker in sorted({0, middle})
        ]
    except Exception as error:  # whatever the model's code raises on such a grid
        return Suggestion(grid, 0, 0, error=f"{type(error).__name__}: {error}")
    totals = [Totals.of(one) for one in seen]
    fallen = dict.fromkeys(name for row in seen[0].rows for name in row.falls_back)
    return Suggestion(
        grid, max(one.peak for one in totals), max(one.forward[1] + one.backward[1] for one in totals), tuple(fallen)
    )


def workers_of(P: Any) -> tuple[Any, int, int]:
    """The array of workers of a partition or of a grid's shape, the size of their world, and this worker's number.

    Raises: ValueError for a shape with an axis of no workers.
    """
    if not isinstance(P, Partition):
        if min(P, default=0) < 1:
            raise ValueError(f"a grid of workers needs at least 1 along each axis; got {tuple(P)}")
        count, known = prod(P), opened()
        if known is None or known.workers.size != count:
            return np.arange(count).reshape(tuple(P)), count, 0
        P = known.reshape(tuple(P))
    return P.workers, P.comm.size, P.comm.rank


def inputs_of(model: torch.nn.Module, given: Any, dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The ``input_shape`` of a call as tensors. Raises: ValueError if it is no shape, tensor, or list of these."""
    listed = [given] if isinstance(given, torch.Tensor) or judge(Sequence[int])(given) else given
    if not judge(Sequence[torch.Tensor | Sequence[Count]])(listed):
        raise ValueError(f"input_shape needs whole numbers, at least 0, or tensors; got {given!r}")
    if dtype is None:
        parameters = (one.dtype for one in model.parameters() if one.dtype.is_floating_point or one.dtype.is_complex)
        dtype = next(parameters, torch.get_default_dtype())
    return [
        one if isinstance(one, torch.Tensor) else torch.empty(tuple(one), dtype=dtype, device="meta") for one in listed
    ]


def _factorisations(n: int, most: Shape) -> Iterator[tuple[int, ...]]:
    """The shapes of all grids of n workers, with at most as many along each axis as ``most`` says."""
    divisors = [[k for k in range(1, min(n, extent) + 1) if n % k == 0] for extent in most]
    return (grid for grid in product(*divisors) if prod(grid) == n)
