"""Sums of what several workers have sent, in an order of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

T = TypeVar("T")


def fold(items: Sequence[T], combine: Callable[[T, T], T]) -> T:
    """Combine items pairwise in a balanced tree, keeping their order: rounding errors grow with the tree's depth."""
    while len(items) > 1:
        items = _fold_once(items, combine)
    return items[0]


def fold_into(y: torch.Tensor, terms: Sequence[torch.Tensor]) -> None:
    """Add tensors up in a balanced tree and write the sum into y, which may be one of them."""
    while len(terms) > 2:
        terms = _fold_once(terms, torch.add)
    if len(terms) == 2:
        torch.add(*terms, out=y)
    else:
        y.copy_(terms[0])


def _fold_once(items: Sequence[T], combine: Callable[[T, T], T]) -> Sequence[T]:
    pairs = [combine(items[i], items[i + 1]) for i in range(0, len(items) - 1, 2)]
    return pairs + list(items[len(items) - len(items) % 2 :])


def begin_with(total: torch.Tensor, x: torch.Tensor | None) -> None:
    """Begin a sum with x, or with nothing."""
    if x is None:
        total.zero_()
    else:
        total.copy_(x)
