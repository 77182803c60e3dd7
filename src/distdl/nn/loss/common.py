"""What the losses have in common."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distdl.agreement import Headers
from distdl.nn.module import Module
from distdl.ops.loss import ABSENT
from distdl.partition import Partition
from distdl.tensors.connection import outside, zeros_on


def check_reduction(kind: str, reduction: str, valid: tuple[str, ...]) -> None:
    """Raises: ValueError for a reduction that the loss of this name does not have."""
    if reduction not in valid:
        raise ValueError(f"{kind} has the reductions {', '.join(valid)}; got {reduction!r}")


def or_absent(weight: torch.Tensor | None) -> torch.Tensor:
    """The weight, or what stands for one that is not given: so every worker agrees on as many tensors."""
    return ABSENT if weight is None else weight


def is_given(headers: Headers, P: Partition, kind: str, what: str, number: int) -> bool:
    """Whether the workers of P have a weight of this kind, as the extra integer of this number says. (A shape does not
    say it: that of a block without elements may be any.)

    Raises: ValueError if some have one and others have none.
    """
    given = headers.extras(P)[..., number].ravel().astype(bool)
    if given.all() or not given.any():
        return bool(given[0])
    with_one, without = (int(P.workers.flat[int(place)]) for place in (given.argmax(), given.argmin()))
    raise ValueError(
        f"{kind} needs a {what} on all workers or on none; worker {with_one} has one and worker {without} has none"
    )


def alone(reduction: str) -> Any:
    """What a worker outside returns: its (empty) input, or 0. It depends on the target, too."""
    return partial(_alone, reduction)


def _alone(reduction: str, x: torch.Tensor, target: Any, *weights: torch.Tensor) -> torch.Tensor:
    y = x if reduction == "none" else x.sum()
    if isinstance(target, torch.Tensor) and target.requires_grad:
        y = y + zeros_on(target, ()).to(y.dtype)
    return outside(y)


def finished(loss: torch.Tensor, reduction: str) -> torch.Tensor:
    """The loss, such that ``backward()`` may be called on it even if nothing that it depends on requires a gradient."""
    if reduction == "none" or loss.requires_grad or not torch.is_grad_enabled():
        return loss
    if not (loss.is_floating_point() or loss.is_complex()):
        return loss
    return loss + torch.empty(0, dtype=loss.dtype, device=loss.device, requires_grad=True).sum()


def described(loss: Module) -> str:
    """The ``extra_repr`` of a loss: its options, and the shapes of its weights."""
    weights = [f"{name}: {list(one.shape)}" for name, one in loss.named_buffers()]
    return ", ".join([Module.extra_repr(loss), *weights])
