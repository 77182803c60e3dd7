"""A model that a user has, made to compute with global tensors."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import torch

from distdl.globals.context import Context
from distdl.globals.operands import taken
from distdl.globals.paths import Entering, Leaving
from distdl.globals.replicas import Replica, enter, map_tensors
from distdl.globals.tensor import GlobalTensor
from distdl.partition import Partition

_BUCKET = 4 << 20
"""Bytes of gradients that travel as one message, at most (of one tensor, as many as it has)."""

WEIGHTS = ("replicated",)
FALLBACKS = ("warn", "error", "silent")


def distribute(
    module: torch.nn.Module, P: Partition, weights: str = "replicated", fallback: str = "warn"
) -> torch.nn.Module:
    """Make a model compute with tensors that are split over a partition. Its code, its parameters and its names stay.

    Every worker of the world of ``P`` has built the model with the same weights, calls it, and calls what follows: the
    loss, ``backward``, the optimiser. ``model(x)`` takes global tensors. A plain tensor, which then has to be the same on
    every worker, is split over ``P`` if it has at least as many dims as ``P`` has axes; else every worker keeps all of it.

    Args:
        module: any torch module.
        P: how tensors are split: its axes are their dims (batch, channel, space...).
        weights: ``"replicated"``: every worker has all parameters. The gradients of one backward travel in few messages,
            and are the same on every worker to the last bit.
        fallback: what is done about a torch function that has no op for global tensors: ``"warn"`` (it runs on one worker,
            and says so once for each place that calls it), ``"silent"`` (it does not say so) or ``"error"``.
    Returns: the module itself.
    Raises: ValueError for other options, or for a module that is distributed already.
    """
    for name, value, known in (("weights", weights, WEIGHTS), ("fallback", fallback, FALLBACKS)):
        if value not in known:
            raise ValueError(f"distribute needs {name} to be one of {', '.join(known)}; got {value!r}")
    if isinstance(module.__dict__.get("forward"), Forward):
        raise ValueError(f"{type(module).__name__} is distributed already, over {module.__dict__['forward'].P}")
    forward = Forward(module, P)
    for path, child in module.named_modules():
        mode = fallback if child is module else None
        child.register_forward_pre_hook(Entering(path, mode))
        child.register_forward_pre_hook(Installing(forward))
        child.register_forward_hook(Uninstalling(forward), always_call=True)
        child.register_forward_hook(Leaving(path, mode), always_call=True)
    module.__dict__["forward"] = forward
    return module


class Forward:
    """The forward of a distributed module: parameters enter, inputs are split, and the module's own forward runs.

    Attributes:
        P: the partition of its inputs.
    """

    def __init__(self, module: torch.nn.Module, P: Partition) -> None:
        self.module, self.P = module, P
        self._copies: dict[int, Replica] = {}  # by the id of a parameter: those of the latest forward
        self._depth = 0

    @property
    def context(self) -> Context:
        return Context.of(self.P.comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        """That of a copied model. The copies of parameters are those of a forward, and stay with it."""
        made = memo[id(self)] = Forward(deepcopy(self.module, memo), self.P)
        return made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given, named = map_tensors((args, kwargs), self._split)
        self._copies = self._entered()
        with _Installed(self, self.module):
            return type(self.module).forward(self.module, *given, **named)

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor or x.dim() < self.P.workers.ndim:
            return x
        layout = self.context.balanced(self.P, x.shape)
        return GlobalTensor._of(taken(x, layout).clone(), layout)

    def _entered(self) -> dict[int, Replica]:
        if not torch.is_grad_enabled():
            return {}
        context, found = self.context, {}
        for bucket in _buckets([one for one in self.module.parameters() if one.requires_grad]):
            for parameter, copy in zip(bucket, enter(context, bucket), strict=True):
                found[id(parameter)] = Replica._of(copy, context)
        return found


def _buckets(parameters: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Parameters whose gradients travel together: those behind each other, of one dtype and device."""
    bucket: list[torch.nn.Parameter] = []
    nbytes = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        alike = not bucket or (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if bucket and (nbytes + size > _BUCKET or not alike):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(parameter)
        nbytes += size
    if bucket:
        yield bucket


class _Installed:
    """While it is open, a module and those in it have the copies of their parameters in the places of these."""

    def __init__(self, forward: Forward, module: torch.nn.Module) -> None:
        self._forward, self._module = forward, module
        self._replaced: list[tuple[dict[str, Any], str, torch.nn.Parameter]] = []

    def __enter__(self) -> None:
        self._forward._depth += 1
        if self._forward._depth > 1:
            return
        copies = self._forward._copies
        for child in self._module.modules():
            own = child._parameters
            for name, parameter in own.items():
                if parameter is not None and id(parameter) in copies:
                    self._replaced.append((own, name, parameter))
        for own, name, parameter in self._replaced:
            own[name] = copies[id(parameter)]  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        self._forward._depth -= 1
        for own, name, parameter in self._replaced:
            own[name] = parameter


class Installing:
    """Before a module's forward, where the model's is not running: a checkpoint recomputes it."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Installing:
        copied_too = id(self.forward.module) in memo  # or a part of the model is copied, by itself
        return Installing(deepcopy(self.forward, memo) if copied_too else self.forward)

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        if module is self.forward.module:
            return
        opened = _Installed(self.forward, module)
        opened.__enter__()
        module.__dict__.setdefault("_distdl_opened", []).append(opened)


class Uninstalling:
    """After it, also if it has raised."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> Uninstalling:
        copied_too = id(self.forward.module) in memo  # or a part of the model is copied, by itself
        return Uninstalling(deepcopy(self.forward, memo) if copied_too else self.forward)

    def __call__(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        opened = module.__dict__.get("_distdl_opened")
        if opened:
            opened.pop().__exit__()
