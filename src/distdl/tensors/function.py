"""Function: the base of our autograd functions, and how those whose backward is differentiated get it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import torch

from distdl.tensors.modes import is_selective, unobserved


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
        if torch._C._are_functorch_transforms_active():
            raise TransformError
        if torch._C._len_torch_dispatch_stack() and not cls.observed and is_selective():
            with unobserved():
                return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]  # as below
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]  # the base is written in C

    @staticmethod
    def entered_into(node: Any) -> Any:
        """Of a node of the graph: the communicator over whose workers its results have entered, as copies of what every
        worker has, or may have. Each worker gets a part of their gradient. None if they are no such copies.
        """
        return None


class BlockFunction(Function):
    """A function of a layer, or of an operator: what it gives are blocks, or copies of which each has its gradient."""

    @staticmethod
    def adds_parts(node: Any) -> bool:
        """Of a node of the graph: whether its results may be copies of one tensor, of whose gradient it adds up the
        parts that the workers have. (That of what one worker alone has may be the whole one.)
        """
        return False


class Given(Enum):
    """What layers and primitives give: blocks; what may be copies that stand for parts of a sum; or what worker 0 alone
    has, as the value of a loss, where the others have zeros or nothing.
    """

    BLOCKS, PARTS, ALONE = range(3)


_GIVEN = "distdl: given by a layer"
_any_given = False


def note_given(y: Any, args: Sequence[Any], kind: Given) -> Any:
    """y, what a layer or a primitive gives: its graph knows that, also where torch's functions alone have made it.

    Args:
        args: that it takes. What it gives as it is stays what it was.
        kind: what it gives, the same on every worker. (Of a module in it, what that has said.)
    """
    global _any_given
    _any_given = True
    for one in y if isinstance(y, tuple) else (y,):
        node: Any = one.grad_fn if isinstance(one, torch.Tensor) and not any(one is x for x in args) else None
        if node is not None:
            node.metadata.setdefault(_GIVEN, kind)
    return y


def any_given() -> bool:
    """Whether a layer or a primitive has given something, on any worker of this process."""
    return _any_given


def given_by(node: Any) -> Given | None:
    """What a node of the graph gives, if a layer or an operator has given that, but of global tensors."""
    noted: Given | None = node.metadata.get(_GIVEN)
    kind = getattr(type(node), "_forward_cls", None)  # an autograd function in Python has it
    if noted is None and isinstance(kind, type) and issubclass(kind, BlockFunction):
        return Given.PARTS if kind.adds_parts(node) else Given.BLOCKS
    return noted


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
