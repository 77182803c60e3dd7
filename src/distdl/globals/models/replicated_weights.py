"""The parameters of a distributed model: what its code reads in their places while its forward runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any
from weakref import WeakSet

import torch

from distdl.globals.consistency.drift import Drift
from distdl.globals.layouts.context import Context
from distdl.globals.models.additions import Additions
from distdl.globals.models.buckets import Bucket, buckets_of, path_around
from distdl.globals.models.parameters import Parameters
from distdl.globals.moving.buffer_writes import settled
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.gradient_sums import Which, enter, enter_apart, settle
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.stale import address_of
from distdl.nn.module import Module
from distdl.partition import Partition


class Replicas:
    """Every worker has all parameters. They enter together at the start of a forward, in buckets if they are many."""

    def __init__(self, module: torch.nn.Module, P: Partition) -> None:
        self.module, self.P = module, P
        self.running, self.additions = 0, Additions()
        self.outside: WeakSet[Any] = WeakSet()
        self._drift = Drift()
        self._copies: dict[int, Replica] = {}  # by the id of a parameter: those of the latest forward
        self._entering: dict[int, Bucket] = {}  # the same: those of which none has been read in it
        self._plain = False  # whether the forward that runs has no gradients, and reads the parameters themselves
        self._held: list[Parameters] | None = None
        self._described: list[Any] = []  # the parameters for which the buckets are
        self._listed: list[torch.Tensor] = []  # these
        self._buckets: list[tuple[list[int], Which]] = []  # their places among these, and which they are

    def begin(self) -> None:
        self._plain = not torch.is_grad_enabled()
        if self._plain and self._share_memory():
            return  # (a checkpoint reads the copies in the backward of an earlier forward)
        self._copies, self._entering = {}, {}
        if self._plain:
            return
        if self._held is None:
            self._held = list(_held(self.module))
        context = Context.of(self.P.comm)
        every = [p for held in self._held for p in held.values() if p is not None]
        every = [p for p in every if type(p) is not Replica]  # (functional_call sets what another model has computed)
        listed = [p for p in every if p.requires_grad]
        for p in listed:
            if p.is_leaf and type(p.grad) is GlobalTensor:  # (made by hand, of activations: torch adds to it)
                p.grad = p.grad.full_tensor()
        described = [(id(p), p.shape, p.dtype, p.device) for p in listed]
        if described != self._described:
            self._described, self._listed = described, listed
            among = [place for place, p in enumerate(every) if p.requires_grad]
            paths = {id(p): path for path, child in self.module.named_modules() for p in child._parameters.values()}
            self._buckets = []
            for places in buckets_of(listed):
                around = path_around(paths[id(listed[place])] for place in places)
                self._buckets.append((places, Which(tuple([among[place] for place in places]), around)))
        alone = len(context.everyone) == 1
        look = None if alone or not listed else self._drift.look(context, self.module)
        settle(context)
        buckets = [([listed[place] for place in places], which) for places, which in self._buckets]
        if alone or len(buckets) < 2:  # (one is full only when the backward has come to its end)
            for bucket, which in buckets:
                self._read(context, bucket, enter(context, bucket, look, which))
            return
        for (bucket, _), use in zip(buckets, enter_apart(context, buckets, look), strict=True):
            self._entering.update(dict.fromkeys(map(id, bucket), Bucket(context, bucket, use)))

    def _share_memory(self) -> bool:
        """Whether copies are there, in the memory of the parameters (``model.half()`` gives these another)."""
        copy = next(iter(self._copies.values()), None)
        return copy is not None and copy._plain.data_ptr() == copy._variable.data_ptr()

    def _read(self, context: Context, parameters: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
        for parameter, copy in zip(parameters, copies, strict=True):
            self._copies[id(parameter)] = Replica._of_parameter(copy, parameter, context)

    def end(self) -> None:
        """The copies stay: a checkpoint reads them in backward."""

    def of(self, owner: Parameters, parameter: torch.Tensor) -> torch.Tensor:
        if (self._plain and self.running) or not parameter.requires_grad:  # (which may be since it has entered)
            return parameter
        copy = self._copies.get(id(parameter))
        if copy is None:
            bucket = self._entering.get(id(parameter))
            if bucket is None:
                return parameter
            self._read(bucket.context, bucket.parameters, bucket.use())
            copy = self._copies[id(parameter)]
        if address_of(copy._plain) != address_of(parameter):
            copy = self._read_again(copy._context, parameter)
        return copy

    def _read_again(self, context: Context, parameter: torch.Tensor) -> Replica:
        """Let a parameter enter by itself whose ``data`` the forward has set since it has entered."""
        with torch.enable_grad():
            self._read(context, [parameter], enter(context, [parameter], recomputed=False))
        return self._copies[id(parameter)]

    def settled(self, value: Any) -> Any:
        if type(value) is not GlobalTensor:
            return value
        if not isinstance(value, torch.nn.Parameter):  # as torch.func.functional_call does, whose gradient goes on
            return value.full_tensor()
        return torch.nn.Parameter(settled(value.detach()), value.requires_grad)

    def enlarged(self, modules: list[torch.nn.Module]) -> None:
        self._held = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Replicas:
        """Those of a copied model. Where a part of the model is copied by itself, its weights enter by themselves."""
        if id(self.module) not in memo:
            return self
        made = memo[id(self)] = Replicas(deepcopy(self.module, memo), self.P)
        return made


def _held(module: torch.nn.Module) -> Iterator[Parameters]:
    """The parameters of the modules that are distributed; those of modules of ``distdl.nn`` live on some workers."""
    own = {id(p) for child in module.modules() if isinstance(child, Module) for p in child.parameters()}
    for child in module.modules():
        held = child._parameters
        if isinstance(held, Parameters) and not any(id(p) in own for p in held.values()):
            yield held
