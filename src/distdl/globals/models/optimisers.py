"""The state of an optimiser of sharded weights: gathered for a file, and loaded from one."""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.moving.alignment import local_slice
from distdl.globals.moving.conversion import full_tensor
from distdl.globals.moving.writes_into_plain import split_beside
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import map_tensors
from distdl.partition.arguments import checks_arguments


@checks_arguments
def optimizer_state_dict(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Gather the ``state_dict()`` of an optimiser: whole tensors, as the sequential optimiser has them. Collective.

    The result is the same on every worker, has memory of its own, and can be saved. ``optimizer.state_dict()`` itself
    has this worker's shares, which cannot be saved.
    """

    def gathered(one: torch.Tensor) -> torch.Tensor:
        detached: Any = one.detach()
        return full_tensor(detached) if type(one) is GlobalTensor else detached.clone()

    state: dict[str, Any] = map_tensors(optimizer.state_dict(), gathered)
    return state


@checks_arguments
def load_optimizer_state_dict(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a state of whole tensors, from :func:`optimizer_state_dict` or from a sequential optimiser.

    Every worker passes the same state, and keeps its shares of it, split as the parameters are. No message is sent.

    Raises: TypeError for what is no dict; what ``optimizer.load_state_dict`` raises for the state of other parameters.
    """
    if not isinstance(state, dict):
        raise TypeError(f"load_optimizer_state_dict needs the state_dict of an optimiser; got a {type(state).__name__}")
    optimizer.load_state_dict(state)
    for parameter, own in optimizer.state.items():
        if not isinstance(parameter, torch.Tensor):  # some optimisers keep more, under other keys
            optimizer.state[parameter] = map_tensors(own, torch.clone)
            continue
        for name, value in own.items():
            if type(value) is torch.Tensor:
                own[name] = _share(value, parameter, name) if type(parameter) is GlobalTensor else value.clone()
            else:
                own[name] = map_tensors(value, torch.clone)


def _share(value: torch.Tensor, parameter: GlobalTensor, name: str) -> torch.Tensor:
    """This worker's share of what an optimiser keeps of a parameter under a name. Counts stay whole."""
    if name == "step" or (not value.dim() and parameter.dim()):
        return value.clone()
    if value.shape == parameter.shape:
        return GlobalTensor._of(local_slice(value, parameter._layout).clone(), parameter._layout)
    found = split_beside(value, (parameter,))
    return GlobalTensor._of(found._block.clone(), found._layout)
