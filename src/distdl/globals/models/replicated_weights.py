"""Replicated weights: every worker has all parameters whole, and the sums of their gradients travel in few messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakSet

import torch

from distdl.globals.consistency.drift import Drift
from distdl.globals.layouts.context import Context
from distdl.globals.models.additions import Additions
from distdl.globals.models.buckets import Bucket, buckets_of, common_path
from distdl.globals.models.parameters import Parameters
from distdl.globals.moving.buffer_writes import value_to_store
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.gradient_sums import Which, enter, enter_apart, settle
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.stale import address_of, storage_of
from distdl.nn.module import Module
from distdl.partition import Partition


class ReplicatedWeights:
    """Weights of which every worker has all.

    At the start of a forward with gradients, all parameters enter the graph as replicas: in one bucket, or in several
    if they are many. A forward without gradients reads the parameters themselves.
    """

    def __init__(self, module: torch.nn.Module, P: Partition) -> None:
        self.module, self.P = module, P
        self.depth, self.additions = 0, Additions()
        self.outside_checkpoints: WeakSet[Any] = WeakSet()
        self._drift = Drift()
        self._replicas: dict[int, Replica] = {}  # of the latest forward, by the id of their parameter
        self._unread: dict[int, Bucket] = {}  # by the id of a parameter: the bucket, until one of its replicas is read
        self._reads_parameters = False  # whether the forward that runs has no gradients
        self._dicts: list[Parameters] | None = None
        self._described: list[Any] = []  # the parameters for which the buckets were made: ids, shapes, dtypes, devices
        self._trained: list[torch.Tensor] = []  # these parameters
        self._buckets: list[tuple[list[int], Which]] = []  # the places of each bucket's parameters among these

    def begin_forward(self) -> None:
        self._reads_parameters = not torch.is_grad_enabled()
        if self._reads_parameters and self._share_memory():
            return  # the replicas of an earlier forward stay: in its backward, a checkpoint may read them
        self._replicas, self._unread = {}, {}
        if self._reads_parameters:
            return
        self._list_trained()
        context = Context.of(self.P.comm)
        alone = len(context.everyone) == 1
        look = None if alone or not self._trained else self._drift.look(context, self.module)
        settle(context)
        buckets = [([self._trained[place] for place in places], which) for places, which in self._buckets]
        if alone or len(buckets) < 2:  # one bucket is full only when the backward ends, so nothing can overlap
            for bucket, which in buckets:
                self._keep_replicas(context, bucket, enter(context, bucket, look, which))
            return
        for (bucket, _), use in zip(buckets, enter_apart(context, buckets, look), strict=True):
            self._unread.update(dict.fromkeys(map(id, bucket), Bucket(context, bucket, use)))

    def _list_trained(self) -> None:
        """List the parameters that require gradients, and make their buckets if the list has changed."""
        if self._dicts is None:
            self._dicts = list(_dicts_of(self.module))
        every = [p for one in self._dicts for p in one.values() if p is not None]
        # torch.func.functional_call may set replicas of another model
        every = [p for p in every if type(p) is not Replica]
        trained = [p for p in every if p.requires_grad]
        for p in trained:
            # a program may have set p.grad to a global tensor; torch will add whole gradients to it
            if p.is_leaf and type(p.grad) is GlobalTensor:
                p.grad = p.grad.full_tensor()
        described = [(id(p), p.shape, p.dtype, p.device) for p in trained]
        if described == self._described:
            return
        self._described, self._trained = described, trained
        numbers = [number for number, p in enumerate(every) if p.requires_grad]
        paths = {id(p): path for path, child in self.module.named_modules() for p in child._parameters.values()}
        self._buckets = []
        for places in buckets_of(trained):
            path = common_path(paths[id(trained[place])] for place in places)
            self._buckets.append((places, Which(tuple([numbers[place] for place in places]), path)))

    def _share_memory(self) -> bool:
        """Whether there are replicas that still share memory with their parameters. ``model.half()`` ends that."""
        replica = next(iter(self._replicas.values()), None)
        return replica is not None and storage_of(replica._plain) == storage_of(replica._variable)

    def _keep_replicas(
        self, context: Context, parameters: Sequence[torch.Tensor], entered: Sequence[torch.Tensor]
    ) -> None:
        for parameter, plain in zip(parameters, entered, strict=True):
            self._replicas[id(parameter)] = Replica._of_parameter(plain, parameter, context)

    def end_forward(self) -> None:
        """Do nothing: the replicas are kept, as a checkpoint may read them in backward."""

    def replica_of(self, owner: Parameters, parameter: torch.Tensor) -> torch.Tensor:
        # the forward itself may have frozen a parameter that entered
        if (self._reads_parameters and self.depth) or not parameter.requires_grad:
            return parameter
        replica = self._replicas.get(id(parameter))
        if replica is None:
            bucket = self._unread.get(id(parameter))
            if bucket is None:
                return parameter
            self._keep_replicas(bucket.context, bucket.parameters, bucket.use())
            replica = self._replicas[id(parameter)]
        if address_of(replica._plain) != address_of(parameter):  # the forward has set the parameter's ``data``
            with torch.enable_grad():
                entered = enter(replica._context, [parameter], recomputed=False)
            self._keep_replicas(replica._context, [parameter], entered)
            replica = self._replicas[id(parameter)]
        return replica

    def as_assigned(self, value: Any) -> Any:
        if type(value) is not GlobalTensor:
            return value
        if not isinstance(value, torch.nn.Parameter):  # torch.func.functional_call sets it, and its gradient goes on
            return value.full_tensor()
        return torch.nn.Parameter(value_to_store(value.detach()), value.requires_grad)

    def adopt(self, modules: list[torch.nn.Module]) -> None:
        self._dicts = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedWeights:
        """The weights of a copied model. A part that is copied alone keeps this object, without replicas."""
        if id(self.module) not in memo:
            return self
        made = memo[id(self)] = ReplicatedWeights(deepcopy(self.module, memo), self.P)
        return made


def _dicts_of(module: torch.nn.Module) -> Iterator[Parameters]:
    """The parameter dicts of a model's distributed modules, without those that have weights of ``distdl.nn``."""
    placed = {id(p) for child in module.modules() if isinstance(child, Module) for p in child.parameters()}
    for child in module.modules():
        found = child._parameters
        if isinstance(found, Parameters) and not any(id(p) in placed for p in found.values()):
            yield found
