r"""Sharded weights: every worker stores its share of each parameter, and a module gathers it when it begins to use it.

A parameter is a global tensor that is split over all workers. The module that owns it gathers it on every worker t
when its forward begins to use it, and frees it when the forward ends. The gradient of the share of a worker s is a sum:

.. math:: w_t = w, \qquad \partial w[\text{box of } s] = \sum_t \partial w_t[\text{box of } s]

Autograd does not keep whole weights for backward. A module's weights are gathered once more when the gradient of its
result is there. They are freed when their own gradient has gone to the shares (by a reduce-scatter, the adjoint of
gathering), or when the backward has left the module.

So between steps a worker has its shares alone. At the peak of a forward it also has the weights of all modules whose
forwards run, one inside another, of which most often only one has weights of its own; and these twice while their
message is unpacked. At the peak of a backward it has the weights of one module and their gradients. Small weights are
an exception: those of several modules may be gathered together, or their gradients sent together (see
:mod:`~distdl.globals.models.prefetch`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakSet

import torch

from distdl.globals.layouts.context import Context, other_world
from distdl.globals.models.additions import Additions
from distdl.globals.models.frames import Frame, SinceGathered
from distdl.globals.models.gathered import Gathered
from distdl.globals.models.gathering import Gathering
from distdl.globals.models.parameters import Parameters
from distdl.globals.models.prefetch import Prefetching
from distdl.globals.models.saved_weights import (
    SaveWeights,
    backward_reads_no_weight,
    gather_in_backward,
    packing_hook,
    restore,
)
from distdl.globals.models.splitting import split_parameters
from distdl.globals.models.states import check_assignment, gather_state
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica
from distdl.nn.compiling import leave_uncompiled
from distdl.partition import Partition
from distdl.tensors.derivatives import Keeping, next_node, saved_tensors_hooks
from distdl.tensors.private_torch import DisableTorchFunction


class ShardedWeights:
    """Weights of which every worker has a share.

    Parameters that are added later stay whole on every worker, but for those that a parametrisation takes over.
    """

    def __init__(self, module: torch.nn.Module, P: Partition) -> None:
        self._begin(module, P)
        split_parameters(module, self._context)

    def _begin(self, module: torch.nn.Module, P: Partition) -> None:
        self.module, self.P = module, P
        self.depth, self.additions = 0, Additions()
        self.outside_checkpoints: WeakSet[Any] = WeakSet()
        self.saving = SaveWeights()
        self._frames: list[Frame] = []
        self._hooks: Any = None
        self._prefetching = Prefetching()
        self._latest: Sequence[Gathered] = ()  # what was gathered by the module whose forward ended last

    @property
    def _context(self) -> Context:
        return Context.of(self.P.comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedWeights:
        """The weights of a copied model. A part of the model that is copied by itself keeps this object."""
        if id(self.module) not in memo:
            return self
        made = memo[id(self)] = ShardedWeights.__new__(ShardedWeights)
        made._begin(deepcopy(self.module, memo), self.P)
        return made

    def begin_forward(self) -> None:
        self.saving.release_failed()
        self._prefetching.begin_forward()
        # hooks around us, as of a checkpoint of the whole model, decide what is saved; but some of ours only count
        others = saved_tensors_hooks()
        counts = None if others is None else getattr(others[0], "counts", None)
        if torch.is_grad_enabled() and (others is None or counts is not None):
            self.saving.counted = counts
            self._hooks = Keeping(self.saving, restore)
            self._hooks.__enter__()
            if self._frames:  # the frame of the model itself began before
                self._frames[-1].hook = self.saving

    def end_forward(self) -> None:
        self._prefetching.end_forward()
        self._latest = ()
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def begin_module(self, module: torch.nn.Module, inputs: Any) -> None:
        """A hook: the forward of a module begins."""
        with DisableTorchFunction():
            self._frames.append(Frame(module, packing_hook()))

    def end_module(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        """A hook: the forward of a module has ended, or failed. Frees its weights; its backward gathers them again.

        Raises: RuntimeError if the forward has written a weight, unless it has failed with an error of its own.
        """
        if not (self._frames and self._frames[-1].module is module):
            return
        with DisableTorchFunction():
            frame = self._frames.pop()
            try:
                if result is not None or sys.exc_info()[0] is None:
                    frame.check_unwritten()
            finally:
                if frame.gathered and not backward_reads_no_weight(module):
                    frame.gathered[0].previous, self._latest = self._latest, frame.gathered
                    gather_in_backward(result, self.saving, frame.gathered, frame.first_node)
                for one in frame.gathered:
                    one.release()

    leave_uncompiled(begin_module)
    leave_uncompiled(end_module)

    def replica_of(self, owner: Parameters, parameter: torch.Tensor) -> torch.Tensor:
        if type(parameter) is not GlobalTensor:
            return parameter
        frame = self._frames[-1] if self._frames else None
        if frame is None or frame.hook is not packing_hook():
            # a checkpoint of a function runs or is recomputed; both times, each weight is gathered by itself
            return self._gather(owner, [parameter], None)[0]
        graph = torch.is_grad_enabled() or (id(parameter), True) in frame.replicas
        if frame.has_to_gather(parameter, graph):
            needed = [parameter]
            if frame.module._parameters is owner:  # the module's own weights are gathered by one message
                alike = (parameter.dtype, parameter.device, parameter.requires_grad)
                own = [one for one in owner.values() if type(one) is GlobalTensor and frame.has_to_gather(one, graph)]
                needed = [one for one in own if (one.dtype, one.device, one.requires_grad) == alike]
            for one, replica in zip(needed, self._gather(owner, needed, frame), strict=True):
                frame.keep(one, graph, replica)
        return frame.replicas[id(parameter), graph][0]

    def as_assigned(self, value: Any) -> Any:
        return value

    def adopt(self, modules: list[torch.nn.Module]) -> None:
        for child in modules:
            child.register_forward_pre_hook(self.begin_module)
            child.register_forward_hook(self.end_module, always_call=True)
            child.register_state_dict_post_hook(gather_state)
            child.register_load_state_dict_pre_hook(check_assignment)

    def _gather(self, owner: Parameters, parameters: list[GlobalTensor], frame: Frame | None) -> list[Replica]:
        """Replicas of parameters that one module owns, by one message or by one that was sent before.

        Args:
            frame: of the module whose forward reads them; None in a checkpoint of a function.
        Raises: ValueError for a parameter of another world, as its gradient would add up over other workers;
            RuntimeError for one whose state_dict was written after the parameter.
        """
        for one in parameters:
            if one._context is not self._context:
                raise other_world("the forward of a model with weights in shares", self._context, one._context)
            block_of(one)  # which brings what was written into a state_dict
        gathered = Gathered(Gathering.of(parameters), parameters, self.saving.held)
        saves = frame is not None and frame.hook is self.saving
        whole = gathered.connected() if frame is None else self._prefetching.gather(gathered, joined=saves)
        gathered.recorded = any(one.requires_grad for one in whole)
        if frame is not None and saves:
            gathered.hold(whole)
            if not frame.gathered:
                frame.first_node = next_node()
            gathered.first_node = frame.first_node
            frame.gathered.append(gathered)
        replicas = []
        for plain, parameter in zip(whole, parameters, strict=True):
            replica = Replica._of_parameter(plain, parameter, self._context)
            replica._since = SinceGathered(owner, parameter)
            replicas.append(replica)
        return replicas
