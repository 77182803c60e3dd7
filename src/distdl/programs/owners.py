"""Who owns the tensors that a step reads: its arguments, and the modules that it can reach."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.programs.calls import Source, leaf_of
from distdl.programs.memory import place_of


class Owners:
    """The tensors that a step may read, by where they lie.

    Args:
        named: parameters and buffers, with their names.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._named = list(named)
        self._found: dict[Any, tuple[Source, torch.Tensor]] = {}
        self._in: dict[int, tuple[Source, torch.Tensor]] = {}
        self._leaves: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        for name, one in self._named:
            kind = "block" if type(one) is GlobalTensor else "tensor"
            leaf = leaf_of(one)
            self._names[id(one)] = name
            self.add(Source(kind, one, name), leaf)
            if leaf.is_leaf and leaf.grad is not None:
                self.add(Source("gradient", one, f"{name}.grad"), leaf.grad)

    def add(self, source: Source, tensor: torch.Tensor) -> None:
        """Note where a tensor lies."""
        place = place_of(tensor)
        self._found.setdefault(place, (source, tensor))
        self._in.setdefault(place[0], (source, tensor))
        if source.kind in ("tensor", "block") and tensor.requires_grad and tensor.is_leaf:
            self._leaves[id(source.of)] = source.of
        elif source.kind == "argument" and tensor.requires_grad and tensor.is_leaf:
            self._leaves[id(tensor)] = tensor

    def find(self, tensor: torch.Tensor) -> tuple[Source | None, torch.Tensor]:
        """Who owns a tensor, or the memory in which it lies; and the owner's tensor there."""
        place = place_of(tensor)
        found = self._found.get(place) or (self._in.get(place[0]) if place[0] else None)
        return (None, tensor) if found is None else found

    def moved(self) -> str:
        """The name of a tensor that lies elsewhere than it did when it was added; empty if there is none."""
        return next((source.name for place, (source, one) in self._found.items() if place_of(one) != place), "")

    def leaves(self) -> Iterator[Any]:
        """The tensors that may get gradients."""
        return iter(self._leaves.values())

    def gradients(self) -> dict[int, Any]:
        """Their gradients, by their ids."""
        return {id(one): leaf_of(one).grad for one in self.leaves()}

    def name(self, owner: Any) -> str:
        return self._names.get(id(owner), "an argument")
