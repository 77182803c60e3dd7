"""A function that one worker runs, as one node of the autograd graph of every worker.

The same worker computes its derivative, in a graph apart from that of all workers. If it fails, every worker raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distdl.globals.layouts.context import Context
from distdl.globals.moving.conversion import gather_blocks
from distdl.partition.sharing import broadcast_value
from distdl.tensors.derivatives import Keeping, is_checkpointed, keeps_graph
from distdl.tensors.function import Function
from distdl.tensors.memory import as_dense

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # the stubs lack it
_RAISED = (ValueError, TypeError, IndexError, NotImplementedError, LinAlgError)
_KINDS: dict[str, type[Exception]] = {one.__name__: one for one in _RAISED}


class Apart:
    """A function that runs on one worker, with its arguments.

    Its own graph begins at the tensors that it takes, and ends at its results. The workers' graph leads past it, from
    the tensors that it :meth:`takes` to those that it :meth:`gives`, and is the same on all of them.

    Args:
        worker: the worker that runs the function.
        name: the name of the function, for errors.
    """

    def __init__(self, context: Context, worker: int, name: str) -> None:
        self.context, self.worker, self.name = context, worker, name
        self.links: list[torch.Tensor] = []  # expanded zeros of the taken shapes, in the workers' graph
        self.edges: list[GradientEdge] = []  # of the taken tensors, in the function's own graph
        self.again = False  # whether a derivative is differentiated, so that the same graph is used several times

    def takes(self, x: torch.Tensor, is_leaf: bool = False) -> torch.Tensor:
        """Return the tensor that the function gets for x, in the same memory.

        Args:
            is_leaf: whether x stands for a leaf. The function gets a leaf then, which it may not write in place.
        """
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        nothing = x.detach().new_zeros(()).expand(x.shape)
        self.links.append(_With.apply(nothing, x))
        is_leaf = is_leaf or x.is_leaf
        leaf = (x if is_leaf else nothing).detach().requires_grad_()
        own = leaf if is_leaf else _With.apply(x.detach(), leaf)
        self.edges.append(get_gradient_edge(own))
        return own

    def runs(self) -> Any:
        """Return the mode in which the function runs: it keeps saved tensors, which a checkpoint would recompute."""
        # detached: a result that its own node saves would keep that node, and the node the result
        return Keeping(lambda x: x.detach(), lambda x: x) if is_checkpointed() else nullcontext()

    def gives(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the results in the workers' graph. Workers that do not run the function pass zeros without volume."""
        if not (self.links and results):
            return results
        given: Sequence[torch.Tensor] = _Apart.apply(self, results, *self.links)
        return given

    def derivative(self, links: Sequence[torch.Tensor]) -> Apart:
        """Return the derivative as a function on the same worker, which takes the arguments of ``links``, too."""
        made = Apart(self.context, self.worker, self.name)
        self.again = made.again = self.again or torch.is_grad_enabled()
        made.links, made.edges = [*links], [*self.edges]
        return made

    def check(self, problem: Exception | None) -> None:
        """Raise the error of the derivative, if it failed on its worker, on every worker."""
        call, comm, everyone = f"the derivative of {self.name}", self.context.comm, self.context.everyone
        failure, failed = failure_of(problem), problem is not None
        if len(everyone) > 1 and not comm.imagined:
            owned = self.context.whole((1,), self.worker)
            flag = torch.full(owned.local, float(failed), device=self.links[0].device)
            if gather_blocks(flag, owned, call).item():  # one message to each worker; a text takes several
                failure = broadcast_value(comm, everyone, call, self.worker, failure)
        raise_failure(failure, call, self.worker)


def failure_of(problem: Exception | None) -> tuple[str, str] | None:
    """Return the kind and the text of an error, to be sent to other workers; None if there is none."""
    return None if problem is None else (type(problem).__name__, str(problem))


def raise_failure(failure: tuple[str, str] | None, call: str, worker: int) -> None:
    """Raise the error that one worker has told in a call; nothing if it told none."""
    if failure is not None:
        kind, text = failure
        raise _KINDS.get(kind, RuntimeError)(f"{call} of a global tensor, on worker {worker}: {text}")


class _With(Function):
    """Return a value, and pass its gradient to another tensor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, dy


class _Apart(Function):
    """The node of the workers' graph: from links to results. Torch refuses a forward-mode derivative of it."""

    @staticmethod
    def forward(ctx: Any, apart: Apart, results: Sequence[torch.Tensor], *links: torch.Tensor) -> Any:
        ctx.apart = apart
        ctx.outputs = [get_gradient_edge(y) if y.requires_grad else None for y in results]
        ctx.set_materialize_grads(False)  # for a result that nobody uses a derivative may not exist
        ctx.save_for_backward(*links)
        return tuple([y.detach() for y in results])

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        links = ctx.saved_tensors  # before any message: this is where a checkpoint recomputes its forward
        apart: Apart = ctx.apart
        derivative = apart.derivative(links)
        given = [(y, derivative.takes(dy)) for y, dy in zip(ctx.outputs, dys, strict=True) if dy is not None]
        known = [(y, dy) for y, dy in given if y is not None]  # empty on the other workers
        dxs: list[torch.Tensor | None] = [None] * len(links)
        problem = None
        try:
            if known:
                outputs, seeds = zip(*known, strict=True)
                again, kept = torch.is_grad_enabled(), apart.again or keeps_graph()
                found = torch.autograd.grad(outputs, apart.edges, seeds, kept, again, allow_unused=True)
                # dense, because the gradient of a table, which may be sparse, is added up over workers
                dxs = [None if dx is None else as_dense(dx) for dx in found]
        except Exception as error:
            problem = error
        apart.check(problem)
        results = [x.new_zeros(x.shape) if dx is None else dx for x, dx in zip(links, dxs, strict=True)]
        return None, None, *(derivative.gives(results) if torch.is_grad_enabled() else results)
