"""A forward as one node of autograd: the gradients come from a graph of its own, or from a line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.programs.halves import Emptied, Halves, Strides, laid
from distdl.programs.randomness import States
from distdl.programs.recorder import Recorder
from distdl.programs.structures import versions_of
from distdl.programs.worker import all_fit, below_autograd
from distdl.tensors.function import Function
from distdl.tensors.recorders import here
from distdl.transport.communicator import Communicator

Gradients = Sequence[torch.Tensor | None]
_keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
_MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
    "{} that a model compiled by distdl.compile needs in its backward, as an input, a parameter or a result, is at "
    "version {}; expected version {}"
)
next_node: Callable[[], int] = getattr(torch.autograd, "_get_sequence_nr")  # noqa: B009  # torch does not export it
_OTHERWISE = "the loss reads other results than in the recordings, or reads them otherwise"
DIFFERENTIATED = "its backward is differentiated (create_graph=True)"


class Node(Function):
    """A forward as one node.

    Its forward takes what gives the gradients of the tensors behind, out of those of the results; the results; and
    whether each of them requires a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        gradients: Callable[[Gradients], Gradients],
        results: Sequence[torch.Tensor],
        requires: Sequence[bool],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_NOTHING)  # a second backward gets torch's own error
        made = [one.detach() for one in results]
        ctx.mark_non_differentiable(*[one for one, needs in zip(made, requires, strict=True) if not needs])
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *seeds: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        return None, None, None, *ctx.gradients(seeds)


_NOTHING = torch.empty(0, device="cpu")


class Graph:
    """A forward whose graph nobody else sees.

    Args:
        results: of the forward.
        inner: the leaves of the graph.
        outer: of each of these, the tensor that gets its gradient: for a parameter, the same.
    """

    def __init__(
        self, results: Sequence[torch.Tensor], inner: Sequence[torch.Tensor], outer: Sequence[torch.Tensor]
    ) -> None:
        self._results, self._inner, self._outer = results, inner, outer
        self._stays = False  # whether the graph of a gradient goes on in this one

    def joined(self) -> tuple[torch.Tensor, ...]:
        """The results as those of one node, whose gradients go to the outer tensors."""
        requires = [one.requires_grad for one in self._results]
        joined: tuple[torch.Tensor, ...] = Node.apply(self.gradients, self._results, requires, *self._outer)
        return joined

    def gradients(self, seeds: Gradients) -> Gradients:
        """Those of the leaves. In a backward that is differentiated, they can be differentiated, too."""
        again = torch.is_grad_enabled()
        self._stays = self._stays or again
        given = [(y, dy) for y, dy in zip(self._results, seeds, strict=True) if dy is not None and y.requires_grad]
        own = [dy.detach().requires_grad_(again and dy.requires_grad) for _, dy in given]
        found: Gradients = torch.autograd.grad(
            [y for y, _ in given],
            self._inner,
            own,
            retain_graph=_keeps_graph() or self._stays,
            create_graph=again,
            allow_unused=True,
        )
        there = [one for one in found if one is not None and one.requires_grad]
        if not there:
            return found
        more = [(mine, dy) for mine, (_, dy) in zip(own, given, strict=True) if mine.requires_grad]
        graph = Graph(there, [*self._inner, *(one for one, _ in more)], [*self._outer, *(one for _, one in more)])
        graph._stays = True
        joined = iter(graph.joined())
        return [next(joined) if one is not None and one.requires_grad else one for one in found]


class Recorded(Graph):
    """The same, of which the first backward is recorded.

    Args:
        recorder: has recorded the forward.
        count: how many arguments that has.
        finish: is called behind the backward, with the values of gradients, the place of the backward's first call, and
            the strides of the gradients of results.
    """

    def __init__(
        self,
        results: Sequence[torch.Tensor],
        inner: Sequence[torch.Tensor],
        outer: Sequence[torch.Tensor],
        recorder: Recorder,
        count: int,
        finish: Callable[[list[Any], int, list[Strides]], None],
    ) -> None:
        super().__init__(results, inner, outer)
        self._recorder: Recorder | None = recorder
        self._count, self._finish = count, finish

    def gradients(self, seeds: Gradients) -> Gradients:
        recorder, self._recorder = self._recorder, None
        if recorder is None or here.recorder is not None:
            return super().gradients(seeds)
        begin, strides = len(recorder.calls), [None if one is None else one.stride() for one in seeds]
        if torch.is_grad_enabled():
            recorder.problem(DIFFERENTIATED)
            self._finish([], begin, strides)
            return super().gradients(seeds)
        # copied, since a gradient may share memory with a value that was recorded
        seeds = [None if one is None else laid(one, one.stride()) for one in seeds]
        for place, one in enumerate(seeds):
            if one is not None:
                recorder.argument(self._count + place, one, f"gradient of result {place}")
        states = States()
        with recorder.recording():
            found = super().gradients(seeds)
            values = [None if one is None else recorder.result_of(one) for one in found]
        advanced = states.advanced()
        if advanced:
            recorder.problem(f"{advanced} random state advances in its backward, and no operator explains it")
        self._finish(values, begin, strides)
        return found


class Replayed:
    """The gradients that the line of a backward gives.

    Args:
        saved: what it reads.
        comm: of the workers that replay together; None if there is none.
        again: computes the forward as it is, for a backward that the line cannot do; it takes the reason. That sends
            messages, so all workers do it if one has to.
        compare: is called with the gradients of results, and with those that the line gives; None if nobody compares.
    """

    def __init__(
        self,
        halves: Halves,
        saved: list[Any],
        comm: Communicator | None,
        again: Callable[[str], Graph],
        compare: Callable[[Gradients, Gradients], None] | None,
    ) -> None:
        self._halves, self._saved, self._comm, self._again = halves, saved, comm, again
        self._compare = compare
        self._tensors = [one for one in saved if isinstance(one, torch.Tensor)]
        self._versions = versions_of(self._tensors)
        self._graph: Graph | None = None

    def gradients(self, seeds: Gradients) -> Gradients:
        for one, now, version in zip(self._tensors, versions_of(self._tensors), self._versions, strict=True):
            if now != version:
                raise RuntimeError(_MODIFIED.format(list(one.shape), now, version))
        given = None if torch.is_grad_enabled() else self._halves.fitting(seeds)
        if self._halves.asks and not all_fit(self._comm, given is not None):
            given = None
        if given is None:
            if self._graph is None:
                reason = DIFFERENTIATED if torch.is_grad_enabled() else _OTHERWISE
                self._graph = self._again(reason)
            return self._graph.gradients(seeds)
        arguments = Emptied(enumerate([*given, *self._saved]))
        if not _keeps_graph():
            self._saved, self._tensors, self._versions = [], [], []
        with below_autograd():
            found: Gradients = self._halves.backward(arguments)
        if self._compare is not None:
            self._compare(seeds, found)
        return found


def unfit_graph(
    results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], known: Sequence[torch.Tensor], first: int
) -> str:
    """Why the graph of a forward cannot be one node; empty if it can.

    Args:
        tensors: the arguments: what is behind them does not count.
        known: leaves that it may have.
        first: autograd's number of the first node that may belong to it.
    """
    seen: set[Any] = {(one.grad_fn, one.output_nr) for one in tensors}
    leaves = {id(one) for one in (*tensors, *known)}
    left: list[Any] = [(one.grad_fn, one.output_nr) for one in results]
    while left:
        edge = left.pop()
        node = edge[0]
        if node is None or edge in seen or node in seen:
            continue
        seen.add(node)
        kind = type(node).__name__
        applied: Any = getattr(getattr(node, "call", None), "function", node)  # a user's function on global tensors
        if getattr(applied, "__name__", kind).startswith("CheckpointFunction"):
            return "a checkpoint in it is reentrant; use_reentrant=False is not"
        if id(node.variable) not in leaves if kind == "AccumulateGrad" else node._sequence_nr() < first:
            if kind == "AccumulateGrad" and not node.variable.numel():  # of a random layer, as its anchor
                return "a checkpoint in it draws random numbers"
            return "it reads a tensor that requires a gradient, and is no argument or parameter of it"
        left += node.next_functions
    return ""
