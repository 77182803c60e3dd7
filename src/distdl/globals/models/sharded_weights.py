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
from typing import Any
from weakref import WeakSet

import torch

from distdl.globals.layouts.context import Context, other_world
from distdl.globals.models.additions import Additions
from distdl.globals.models.frames import Frame, Since, state_with_share
from distdl.globals.models.gathered import Gathered
from distdl.globals.models.gathering import Gathering
from distdl.globals.models.parameters import Parameters
from distdl.globals.models.prefetch import Course
from distdl.globals.models.saved_weights import Keep, forgets_weights, gather_before, hooks_now, restore
from distdl.globals.models.splitting import split_parameters
from distdl.globals.models.states import check_assignment, whole_state
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica
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
        self._frames: list[Frame] = []
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
            self._frames.append(Frame(module, hooks_now()))

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
                if frame.gathered and not forgets_weights(module):
                    frame.gathered[0].before, self._latest = self._latest, frame.gathered
                    gather_before(result, self.keep, frame.gathered, frame.first)
                for one in frame.gathered:
                    one.release()

    leave_uncompiled(begin_module)
    leave_uncompiled(end_module)

    def of(self, owner: Parameters, parameter: torch.Tensor) -> torch.Tensor:
        if type(parameter) is not GlobalTensor:
            return parameter
        frame = self._frames[-1] if self._frames else None
        if frame is None or frame.hooks is not hooks_now():
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
                frame.copies[id(one), graph] = copy, state_with_share(copy)
        return frame.copies[id(parameter), graph][0]

    def settled(self, value: Any) -> Any:
        return value

    def enlarged(self, modules: list[torch.nn.Module]) -> None:
        """(New parameters stay whole on every worker; those that a parametrisation takes over are in shares.)"""
        for child in modules:
            child.register_forward_pre_hook(self.begin_module)
            child.register_forward_hook(self.end_module, always_call=True)
            child.register_state_dict_post_hook(whole_state)
            child.register_load_state_dict_pre_hook(check_assignment)

    def _gather(self, owner: Parameters, parameters: list[GlobalTensor], frame: Frame | None) -> list[torch.Tensor]:
        for one in parameters:
            if one._context is not self._context:  # (whose gradient would add up over other workers)
                raise other_world("the forward of a model with weights in shares", self._context, one._context)
            block_of(one)  # (brings what has been written into its state_dict)
        gathered = Gathered(Gathering.of(parameters), parameters, self.keep.held)
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
            found[-1].__dict__["_since"] = Since(owner, parameter)
        return found
