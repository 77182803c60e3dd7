"""Where shares of parameters lie: each parameter is split over all workers, as evenly as its extents let it be."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from math import prod
from typing import Any

import numpy as np
import torch
from torch.utils import swap_tensors

from distdl.geometry.boxes import Shape, balanced, slices
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.nn.module import Module


def split_parameters(module: torch.nn.Module, context: Context) -> None:
    """Make every parameter of a module a global tensor that is split over all workers. Its names stay.

    The tensor object stays, too, so that an optimiser that has been made before, or whoever else refers to a parameter,
    has the share. Only where a graph or a weak reference holds on to one of them, all are other objects.
    """
    loads = dict.fromkeys(context.everyone, 0)  # cells that each worker has got
    made: dict[int, torch.nn.Parameter] = {}
    every: list[Any] = list(module.parameters())
    listed = [one for one in every if type(one) is not GlobalTensor]
    alone = all(one._use_count() == 1 and not weakref.getweakrefs(one) for one in listed)
    apart = {id(one) for child in module.modules() if isinstance(child, Module) for one in child.parameters()}
    for child in module.modules():
        held: list[tuple[str, Any]] = list(child._parameters.items())
        for name, parameter in held:
            if parameter is None or id(parameter) in apart:  # (those of distdl.nn live on some workers as it is)
                continue
            if type(parameter) is GlobalTensor:  # (a share already, by another of its names or of another model)
                continue
            if id(parameter) not in made:
                layout = _layout(context, tuple(parameter.shape), loads)
                whole = parameter.detach()
                block = whole[slices(layout.box)].clone() if layout.active else whole.new_zeros(layout.local)
                share = torch.nn.Parameter(GlobalTensor._of(block, layout), parameter.requires_grad)
                made[id(parameter)] = _become(parameter, share) if alone else share
                for worker in layout:
                    loads[worker] += prod(layout.shapes[worker])
            setattr(child, name, made[id(parameter)])  # (recurrent layers take note of it)


def _become(parameter: torch.nn.Parameter, share: torch.nn.Parameter) -> torch.nn.Parameter:
    """Let a parameter be its share."""
    gradient = parameter.grad
    with torch._C.DisableTorchFunctionSubclass():
        swap_tensors(parameter, share)
    if gradient is not None:
        parameter.grad = gradient
    return parameter


def _layout(context: Context, extents: Shape, loads: dict[int, int]) -> KnownLayout:
    """The split of a parameter over all workers in which the largest block is smallest; along few dims, if it can be.

    Who has the least so far gets the largest block, so that what does not divide evenly does not always go to the same.
    """
    workers = sorted(context.everyone, key=lambda worker: (loads[worker], worker))
    if not extents:
        return context.whole((), workers[0])

    def cost(places: Shape) -> tuple[int, int, Shape]:
        largest = prod(-(-extent // n) for extent, n in zip(extents, places, strict=True))
        return largest, sum(n > 1 for n in places), tuple(-n for n in places)

    places = min(_grids(len(workers), len(extents)), key=cost)
    intervals = [balanced(extent, n) for extent, n in zip(extents, places, strict=True)]
    sizes = np.ones(places, dtype=np.int64)
    for dim, along in enumerate(intervals):
        lengths = np.array([stop - start for start, stop in along])
        sizes *= lengths.reshape([-1 if axis == dim else 1 for axis in range(len(places))])
    array = np.empty(sizes.size, dtype=np.int64)
    array[np.argsort(-sizes.ravel(), kind="stable")] = workers
    return context.layout(array.reshape(places), intervals)


def _grids(count: int, dims: int) -> Iterator[Shape]:
    """All arrays of so many workers with so many axes."""
    if dims == 1:
        yield (count,)
        return
    for n in range(1, count + 1):
        if count % n == 0:
            for rest in _grids(count // n, dims - 1):
                yield (n, *rest)
