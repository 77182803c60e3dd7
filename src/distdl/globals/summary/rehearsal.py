"""Rehearsal: the forward and backward of a distributed model on one worker, without memory or messages.

The tensors are meta tensors, which have shapes only, and the communicator sends nothing. All else is what really runs:
the same handlers, operators and autograd nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray

from distdl.globals.layouts.context import Context
from distdl.globals.models.distribute import distribute
from distdl.globals.summary.results import Rehearsal
from distdl.globals.summary.watching import Watch
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.partition import CartesianPartition
from distdl.tensors.draws import Draws, seed
from distdl.transport import Communicator
from distdl.transport.communicator import Group, IntArray, Message, Pending


class Imagined(Communicator):
    """The communicator of a worker without others: it sends nothing, and leaves what it would receive unwritten."""

    imagined = True

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        return Pending()

    def all_max(self, group: Group, values: IntArray) -> IntArray:
        return values

    def all_gather(self, group: Group, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta or len(group) == 1:
            return super().all_gather(group, tensor)
        raise RuntimeError(
            f"a model is summed up from what one worker sees; its forward asks the others what they have: {self.where}"
        )


Inputs = Sequence[torch.Tensor]


def rehearse(
    model: torch.nn.Module,
    workers: NDArray[Any],
    size: int,
    me: int,
    inputs: Inputs,
    backward: bool,
    **options: Any,
) -> Rehearsal:
    """Run a model as one of many workers, and return what it needs and sends there.

    Args:
        workers: the array over which a copy of the model is distributed, in a world of ``size``.
        me: the number of the worker to run as.
        inputs: tensors of the global shapes, of which only shape and dtype are read.
        options: of ``distribute``.
    Raises: what ``distribute`` and the model raise.
    """
    comm = Imagined(me, size)
    P, context = CartesianPartition(comm, workers), Context.of(comm)
    own = distribute(on_meta(model), P, **{"fallback": "silent", **options})
    context.own(Draws).seed = seed()  # elsewhere, distribute_tensor sets it

    def split(x: torch.Tensor) -> torch.Tensor:
        if x.dim() < workers.ndim:
            return x.to("meta")
        layout = context.balanced(workers, x.shape)
        return GlobalTensor._of(torch.empty(layout.local, dtype=x.dtype, device="meta"), layout)

    return Watch(own, comm).run([split(one) for one in inputs], backward)


def on_meta(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model whose tensors are meta tensors. Its weights are never copied.

    Sparse tensors stay as they are, as a meta tensor does not keep the number of their values.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for own in (module._parameters, module._buffers, module.__dict__):
            for tensor in own.values():
                if isinstance(tensor, torch.nn.Parameter):
                    memo[id(tensor)] = torch.nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)
                elif isinstance(tensor, torch.Tensor):
                    memo[id(tensor)] = tensor.detach().to("meta") if tensor.layout is torch.strided else tensor
    return copy.deepcopy(model, memo)
