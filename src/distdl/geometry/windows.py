"""Windows: which run of inputs a run of outputs reads. Pure integer functions.

Intervals of inputs are in the coordinates of the unpadded input, so they may begin below 0 or end beyond the input:
what lies there is padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import index
from typing import Any, ClassVar, Self

from distdl.geometry.boxes import MOST, Interval, Intervals, Shape, balanced


def span(kernel: int, dilation: int) -> int:
    """Input cells from the first tap of a kernel to its last, both included."""
    return dilation * (kernel - 1) + 1


def sliding(outputs: Interval, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> Interval:
    """Inputs that a convolution or a pooling reads for ``outputs``. ``padding`` is what stands before the first cell.

    Output ``o`` reads ``o * stride - padding + t * dilation`` for ``0 <= t < kernel``. No outputs read no inputs.

    >>> sliding((0, 3), kernel=3, padding=1)
    (-1, 4)
    """
    first, stop = outputs
    start = first * stride - padding
    if stop <= first:
        return (start, start)
    return (start, (stop - 1) * stride - padding + span(kernel, dilation))


def sliding_extent(
    extent: int, kernel: int, stride: int = 1, padding: tuple[int, int] = (0, 0), dilation: int = 1
) -> int:
    """Number of outputs of a convolution or a pooling (rounded down) over ``extent`` inputs. Never negative."""
    spare = extent + sum(padding) - span(kernel, dilation)
    return max(spare // stride + 1, 0)


@dataclass(frozen=True)
class Sliding:
    """The geometry of a convolution or a pooling: a number for each dim of space, in cells.

    Attributes:
        padding: cells before the tensor, and behind it.
        behind: cells behind it, where they are not as many as before it.
    """

    kernel: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    behind: Shape | None = None
    _least: ClassVar[str] = "at least as large as its kernel"

    @classmethod
    def of(cls, name: str, space: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Self:
        """From whole numbers as torch's layers take them: one for all dims of space, or a sequence with one for each.

        Raises: ValueError that names the layer, for another count of numbers or one that is out of range.
        """
        given = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
        return cls(*(sizes(name, space, option, value) for option, value in given.items()))

    @classmethod
    def of_convolution(cls, name: str, space: int, kernel: Any, stride: Any, padding: Any, dilation: Any) -> Sliding:
        """The same, and padding may be ``same`` or ``valid``, too."""
        if not isinstance(padding, str):
            return cls.of(name, space, kernel, stride, padding, dilation)
        if padding not in ("same", "valid"):
            raise ValueError(f"{name} needs padding in cells, or 'same' or 'valid'; got {padding!r}")
        unpadded = cls.of(name, space, kernel, stride, 0, dilation)
        return unpadded.same(name) if padding == "same" else unpadded

    @property
    def spans(self) -> Shape:
        """Cells that a window spans: the smallest padded input that has an output."""
        return tuple(span(k, d) for k, d in zip(self.kernel, self.dilation, strict=True))

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Cells of padding before and behind the tensor."""
        return tuple(zip(self.padding, self.padding if self.behind is None else self.behind, strict=True))

    def same(self, name: str) -> Sliding:
        """With as much padding as gives as many outputs as there are inputs; what is odd of it stands behind.

        Raises: ValueError that names the layer, unless the stride is 1.
        """
        if any(n > 1 for n in self.stride):
            raise ValueError(f"{name} needs stride 1 for padding 'same'; got {self.stride}")
        total = [cells - 1 for cells in self.spans]
        return replace(self, padding=tuple(n // 2 for n in total), behind=tuple(n - n // 2 for n in total))

    def windows(self, name: str, extents: Shape, parts: Shape) -> tuple[list[Intervals], list[Intervals]]:
        """Split the outputs as evenly as possible; for each dim, the inputs and the outputs of each part.

        Args:
            extents: global extents of the input in space.
            parts: number of parts along each dim.
        Raises: ValueError that names the layer, if there is no output.
        """
        inputs: list[Intervals] = []
        outputs: list[Intervals] = []
        for dim, (extent, places) in enumerate(zip(extents, parts, strict=True)):
            count, (before, behind) = self.outputs(dim, extent), self.widths[dim]
            if count == 0:
                raise ValueError(
                    f"{name} needs an input {self._least}; in dim {dim + 2} the kernel spans {self.spans[dim]} cells "
                    f"and the input has {extent}, with its padding {before + extent + behind}"
                )
            outputs.append(balanced(count, places))
            inputs.append(
                [sliding(run, self.kernel[dim], self.stride[dim], before, self.dilation[dim]) for run in outputs[-1]]
            )
        return inputs, outputs

    def outputs(self, dim: int, extent: int) -> int:
        """Number of outputs along a dim of space whose input has this extent."""
        return sliding_extent(extent, self.kernel[dim], self.stride[dim], self.widths[dim], self.dilation[dim])


def sizes(name: str, space: int, option: str, value: Any) -> Shape:
    """A whole number for each dim of space, from one for all or a sequence: at least 0 for paddings, 1 for others.

    Raises: ValueError that names the layer and the option.
    """
    least = 0 if "padding" in option else 1
    numbers = _whole_numbers(value, space)
    if len(numbers) != space or min(numbers) < least or max(numbers) > MOST:
        limit = f"at most {MOST}" if max(numbers, default=0) > MOST else f"at least {least}"
        raise ValueError(f"{name} needs {option} to be one whole number, or {space} of them, {limit}; got {value!r}")
    return numbers


def pooled_extent(
    extent: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, ceil_mode: bool = False
) -> int:
    """Number of outputs of a pooling over ``extent`` inputs with ``padding`` cells at both ends. Never negative.

    With ``ceil_mode`` the last window may reach beyond the padding behind, if it starts in front of that.

    >>> pooled_extent(6, kernel=3, stride=2), pooled_extent(6, kernel=3, stride=2, ceil_mode=True)
    (2, 3)
    """
    spare = extent + 2 * padding - span(kernel, dilation)
    if not ceil_mode:
        return max(spare // stride + 1, 0)
    count = -(-spare // stride) + 1
    return max(count - ((count - 1) * stride >= extent + padding), 0)


@dataclass(frozen=True)
class PoolSliding(Sliding):
    """The geometry of a pooling: windows that slide; the last may reach beyond the padding."""

    ceil_mode: bool = False
    _least: ClassVar[str] = "that is not empty, and at least as large as its window"

    def outputs(self, dim: int, extent: int) -> int:
        k, s, p, d = self.kernel[dim], self.stride[dim], self.padding[dim], self.dilation[dim]
        return pooled_extent(extent, k, s, p, d, self.ceil_mode) if extent else 0

    def counts(self, dim: int, extent: int, outputs: Interval, padded: bool) -> list[int]:
        """For each output along a dim, how many cells an average counts: those of the tensor, or of its padding too.

        What a window has beyond the padding never counts.
        """
        k, s, p = self.kernel[dim], self.stride[dim], self.padding[dim]
        first, last = (-p, extent + p) if padded else (0, extent)
        starts = [output * s - p for output in range(*outputs)]
        return [min(start + k, last) - max(start, first) for start in starts]


def adaptive(outputs: Interval, extent: int, count: int) -> Interval:
    """Inputs that an adaptive pooling of ``extent`` inputs to ``count`` outputs reads for some of these.

    Output ``o`` reads from ``floor(o * extent / count)`` to ``ceil((o + 1) * extent / count)``. The inverse is the
    same function: ``adaptive(inputs, count, extent)`` are the outputs that read any of these inputs.

    >>> [adaptive((o, o + 1), 5, 3) for o in range(3)], adaptive((1, 2), 3, 5)
    ([(0, 2), (1, 4), (3, 5)], (0, 2))
    """
    first, stop = outputs
    start = first * extent // count
    return (start, start if stop <= first else -(-stop * extent // count))


def _whole_numbers(value: Any, count: int) -> Shape:
    """One number for each dim, from one for all or a sequence; none where something is no whole number."""
    try:
        return (index(value),) * count
    except TypeError:
        pass
    try:
        return tuple(index(number) for number in value)
    except TypeError:
        return ()


def reading(outputs: Intervals, ends: Callable[[list[int]], tuple[list[int], list[int]]]) -> list[Interval]:
    """Inputs that runs of outputs read, where later outputs never read earlier inputs, as in an interpolation.

    Args:
        outputs: the runs.
        ends: from outputs to the first input that each reads, and the last. Both never decrease.
    Returns: for each run, what lies between the first input of its first output and the last of its last.

    >>> reading([(0, 3), (3, 3), (3, 6)], lambda outputs: ([o // 2 for o in outputs], [o // 2 + 1 for o in outputs]))
    [(0, 3), (0, 0), (1, 4)]
    """
    filled = [run for run in outputs if run[0] < run[1]]
    first, last = ends([start for start, _ in filled] + [stop - 1 for _, stop in filled])
    windows = iter([(i, j + 1) for i, j in zip(first, last[len(filled) :], strict=False)])
    return [next(windows) if start < stop else (0, 0) for start, stop in outputs]
