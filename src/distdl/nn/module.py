"""What all modules of distdl have in common."""

from __future__ import annotations

import zlib
from abc import abstractmethod
from typing import Any, ClassVar, Generic, TypeVar, overload

import torch

from distdl.agreement import Agreement
from distdl.agreement.header import Carried, Headers
from distdl.exchange.route import Route, move
from distdl.nn.compiling import leave_uncompiled
from distdl.partition import Partition
from distdl.plan import Plan
from distdl.tensors.connection import local as local
from distdl.tensors.connection import no_view as no_view
from distdl.tensors.connection import zeros_on as zeros_on
from distdl.tensors.dtypes import can_be_added, carries_gradients
from distdl.transport.label import Label

Value = TypeVar("Value")


class Module(torch.nn.Module):
    """A torch module whose workers act together: every worker of the world builds it and calls it, in one order.

    To ``torch.compile`` it is a break in the graph: what stands between such modules is compiled.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in cls.__dict__:
            leave_uncompiled(cls.__dict__["forward"])

    def extra_repr(self) -> str:
        """Its partitions and its other options (see :class:`Option`), in the order in which they were set."""
        options = {
            name: value for name, value in vars(self).items() if isinstance(getattr(type(self), name, 0), Option)
        }
        partitions = [f"{name}: {P}" for name, P in options.items() if isinstance(P, Partition)]
        others = [f"{name}={value!r}" for name, value in options.items() if not isinstance(value, Partition)]
        return "; ".join([*partitions, ", ".join(others)] if others else partitions)


class Option(Generic[Value]):
    """A public attribute of a module that its constructor sets, once.

    What a module sets up follows from its options and is kept, and the workers agree on tensors at each call, not on
    options. A change would be ignored in silence, or would hold on one worker only. So it is an error::

        class DistributedPad(Module):
            mode = Option[str]()

    Raises: AttributeError where it is set again or deleted.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, module: None, owner: type) -> Option[Value]: ...

    @overload
    def __get__(self, module: torch.nn.Module, owner: type) -> Value: ...

    def __get__(self, module: torch.nn.Module | None, owner: type) -> Any:
        if module is None:
            return self
        try:
            return module.__dict__[self._name]
        except KeyError:
            raise AttributeError(self._name) from None  # which torch turns into its own sentence

    def __set__(self, module: torch.nn.Module, value: Value) -> None:
        if self._name in module.__dict__:
            raise self._refusal(module)
        module.__dict__[self._name] = value

    def __delete__(self, module: torch.nn.Module) -> None:
        raise self._refusal(module)

    def _refusal(self, module: torch.nn.Module) -> AttributeError:
        return AttributeError(
            f"{type(module).__name__} keeps the {self._name} that it was built with, because what its workers have set "
            f"up follows from it; build a new layer with another {self._name}"
        )


class Primitive(Module):
    """A linear map from the tensors of the workers of ``P_x`` to those of the workers of ``P_y``.

    What a worker gets back:

    =============  =============  ==================================================================================
    in ``P_x``     in ``P_y``     returns
    =============  =============  ==================================================================================
    yes or no      yes            its part of y, with the dtype of the workers that have a part of x
    yes            no             a tensor of zero volume: shape ``(batch, 0)`` with ``preserve_batch``, else ``(0,)``
    no             no             a clone of its input
    =============  =============  ==================================================================================

    A worker outside ``P_x`` passes any tensor of zero volume. Inputs and gradients are never written or returned. The
    gradient of an input has that input's shape and dtype, also where it has no volume.

    Subclasses give ``plan``, and say with ``adds`` whether its forward adds tensors up.
    """

    adds: ClassVar[bool] = False

    def __init__(self, P_x: Partition, P_y: Partition, preserve_batch: bool = True, options: Any = ()) -> None:
        team = P_x | P_y
        super().__init__()
        self.P_x = P_x
        self.P_y = P_y
        self.preserve_batch = preserve_batch
        self._member = P_x.comm.rank in team
        self._last: Route | None = None  # what the latest forward moved along
        self._name = Label(f"{type(self).__name__} (P_x: {P_x}; P_y: {P_y})")
        places = [(P.workers.shape, zlib.crc32(P.workers.tobytes())) for P in (P_x, P_y)]
        self._agreement = Agreement.among(team, self._name, (options, places), self._derive, (P_x, P_y), (P_x,))

    @abstractmethod
    def plan(self, headers: Headers) -> Plan:
        """The plan that follows from what the members reported. A pure function; what it raises, all members raise."""

    def header_extras(self) -> tuple[int, ...]:
        """More integers for this worker's header."""
        return ()

    def _derive(self, headers: Headers) -> tuple[Route, torch.dtype]:
        dtype = headers.dtype(self.P_x, type(self).__name__)
        if self.adds and not can_be_added(dtype):
            raise ValueError(f"{type(self).__name__} adds tensors, and torch does not add tensors of {dtype}")
        comm = self.P_x.comm
        return Route(self.plan(headers), comm, headers.members, self._name), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._member:
            return x.clone()
        decision = self._agreement.reach((x,), self.header_extras())
        route, dtype = decision.outcome
        self.__dict__["_last"] = route  # (torch's way to set an attribute takes longer)
        return move(route, x, dtype, blank_shape(x, self.preserve_batch), decision.carried[0])

    def extra_repr(self) -> str:
        return f"P_x: {self.P_x}; P_y: {self.P_y}"


def blank_shape(x: torch.Tensor, preserve_batch: bool) -> tuple[int, ...]:
    """Shape of the tensor of zero volume that a worker without output returns for the input x."""
    return (x.shape[0], 0) if preserve_batch and x.dim() else (0,)


def check_buffer_manager(buffer_manager: Any) -> None:
    """Check an argument of the published interface. Our message memory belongs to the communicator.

    Raises: ValueError unless it is None or can be asked for buffers.
    """
    if buffer_manager is not None and not callable(getattr(buffer_manager, "request_buffers", None)):
        raise ValueError(f"buffer_manager must be None or have request_buffers; got {type(buffer_manager).__name__}")


def stay(x: torch.Tensor, carried: Carried) -> torch.Tensor:
    """x, where a layer moves nothing. Inside an activation checkpoint it is recorded all the same, on every member.

    A checkpoint computes its forward again as far as to what it saved last. So every member saves something behind the
    layer's agreement, or some would come past it again and wait for others that do not.
    """
    hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    if not (hooked and carried.gradient and carries_gradients(x.dtype)):
        return x
    y: torch.Tensor = _Stays.apply(x, torch.empty(0, device=x.device, requires_grad=True))  # type: ignore[no-untyped-call]
    return y


class _Stays(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(anchor)
        alias: torch.Tensor = torch.ops.aten.alias(x)  # (view_as changes the strides of dims of extent 1)
        return alias

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (anchor,) = ctx.saved_tensors
        return dy, torch.zeros_like(anchor)

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, anchor: torch.Tensor | None) -> torch.Tensor:
        return tangent
