"""What all modules of distdl have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar, overload

import torch

from distdl.agreement.header import Carried
from distdl.nn.compiling import leave_uncompiled
from distdl.partition import Partition
from distdl.tensors.connection import local as local
from distdl.tensors.connection import no_view as no_view
from distdl.tensors.connection import zeros_on as zeros_on
from distdl.tensors.dtypes import carries_gradients

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


def options(count: int) -> Iterator[Option[Any]]:
    """As many options, for names that stand side by side: ``kernel_size, stride = options(2)``."""
    return (Option[Any]() for _ in range(count))


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
