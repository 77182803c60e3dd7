"""Modes that see each operator of torch: those of others are not to see what we compute for ourselves."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack


def unobserved() -> AbstractContextManager[Any]:
    """A context for what a worker computes once (set-ups), or as messages arrive: no mode of others sees it.

    A selective checkpoint counts the operators of its forward, and hands out their results when it recomputes that. Of
    set-ups there are none then, and which of two workers copies a message differs from time to time.
    """
    if not torch._C._len_torch_dispatch_stack():
        return _NOTHING
    own = any(type(one).__module__.startswith("distdl.") for one in _get_current_dispatch_mode_stack())
    return _NOTHING if own else _disable_current_modes()


_NOTHING: AbstractContextManager[Any] = nullcontext()
