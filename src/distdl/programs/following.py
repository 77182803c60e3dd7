"""Replays that are followed: by a trace, a ledger or a profile, which name the modules of what is done."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from distdl.tensors.private_torch import profiler_enabled
from distdl.workers.attribution import opened


def is_followed() -> bool:
    """Whether anybody asks for the modules of what this thread does."""
    return bool(opened.here) or profiler_enabled()


def follow(modules: Mapping[str, torch.nn.Module]) -> Callable[[str], None]:
    """What a replay calls as it comes to another module, or outside of all of them.

    Args:
        modules: of the step, by their paths.
    """
    told = [attribution.replay() for attribution in opened.here]

    def comes_to(path: str) -> None:
        for tell in told:
            tell(modules.get(path))

    return comes_to
