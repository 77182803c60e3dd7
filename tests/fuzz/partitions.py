"""Random blocks of tensors: any workers in any order, of uneven sizes, some of them empty, some workers idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from hypothesis import strategies as st

from distdl.geometry.boxes import balanced, runs
from distdl.partition import Layout, Partition

WORKERS = 4
_GRIDS = {  # for each number of axes, all shapes of so many workers at most
    axes: [shape for shape in product(range(1, WORKERS + 1), repeat=axes) if prod(shape) <= WORKERS]
    for axes in range(1, 6)
}


@dataclass(frozen=True)
class Blocks:
    """How a tensor lies on workers.

    Attributes:
        workers: the workers of the grid, in the order of their ranks; the others are idle.
        sizes: for each dim, the sizes of the blocks along the axis of the grid.
    """

    workers: tuple[int, ...]
    sizes: tuple[tuple[int, ...], ...]

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(map(len, self.sizes))

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(map(sum, self.sizes))

    @property
    def balanced(self) -> bool:
        return all(list(balanced(sum(one), len(one))) == list(runs(one)) for one in self.sizes)

    def partition(self, world: Partition) -> Partition:
        return world.create_partition_inclusive(self.workers).reshape(*self.grid)

    def layout(self, world: Partition) -> Layout:
        return Layout.of(self.partition(world), [runs(sizes) for sizes in self.sizes])

    def block(self, world: Partition, whole: torch.Tensor) -> torch.Tensor:
        """This worker's block of a tensor; one of zero volume where the worker is idle."""
        layout = self.layout(world)
        return layout.block(whole).clone() if world.rank in layout else whole.new_zeros(0)


@st.composite
def workers_of(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    return tuple(draw(st.permutations(range(WORKERS)))[:count])


@st.composite
def splits(draw: st.DrawFn, extent: int, parts: int, even: bool = False) -> tuple[int, ...]:
    """Sizes of so many blocks of a dim; none has to have any cell, unless the split is to be even."""
    if even or draw(st.integers(0, 2)) == 0:
        return tuple(stop - start for start, stop in balanced(extent, parts))
    cuts = sorted(draw(st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)))
    return tuple(stop - start for start, stop in zip([0, *cuts], [*cuts, extent], strict=True))


@st.composite
def blocks(draw: st.DrawFn, extents: Sequence[int], grid: Sequence[int] | None = None, even: bool = False) -> Blocks:
    """How a tensor of this shape lies on some of the workers; over this grid, if one is given."""
    shape = tuple(grid) if grid is not None else draw(st.sampled_from(_GRIDS[len(extents)]))
    sizes = tuple(draw(splits(n, p, even)) for n, p in zip(extents, shape, strict=True))
    return Blocks(draw(workers_of(prod(shape))), sizes)


def assembled(
    blocks: Sequence[tuple[tuple[tuple[int, int], ...], torch.Tensor]], extents: Sequence[int]
) -> torch.Tensor:
    """The tensor that boxes and blocks of them tile.

    Raises: AssertionError unless each cell is in exactly one box, and each block has its box's shape.
    """
    whole = torch.zeros(tuple(extents), dtype=blocks[0][1].dtype)
    held = torch.zeros(tuple(extents), dtype=torch.int64)
    for box, block in blocks:
        assert tuple(block.shape) == tuple(stop - start for start, stop in box), (box, tuple(block.shape))
        whole[tuple(slice(*one) for one in box)] = block
        held[tuple(slice(*one) for one in box)] += 1
    assert bool((held == 1).all()), f"cells are held {held.tolist()} times"
    return whole
