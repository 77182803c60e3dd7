"""State dicts of a model with sharded weights: they hold whole tensors, and writes into these reach the shares."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

from distdl.globals.moving.alignment import local_slice
from distdl.globals.moving.conversion import full_tensor
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.views.aliasing import count_of_writes

_OUTDATED = (
    "a tensor that state_dict() gave was written after its parameter had changed, and has the values of before; with "
    "weights='sharded' state_dict() gives copies, so call it again before you write into them"
)


def gather_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A hook behind ``state_dict()``: put whole tensors in the places of one module's shares. Collective.

    A parameter with several names is gathered once, and its names share the tensor. With ``keep_vars=True`` the state
    dict keeps the parameters themselves.
    """
    parameters: dict[str, Any] = module._parameters
    for name, parameter in parameters.items():
        value = state.get(prefix + name)
        if type(value) is not GlobalTensor or parameter is None or value is parameter:
            continue
        ties = [one for one in parameter.__dict__.get("_ties", ()) if one.holds()]
        tie = next((one for one in ties if type(one) is _StateTie and one.is_of(state)), None)
        if tie is None:
            whole = full_tensor(GlobalTensor._of(value._block.detach(), value._layout))
            tie = _StateTie(parameter, whole, state)
            parameter._ties = [*ties, tie]
        state[prefix + name] = tie.hand_out()


class _StateTie:
    """The tie of a sharded parameter to the whole tensor that a ``state_dict()`` gave: in torch, they are one.

    A program that writes into that tensor (``for v in ema.state_dict().values(): v.mul_(0.9)`` averages weights) does
    so on every worker, so each worker has the new values of its share. They are copied there when the parameter is used
    next, or when the tensor is freed.
    """

    def __init__(self, parameter: torch.Tensor, whole: torch.Tensor, state: dict[str, Any]) -> None:
        self._parameter: weakref.ref[Any] = weakref.ref(parameter)
        # no weak reference can be made to a plain dict
        self._state = weakref.ref(state) if isinstance(state, OrderedDict) else None
        self._whole, self._handed_out = whole, 0
        self._note_writes(parameter)
        self._error = ""

    def is_of(self, state: dict[str, Any]) -> bool:
        """Whether the tensor was gathered for this state dict, which is being made."""
        return self._state is not None and self._state() is state

    def hand_out(self) -> torch.Tensor:
        """An alias of the whole tensor for a state dict. Writes into it are noticed until it is freed."""
        alias = self._whole.detach()
        self._handed_out += 1
        weakref.finalize(alias, self._freed).atexit = False
        return alias

    def _note_writes(self, parameter: Any) -> None:
        self._whole_writes, self._share_writes = count_of_writes(self._whole), count_of_writes(parameter._block)

    def holds(self) -> bool:
        return self._handed_out > 0 or bool(self._error)

    def check(self, x: GlobalTensor) -> None:
        """Copy what was written into the whole tensor to this worker's share of the parameter.

        Args:
            x: the parameter.
        Raises: RuntimeError if the parameter was written before that.
        """
        if not self._error and count_of_writes(self._whole) != self._whole_writes:
            if count_of_writes(x._block) != self._share_writes:
                self._error = _OUTDATED
            else:
                with torch.no_grad():
                    x._block.copy_(local_slice(self._whole, x._layout) if x._layout.active else x._block.detach())
                self._note_writes(x)
        if self._error:
            raise RuntimeError(self._error)

    def _freed(self) -> None:
        self._handed_out -= 1
        parameter = self._parameter()
        if parameter is None or self._handed_out:
            return
        try:
            self.check(parameter)
        except RuntimeError:
            return  # the next use of the parameter raises it
        parameter._ties = [one for one in parameter._ties if one is not self]


def check_assignment(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    """A hook before ``load_state_dict``. Raises: ValueError if it would assign whole tensors in place of shares."""
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would put whole tensors in the places of this worker's shares, and an "
            "optimiser would go on with the old ones; without assign=True, the values are copied into the shares"
        )
