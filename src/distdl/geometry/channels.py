"""Channels of a convolution, in groups: which inputs a run of outputs reads. Pure integer functions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from distdl.geometry.boxes import Interval


@dataclass(frozen=True)
class Channels:
    """The channels of a convolution, or of a transposed one.

    Attributes:
        inputs, outputs: how many there are.
        groups: of inputs, and as many of outputs; the outputs of each read the inputs of the same.
    """

    inputs: int
    outputs: int
    groups: int = 1

    def check(self, name: str) -> None:
        """Check that groups divide channels.

        Raises: ValueError that names the layer.
        """
        inputs, outputs, groups = self.inputs, self.outputs, self.groups
        if not 1 <= groups <= min(inputs, outputs) or inputs % groups or outputs % groups:
            raise ValueError(f"{name} needs channels that {groups} groups divide; got {inputs} and {outputs}")

    @property
    def read(self) -> int:
        """Inputs of one group."""
        return self.inputs // self.groups

    @property
    def produced(self) -> int:
        """Outputs of one group."""
        return self.outputs // self.groups

    def read_by(self, outputs: Interval) -> Interval:
        """The inputs that a run of outputs reads: all of every group it touches.

        >>> Channels(9, 6, groups=3).read_by((1, 5))
        (0, 9)
        """
        first, stop = outputs
        last = -(-stop // self.produced) if stop > first else first // self.produced
        return first // self.produced * self.read, last * self.read

    def pieces(self, outputs: Interval) -> list[Interval]:
        """Split a run of outputs into parts of single groups and one run of whole groups, in their order.

        >>> Channels(4, 8, groups=4).pieces((1, 7))
        [(1, 2), (2, 6), (6, 7)]
        """
        (first, stop), size = outputs, self.produced
        begin, end = -(-first // size) * size, stop // size * size
        ends = [first, begin, end, stop] if begin <= end else [first, stop]
        return [(start, last) for start, last in pairwise(ends) if start < last]
