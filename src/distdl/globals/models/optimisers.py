"""The state of an optimiser whose parameters are stored in shares: as whole tensors, for a file, and back."""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.moving.alignment import taken
from distdl.globals.moving.conversion import full_tensor
from distdl.globals.moving.writes_into_plain import split_beside
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import map_tensors
from distdl.partition.arguments import checks_arguments


@checks_arguments
def optimizer_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The ``state_dict()`` of an optimiser with whole tensors: that of the sequential one. Collective.

    It is the same on every worker, has memory of its own, and can be saved. ``optimizer.state_dict()`` itself refers
    to this worker's shares, which cannot.
    """

    def whole(one: torch.Tensor) -> torch.Tensor:
        detached: Any = one.detach()
        return full_tensor(detached) if type(one) is GlobalTensor else detached.clone()

    state: dict[str, Any] = map_tensors(optimizer.state_dict(), whole)
    return state


@checks_arguments
def load_optimizer_state_dict(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state of whole tensors: of :func:`optimizer_state_dict`, or of a sequential optimiser.

    Each worker keeps its shares of it, split as the parameters are. Nothing moves: every worker has the state.

    Raises: what ``optimizer.load_state_dict`` raises, for the state of other parameters.
    """
    if not isinstance(state, dict):
        raise TypeError(f"load_optimizer_state_dict needs the state_dict of an optimiser; got a {type(state).__name__}")
    optimizer.load_state_dict(state)
    for parameter, own in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):  # (what some optimisers keep of no parameter)
            optimizer.state[parameter] = map_tensors(own, torch.clone)
            continue
        for name, value in own.items():
            if type(value) is torch.Tensor:
                own[name] = _share(value, parameter, name) if type(parameter) is GlobalTensor else value.clone()
            else:
                own[name] = map_tensors(value, torch.clone)


def _share(value: torch.Tensor, parameter: GlobalTensor, name: str) -> torch.Tensor:
    if name == "step" or (not value.dim() and parameter.dim()):  # (a count, which every worker has)
        return value.clone()
    if value.shape == parameter.shape:
        return GlobalTensor._of(taken(value, parameter._layout).clone(), parameter._layout)
    found = split_beside(value, (parameter,))
    return GlobalTensor._of(found._block.clone(), found._layout)
