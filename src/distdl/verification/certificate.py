"""What a comparison of two programs found when they are equal."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch


def versions() -> dict[str, str]:
    """Of distdl, torch and Python, as they run here."""
    return {"distdl": version("distdl"), "torch": torch.__version__, "Python": platform.python_version()}


@dataclass(frozen=True)
class Certificate:
    """Two programs were compared, tensor by tensor, and are equal to rounding. Its text is for people to read.

    Attributes:
        subject: what was verified: the model's class, or the name of the candidate.
        workers: how many workers ran it.
        partition: the shape of the partition over which the inputs were split; None for two callables.
        backend: what carried the messages: ``threads``, ``gloo``, ``mpi``, ...
        dtypes: the dtypes of the compared tensors.
        steps: how many steps of training were compared.
        compared: how many tensors of each kind were compared.
        largest: the largest absolute difference of any two elements.
        where: the tensor and the cell in which it is.
        scale: the largest absolute value in that tensor.
        margin: the largest difference as a part of the one that rounding explains (see :func:`distdl.verify`); at
            most 1.
        not_compared: what was left out, and why.
        versions: of distdl, torch and Python.
    """

    subject: str
    workers: int
    partition: tuple[int, ...] | None
    backend: str
    dtypes: tuple[str, ...]
    steps: int
    compared: Mapping[str, int]
    largest: float
    where: str
    scale: float
    margin: float
    not_compared: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=versions)

    def to_json(self) -> str:
        """All attributes, as JSON, and ``"equal": true``."""
        return json.dumps({"equal": True, **asdict(self)}, indent=2)

    def __str__(self) -> str:
        grid = "" if self.partition is None else f" as {'x'.join(map(str, self.partition))}"
        counts = ", ".join(f"{n} {kind}" for kind, n in self.compared.items())
        place = f", in {self.where}, whose largest value is {self.scale:.2g}" if self.largest else ""
        lines = [
            f"{self.subject} on {self.workers} workers{grid} ({self.backend}) equals the sequential one",
            f"  compared      {counts}; steps: {self.steps}",
            f"  largest       {self.largest:.2g}{place}",
            f"  rounding      explains at least {1 / self.margin:.2g} times what was found"
            if self.margin
            else "  rounding      every element is equal",
            f"  dtypes        {', '.join(self.dtypes)}",
            f"  versions      {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
            *(f"  not compared  {one}" for one in self.not_compared),
        ]
        return "\n".join(lines)


class Mismatch(AssertionError):
    """Two programs that were compared differ.

    Attributes:
        difference: the same as data: ``subject``; how many tensors are ``differing``, and how many there are; and the
            first of them in the ``forward`` and in the ``backward``, each with its kind, name and step, the largest
            difference, its cell, what rounding explains, and the last tensor that agrees before. None, where there is
            none.
    """

    difference: Mapping[str, Any] = {}

    def to_json(self) -> str:
        """The difference as JSON, with ``"equal": false`` and the text of the error."""
        return json.dumps({"equal": False, **self.difference, "problem": str(self)}, indent=2)
