"""Placement: on which worker a block of a parameter lives, and with which values it begins.

Initial values are those of torch's own layers, uniform within a bound that follows from the global fan-in. The value of
an element depends on the seed, the parameter and the element's place in the global tensor, and on nothing else: another
partition begins with the same network, and no worker ever holds the whole of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod
from weakref import WeakKeyDictionary

import numpy as np
import torch

from distdl.boxes import Box, shape
from distdl.comm import Communicator
from distdl.layout import Layout

_made: WeakKeyDictionary[Communicator, Counter[str]] = WeakKeyDictionary()
_PER_COUNT = 4  # numbers that Philox draws for each value of its counter


def uniform_parameter(layout: Layout, bound: float) -> torch.nn.Parameter:
    """The block of a parameter that this worker stores, uniform in ``[-bound, bound)``; of zero volume where it has
    none.

    Every worker makes the parameters of a network in the same order. The seed is that of ``torch.manual_seed``, which
    has to be the same on all workers; torch's generator is not drawn from.

    Args:
        layout: the box of the global parameter on each worker that stores some of it.
    """
    comm = layout.partition.comm
    number = _made.setdefault(comm, Counter())
    number["parameters"] += 1
    if comm.rank not in layout.partition:
        return torch.nn.Parameter(torch.empty(0))
    starts, length = _runs(layout[comm.rank], layout.extents)
    key = np.array([torch.initial_seed() % 2**64, number["parameters"]], dtype=np.uint64)
    values = np.empty((len(starts), length))
    for row, start in zip(values, starts, strict=True):
        generator = np.random.Generator(np.random.Philox(key=key, counter=start // _PER_COUNT))
        row[:] = generator.random(start % _PER_COUNT + length)[start % _PER_COUNT :]
    block = torch.from_numpy((2 * values - 1) * bound).reshape(shape(layout[comm.rank]))
    return torch.nn.Parameter(block.to(torch.get_default_dtype()))


def _runs(box: Box, extents: Sequence[int]) -> tuple[list[int], int]:
    """Where the runs of consecutive elements of a box begin in the flattened global tensor, and how long they are."""
    strides = [prod(extents[dim + 1 :]) for dim in range(len(extents))]
    first = len(box) - 1
    while first > 0 and box[first] == (0, extents[first]):
        first -= 1
    length = prod(stop - start for start, stop in box[first:])
    starts = np.array([box[first][0] * strides[first]])
    for (start, stop), stride in zip(box[:first], strides[:first], strict=True):
        starts = np.add.outer(starts, np.arange(start, stop) * stride)
    return sorted(starts.ravel().tolist()), length


def parameter_layouts(network: torch.nn.Module) -> dict[str, Layout]:
    """Of every parameter in a network that is cut up over workers: its name, and which block of it lives where.

    They stand in the order in which the sequential network has its parameters.
    """
    return {
        f"{prefix}.{name}" if prefix else name: layout
        for prefix, module in network.named_modules()
        for name, layout in getattr(module, "parameter_layouts", {}).items()
    }
