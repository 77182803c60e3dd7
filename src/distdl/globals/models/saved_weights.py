"""Saved tensors: autograd keeps no gathered weight for backward, but gathers it again when a backward comes to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from distdl.globals.models.gathered import Gathered, come_along
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.structures import tensors_in
from distdl.tensors.derivatives import saved_tensors_hooks


class _Again(NamedTuple):
    """What is kept in the place of a tensor that lies in the memory of a gathered weight."""

    gathered: Gathered
    place: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """A tensor that is kept, and how often it had been written by then: torch compares that only where it keeps."""

    tensor: torch.Tensor
    version: int


class Keep:
    """What is kept of a tensor that autograd saves: of a gathered weight, only where to gather it again.

    Attributes:
        counted: what counts the tensors that are kept, if anything does.
    """

    def __init__(self) -> None:
        self.counted: Callable[[torch.Tensor], Any] | None = None
        self.held: dict[int, tuple[Gathered, int]] = {}  # by the memory
        # what has come together again, and a number before those of the nodes that read it, by the backward
        self._again: dict[int, list[tuple[Gathered, int]]] = {}

    def gather_again(self, gathered: Sequence[Gathered], first: int, number: int, gradients: Any) -> None:
        """Let weights come together for a backward, and those go that it reads no more.

        Those that get a gradient go with it; others do not, and nor do those of which a backward asks for none. A
        backward runs its nodes from the latest to the first, so it has left a module of which all were made later.

        Args:
            first: a number before those of the nodes that read them.
            number: that of the node that is to run.
            gradients: that it gets.
        """
        backward = torch._C._current_graph_task_id()
        if backward not in self._again:
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._release(backward))
        self._release(backward, number)
        if not torch.is_grad_enabled():
            self._again[backward] += [(one, one.first) for one in come_along(gathered)]
        for one in gathered:
            one.wholes()
        if not torch.is_grad_enabled():  # (else the backward of this one may read them, and not come by here)
            self._again[backward] += [(one, first) for one in gathered]

    def settle(self) -> None:
        """Let go what backwards have left that failed."""
        if torch._C._current_graph_task_id() == -1:
            for backward in list(self._again):
                self._release(backward)

    def _release(self, backward: int, number: int = -1) -> None:
        """Let go what nodes behind a number have read in a backward; without one, all."""
        waiting = self._again.pop(backward, [])
        for one, first in waiting:
            if first > number:
                one.release()
        if number >= 0:
            self._again[backward] = [each for each in waiting if each[1] <= number]

    def __call__(self, x: torch.Tensor) -> Any:
        plain = type(x) is not GlobalTensor and x.layout is torch.strided
        found = None
        if plain and self.held:
            found = self.held.get(x.untyped_storage()._cdata)
        if found is not None and x.dtype is found[0].gathering.dtype and not (x.is_conj() or x.is_neg()):
            return _Again(*found, x.size(), x.stride(), int(x.storage_offset()))
        if self.counted is not None:
            self.counted(x)
        return _Kept(x.detach(), x._version) if plain else x


def restore(kept: Any) -> torch.Tensor:
    if isinstance(kept, _Again):
        return kept.gathered.wholes()[kept.place].as_strided(kept.shape, kept.strides, kept.offset)
    if isinstance(kept, _Kept):
        if kept.tensor._version != kept.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(kept.tensor.shape)} is at version {kept.tensor._version}; expected version "
                f"{kept.version}"
            )
        return kept.tensor
    found: torch.Tensor = kept
    return found


def gather_before(result: Any, keep: Keep, gathered: list[Gathered], first: int) -> None:
    """Gather weights again as soon as the gradient of a module's result is there: at the same point on every worker.

    A view that is written in place behind the module gets another node, and its own never runs. So of a view it is the
    node of its base, unless that was there before the weights were.
    """

    gathered = [one for one in gathered if one.recorded or not one.is_outdated()]  # (it has written them)
    nodes: set[Any] = set()
    for one in tensors_in(result):
        block = one._block if type(one) is GlobalTensor else one._plain if type(one) is Replica else one
        node: Any = block.grad_fn
        base: Any = block._base
        made = None if base is None else base.grad_fn
        if made is not None and made._sequence_nr() >= first:
            node = made
        if node is not None and node not in nodes:
            nodes.add(node)
            node.register_prehook(partial(keep.gather_again, gathered, first, int(node._sequence_nr())))


def forgets_weights(module: torch.nn.Module) -> bool:
    """Whether a module's backward reads no weight, on any worker: that of a lookup does not, which is all it does."""
    looks_up = type(module) is torch.nn.Embedding and not (module.scale_grad_by_freq or module.sparse)
    as_it_is = "forward" not in module.__dict__ and list(module._parameters) == ["weight"]
    hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
    return looks_up and as_it_is and hooks == (1, 1)  # (ours)


def hooks_now() -> Any:
    hooks = saved_tensors_hooks()
    return None if hooks is None else hooks[0]
