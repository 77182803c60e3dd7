"""Saved tensors: autograd keeps no gathered weight for backward, but gathers it again when a backward comes to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from distdl.globals.models.gathered import Gathered, prefetch_backward
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.structures import tensors_in
from distdl.tensors.derivatives import saved_tensors_hooks
from distdl.tensors.private_torch import current_graph_task_id, queue_callback


class _WeightView(NamedTuple):
    """What is saved for a tensor in the memory of a gathered weight: the weight, and how the tensor lies there."""

    gathered: Gathered
    place: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Saved(NamedTuple):
    """What is saved for any other tensor: itself, and its version then, which torch compares only where it saves."""

    tensor: torch.Tensor
    version: int


class SaveWeights:
    """The hook that packs what autograd saves for backward. :func:`restore` is the one that unpacks it.

    Attributes:
        counted: called with each tensor that is kept; None if nothing counts them.
        held: the whole tensors that are not kept, by their memory; see :class:`Gathered`.
    """

    def __init__(self) -> None:
        self.counted: Callable[[torch.Tensor], Any] | None = None
        self.held: dict[int, tuple[Gathered, int]] = {}
        # for each backward under way, by its id: what it has gathered, with a sequence number before those of the
        # nodes that read it
        self._present: dict[int, list[tuple[Gathered, int]]] = {}

    def gather_again(self, gathered: Sequence[Gathered], first_node: int, node: int, gradients: Any) -> None:
        """A hook of a node: gather weights again for a backward, and free those that the backward has left behind.

        Weights that get a gradient are freed with it. Others are not, nor are those that a backward does not ask about:
        they are freed here. A backward runs its nodes from the last to the first, so it has left a module behind if all
        nodes of that module are later than the one that runs.

        Args:
            first_node: a sequence number before those of the nodes that read the weights.
            node: the sequence number of the node that is to run.
        """
        backward = current_graph_task_id()
        if backward not in self._present:
            queue_callback(lambda: self._release(backward))
        self._release(backward, node)
        # the backward of a backward that makes a graph may read the weights, and does not come by here
        makes_graph = torch.is_grad_enabled()
        if not makes_graph:
            self._present[backward] += [(one, one.first_node) for one in prefetch_backward(gathered)]
        for one in gathered:
            one.values()
        if not makes_graph:
            self._present[backward] += [(one, first_node) for one in gathered]

    def release_failed(self) -> None:
        """Free what backwards have gathered that failed, unless a backward is under way."""
        if current_graph_task_id() == -1:
            for backward in list(self._present):
                self._release(backward)

    def _release(self, backward: int, node: int = -1) -> None:
        """Free what only nodes later than this one read in a backward; all that it has gathered if none is given."""
        present = self._present.pop(backward, [])
        for one, first_node in present:
            if first_node > node:
                one.release()
        if node >= 0:
            self._present[backward] = [each for each in present if each[1] <= node]

    def __call__(self, x: torch.Tensor) -> Any:
        plain = type(x) is not GlobalTensor and x.layout is torch.strided
        found = None
        if plain and self.held:
            found = self.held.get(x.untyped_storage()._cdata)
        if found is not None and x.dtype is found[0].gathering.dtype and not (x.is_conj() or x.is_neg()):
            return _WeightView(*found, x.size(), x.stride(), int(x.storage_offset()))
        if self.counted is not None:
            self.counted(x)
        return _Saved(x.detach(), x._version) if plain else x


def restore(saved: Any) -> torch.Tensor:
    """The tensor for which :class:`SaveWeights` has saved something. A weight that has been freed is gathered again.

    Raises: RuntimeError if the tensor or the weight was written since.
    """
    if isinstance(saved, _WeightView):
        return saved.gathered.values()[saved.place].as_strided(saved.shape, saved.strides, saved.offset)
    if isinstance(saved, _Saved):
        if saved.tensor._version != saved.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(saved.tensor.shape)} is at version {saved.tensor._version}; expected version "
                f"{saved.version}"
            )
        return saved.tensor
    found: torch.Tensor = saved
    return found


def gather_in_backward(result: Any, hook: SaveWeights, gathered: list[Gathered], first_node: int) -> None:
    """Gather a module's weights again when the gradient of its result is there: at the same point on every worker.

    The hook is set on the nodes of the result. If a view is written in place behind the module, it gets another node,
    and its own never runs; so for a view, the node of its base is taken, unless that is older than the weights.

    Args:
        result: of the module's forward; any structure.
        gathered: what the module has gathered. What its forward itself has written, without a graph, is left out.
        first_node: a sequence number before those of the nodes that read the weights.
    """
    gathered = [one for one in gathered if one.recorded or not one.is_outdated()]
    nodes: set[Any] = set()
    for one in tensors_in(result):
        block = one._block if type(one) is GlobalTensor else one._plain if type(one) is Replica else one
        node: Any = block.grad_fn
        base: Any = block._base
        of_base = None if base is None else base.grad_fn
        if of_base is not None and of_base._sequence_nr() >= first_node:
            node = of_base
        if node is not None and node not in nodes:
            nodes.add(node)
            node.register_prehook(partial(hook.gather_again, gathered, first_node, int(node._sequence_nr())))


def backward_reads_no_weight(module: torch.nn.Module) -> bool:
    """True for torch's own ``Embedding`` without hooks of users: its backward needs the indices alone."""
    looks_up = type(module) is torch.nn.Embedding and not (module.scale_grad_by_freq or module.sparse)
    unchanged = "forward" not in module.__dict__ and list(module._parameters) == ["weight"]
    only_ours = len(module._forward_pre_hooks) == len(module._forward_hooks) == 1
    return looks_up and unchanged and only_ours


def packing_hook() -> Any:
    """The hook that packs what is saved for backward now; None if there is none."""
    return (saved_tensors_hooks() or (None,))[0]
