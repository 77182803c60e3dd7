"""``torch.einsum``: products that an equation of labels describes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import torch

from distdl.globals.functions.products import contract
from distdl.globals.rules.work import check_shapes
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import handles


@handles("einsum", "torch")
def einsum(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Contract operands in any layouts. torch has made an equation of labels that are given as lists."""
    equation, *operands = args
    labels, out = _labelled(equation, tuple(one.dim() for one in operands))
    check_shapes(_einsum(equation), operands, compares=True)
    if any(len(set(own)) < len(own) for own in labels):
        diagonals = [_without_repeats(one, own) for one, own in zip(operands, labels, strict=True)]
        operands, labels = [one for one, _ in diagonals], tuple(own for _, own in diagonals)
        equation = _equation_of(labels, out)
    if len(operands) == 1 and len(out) == len(labels[0]) and type(operands[0]) is GlobalTensor:
        # nothing is summed over, and torch returns a view
        return operands[0].permute([labels[0].index(label) for label in out])
    return contract(_einsum(equation), operands, labels, out, "einsum")


def _without_repeats(operand: Any, labels: Sequence[str]) -> tuple[Any, tuple[str, ...]]:
    """The diagonal of the dims of an operand that share a label, and the labels of the dims of the result."""
    own = list(labels)
    while len(set(own)) < len(own):
        first, second = next((i, j) for j in range(len(own)) for i in range(j) if own[i] == own[j])
        operand = operand.diagonal(0, first, second)
        own = [label for dim, label in enumerate(own) if dim not in (first, second)] + [own[first]]
    return operand, tuple(own)


def _equation_of(labels: Sequence[Sequence[Hashable]], out: Sequence[Hashable]) -> str:
    """The equation with one letter for each label."""
    letters = dict(zip(dict.fromkeys(label for own in (*labels, out) for label in own), _LETTERS, strict=False))
    left, right = (",".join("".join(letters[label] for label in own) for own in terms) for terms in (labels, [out]))
    return f"{left}->{right}"


_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@lru_cache(1024)
def _einsum(equation: str) -> Callable[..., torch.Tensor]:
    """torch's einsum with this equation: the same object for the same equation, as caches of checks need it."""
    return lambda *blocks: torch.einsum(equation, *blocks)


@lru_cache(1024)
def _labelled(equation: str, ranks: tuple[int, ...]) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """The labels of each operand of an equation, and those of the result. A dim in ``...`` has its place as label.

    Args:
        ranks: the number of dims of each operand.
    Raises: RuntimeError if there are more or fewer operands than terms.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise RuntimeError(f"einsum(): {len(terms)} operands stand in the equation {equation!r}; got {len(ranks)}")
    hidden = max(
        (rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True) if "..." in term),
        default=0,
    )

    def expand(term: str, more: int) -> tuple[str, ...]:
        before, dots, behind = term.partition("...")
        return (*before, *(f".{place}" for place in range(more, 0, -1) if dots), *behind)

    labels = tuple(expand(term, rank - len(term.replace("...", ""))) for term, rank in zip(terms, ranks, strict=True))
    if arrow:
        return labels, expand(right, hidden)
    letters = left.replace(",", "").replace(".", "")
    once = sorted({one for one in letters if letters.count(one) == 1})
    return labels, (*expand("..." if hidden else "", hidden), *once)
