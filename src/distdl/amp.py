"""Mixed precision: a scaler of gradients on which all workers agree."""

from __future__ import annotations

from typing import Any

import torch

from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.workers.worlds import world


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for a model whose parameters lie on several workers.

    A gradient that overflows on one worker skips the step on all of them, and lowers the scale of all. torch's own sees
    the gradients of its worker only, so weights and scales would drift apart in silence. Every worker makes one, and
    calls its methods in the same order, also where it stores no parameter.

    Args:
        device, init_scale, growth_factor, backoff_factor, growth_interval, enabled: those of torch; the same on every
            worker.
        P: the workers that agree; by default those of :func:`distdl.world`.
    Source: Micikevicius et al., Mixed precision training, arXiv:1710.03740.
    """

    @checks_arguments
    def __init__(self, device: str = "cuda", *args: Any, P: Partition | None = None, **kwargs: Any) -> None:
        super().__init__(device, *args, **kwargs)
        self._P = P

    def _unscale_grads_(self, *args: Any, **kwargs: Any) -> dict[torch.device, torch.Tensor]:
        found = super()._unscale_grads_(*args, **kwargs)
        own = any(bool(one.item()) for one in found.values())
        overflow = float((self._P or world()).allreduce_data(int(own), "max"))
        # a worker without gradients has found nothing, and torch would refuse to go on without an entry
        devices = list(found) or [torch.device(self._device)]
        return {device: torch.full((), overflow, dtype=torch.float32, device=device) for device in devices}
