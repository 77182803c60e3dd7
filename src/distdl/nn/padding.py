"""Padding of a tensor that is split over workers."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

from distdl.geometry.borders import PADDING_MODES, Border
from distdl.geometry.boxes import MOST, Shape
from distdl.nn.layer import Application, Layer
from distdl.nn.module import Option
from distdl.ops.padding import Padding
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments


class DistributedPad(Layer):
    r"""Pad a tensor, or remove cells at its borders, as ``torch.nn.functional.pad`` does.

    Forward: :math:`y[c] = x[s(c)]`, where s(c) is the cell of x that is copied to the cell c of y; if there is none, y
    is ``value``. Each worker fetches the cells that its block of y reads, from as many blocks of x as needed.
    Adjoint: :math:`\partial x[c] = \sum_{c'\,:\,s(c') = c} \partial y[c']`, on the worker that owns c.

    Args:
        P_x: partition of input and output; axis i splits dim i. Any of them may be split.
        padding: cells before and after each dim, **the last dim first**: ``(before, after, before, after, ...)``.
            Negative numbers remove cells.
        mode: ``constant``, ``reflect``, ``replicate`` or ``circular``.
        value: value of the cells around x, in the mode ``constant``.
    Shapes: x local, as many dims as P_x has axes, in elements, any split that is a grid. y is split as evenly as
        possible, longer blocks first, in the dims that ``padding`` covers, and in the others as x is. Workers outside
        P_x return a clone of their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of the
        wrong rank, for padding that is too large (reflect: the extent or more; circular: more than the extent that is
        left), or if nothing would be left.
    """

    P_x = Option[Partition]()
    padding = Option[Shape]()
    mode = Option[str]()
    value = Option[float]()

    @checks_arguments
    def __init__(self, P_x: Partition, padding: Sequence[int], mode: str = "constant", value: float = 0.0) -> None:
        pairs, axes = _pairs(padding, P_x.workers.ndim), P_x.workers.ndim
        if mode not in PADDING_MODES:
            raise ValueError(f"DistributedPad has the modes {', '.join(PADDING_MODES)}; got {mode!r}")
        if mode != "constant" and value:
            raise ValueError(f"DistributedPad has a value in the mode 'constant' only; got {value} and mode {mode!r}")
        flat = tuple(number for pair in pairs for number in pair)
        widths = ((0, 0),) * (axes - len(pairs)) + tuple(reversed(pairs))
        op = Padding(Border(mode, widths), value, tuple(range(axes - len(pairs), axes)))
        name = f"DistributedPad (P_x: {P_x}; padding {flat}, {mode})"
        super().__init__(name, P_x, Application(op, (P_x,), P_x))
        self.P_x, self.padding, self.mode, self.value = P_x, flat, mode, value


def _pairs(padding: Any, axes: int) -> list[tuple[int, int]]:
    """Cells before and after each dim, the last dim first."""
    try:
        numbers = [index(number) for number in padding]
    except TypeError:
        numbers = [0]
    if len(numbers) % 2 or not 2 <= len(numbers) <= 2 * axes or max(map(abs, numbers)) > MOST:
        raise ValueError(
            f"DistributedPad needs two whole numbers for each padded dim, the last dim first, of at most {axes} dims; "
            f"got {padding!r}"
        )
    return list(zip(numbers[::2], numbers[1::2], strict=True))
