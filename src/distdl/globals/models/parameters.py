"""The dicts of a distributed model's modules, in which its code looks up parameters and buffers by their names."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch

from distdl.globals.models.additions import Additions
from distdl.globals.moving.buffer_writes import settled
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica, parameter_of, plain_of
from distdl.nn.compiling import leave_uncompiled
from distdl.partition import Partition
from distdl.tensors.derivatives import is_checkpointed, is_recomputed
from distdl.tensors.levels import beneath
from distdl.tensors.repeats import checkpoints


class Copies(Protocol):
    """How the parameters of a model come to where its forward computes with them.

    Attributes:
        P: the partition over which the model is distributed.
        running: how many forwards of it run, one inside another.
        additions: what was set in the model since the last of them.
        outside: the checkpoints in which parameters have been read outside of any forward of it.
    """

    P: Partition
    running: int
    additions: Additions
    outside: WeakSet[Any]

    def begin(self) -> None:
        """A forward begins that is not inside another."""

    def end(self) -> None:
        """It has ended, or raised."""

    def of(self, owner: Parameters, parameter: torch.Tensor) -> torch.Tensor:
        """What a forward reads in the place of a parameter of a module."""

    def settled(self, value: Any) -> Any:
        """What a parameter becomes that is set to a value."""

    def enlarged(self, modules: list[torch.nn.Module]) -> None:
        """Modules belong to the model from now on, or their parameters have changed."""


class Parameters(dict[str, Any]):
    """The parameters of one module. Who looks one up by its name while the forward runs gets a copy that has entered.

    So does a forward that a checkpoint recomputes during backward; but what a checkpoint has computed outside of the
    model's forward (``checkpoint(model.encoder, x)``) reads again what it has read. Optimisers, ``state_dict`` and all
    else that lists parameters see the parameters themselves.
    """

    def __init__(self, copies: Copies, parameters: dict[str, Any]) -> None:
        super().__init__(parameters)
        self.copies = copies

    def __getitem__(self, name: str) -> Any:
        return self.read(super().__getitem__(name))

    def read(self, parameter: Any) -> Any:
        """What is read now in the place of one of these parameters."""
        if parameter is None or not (self.copies.running or self._is_recomputed()):
            return parameter
        # (no mode is to see each call on the way to a copy, nor ours; and a copy is none of an element)
        with torch._C.DisableTorchFunction(), beneath():
            return self.copies.of(self, parameter)

    def _is_recomputed(self) -> bool:
        """Whether a checkpoint recomputes what it has computed in a forward of the model."""
        outside = self.copies.outside
        if is_recomputed():
            return not (outside and any(one in outside for one, _ in checkpoints()))
        if is_checkpointed():
            outside.update(one for one, _ in checkpoints())
        return False

    leave_uncompiled(__getitem__)
    leave_uncompiled(read)

    def __setitem__(self, name: str, value: Any) -> None:
        # (torch.func.functional_call puts back what it has read here)
        value = self.copies.settled(_registered(value))
        if isinstance(value, torch.nn.Parameter):  # (what it puts here before is no part of the model)
            self.copies.additions.note(value, self.copies.running)
        super().__setitem__(name, value)


class Buffers(dict[str, Any]):
    """The buffers of one module. One that is set to a global tensor becomes the whole tensor, on every worker."""

    def __init__(self, copies: Copies, buffers: dict[str, Any]) -> None:
        super().__init__(buffers)
        self.copies = copies

    def __setitem__(self, name: str, value: Any) -> None:
        if type(value) is not GlobalTensor:
            self.copies.additions.note(value, self.copies.running)
        super().__setitem__(name, settled(value))


def _registered(value: Any) -> Any:
    """What a module registers where a forward sets a parameter to what it has read: the parameter itself.

    ``self.v = self.w`` gives w another name. ``self.v = nn.Parameter(self.w.detach())`` has made a new parameter, which
    is a replica until it is registered here.
    """
    if type(value) is not Replica:
        return value
    variable = parameter_of(value)
    if variable is value and isinstance(value, torch.nn.Parameter):
        variable = plain_of(value)
    if isinstance(value, torch.nn.Parameter) and not isinstance(variable, torch.nn.Parameter):
        variable.__class__ = torch.nn.Parameter
    return variable
