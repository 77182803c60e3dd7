"""What one worker computes, as one node of the autograd graph on every worker.

Its derivative is computed on that worker, too, apart from the graph that all have; if that raises, every worker raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distdl.globals.layouts.context import Context
from distdl.globals.moving.conversion import value_of
from distdl.partition.sharing import broadcast_value
from distdl.tensors.derivatives import Keeping, is_checkpointed, keeps_graph
from distdl.tensors.function import Function
from distdl.tensors.memory import as_dense

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # (the stubs lack it)
_RAISED = (ValueError, TypeError, IndexError, NotImplementedError, LinAlgError)
_KINDS: dict[str, type[Exception]] = {one.__name__: one for one in _RAISED}


class Apart:
    """A function that runs on one worker, and what it takes.

    Its own graph begins where it takes a tensor, and ends at its results. The workers' graph goes past it, from what it
    takes to what it :meth:`gives`, so that it looks the same on all of them.

    Args:
        worker: the one that runs it.
        name: of the function.
    """

    def __init__(self, context: Context, worker: int, name: str) -> None:
        self.context, self.worker, self.name = context, worker, name
        self.links: list[torch.Tensor] = []  # in the workers' graph, of the shapes of what is taken, without memory
        self.edges: list[GradientEdge] = []  # where it was taken, in the function's own graph
        self.again = False  # whether derivatives are themselves differentiated: through the same graph, several times

    def takes(self, x: torch.Tensor, is_leaf: bool = False) -> torch.Tensor:
        """What the function gets in the place of x: the same memory.

        Args:
            is_leaf: whether x stands for a leaf. (One stays one: it may not be written in place.)
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
        """Where the function runs. It keeps what its derivative needs, which a checkpoint would recompute alone."""
        # (a result that its own node saves would keep the node, which keeps it: so it is detached)
        return Keeping(lambda x: x.detach(), lambda x: x) if is_checkpointed() else nullcontext()

    def gives(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results in the workers' graph. On the other workers they are zeros, without volume."""
        if not (self.links and results):
            return results
        given: Sequence[torch.Tensor] = _Apart.apply(self, results, *self.links)
        return given

    def derivative(self, links: Sequence[torch.Tensor]) -> Apart:
        """The function's derivative, which runs on the same worker: it takes the function's arguments, too.

        Args:
            links: to these arguments.
        """
        made = Apart(self.context, self.worker, self.name)
        self.again = made.again = self.again or torch.is_grad_enabled()
        made.links, made.edges = [*links], [*self.edges]
        return made

    def check(self, problem: Exception | None) -> None:
        """Raises: on every worker, what the derivative has raised on the one."""
        call, comm, everyone = f"the derivative of {self.name}", self.context.comm, self.context.everyone
        failure, failed = failure_of(problem), problem is not None
        if len(everyone) > 1 and not comm.imagined:
            owned = self.context.whole((1,), self.worker)
            flag = torch.full(owned.local, float(failed), device=self.links[0].device)
            if value_of(flag, owned, call).item():  # (one message for each worker; a text would take several)
                failure = broadcast_value(comm, everyone, call, self.worker, failure)
        raise_failure(failure, call, self.worker)


def failure_of(problem: Exception | None) -> tuple[str, str] | None:
    """The kind and the text of an error that one worker has raised, to be sent to the others; None if it has not."""
    return None if problem is None else (type(problem).__name__, str(problem))


def raise_failure(failure: tuple[str, str] | None, call: str, worker: int) -> None:
    """Raises: on every worker, what the one has raised, if it has."""
    if failure is not None:
        kind, text = failure
        raise _KINDS.get(kind, RuntimeError)(f"{call} of a global tensor, on worker {worker}: {text}")


class _With(Function):
    """A value that has the gradient of another tensor."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, dy


class _Apart(Function):
    """The results of a function that has run apart. (It has no forward-mode derivative: torch says so.)"""

    @staticmethod
    def forward(ctx: Any, apart: Apart, results: Sequence[torch.Tensor], *links: torch.Tensor) -> Any:
        ctx.apart = apart
        ctx.outputs = [get_gradient_edge(y) if y.requires_grad else None for y in results]
        ctx.set_materialize_grads(False)  # (a derivative may not exist for a result that nobody uses)
        ctx.save_for_backward(*links)
        return tuple([y.detach() for y in results])

    @staticmethod
    def backward(ctx: Any, *dys: torch.Tensor | None) -> tuple[Any, ...]:
        links = ctx.saved_tensors  # before any message: this is where a checkpoint recomputes its forward
        apart: Apart = ctx.apart
        derivative = apart.derivative(links)
        given = [(y, derivative.takes(dy)) for y, dy in zip(ctx.outputs, dys, strict=True) if dy is not None]
        known = [(y, dy) for y, dy in given if y is not None]  # (none on the other workers)
        dxs: list[torch.Tensor | None] = [None] * len(links)
        problem = None
        try:
            if known:
                outputs, seeds = zip(*known, strict=True)
                again, kept = torch.is_grad_enabled(), apart.again or keeps_graph()
                found = torch.autograd.grad(outputs, apart.edges, seeds, kept, again, allow_unused=True)
                # (a sparse one, as of a table, is added up with those of other workers)
                dxs = [None if dx is None else as_dense(dx) for dx in found]
        except Exception as error:
            problem = error
        apart.check(problem)
        results = [x.new_zeros(x.shape) if dx is None else dx for x, dx in zip(links, dxs, strict=True)]
        return None, None, *(derivative.gives(results) if torch.is_grad_enabled() else results)
