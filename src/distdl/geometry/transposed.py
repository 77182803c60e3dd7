"""Transposed: which inputs a transposed convolution reads for a run of outputs. Pure integer functions.

Intervals are as in ``distdl.geometry.windows``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from distdl.geometry.boxes import Interval, Intervals, Shape, balanced
from distdl.geometry.edges import Crop, Strip
from distdl.geometry.windows import sizes, span


def transposed(
    outputs: Interval, extent: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1
) -> Interval:
    """Inputs that a transposed convolution of ``extent`` inputs reads for ``outputs``: from the first to the last.

    Input ``i`` adds to the outputs ``i * stride - padding + t * dilation`` for ``0 <= t < kernel``. Outputs between the
    taps of all inputs read none.

    >>> transposed((3, 6), extent=9, kernel=3, stride=2, padding=1)
    (1, 4)
    """
    first, stop = outputs
    reach = span(kernel, dilation) - 1
    start, last = max(-((reach - first - padding) // stride), 0), min((stop - 1 + padding) // stride, extent - 1)

    def adds(cell: int) -> bool:
        before = first - (cell * stride - padding)  # from its first tap to the outputs
        return max(-(-before // dilation), 0) * dilation < before + stop - first

    while start <= last and not adds(start):
        start += 1
    while start <= last and not adds(last):
        last -= 1
    return (start, last + 1) if start <= last else (start, start)


class TransposedLine(NamedTuple):
    """The geometry of a transposed convolution along one dim, in cells."""

    kernel: int
    stride: int
    padding: int
    dilation: int

    def crop(self, cells: Interval, outputs: Interval) -> Crop:
        """How to come from some cells to the outputs to which they add: by the operator itself, as far as it can."""
        s, reach = self.stride, span(self.kernel, self.dilation)
        (start, stop), (first, end) = cells, outputs
        origin = start * s - self.padding if start >= 0 else first  # the output at the first tap of the cells
        before, behind = first - origin, origin + (stop - start - 1) * s + reach - end  # cells too many
        most = max(s, self.dilation) - 1
        padding = max(min(before, behind + most), 0)
        output_padding = min(max(padding - behind, 0), most)
        return Crop(padding, output_padding, padding - before, padding - output_padding - behind)

    def strip(self, cells: Interval, outputs: Interval) -> Strip | None:
        """What some cells add to these outputs; None if it is nothing."""
        k, s, p, d = self
        (start, stop), (first, end) = cells, outputs
        if stop <= start or end <= first:
            return None
        origin, last = start * s - p, (stop - 1) * s - p  # the outputs at the first tap of the first and the last cell
        taps = max(-((last - first) // d), 0), min((end - 1 - origin) // d + 1, k)
        if taps[0] >= taps[1]:
            return None
        made = origin + taps[0] * d, last + (taps[1] - 1) * d + 1
        run = max(made[0], first), min(made[1], end)
        if run[0] >= run[1]:
            return None
        return Strip((0, 0), taps, (run[0] - first, run[1] - first), (made[0] - run[0], run[1] - made[1]))


@dataclass(frozen=True)
class Transposed:
    """The geometry of a transposed convolution: a number for each dim of space, in cells."""

    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    output_padding: Shape

    @classmethod
    def of(
        cls, name: str, space: int, kernel: Any, stride: Any, padding: Any, dilation: Any, output_padding: Any
    ) -> Transposed:
        """From whole numbers as torch's layers take them: one for all dims of space, or a sequence with one for each.

        Raises: ValueError that names the layer, for another count of numbers or one that is out of range.
        """
        given = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
        given["output_padding"] = output_padding
        found = cls(*(sizes(name, space, option, value) for option, value in given.items()))
        limits = zip(found.output_padding, found.stride, found.dilation, strict=True)
        if any(more >= max(s, d) for more, s, d in limits):
            raise ValueError(
                f"{name} needs an output_padding smaller than the stride or the dilation; got output_padding "
                f"{output_padding!r}, stride {stride!r} and dilation {dilation!r}"
            )
        return found

    def counts(self, name: str, extents: Shape, asked: Shape | None = None) -> Shape:
        """Global extents of the output in space: those asked for, or those that follow from ``output_padding``.

        Args:
            extents: global extents of the input in space.
        Raises: ValueError that names the layer, for an extent that is not possible.
        """
        counts = []
        for dim, (extent, s) in enumerate(zip(extents, self.stride, strict=True)):
            least = (extent - 1) * s - 2 * self.padding[dim] + span(self.kernel[dim], self.dilation[dim])
            count = least + self.output_padding[dim] if asked is None else asked[dim]
            if asked is not None and not least <= count < least + s:
                raise ValueError(
                    f"{name} needs an output_size from {least} to {least + s - 1} in dim {dim + 2}, where the input "
                    f"has {extent} cells; got {count}"
                )
            if extent < 1 or count < 1:
                raise ValueError(
                    f"{name} needs an input that has an output; in dim {dim + 2} the input has {extent} cells, and "
                    f"the output would have {count}"
                )
            counts.append(count)
        return tuple(counts)

    def windows(
        self, name: str, extents: Shape, parts: Shape, asked: Shape | None = None
    ) -> tuple[list[Intervals], list[Intervals]]:
        """Split the outputs as evenly as possible; for each dim, the inputs and the outputs of each part.

        Args:
            extents: global extents of the input in space.
            parts: number of parts along each dim.
            asked: global extents of the output, if they are given.
        Raises: ValueError that names the layer, for outputs that are not possible.
        """
        counts = self.counts(name, extents, asked)
        outputs = [balanced(count, places) for count, places in zip(counts, parts, strict=True)]
        return [[self.window(d, run, extents[d]) for run in runs] for d, runs in enumerate(outputs)], [*outputs]

    def window(self, dim: int, outputs: Interval, extent: int) -> Interval:
        """The inputs that a run of outputs along a dim of space reads; where none reaches them, one cell of zero."""
        k, s, p, d = self.kernel[dim], self.stride[dim], self.padding[dim], self.dilation[dim]
        start, stop = transposed(outputs, extent, k, s, p, d)
        if start == stop and outputs[0] < outputs[1]:
            return (-1, 0)  # beyond the tensor, so nobody sends it
        return (start, stop)

    def line(self, dim: int) -> TransposedLine:
        """The geometry along a dim of space."""
        return TransposedLine(self.kernel[dim], self.stride[dim], self.padding[dim], self.dilation[dim])
