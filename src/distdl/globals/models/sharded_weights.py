r"""Parameters of which every worker stores its share: they come together just before a module uses them.

A parameter is a global tensor that is split over all workers. The forward of the module that owns it gathers it,

.. math:: w_t = w, \qquad \partial w[\text{box of } s] = \sum_t \partial w_t[\text{box of } s]

and after the module's forward the whole is gone again. What autograd would keep of it for backward is not kept: the
weights are gathered once more when the gradient of the module's result is there, and go when theirs has been given to
the shares (the adjoint of gathering: a reduce-scatter) or the backward has left the module. So between steps a worker
has its shares. At the peak it has, beside them, the weights of the modules whose forward runs, one inside another (most
often one module has weights of its own), twice while the message is unpacked, or in backward those of one module and
their gradients; and some small ones that have come along before they are needed, or whose gradients wait to go back as
one message (see :mod:`~distdl.globals.models.prefetch`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from typing import Any
from weakref import WeakSet

import torch

from distdl.globals.layouts.context import Context, other_world
from distdl.globals.models.gathered import Gathered, Keep, restore
from distdl.globals.models.gathering import Gathering, state_of
from distdl.globals.models.prefetch import Course
from distdl.globals.models.replicated_weights import Additions, Parameters
from distdl.globals.models.splitting import split_parameters
from distdl.globals.models.states import whole_state
from distdl.globals.moving.alignment import taken
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import WRITTEN, Replica, plain_of
from distdl.globals.tensor.stale import computed_from
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.tensor.table import REPLICATED
from distdl.globals.views.aliasing import writes_of
from distdl.nn.compiling import leave_uncompiled
from distdl.partition import Partition
from distdl.tensors.derivatives import Keeping, next_node, saved_tensors_hooks


class Shares:
    """Every worker has a share of every parameter."""

    def __init__(self, module: torch.nn.Module, P: Partition) -> None:
        self._settle(module, P)
        split_parameters(module, self._context)

    def _settle(self, module: torch.nn.Module, P: Partition) -> None:
        self.module, self.P = module, P
        self.running, self.additions = 0, Additions()
        self.outside: WeakSet[Any] = WeakSet()
        self.keep = Keep()
        self._frames: list[_Frame] = []
        self._hooks: Any = None
        self._course = Course()
        self._latest: Sequence[Gathered] = ()  # of the module whose forward ended last

    @property
    def _context(self) -> Context:
        return Context.of(self.P.comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shares:
        """Those of a copied model. A part of the model that is copied by itself keeps these."""
        if id(self.module) not in memo:
            return self
        made = memo[id(self)] = Shares.__new__(Shares)
        made._settle(deepcopy(self.module, memo), self.P)
        return made

    def begin(self) -> None:
        self.keep.settle()
        self._course.begin()
        # (inside of hooks of others, as in a checkpoint of the whole model, it is up to them what is kept)
        others = saved_tensors_hooks()
        counts = None if others is None else getattr(others[0], "counts", None)
        if torch.is_grad_enabled() and (others is None or counts is not None):
            self.keep.counted = counts
            self._hooks = Keeping(self.keep, restore)
            self._hooks.__enter__()
            if self._frames:  # that of the model itself, which began before
                self._frames[-1].hooks = self.keep

    def end(self) -> None:
        self._course.end()
        self._latest = ()
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def begin_module(self, module: torch.nn.Module, inputs: Any) -> None:
        """A hook: the forward of a module begins."""
        with torch._C.DisableTorchFunction():
            self._frames.append(_Frame(module, _hooks_now()))

    def end_module(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        """A hook: it has ended, or failed."""
        if not (self._frames and self._frames[-1].module is module):
            return
        with torch._C.DisableTorchFunction():
            frame = self._frames.pop()
            try:
                if result is not None or sys.exc_info()[0] is None:  # (an error of the forward is enough)
                    frame.check_unwritten()
            finally:
                if frame.gathered and not _forgets_weights(module):
                    frame.gathered[0].before, self._latest = self._latest, frame.gathered
                    _gather_before(result, self.keep, frame.gathered, frame.first)
                for one in frame.gathered:
                    one.release()

    leave_uncompiled(begin_module)
    leave_uncompiled(end_module)

    def of(self, owner: Parameters, parameter: torch.Tensor) -> torch.Tensor:
        if type(parameter) is not GlobalTensor:
            return parameter
        frame = self._frames[-1] if self._frames else None
        if frame is None or frame.hooks is not _hooks_now():
            # a checkpoint of a function, that runs or is recomputed: both gather each weight by itself
            return self._gather(owner, [parameter], None)[0]
        graph = torch.is_grad_enabled() or (id(parameter), True) in frame.copies
        if frame.is_outdated(parameter, graph):
            wanted = [parameter]
            if frame.module._parameters is owner:  # its own weights come together as one message
                alike = (parameter.dtype, parameter.device, parameter.requires_grad)
                listed = [one for one in owner.values() if type(one) is GlobalTensor and frame.is_outdated(one, graph)]
                wanted = [one for one in listed if (one.dtype, one.device, one.requires_grad) == alike]
            for one, copy in zip(wanted, self._gather(owner, wanted, frame), strict=True):
                frame.copies[id(one), graph] = copy, _lies(copy)
        return frame.copies[id(parameter), graph][0]

    def settled(self, value: Any) -> Any:
        return value

    def enlarged(self, modules: list[torch.nn.Module]) -> None:
        """(New parameters stay whole on every worker; those that a parametrisation takes over are in shares.)"""
        for child in modules:
            child.register_forward_pre_hook(self.begin_module)
            child.register_forward_hook(self.end_module, always_call=True)
            child.register_state_dict_post_hook(whole_state)
            child.register_load_state_dict_pre_hook(_check_assignment)

    def _gather(self, owner: Parameters, parameters: list[GlobalTensor], frame: _Frame | None) -> list[torch.Tensor]:
        for one in parameters:
            if one._context is not self._context:  # (whose gradient would add up over other workers)
                raise other_world("the forward of a model with weights in shares", self._context, one._context)
            block_of(one)  # (brings what has been written into its state_dict)
        gathered = Gathered(Gathering.of(parameters), parameters, self.keep)
        kept = frame is not None and frame.hooks is self.keep
        copies = gathered.copies() if frame is None else self._course.copies(gathered, joined=kept)
        gathered.recorded = any(one.requires_grad for one in copies)
        if frame is not None and kept:
            gathered.hold(copies)
            if not frame.gathered:
                frame.first = next_node()
            gathered.first = frame.first
            frame.gathered.append(gathered)
        found: list[torch.Tensor] = []
        for copy, parameter in zip(copies, parameters, strict=True):
            found.append(Replica._of_parameter(copy, parameter, self._context))
            found[-1].__dict__["_since"] = _Since(owner, parameter)
        return found


class _Frame:
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
            if _lies(copy) == before:
                continue
            if not isinstance(self.module, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
                raise RuntimeError(WRITTEN.format(f"{type(self.module).__name__}.forward has written"))
            share: Any = copy.__dict__["_variable"]
            if share._layout.active:
                share._block.data.copy_(taken(plain_of(copy).detach(), share._layout))


def _lies(copy: torch.Tensor) -> tuple[int, ...]:
    """Where the copy of a weight lies, and how often it and its share have been written."""
    plain = plain_of(copy)
    return plain.data_ptr(), writes_of(plain), *state_of(copy.__dict__["_variable"])


class _Since:
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


def _hooks_now() -> Any:
    hooks = saved_tensors_hooks()
    return None if hooks is None else hooks[0]


def _forgets_weights(module: torch.nn.Module) -> bool:
    """Whether a module's backward reads no weight, on any worker: that of a lookup does not, which is all it does."""
    looks_up = type(module) is torch.nn.Embedding and not (module.scale_grad_by_freq or module.sparse)
    as_it_is = "forward" not in module.__dict__ and list(module._parameters) == ["weight"]
    hooks = len(module._forward_pre_hooks), len(module._forward_hooks)
    return looks_up and as_it_is and hooks == (1, 1)  # (ours)


def _gather_before(result: Any, keep: Keep, gathered: list[Gathered], first: int) -> None:
    """Gather weights again as soon as the gradient of a module's result is there: at the same point on every worker.

    A view that is written in place behind the module gets another node, and its own never runs. So of a view it is the
    node of its base, unless that was there before the weights were.
    """

    gathered = [one for one in gathered if one.recorded or not one.is_outdated()]  # (it has written them)
    nodes: set[Any] = set()
    for one in tensors_in(result):
        block = one._block if type(one) is GlobalTensor else one._plain if type(one) is Replica else one
        node: Any = block.grad_fn
        base: Any = block._base
        made = None if base is None else base.grad_fn
        if made is not None and made._sequence_nr() >= first:
            node = made
        if node is not None and node not in nodes:
            nodes.add(node)
            node.register_prehook(partial(keep.gather_again, gathered, first, int(node._sequence_nr())))


def _check_assignment(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would put whole tensors in the places of this worker's shares, and an "
            "optimiser would go on with the old ones; without assign=True, the values are copied into the shares"
        )
