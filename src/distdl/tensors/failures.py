"""What a backward that has failed leaves behind.

Torch keeps the nodes that it would have come to, and what these have saved, in a queue of the thread, until a later
backward of this thread comes to them. If the thread ends before, they go as it ends, without Python's lock: if Python
is about to end then, the process is aborted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from distdl.tensors.modes import unobserved
from distdl.tensors.private_torch import current_graph_task_id


@contextmanager
def forgetting() -> Iterator[None]:
    """A context for a backward: if it fails, nothing of it is kept."""
    try:
        yield
    except BaseException:
        forget_failed()
        raise


def forget_failed() -> None:
    """Let this thread forget the backwards that have failed in it. Nothing, inside of another backward."""
    if current_graph_task_id() != -1:
        return
    leaf, oldest = _OLDEST
    # torch takes the newest nodes first, so before it comes to this oldest one it drops all nodes of backwards that
    # have ended. No gradient is passed, as torch would compare it by means of sympy, whose import takes 0.4 s.
    with unobserved(), torch.inference_mode(False):
        torch.autograd.grad(oldest, leaf, retain_graph=True)


def _oldest() -> tuple[torch.Tensor, torch.Tensor]:
    """A leaf, and the result of a node that is older than all others: each thread numbers its own from 0."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def make() -> None:
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        found.append((leaf, torch.ops.aten.alias(leaf)))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    return found[0]


_OLDEST = _oldest()
