"""Function: the base of our autograd functions."""

from __future__ import annotations

from typing import Any

import torch


class Function(torch.autograd.Function):
    """``torch.autograd.Function`` whose ``apply`` costs less.

    torch's own looks through its arguments for tensors of ``torch.func`` transforms that have ended: nine calls of
    Python, some 2 us. What moves between workers or is computed on blocks is none (an agreement refuses it).
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]  # (of a base in C)

    @staticmethod
    def entered_into(node: Any) -> Any:
        """Of a node of the graph: the context into which its results have entered, as copies of what every worker has.

        None if they are no such copies.
        """
        return None
