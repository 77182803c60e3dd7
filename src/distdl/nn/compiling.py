"""What ``torch.compile`` does with distdl's modules: it leaves them uncompiled, as a graph break.

A module agrees with other workers and reads memory by address, which cannot be traced. ``torch.compiler.disable`` would
do the same, but it imports the compiler (1.6 s) and costs 0.3 us in every call. The way here costs nothing unless
something is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_frames = torch._C._dynamo.eval_frame
REASON = "workers agree and exchange messages inside, which torch cannot trace; distdl.compile can record such a step"


def leave_uncompiled(forward: Callable[..., Any]) -> None:
    """Mark a function, so that the compiler neither traces it nor compiles what it calls."""
    skip = _frames._FrameAction.SKIP
    _frames.set_code_exec_strategy(forward.__code__, _frames._FrameExecStrategy(skip, skip))
    marked: Any = forward
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, REASON
