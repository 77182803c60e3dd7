"""Function: the base of our autograd functions, and how those whose backward is differentiated get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.tensors.modes import is_selective, unobserved
from distdl.tensors.private_torch import are_functorch_transforms_active, len_torch_dispatch_stack


class TransformError(RuntimeError):
    """What is split over workers has met a tensor that a transform of ``torch.func`` has wrapped."""

    def __init__(self, text: str = "") -> None:
        super().__init__(
            text
            or "torch.vmap and the transforms of torch.func do not work here with what is split over workers (a mask "
            "made by vmap, as in some language models, too): batched and wrapped tensors have no blocks. Write the "
            "batch as a dim, or use torch.autograd.grad and torch.autograd.functional"
        )


class Function(torch.autograd.Function):
    """``torch.autograd.Function`` whose ``apply`` costs less.

    torch's own looks through its arguments for tensors of ``torch.func`` transforms that have ended: nine calls of
    Python, some 2 us. What moves between workers or is computed on blocks is none (an agreement refuses it).

    Raises: TransformError inside such a transform.
    """

    observed = False
    """Whether a selective checkpoint sees the operators in it, and may save what they give. Then none of them may write
    into what another one gives, nor receive a message."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if are_functorch_transforms_active():
            raise TransformError
        if len_torch_dispatch_stack() and not cls.observed and is_selective():
            with unobserved():
                return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]  # as below
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]  # the base is written in C

    enters = False
    """Whether its results are this worker's copies of what every worker has: of the gradient, each gets a part."""


def gradients_of(
    function: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
    dy: torch.Tensor,
) -> list[torch.Tensor | None]:
    """The gradients of a function by those of its tensors that are wanted; they can be differentiated.

    Each is that of this function alone, also where one of the tensors follows from another or is the same.
    """
    given = [torch.ops.aten.alias(x) if one and x is not None else x for x, one in zip(tensors, wanted, strict=True)]
    inputs = [x for x, one in zip(given, wanted, strict=True) if one and x is not None]
    found = iter(torch.autograd.grad(function(*given), inputs, dy, create_graph=True))
    return [next(found) if one else None for one in wanted]
