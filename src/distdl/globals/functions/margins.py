"""Losses of margins between the classes of a sample: each sample is whole where its loss is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from distdl.globals.fallback import fall_back
from distdl.globals.functions.losses import reduction_of
from distdl.globals.functions.work import work_on
from distdl.globals.table import handles


@handles("multi_margin_loss multilabel_margin_loss", "functional")
def margin_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of one class for each sample, or of several, of which -1 is the end."""
    several = func is functional.multilabel_margin_loss

    def run(
        input: Any,
        target: Any,
        p: int = 1,
        margin: float = 1.0,
        weight: Any = None,
        size_average: Any = None,
        reduce: Any = None,
        reduction: str = "mean",
    ) -> Any:
        if p not in (1, 2):
            raise ValueError("only p == 1 and p == 2 supported")
        wanted = reduction_of(size_average, reduce, reduction)
        shape = input.shape if several else input.shape[:-1]
        known = input.dim() in (1, 2) and input.numel() and target.shape == shape and target.dtype is torch.int64
        same = weight is None or (weight.dtype is input.dtype and weight.shape == input.shape[-1:])
        if not (known and same and input.is_floating_point()):
            return fall_back(func, args, kwargs)  # (for torch's error, and what is empty)
        x, t = (input, target) if input.dim() == 2 else (input.unsqueeze(0), target.unsqueeze(0))
        operands, labels = [x, t], [("n", "c"), ("n", "c") if several else ("n",)]
        if weight is not None:
            operands.append(weight.detach())
            labels.append(("c",))

        def each(x: torch.Tensor, t: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
            if several:
                return functional.multilabel_margin_loss(x, t, reduction="none")
            return functional.multi_margin_loss(x, t, p, margin, weight, reduction="none")

        losses: Any = work_on(operands, labels, ("n",), adds=False)(each, operands, func.__name__)
        if wanted == "none":
            return losses if input.dim() == 2 else losses.squeeze(0)
        return losses.mean() if wanted == "mean" else losses.sum()

    if several:
        names = ("input", "target", "size_average", "reduce", "reduction")
        return run(**dict(zip(names, args, strict=False)), **kwargs)
    return run(*args, **kwargs)
