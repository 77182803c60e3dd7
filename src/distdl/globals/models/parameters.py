"""The dicts of a distributed model's modules, in which its code looks up parameters and buffers by name."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch

from distdl.globals.models.additions import Additions
from distdl.globals.moving.buffer_writes import value_to_store
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica, parameter_of, plain_of
from distdl.nn.compiling import leave_uncompiled
from distdl.partition import Partition
from distdl.tensors.derivatives import is_checkpointed, is_recomputed
from distdl.tensors.levels import beneath
from distdl.tensors.private_torch import DisableTorchFunction
from distdl.tensors.repeats import checkpoints


class Weights(Protocol):
    """Where the parameters of a model are stored, and how a forward gets replicas of them.

    Attributes:
        P: the partition over which the model is distributed.
        depth: how many forwards of the model run, one inside another.
        additions: what was set in the model since its last forward.
        outside_checkpoints: the checkpoints in which parameters were read outside of any forward of the model.
    """

    P: Partition
    depth: int
    additions: Additions
    outside_checkpoints: WeakSet[Any]

    def begin_forward(self) -> None:
        """Called when an outermost forward begins."""

    def end_forward(self) -> None:
        """Called when it has ended, or raised."""

    def replica_of(self, owner: Parameters, parameter: torch.Tensor) -> torch.Tensor:
        """The replica that a forward computes with when it reads a parameter of a module whose dict is the owner."""

    def as_assigned(self, value: Any) -> Any:
        """The parameter that is stored when a value is assigned to a parameter's name; other values as they are."""

    def adopt(self, modules: list[torch.nn.Module]) -> None:
        """Called when modules have joined the model, or their parameters have changed."""


class Parameters(dict[str, Any]):
    """The parameters of one module. Looking one up by name gives its replica while a forward of the model runs.

    It does so, too, while a checkpoint recomputes in backward what it computed in a forward. A checkpoint outside of
    the model's forward, as ``checkpoint(model.encoder, x)``, reads the parameter itself both times. Optimisers,
    ``state_dict`` and all else that lists the values of this dict get the parameters themselves.
    """

    def __init__(self, weights: Weights, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.weights = weights

    def __getitem__(self, name: str) -> Any:
        return self.read(super().__getitem__(name))

    def read(self, parameter: Any) -> Any:
        """The replica of one of these parameters in a forward of the model; else the parameter itself, or None."""
        if parameter is None or not (self.weights.depth or self._is_recomputed()):
            return parameter
        # no mode sees the calls that make a replica, and a replica belongs to no level of vmap
        with DisableTorchFunction(), beneath():
            return self.weights.replica_of(self, parameter)

    def _is_recomputed(self) -> bool:
        """Whether a checkpoint recomputes what it computed in a forward of the model. Notes checkpoints outside."""
        outside = self.weights.outside_checkpoints
        if is_recomputed():
            return not (outside and any(one in outside for one, _ in checkpoints()))
        if is_checkpointed():
            outside.update(one for one, _ in checkpoints())
        return False

    leave_uncompiled(__getitem__)
    leave_uncompiled(read)

    def __setitem__(self, name: str, value: Any) -> None:
        # torch.func.functional_call sets tensors that are no parameters, and puts back the replica that it has read
        value = self.weights.as_assigned(_registered(value))
        if isinstance(value, torch.nn.Parameter):
            self.weights.additions.note_set(value, self.weights.depth > 0)
        super().__setitem__(name, value)


class Buffers(dict[str, Any]):
    """The buffers of one module. One that is set to a global tensor becomes the gathered tensor, on every worker."""

    def __init__(self, weights: Weights, buffers: dict[str, Any]) -> None:
        super().__init__(buffers)
        self.weights = weights

    def __setitem__(self, name: str, value: Any) -> None:
        if type(value) is not GlobalTensor:
            self.weights.additions.note_set(value, self.weights.depth > 0)
        super().__setitem__(name, value_to_store(value))


def _registered(value: Any) -> Any:
    """The parameter that a module registers when a forward assigns a value that it has read to a name.

    ``self.v = self.w`` gives w another name, so a replica is registered as its parameter. ``self.v =
    nn.Parameter(self.w.detach())`` has made a new parameter, which is a replica until here. Other values as they are.
    """
    if type(value) is not Replica:
        return value
    variable = parameter_of(value)
    if variable is value and isinstance(value, torch.nn.Parameter):
        variable = plain_of(value)
    if isinstance(value, torch.nn.Parameter) and not isinstance(variable, torch.nn.Parameter):
        variable.__class__ = torch.nn.Parameter
    return variable
