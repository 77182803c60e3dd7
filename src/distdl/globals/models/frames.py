"""What one module's forward has gathered of its shares, and how long that is what the shares hold."""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.models.gathered import Gathered
from distdl.globals.models.gathering import state_of
from distdl.globals.models.parameters import Parameters
from distdl.globals.moving.alignment import taken
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import WRITTEN, plain_of
from distdl.globals.tensor.stale import computed_from
from distdl.globals.tensor.table import REPLICATED
from distdl.globals.views.aliasing import writes_of


class Frame:
    """A module whose forward runs.

    Attributes:
        hooks: that keep what was saved for backward where it began.
        copies: what it has gathered, by the id of the parameter and whether with a graph; and where it lay then, and
            how often it and its share had been written.
        gathered: those that autograd is not to keep.
        first: a number before those of the autograd nodes that read what was gathered; 0 if nothing was.
    """

    def __init__(self, module: torch.nn.Module, hooks: Any) -> None:
        self.module, self.hooks = module, hooks
        self.copies: dict[tuple[int, bool], tuple[torch.Tensor, tuple[int, ...]]] = {}
        self.gathered: list[Gathered] = []
        self.first = 0

    def is_outdated(self, parameter: GlobalTensor, graph: bool) -> bool:
        """Whether a parameter has to be gathered: it was not, or it has been frozen or trained since."""
        if (id(parameter), graph) not in self.copies:
            return True
        copy, _ = self.copies[id(parameter), graph]
        return torch.is_grad_enabled() and plain_of(copy).requires_grad is not parameter.requires_grad

    def check_unwritten(self) -> None:
        """Check that the forward, which has ended, has written no weight that it has read.

        But a table is written whose rows it shortens (``Embedding(max_norm=...)``).

        Raises: RuntimeError.
        """
        for copy, before in self.copies.values():
            if state_with_share(copy) == before:
                continue
            if not isinstance(self.module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
                raise RuntimeError(WRITTEN.format(f"{type(self.module).__name__}.forward has written"))
            share: Any = copy.__dict__["_variable"]
            if share._layout.active:
                share._block.data.copy_(taken(plain_of(copy).detach(), share._layout))


def state_with_share(copy: torch.Tensor) -> tuple[int, ...]:
    """Where the copy of a weight lies, and how often it and its share have been written."""
    plain = plain_of(copy)
    return plain.data_ptr(), writes_of(plain), *state_of(copy.__dict__["_variable"])


class Since:
    """Since when a copy has what its parameter has."""

    def __init__(self, owner: Parameters, parameter: Any) -> None:
        self._owner, self._parameter, self._state = owner, parameter, state_of(parameter)

    def now(self) -> torch.Tensor:
        return self._owner.read(self._parameter)  # type: ignore[no-any-return]

    def is_over(self, copy: torch.Tensor) -> bool:
        if state_of(self._parameter) != self._state:
            return True
        is_itself = copy.__dict__.get("_variable") is self._parameter  # (and no view)
        wants: bool = self._parameter._block.requires_grad
        return is_itself and torch.is_grad_enabled() and plain_of(copy).requires_grad is not wants


def _data_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The ``data`` of a copy; that of a share's copy is one of which torch counts what is written there."""
    copy = args[0]
    plain = plain_of(copy)
    return computed_from([copy], plain.detach() if "_since" in copy.__dict__ else func(plain), copy._context)


_data: Any = torch.Tensor.data
REPLICATED[_data.__get__] = _data_of
