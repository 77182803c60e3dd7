"""What ``state_dict()`` of a model in shares gives: whole tensors, and what is written into them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import Any

import torch

from distdl.globals.moving.alignment import taken
from distdl.globals.moving.conversion import full_tensor
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.views.aliasing import writes_of

_OUTDATED = (
    "a tensor that state_dict() gave was written after its parameter had changed, and has the values of before; with "
    "weights='sharded' state_dict() gives copies, so call it again before you write into them"
)


def whole_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """In a state_dict stand whole tensors, as in that of the model on one worker."""
    listed: dict[str, Any] = module._parameters
    for name, parameter in listed.items():
        value = state.get(prefix + name)
        if value is parameter:  # (keep_vars=True asks for these themselves)
            continue
        if type(value) is GlobalTensor and parameter is not None:
            ties = [one for one in parameter.__dict__.get("_ties", ()) if one.holds()]
            tie = next((one for one in ties if type(one) is _HandedOut and one.is_in(state)), None)
            if tie is None:  # (a parameter under several names comes once, and its names share it)
                whole = full_tensor(GlobalTensor._of(value._block.detach(), value._layout))
                tie = _HandedOut(parameter, whole, state)
                parameter._ties = [*ties, tie]
            state[prefix + name] = tie.hand_out()


class _HandedOut:
    """The tie of a parameter in shares to the whole tensor that a ``state_dict()`` gave: in torch, they are one.

    Whoever writes into it (averages of weights do: ``for v in ema.state_dict().values(): v.mul_(0.9)``) writes on every
    worker, so each has what its share becomes. That happens when the parameter is used next, or the tensor goes.
    """

    def __init__(self, parameter: torch.Tensor, whole: torch.Tensor, state: dict[str, Any]) -> None:
        self._parameter: weakref.ref[Any] = weakref.ref(parameter)
        self._state = weakref.ref(state) if isinstance(state, OrderedDict) else None  # (others cannot be referred to)
        self._values, self._out = whole, 0
        self._note(parameter)
        self._why = ""

    def is_in(self, state: dict[str, Any]) -> bool:
        """Whether it was made for this dict, which is under way."""
        return self._state is not None and self._state() is state

    def hand_out(self) -> torch.Tensor:
        """The tensor for a state_dict; what is written into it is noticed until it goes."""
        made = self._values.detach()
        self._out += 1
        weakref.finalize(made, self._gone).atexit = False
        return made

    def _note(self, parameter: Any) -> None:
        self._writes, self._block_writes = writes_of(self._values), writes_of(parameter._block)

    def holds(self) -> bool:
        return self._out > 0 or bool(self._why)

    def check(self, x: GlobalTensor) -> None:
        """Bring what has been written into the whole tensor since.

        Raises: RuntimeError if the parameter has changed, too, before that.
        """
        if not self._why and writes_of(self._values) != self._writes:
            if writes_of(x._block) != self._block_writes:
                self._why = _OUTDATED
            else:
                with torch.no_grad():
                    x._block.copy_(taken(self._values, x._layout) if x._layout.active else x._block.detach())
                self._note(x)
        if self._why:
            raise RuntimeError(self._why)

    def _gone(self) -> None:
        self._out -= 1
        parameter = self._parameter()
        if parameter is None or self._out:
            return
        try:
            self.check(parameter)
        except RuntimeError:
            return  # (which the next use of the parameter raises)
        parameter._ties = [one for one in parameter._ties if one is not self]


def check_assignment(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would put whole tensors in the places of this worker's shares, and an "
            "optimiser would go on with the old ones; without assign=True, the values are copied into the shares"
        )
