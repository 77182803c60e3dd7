"""What one worker computes, as one node of the autograd graph on every worker.

Its derivative is computed on that worker, too, apart from the graph that all have; if that raises, every worker raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distdl.globals.context import Context
from distdl.partition.sharing import broadcast_value
from distdl.tensors.derivatives import NONE, Keeping, is_checkpointed, keeps_graph
from distdl.tensors.function import Function
from distdl.tensors.memory import as_dense

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # (the stubs lack it)
_RAISED = (ValueError, TypeError, IndexError, NotImplementedError, LinAlgError)
_KINDS: dict[str, type[Exception]] = {one.__name__: one for one in _RAISED}


class Failure(NamedTuple):
    """What one worker raised, as the others are told of it."""

    kind: str
    message: str

    @classmethod
    def of(cls, problem: Exception) -> Failure:
        return cls(type(problem).__name__, str(problem))

    def error(self, call: str, worker: int) -> Exception:
        """The error that every worker raises."""
        return _KINDS.get(self.kind, RuntimeError)(f"{call} of a global tensor, on worker {worker}: {self.message}")


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
        leaf = x.detach() if is_leaf else nothing.detach()
        leaf.requires_grad_()
        own = leaf if is_leaf else _With.apply(x.detach(), leaf)
        self.edges.append(get_gradient_edge(own))
        return own

    def runs(self) -> Any:
        """Where the function runs. It keeps what its derivative needs, which a checkpoint would recompute alone."""
        return Keeping(partial(_cells), _same) if is_checkpointed() else nullcontext()

    def gives(self, results: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The results in the workers' graph. On the other workers they are zeros, without volume."""
        if not (self.links and results):
            return results
        given: Sequence[torch.Tensor] = _Apart.apply(self, results, *self.links)
        return given

    def differentiate(
        self, outputs: Sequence[GradientEdge | None], dys: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The derivatives by what the function took; None where a result does not depend on it.

        Raises: on every worker, what torch raises on the one.
        """
        found: list[torch.Tensor | None] = [None] * len(self.edges)
        failure, again = None, torch.is_grad_enabled()
        if self.context.me == self.worker:
            known = [(y, dy) for y, dy in zip(outputs, dys, strict=True) if y is not None]
            try:
                if known:
                    ys, dys = zip(*known, strict=True)
                    kept = self.again or keeps_graph()
                    listed = torch.autograd.grad(ys, self.edges, dys, kept, again, allow_unused=True)
                    # (a sparse one, as of a table, is added up with those of other workers)
                    found = [None if dx is None else as_dense(dx) for dx in listed]
            except Exception as problem:
                failure = Failure.of(problem)
        self._agree(failure)
        return found

    def _agree(self, failure: Failure | None) -> None:
        """Raise on every worker if the one has failed."""
        context, call = self.context, f"the derivative of {self.name}"
        failed = failure is not None
        if len(context.everyone) > 1 and not context.comm.imagined:
            owned, needed = context.whole((1,), self.worker), context.everywhere((1,))
            flag = torch.full(owned.local, float(failed), device=self.links[0].device)
            failed = bool(context.moving(owned, needed, flag.dtype, NONE, call).execute(flag).item())
            if failed:
                failure = Failure(*broadcast_value(context.comm, context.everyone, call, self.worker, failure))
        if failure is not None:
            raise failure.error(call, self.worker)


def _cells(x: torch.Tensor) -> torch.Tensor:
    return x.detach()  # (a result that its own node saves would keep the node, which keeps it)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


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
        apart.again = apart.again or torch.is_grad_enabled()
        derivative = Apart(apart.context, apart.worker, apart.name)
        derivative.links, derivative.edges, derivative.again = [*links], [*apart.edges], apart.again
        outputs = [y for y, dy in zip(ctx.outputs, dys, strict=True) if dy is not None]
        found = apart.differentiate(outputs, [derivative.takes(dy) for dy in dys if dy is not None])
        dxs = [link.new_zeros(link.shape) if dx is None else dx for dx, link in zip(found, links, strict=True)]
        return None, None, *(derivative.gives(dxs) if torch.is_grad_enabled() else dxs)
