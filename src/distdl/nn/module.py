"""What all modules of distdl have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import torch

from distdl.nn.compiling import leave_uncompiled
from distdl.partition import Partition

Value = TypeVar("Value")

COPIES = "distdl: copies of one tensor"
"""The key in a node's metadata that says that its results may be copies of one tensor, of whose gradient the backward
adds up the parts that the workers have."""

call_in_forward: Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any] | None = None
"""Calls what a module computes of plain tensors: inside of a distributed forward, it gives blocks. Set by globals."""


class Module(torch.nn.Module):
    """A torch module whose workers act together: every worker of the world builds and calls it, in the same order.

    For ``torch.compile`` it is a graph break: only what lies between such modules is compiled.
    """

    _gives_copies = False  # whether results may be copies of one tensor
    _member = True  # whether this worker takes part

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "forward" in cls.__dict__:
            leave_uncompiled(cls.__dict__["forward"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module with this worker's tensors. A global tensor among the arguments takes the call over."""
        for one in (*args, *kwargs.values()) if kwargs else args:
            if type(one) is not torch.Tensor:  # the common case first: a look-up of what is not there takes longer
                take_over = getattr(type(one), "_call_module", None)
                if take_over is not None:
                    return take_over(self, self._call_plain, args, kwargs)
        if call_in_forward is None or not hasattr(self, "P_x"):
            return self._call_plain(*args, **kwargs)
        return call_in_forward(self._call_plain, args, kwargs)

    def _call_plain(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with plain tensors."""
        y = self._wrapped_call_impl(*args, **kwargs)
        node: Any = y.grad_fn if self._gives_copies else None
        if node is not None:
            node.metadata[COPIES] = True
        return y

    def extra_repr(self) -> str:
        """The partitions and the other options (see :class:`Option`), in the order in which they were set."""
        options = {
            name: value for name, value in vars(self).items() if isinstance(getattr(type(self), name, 0), Option)
        }
        partitions = [f"{name}: {P}" for name, P in options.items() if isinstance(P, Partition)]
        others = [f"{name}={value!r}" for name, value in options.items() if not isinstance(value, Partition)]
        return "; ".join([*partitions, ", ".join(others)] if others else partitions)


class Option(Generic[Value]):
    """A public attribute of a module that is set once, by its constructor.

    What a module sets up depends on its options and is cached, and in each call the workers agree on tensors, not on
    options. So a change would be silently ignored, or would hold on one worker only. It is therefore an error::

        class DistributedPad(Module):
            mode = Option[str]()

    Raises: AttributeError if it is set again or deleted.
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


def check_buffer_manager(buffer_manager: Any) -> None:
    """Check an argument of the published interface. It is not used: message memory belongs to the communicator.

    Raises: ValueError unless it is None or has ``request_buffers``.
    """
    if buffer_manager is not None and not callable(getattr(buffer_manager, "request_buffers", None)):
        raise ValueError(f"buffer_manager must be None or have request_buffers; got {type(buffer_manager).__name__}")
