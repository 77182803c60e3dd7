"""What has failed on this worker, and may not have failed on the others."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import _StopRecomputationError

from distdl.globals.layouts.context import Context
from distdl.partition.meeting import meet
from distdl.tensors.modes import unobserved
from distdl.transport.communicator import CommunicationError


def meet_in(error: Exception, what: str, context: Context) -> None:
    """Find out that something has failed on every worker, after the same exchanges. Then all of them may go on.

    Where it depends on the values or the layout of blocks whether torch raises, one worker may do so alone. It waits
    here for the others, who wait for it elsewhere. Sooner or later that is an error on all of them, and its text says
    where each waits. (Nothing is asked where nothing fails.)

    Args:
        what: the same text on every worker.
    Raises: CommunicationError, if some have not failed.
    """
    inside = torch._C._current_graph_task_id() != -1  # (of a backward, which fails by this one)
    if inside or isinstance(error, (CommunicationError, _StopRecomputationError)):
        return
    if torch._C._are_functorch_transforms_active():
        return
    text = f"{what} that has failed ({type(error).__name__}: {error})"
    context.comm.where = text
    try:
        with unobserved():
            meet(context.comm, context.everyone, f"{what} that has failed", shown=text)
    except CommunicationError as apart:
        apart.has_own_cause = True
        raise apart from error


def depends_on_values(error: RuntimeError) -> bool:
    """Whether torch has raised an error because of a value in a block: an integer has been divided by 0."""
    return str(error) == "ZeroDivisionError"
