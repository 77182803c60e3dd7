"""The parameters of a distributed model: what its code reads in their places while its forward runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from itertools import takewhile
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch
from torch.utils.weak import WeakIdKeyDictionary

from distdl.globals.consistency.drift import Drift
from distdl.globals.consistency.equality import whole_of
from distdl.globals.layouts.context import Context
from distdl.globals.moving.buffer_writes import settled
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.gradient_sums import Which, enter, enter_apart, settle
from distdl.globals.tensor.replicas import Replica, parameter_of, plain_of
from distdl.globals.tensor.stale import address_of
from distdl.globals.views.aliasing import writes_of
from distdl.nn.compiling import leave_uncompiled
from distdl.nn.module import Module
from distdl.partition import Partition
from distdl.tensors.derivatives import is_checkpointed, is_recomputed
from distdl.tensors.levels import beneath
from distdl.tensors.repeats import checkpoints

_BUCKET = 4 << 20
"""Bytes of gradients that travel as one message, at most (of one tensor, as many as it has)."""


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


class Additions:
    """Whether tensors and modules were set in a distributed model outside of its forward.

    Workers may have drawn other weights for them, so they are made equal before the next forward. Before the first one,
    so are weights that have been written since the model was distributed, as ``model.apply(init)`` does.

    Attributes:
        open: whether there may be any.
    """

    def __init__(self) -> None:
        self.open = False
        self._equal = WeakIdKeyDictionary()  # what is equal on the workers: modules, parameters and buffers
        self._begun = WeakIdKeyDictionary()  # how often each tensor had been written then, until the first forward

    def begin(self, module: torch.nn.Module) -> None:
        """Take note that a model has been distributed."""
        self.settle(module)
        for _, one in whole_of(module):
            self._begun[one] = writes_of(one)
        self.open = True

    def note(self, value: Any, copies: Copies) -> None:
        """Take note of a value that was set, unless the forward itself has set it."""
        if value is None or type(value) is GlobalTensor or value in self._equal or copies.running or is_recomputed():
            return
        self.open = True

    def unknown(self, module: torch.nn.Module) -> set[int]:
        """The ids of the parameters and buffers of which nobody knows whether they are equal: all of new modules."""
        new = [child for child in module.modules() if child not in self._equal]
        inside = {id(one) for child in new for one in (*child.parameters(), *child.buffers())}
        inside |= {id(one) for one, writes in self._begun.items() if writes_of(one) != writes}
        return {id(one) for _, one in whole_of(module) if id(one) in inside or one not in self._equal}

    def settle(self, module: torch.nn.Module) -> None:
        """Take note that all of a module is equal on the workers."""
        for one in (*module.modules(), *module.parameters(), *module.buffers()):
            self._equal[one] = True

    def close(self, module: torch.nn.Module) -> None:
        """Take note that all of the model is."""
        self.settle(module)
        self.open = False
        self._begun = WeakIdKeyDictionary()


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
            self.copies.additions.note(value, self.copies)
        super().__setitem__(name, value)


class Buffers(dict[str, Any]):
    """The buffers of one module. One that is set to a global tensor becomes the whole tensor, on every worker."""

    def __init__(self, copies: Copies, buffers: dict[str, Any]) -> None:
        super().__init__(buffers)
        self.copies = copies

    def __setitem__(self, name: str, value: Any) -> None:
        if type(value) is not GlobalTensor:
            self.copies.additions.note(value, self.copies)
        super().__setitem__(name, settled(value))


class Replicas:
    """Every worker has all parameters. They enter together at the start of a forward, in buckets if they are many."""

    def __init__(self, module: torch.nn.Module, P: Partition) -> None:
        self.module, self.P = module, P
        self.running, self.additions = 0, Additions()
        self.outside: WeakSet[Any] = WeakSet()
        self._drift = Drift()
        self._copies: dict[int, Replica] = {}  # by the id of a parameter: those of the latest forward
        self._entering: dict[int, _Bucket] = {}  # the same: those of which none has been read in it
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
            for places in _buckets(listed):
                around = _around(paths[id(listed[place])] for place in places)
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
            self._entering.update(dict.fromkeys(map(id, bucket), _Bucket(context, bucket, use)))

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


class _Bucket(NamedTuple):
    """Parameters whose gradients travel together, and what gives their copies."""

    context: Context
    parameters: list[torch.Tensor]
    use: Callable[[], tuple[torch.Tensor, ...]]


def _held(module: torch.nn.Module) -> Iterator[Parameters]:
    """The parameters of the modules that are distributed; those of modules of ``distdl.nn`` live on some workers."""
    own = {id(p) for child in module.modules() if isinstance(child, Module) for p in child.parameters()}
    for child in module.modules():
        held = child._parameters
        if isinstance(held, Parameters) and not any(id(p) in own for p in held.values()):
            yield held


def _around(paths: Iterable[str]) -> str:
    """The path of the smallest module in which modules are."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))


def _buckets(parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """The places of parameters whose gradients travel together: those behind each other, of one dtype and device.

    One that is there several times has the first of its places.
    """
    bucket: list[int] = []
    nbytes = 0
    places = {id(parameter): place for place, parameter in reversed(list(enumerate(parameters)))}
    for place, parameter in enumerate(parameters):
        if places[id(parameter)] != place:
            continue
        first = parameters[bucket[0]] if bucket else parameter
        alike = (first.dtype, first.device) == (parameter.dtype, parameter.device)
        if bucket and (nbytes + parameter.nbytes > _BUCKET or not alike):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(place)
        nbytes += parameter.nbytes
    if bucket:
        yield bucket
