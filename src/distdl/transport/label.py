"""Label: what a layer is called, in errors, in the ledger and in a profile."""

from __future__ import annotations

import zlib


class Label:
    """The name of a layer: its class and partitions, and its path in a model once that has named its layers.

    Attributes:
        name: class, partitions and main options; the same text on every worker.
        path: where the layer stands in its model (``encoder.2.conv``); empty until then.
        mark: a number that follows from the name, to tell the layer's messages from another's.
    """

    __slots__ = ("mark", "name", "path")

    def __init__(self, name: str, path: str = "") -> None:
        self.name = name
        self.path = path
        self.mark = zlib.crc32(name.encode())

    @property
    def kind(self) -> str:
        """The class alone, and the path."""
        kind = self.name.partition(" ")[0]
        return f"{self.path}: {kind}" if self.path else kind

    def __str__(self) -> str:
        return f"{self.path}: {self.name}" if self.path else self.name
