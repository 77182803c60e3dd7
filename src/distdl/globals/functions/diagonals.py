"""Diagonals of matrices, and triangles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distdl.globals.functions.shapes import shape_of
from distdl.globals.operands import block_of
from distdl.globals.table import handles
from distdl.globals.tensor import GlobalTensor


@handles("tril triu", "torch Tensor")
def triangle(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """A triangle of the last two dims, the rest being zero."""

    def run(input: Any, diagonal: int = 0) -> GlobalTensor:
        shape_of(func, input, (diagonal,), {})  # (for torch's error)
        layout = input._layout
        (row, _), (column, _) = layout.box[-2:]
        return GlobalTensor._of(func(block_of(input), diagonal + row - column), layout)

    return run(*args, **kwargs)
