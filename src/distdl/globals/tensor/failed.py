"""Errors that one worker may have alone: all workers find out whether they have the same."""

from __future__ import annotations

from distdl.globals.layouts.context import Context
from distdl.partition.meeting import meet
from distdl.tensors.modes import unobserved
from distdl.tensors.private_torch import StopRecomputationError, are_functorch_transforms_active, current_graph_task_id
from distdl.transport.communicator import CommunicationError


def meet_in(error: Exception, what: str, context: Context) -> None:
    """Wait until all workers have failed in the same call. Then each may raise its error and go on after it.

    Where it depends on the values or the layout of blocks whether torch raises, one worker may do so alone. It waits
    here for the others, who wait for it elsewhere, and that ends in an error on all of them, whose text says where each
    waits. A call that does not fail costs no message.

    Inside of a backward nothing is asked: the backward fails by this error, and its caller asks.

    Args:
        what: the call, as a text that is the same on every worker.
    Raises: CommunicationError if some workers have not failed.
    """
    inside_backward = current_graph_task_id() != -1
    if inside_backward or isinstance(error, (CommunicationError, StopRecomputationError)):
        return
    if are_functorch_transforms_active():
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
    """Whether torch has raised an error because of a value in a block, as where an integer is divided by 0."""
    return str(error) == "ZeroDivisionError"
