"""The adaptive pooling layers: as many outputs as asked for, whatever the extent of the input."""

from __future__ import annotations

from operator import index
from typing import Any

from distdl.geometry.boxes import MOST
from distdl.nn.module import Option
from distdl.nn.pooling.layer import PoolingLayer
from distdl.ops.adaptive_pooling import AdaptiveAverage, AdaptiveMaximum
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments


class _AdaptiveAvgPool(PoolingLayer):
    r"""Pool to a given global shape in space: the mean of each window.

    Along each dim, output o of n is computed from the cells ``floor(o L / n)`` up to, but not including,
    ``ceil((o + 1) L / n)`` of L.
    Forward: each worker sums the cells of a window that lie in its own block; the sums are added up on the worker that
    has the output. Adjoint: the transpose. If there are fewer outputs than workers, some workers have none.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        output_size: global extents of y in space, one number or one for each dim; None in place of a number
            keeps that of x.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in space, longer blocks first, and in batch and channels as x is. Workers outside P_x return a clone of
        their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        the wrong rank, empty in space, or of a dtype that torch's operator does not accept.
    """

    output_size = Option[tuple[int | None, ...]]()

    @checks_arguments
    def __init__(self, P_x: Partition, output_size: Any) -> None:
        extents = _extents(type(self).__name__, output_size, self.space)
        least, options = (1,) * (self.space + 2), f"output {'x'.join(map(str, extents))}"
        super().__init__(P_x, AdaptiveAverage(extents), least, options)
        self.output_size = extents


class _AdaptiveMaxPool(PoolingLayer):
    r"""Pool to a given global shape in space: the largest cell of each window.

    Along each dim, output o of n is computed from the cells ``floor(o L / n)`` up to, but not including,
    ``ceil((o + 1) L / n)`` of L.
    Forward: each worker finds the largest cell of a window in its own block; these are compared on the worker that has
    the output. Adjoint: the transpose. If there are fewer outputs than workers, some workers have none.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        output_size: global extents of y in space, one number or one for each dim; None in place of a number
            keeps that of x.
        return_indices: also return where in space each cell lies, as torch does: its number in the flattened global
            space. Indices need messages of their own.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid. y is split as evenly as
        possible in space, longer blocks first, and in batch and channels as x is. Workers outside P_x return a clone of
        their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        the wrong rank, empty in space, or of a dtype that torch's operator does not accept.
    """

    output_size = Option[tuple[int | None, ...]]()
    return_indices = Option[bool]()

    @checks_arguments
    def __init__(self, P_x: Partition, output_size: Any, return_indices: bool = False) -> None:
        extents = _extents(type(self).__name__, output_size, self.space)
        op = AdaptiveMaximum(extents, bool(return_indices))
        super().__init__(P_x, op, (1,) * (self.space + 2), f"output {'x'.join(map(str, extents))}")
        self.output_size, self.return_indices = extents, op.indices


def _extents(name: str, given: Any, space: int) -> tuple[int | None, ...]:
    """One extent for each dim of space, from one for all or a sequence."""
    try:
        listed = [given] * space if hasattr(given, "__index__") else list(given)
        extents = tuple(None if extent is None else index(extent) for extent in listed)
    except TypeError:
        extents = ()
    if len(extents) != space or any(extent is not None and not 1 <= extent <= MOST for extent in extents):
        raise ValueError(
            f"{name} needs output_size to be one whole number from 1 to {MOST}, or {space} of them or None; "
            f"got {given!r}"
        )
    return extents


class DistributedAdaptiveAvgPool1d(_AdaptiveAvgPool):
    __doc__ = _AdaptiveAvgPool.__doc__
    space = 1


class DistributedAdaptiveAvgPool2d(_AdaptiveAvgPool):
    __doc__ = _AdaptiveAvgPool.__doc__
    space = 2


class DistributedAdaptiveAvgPool3d(_AdaptiveAvgPool):
    __doc__ = _AdaptiveAvgPool.__doc__
    space = 3


class DistributedAdaptiveMaxPool1d(_AdaptiveMaxPool):
    __doc__ = _AdaptiveMaxPool.__doc__
    space = 1


class DistributedAdaptiveMaxPool2d(_AdaptiveMaxPool):
    __doc__ = _AdaptiveMaxPool.__doc__
    space = 2


class DistributedAdaptiveMaxPool3d(_AdaptiveMaxPool):
    __doc__ = _AdaptiveMaxPool.__doc__
    space = 3
