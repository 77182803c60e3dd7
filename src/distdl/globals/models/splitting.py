"""Splitting parameters into shares: each over all workers, as evenly as its extents allow."""

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
from distdl.tensors.private_torch import DisableTorchFunctionSubclass


def split_parameters(module: torch.nn.Module, context: Context) -> None:
    """Make every parameter of a module a global tensor that is split over all workers. Its names stay.

    Parameters of ``distdl.nn``, which are on some workers only, stay as they are; so do those that are shares already.
    The tensor objects stay, too, so that an optimiser that was made before has the shares. Only if a graph or a weak
    reference keeps one of them alive, all of them become new objects.
    """
    loads = dict.fromkeys(context.everyone, 0)  # how many cells each worker has got
    shares: dict[int, torch.nn.Parameter] = {}
    every: list[Any] = list(module.parameters())
    whole = [one for one in every if type(one) is not GlobalTensor]
    can_swap = all(one._use_count() == 1 and not weakref.getweakrefs(one) for one in whole)
    placed = {id(one) for child in module.modules() if isinstance(child, Module) for one in child.parameters()}
    for child in module.modules():
        named: list[tuple[str, Any]] = list(child._parameters.items())
        for name, parameter in named:
            if parameter is None or id(parameter) in placed or type(parameter) is GlobalTensor:
                continue
            if id(parameter) not in shares:
                layout = _even_layout(context, tuple(parameter.shape), loads)
                share = _share_of(parameter, layout)
                shares[id(parameter)] = _swap(parameter, share) if can_swap else share
                for worker in layout:
                    loads[worker] += prod(layout.shapes[worker])
            setattr(child, name, shares[id(parameter)])  # by setattr, which recurrent layers define


def _share_of(parameter: torch.nn.Parameter, layout: KnownLayout) -> torch.nn.Parameter:
    whole = parameter.detach()
    block = whole[slices(layout.box)].clone() if layout.active else whole.new_zeros(layout.local)
    return torch.nn.Parameter(GlobalTensor._of(block, layout), parameter.requires_grad)


def _swap(parameter: torch.nn.Parameter, share: torch.nn.Parameter) -> torch.nn.Parameter:
    """Make the object of a parameter its share. Returns: that object, with the gradient that it had."""
    gradient = parameter.grad
    with DisableTorchFunctionSubclass():
        swap_tensors(parameter, share)
    if gradient is not None:
        parameter.grad = gradient
    return parameter


def _even_layout(context: Context, extents: Shape, loads: dict[int, int]) -> KnownLayout:
    """The layout over all workers in which the largest block of a parameter is smallest, split along the fewest dims.

    The worker with the fewest cells so far, as ``loads`` says, gets the largest block, or a parameter without dims.
    """
    workers = sorted(context.everyone, key=lambda worker: (loads[worker], worker))
    if not extents:
        return context.whole((), workers[0])

    def cost(grid: Shape) -> tuple[int, int, Shape]:
        largest = prod(-(-extent // n) for extent, n in zip(extents, grid, strict=True))
        return largest, sum(n > 1 for n in grid), tuple(-n for n in grid)

    grid = min(_grids(len(workers), len(extents)), key=cost)
    intervals = [balanced(extent, n) for extent, n in zip(extents, grid, strict=True)]
    sizes = np.ones(grid, dtype=np.int64)
    for dim, along in enumerate(intervals):
        lengths = np.array([stop - start for start, stop in along])
        sizes *= lengths.reshape([-1 if axis == dim else 1 for axis in range(len(grid))])
    array = np.empty(sizes.size, dtype=np.int64)
    array[np.argsort(-sizes.ravel(), kind="stable")] = workers
    return context.layout(array.reshape(grid), intervals)


def _grids(workers: int, axes: int) -> Iterator[Shape]:
    """The shapes of all grids of so many workers with so many axes."""
    if axes == 1:
        yield (workers,)
        return
    for n in range(1, workers + 1):
        if workers % n == 0:
            for rest in _grids(workers // n, axes - 1):
                yield (n, *rest)
