"""Label: what a layer is called in errors, in the ledger and in a profile, and what tells its messages from others."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

from distdl.environment.arguments import checks_arguments
from distdl.environment.types import Count

MARKS = 1 << 27  # how many marks there are (Python computes faster with what stays below 2 to the 30)


class Label:
    """The name of a layer: class, partitions and number, and its path in a model once that has named its layers.

    Layers may have one name. Every worker builds every layer, in one order, so their numbers tell them apart: two
    layers never take each other's messages. A deep copy has a number of its own: that of the original, and which copy
    of it this is.

    Args:
        name: class, partitions and main options; the same text on every worker.
        number: how many layers were built in this world before; None for what is no layer.
        detail: what else tells it from others of its name; complete in its ``repr``, and the same on every worker.
    Attributes:
        name, number: as above.
        path: where the layer stands in its model (``encoder.2.conv``); empty until then.
        mark: a number that follows from name, number and detail, to tell the layer's messages from another's.
    """

    __slots__ = ("__weakref__", "_copies", "_copy", "mark", "name", "number", "path")

    @checks_arguments
    def __init__(self, name: str, number: Count | None = None, detail: object = ()) -> None:
        self.name = name
        self.number = number
        self.path = ""
        self._copies: Iterator[int] = itertools.count(1)
        self._copy = 0
        self.mark = _mark((self.identity, detail))

    @property
    def kind(self) -> str:
        """The class alone, and the path."""
        kind = self.name.partition(" ")[0]
        return f"{self.path}: {kind}" if self.path else kind

    @property
    def numbered(self) -> str:
        """The name with path and number, for errors in which layers may have one name."""
        if self.number is None:
            return str(self)
        return f"{self} [layer {self.number}{f', copy {self._copy}' if self._copy else ''}]"

    @property
    def identity(self) -> tuple[str, int | None, int]:
        """What tells the layer from all others of its world."""
        return self.name, self.number, self._copy

    def __str__(self) -> str:
        return f"{self.path}: {self.name}" if self.path else self.name

    def __deepcopy__(self, memo: dict[int, Any]) -> Label:
        if self.number is None:
            return self
        twin = memo[id(self)] = Label(self.name, self.number)
        twin.path, twin._copies, twin._copy = self.path, self._copies, next(self._copies)
        twin.mark = _mark(twin.identity)
        return twin


def _mark(identity: object) -> int:
    return zlib.crc32(repr(identity).encode()) % MARKS
