"""Random functions of plain tensors while a distributed model runs: every worker draws the same.

A plain tensor is to be the same on every worker. But workers that are threads share torch's generator, and workers that
are processes may have different seeds. So ``torch.rand(x.shape)`` in a model's code draws as random functions of global
tensors do: from the seed on which the workers have agreed, and the count of random calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distdl.globals.functions.random import draw_whole, next_draw, of_replica
from distdl.globals.layouts.context import Context
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.tensor.table import REPLICATED
from distdl.nn.compiling import leave_uncompiled
from distdl.tensors.draws import Draw
from distdl.tensors.private_torch import is_torch_function_enabled, len_torch_function_stack
from distdl.tensors.recorders import as_one_call

_TAKE_GENERATOR = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.multinomial, torch.poisson,
    torch.Tensor.multinomial,
}  # fmt: skip
_OURS = frozenset([GlobalTensor, Replica, torch.Tensor, torch.nn.Parameter])


class _ThreadState(threading.local):
    context: Context | None = None  # of the innermost Drawing that is on


_thread = _ThreadState()


class _Drawn:
    """Whether any random call of a world was one of plain tensors."""

    plain = False


class Drawing(TorchFunctionMode):
    """While this is on, random functions of plain tensors draw the same on every worker. Costs 1 to 2 us a call.

    A function that is given a generator draws from it, as in torch.
    """

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self._around: Context | None = None

    def __enter__(self) -> Drawing:
        self._around, _thread.context = _thread.context, self.context
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        _thread.context = self._around
        super().__exit__(*problem)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if GlobalTensor in types and _is_next(types):  # saves torch's second dispatch
            return GlobalTensor.__torch_function__(func, types, args, kwargs)
        kwargs = kwargs or {}
        handled = REPLICATED.get(func) is of_replica
        if (handled or func in _TAKE_GENERATOR) and GlobalTensor not in types and kwargs.get("generator") is None:
            self.context.own(_Drawn).plain = True
            if handled:
                return draw_whole(func, args, kwargs, self.context)
            device = _device(args, kwargs)
            if device.type != "meta":
                kwargs = {**kwargs, "generator": generator(self.context, device)}
        return func(*args, **kwargs)

    leave_uncompiled(__torch_function__)


def _is_next(types: Sequence[type]) -> bool:
    """Whether torch would call the dispatch of global tensors next: no other mode is on, and no foreign type there."""
    enabled = is_torch_function_enabled() and not len_torch_function_stack()
    return enabled and _OURS.issuperset(types)


def drawn_by() -> Context | None:
    """The context by which plain tensors of this thread draw now; None if they draw from torch's generator."""
    return _thread.context


@contextmanager
def drawing(context: Context | None) -> Iterator[None]:
    """Let plain tensors draw by a context that :func:`drawn_by` has returned before; None changes nothing.

    The mode is entered even if it is on already, because torch takes it off in a backward that is called under it.
    """
    with nullcontext() if context is None else Drawing(context):
        yield


def redrawing(outputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """The mode for a backward of these tensors, so that a checkpoint in it recomputes its forward with equal draws."""
    context = next((one._context for one in outputs if type(one) is GlobalTensor), None)
    return Drawing(context) if context is not None and context.own(_Drawn).plain else nullcontext()


def generator(context: Context, device: torch.device) -> torch.Generator:
    """A generator for the next random call, in the same state on every worker."""
    return _generator_of(next_draw(context), device)


@as_one_call
def _generator_of(draw: Draw, device: torch.device) -> torch.Generator:
    # mixed, because generators with neighbouring seeds may give similar numbers
    mixed = (draw.seed * 0x9E3779B97F4A7C15 + draw.number * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) % 2**63
    return torch.Generator(device).manual_seed(mixed)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    """The device on which a random function makes its result."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    found = tensors_in((args, kwargs))
    return found[0].device if found else torch.get_default_device()
