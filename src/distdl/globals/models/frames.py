"""Frames: what one call of a module has gathered, and whether the shares still hold it."""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.models.gathered import Gathered
from distdl.globals.models.gathering import share_version
from distdl.globals.models.parameters import Parameters
from distdl.globals.moving.alignment import local_slice
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import WRITTEN, Replica, plain_of
from distdl.globals.tensor.stale import computed_from
from distdl.globals.tensor.table import REPLICATED
from distdl.globals.views.aliasing import count_of_writes


class Frame:
    """A call of a module's forward.

    Attributes:
        hook: that packed what was saved for backward when the call began.
        replicas: what it has gathered, by the id of the parameter and by whether a graph was made; with the version of
            each then.
        gathered: of these, what autograd is not to keep.
        first_node: a sequence number of autograd before those of the nodes that read these; 0 if there are none.
    """

    def __init__(self, module: torch.nn.Module, hook: Any) -> None:
        self.module, self.hook = module, hook
        self.replicas: dict[tuple[int, bool], tuple[Replica, tuple[int, ...]]] = {}
        self.gathered: list[Gathered] = []
        self.first_node = 0

    def has_to_gather(self, parameter: GlobalTensor, graph: bool) -> bool:
        """Whether a parameter has not been gathered yet, or has been frozen or unfrozen since."""
        if (id(parameter), graph) not in self.replicas:
            return True
        replica, _ = self.replicas[id(parameter), graph]
        return torch.is_grad_enabled() and plain_of(replica).requires_grad is not parameter.requires_grad

    def keep(self, parameter: GlobalTensor, graph: bool, replica: Replica) -> None:
        """Keep the replica of a parameter, for all that read it in this call."""
        self.replicas[id(parameter), graph] = replica, _version(replica)

    def check_unwritten(self) -> None:
        """Check, when the call has ended, that it has written no weight.

        An ``Embedding(max_norm=...)`` may: what it has written goes into the share.

        Raises: RuntimeError.
        """
        for replica, before in self.replicas.values():
            if _version(replica) == before:
                continue
            if not isinstance(self.module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
                raise RuntimeError(WRITTEN.format(f"{type(self.module).__name__}.forward has written"))
            share: Any = replica._variable
            if share._layout.active:
                share._block.data.copy_(local_slice(plain_of(replica).detach(), share._layout))


def _version(replica: Replica) -> tuple[int, ...]:
    """Numbers that change when a replica gets other memory, or when it or its share is written."""
    plain = plain_of(replica)
    parameter: Any = replica._variable
    return plain.data_ptr(), count_of_writes(plain), *share_version(parameter)


class SinceGathered:
    """Tells whether a replica is outdated: its share was written after it was gathered."""

    def __init__(self, owner: Parameters, parameter: GlobalTensor) -> None:
        self._owner, self._parameter, self._version = owner, parameter, share_version(parameter)

    def now(self) -> torch.Tensor:
        """What the module reads now: in a forward, a new replica."""
        return self._owner.read(self._parameter)  # type: ignore[no-any-return]

    def is_over(self, copy: torch.Tensor) -> bool:
        """Whether a replica or a view of it is outdated. A replica is, too, if its parameter was frozen or unfrozen."""
        if share_version(self._parameter) != self._version:
            return True
        is_view = copy.__dict__.get("_variable") is not self._parameter
        wants: bool = self._parameter._block.requires_grad
        return not is_view and torch.is_grad_enabled() and plain_of(copy).requires_grad is not wants


def _data_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The ``data`` of a replica. That of a sharded weight is detached, so that writes into it count as the weight's."""
    replica = args[0]
    plain = plain_of(replica)
    return computed_from([replica], plain.detach() if "_since" in replica.__dict__ else func(plain), replica._context)


_data: Any = torch.Tensor.data
REPLICATED[_data.__get__] = _data_of
