"""Random functions of plain tensors while a distributed model runs: every worker draws the same.

A plain tensor is the same on every worker, but workers that are threads share torch's generator, and those that are
processes may have other seeds. So ``torch.rand(x.shape)`` in a model's code draws by what random functions of global
tensors draw by: the seed on which the workers have agreed, and how many calls there were.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distdl.globals.functions import random
from distdl.globals.functions.random import next_draw, of_copies
from distdl.globals.layouts.context import Context
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.tensor.table import TABLE
from distdl.nn.compiling import leave_uncompiled

_TAKE_GENERATOR = {
    torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal, torch.multinomial, torch.poisson,
    torch.Tensor.multinomial,
}  # fmt: skip
_OURS = frozenset([GlobalTensor, Replica, torch.Tensor, torch.nn.Parameter])
_DRAWN = {func for func, handler in TABLE.items() if getattr(handler, "__module__", "") == random.__name__}


class _Here(threading.local):
    context: Context | None = None  # of the innermost that is on


_here = _Here()


class _Drawn:
    """Whether any random call of a world was one of plain tensors."""

    plain = False


class Drawing(TorchFunctionMode):
    """While this is on, random functions of plain tensors draw the same on every worker. Costs 1 to 2 us a call."""

    def __init__(self, context: Context) -> None:
        super().__init__()
        self.context = context
        self._around: Context | None = None

    def __enter__(self) -> Drawing:
        self._around, _here.context = _here.context, self.context
        super().__enter__()
        return self

    def __exit__(self, *problem: Any) -> None:
        _here.context = self._around
        super().__exit__(*problem)

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if GlobalTensor in types and _is_next(types):  # (without the way through torch once more)
            return GlobalTensor.__torch_function__(func, types, args, kwargs)
        kwargs = kwargs or {}
        drawn = func in _DRAWN
        if (drawn or func in _TAKE_GENERATOR) and GlobalTensor not in types and kwargs.get("generator") is None:
            self.context.own(_Drawn).plain = True
            if drawn:
                return of_copies(func, args, kwargs, self.context)
            device = _device(args, kwargs)
            if device.type != "meta":
                kwargs = {**kwargs, "generator": generator(self.context, device)}
        return func(*args, **kwargs)

    leave_uncompiled(__torch_function__)


def _is_next(types: Sequence[type]) -> bool:
    """Whether torch would ask global tensors next what a function of such tensors is."""
    enabled = torch._C._is_torch_function_enabled() and not torch._C._len_torch_function_stack()  # (no other mode)
    return enabled and _OURS.issuperset(types)


def drawn_by() -> Context | None:
    """Of which world plain tensors draw here; None if they draw from torch's generator."""
    return _here.context


@contextmanager
def drawing(context: Context | None) -> Iterator[None]:
    """In which plain tensors draw as where :func:`drawn_by` has given this."""
    # (also where one is on: in a backward that was called under it, torch has taken it off)
    with nullcontext() if context is None else Drawing(context):
        yield


def redrawing(outputs: Sequence[Any]) -> AbstractContextManager[Any]:
    """For a backward of these tensors: a forward that a checkpoint recomputes in it draws what it drew."""
    context = next((one._context for one in outputs if type(one) is GlobalTensor), None)
    return Drawing(context) if context is not None and context.own(_Drawn).plain else nullcontext()


def generator(context: Context, device: torch.device) -> torch.Generator:
    """One for the next random call."""
    draw = next_draw(context)
    # (neighbouring seeds are well apart in Philox and in the Mersenne twister, once they are mixed)
    mixed = (draw.seed * 0x9E3779B97F4A7C15 + draw.number * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) % 2**63
    return torch.Generator(device).manual_seed(mixed)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    found = tensors_in((args, kwargs))
    return found[0].device if found else torch.get_default_device()
