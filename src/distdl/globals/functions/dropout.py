"""Dropout and other layers that draw while training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.functions.distributions import between
from distdl.globals.functions.random import drawn, draws, next_draw, random_like, takes_generator
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, composite
from distdl.globals.views.aliasing import note_written, write_back
from distdl.globals.views.strides import keep_order
from distdl.ops.dropout import masked
from distdl.tensors.draws import Draws
from distdl.tensors.repeats import repeatable

_ALPHA = 1.7580993408473766  # the negative of what SELU tends to


def _dropping(
    name: str, batched: int | None = None, leading: int | None = None, alpha: bool = False
) -> Callable[..., Any]:
    """A handler of a dropout function.

    Args:
        batched: the number of dims of a tensor with a batch. One with fewer has no batch, and its first dim is drawn.
        leading: how many dims are drawn, beginning with the first; None for all.
        alpha: whether it is alpha dropout, which keeps mean and variance of what SELU returns.
    """

    @by_name
    def handler(
        func: Any,
        input: GlobalTensor,
        p: float = 0.5,
        training: bool = not alpha,
        inplace: bool = False,
        train: Any = None,
    ) -> Any:
        training = training if train is None else train  # the operators of torch call it train
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not training or p == 0:
            return input
        if leading == 2 and input.dim() < 2:
            raise RuntimeError(f"{name} needs a tensor of at least 2 dims; got {tuple(input.shape)}")
        dims = leading if leading is None or batched is None or input.dim() >= batched else 1
        return dropped(input, float(p), dims, alpha, inplace or func.__name__.endswith("_"), name)

    return handler


def dropped(
    x: GlobalTensor, p: float, leading: int | None, alpha: bool = False, inplace: bool = False, name: str = "dropout"
) -> GlobalTensor:
    r"""Set random elements of a tensor to zero and scale the others: :math:`y = x m / (1 - p)` with a random mask m.

    Args:
        leading: how many dims the mask has, beginning with the first; it is the same along the others. None for all.
        alpha: whether dropped elements become the limit of SELU instead, scaled to keep mean and variance.
        inplace: whether x is written and returned.
    """
    draw, block, layout = next_draw(x._context), block_of(x), x._layout
    mask = drawn(layout, draw, None, torch.bool, block.device, leading, p)
    scale, shift = (0.0 if p == 1 else 1 / (1 - p)), None
    if alpha:  # y = scale (x m + (m - 1) alpha) + scale alpha p
        scale = 0.0 if p == 1 else 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        shift = (mask.to(block.dtype) - 1 + p) * (_ALPHA * scale)
    if inplace:
        block.mul_(mask).mul_(scale)
        if shift is not None:
            block.add_(shift)
        note_written(x, name)
        return x
    # if a checkpoint repeats this call with other draws, the backward raises
    y = masked(block if x._context.own(Draws).repeats else repeatable(block), mask, scale)
    made = GlobalTensor._of(y if shift is None else y + shift, layout)
    keep_order((x,), made, dropped)
    return made


draws("dropout dropout_", "torch functional")(_dropping("dropout"))
draws("dropout1d", "functional")(_dropping("dropout1d", 3, 2))
draws("dropout2d", "functional")(_dropping("dropout2d", None, 2))
draws("dropout3d", "functional")(_dropping("dropout3d", 5, 2))
draws("feature_dropout feature_dropout_", "torch")(_dropping("feature_dropout", None, 2))
draws("alpha_dropout alpha_dropout_", "torch functional")(_dropping("alpha_dropout", alpha=True))
draws("feature_alpha_dropout feature_alpha_dropout_", "torch functional")(
    _dropping("feature_alpha_dropout", None, 2, alpha=True)
)


@draws("rrelu rrelu_", "torch functional")
@takes_generator
@by_name
def rrelu(
    func: Any,
    input: GlobalTensor,
    lower: float = 0.125,
    upper: float = 1 / 3,
    training: bool = False,
    inplace: Any = False,
) -> Any:
    """Leaky ReLU whose slope is drawn for each element while training, and is the mean slope otherwise."""
    inplace = bool(inplace) or func.__name__.endswith("_")
    if lower > upper:
        raise RuntimeError("Lower bound should be less than or equal to the upper bound")
    if not training:
        return functional.leaky_relu(input, (lower + upper) / 2, inplace=inplace)
    block = block_of(input)
    slope = random_like(input, between(lower, upper, input.dtype))
    y = block * torch.where(block.detach() <= 0, slope, torch.ones_like(slope))
    z = GlobalTensor._of(y, input._layout)
    return write_back(input, z, "rrelu_") if inplace else z


_gumbel_softmax = composite(functional.gumbel_softmax)


@draws("gumbel_softmax", "functional")
def gumbel_softmax(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Softmax of logits with Gumbel noise, as torch composes it."""
    return _gumbel_softmax(*args, **kwargs)
