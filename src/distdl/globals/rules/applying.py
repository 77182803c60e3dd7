"""Ops of ``distdl.ops`` applied to global tensors, with weights that every worker has whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from distdl.environment.arguments import known
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.alignment import GRADIENT, derivatives_of, entire
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica
from distdl.ops import Op, Setup, Site
from distdl.partition import Partition, Signature
from distdl.tensors.connection import no_view
from distdl.tensors.derivatives import NONE, is_differentiated_forward
from distdl.tensors.dtypes import HALVES
from distdl.transport import Label


class Ready(NamedTuple):
    """An op that is set up for tensors of given signatures: its steps on this worker, and where its results lie."""

    setup: Setup
    results: tuple[KnownLayout, ...]


def ready(
    context: Context,
    key: Hashable,
    choose: Callable[[], tuple[Any, Partition]],
    name: str,
    *tensors: tuple[KnownLayout | None, torch.Tensor],
) -> Ready:
    """The setup of an op, made once.

    Args:
        key: what the op follows from, apart from the tensors.
        choose: gives the op, and the partition of the workers that compute.
        tensors: of each, its layout and this worker's block; no layout of one that every worker has whole.
    """
    if is_differentiated_forward():
        described = [(layout, one.shape, one.dtype, derivatives_of(one)) for layout, one in tensors]
    else:  # (the same, with one look at the mode)
        on = GRADIENT if torch.is_grad_enabled() else NONE
        described = [(layout, one.shape, one.dtype, on if one.requires_grad else NONE) for layout, one in tensors]

    def make() -> Ready:
        op, work = choose()
        signatures = []
        for layout, shape, dtype, derivatives in described:
            lies = context.everywhere(shape) if layout is None else layout
            signatures.append(known(Signature, lies, dtype, derivatives, tuple(shape)))
        detail = [(one.layout, one.dtype) for one in signatures]
        setup = op.setup(Site(work, context.everyone, Label(name, detail=detail)), *signatures)
        return Ready(setup, tuple(map(context.known, setup.results)))

    return context.keep((name, key, *described), make)


def run(made: Ready, *tensors: Any) -> Any:
    """Make the three steps; each result becomes a global tensor."""
    y = made.setup(*tensors)
    if isinstance(y, tuple):
        return tuple(as_global(one, layout) for one, layout in zip(y, made.results, strict=True))
    return as_global(y, made.results[0])


def as_global(block: torch.Tensor, layout: KnownLayout) -> GlobalTensor:
    """The global tensor of a block, which may have any shape without cells where the layout has none.

    What is reshaped is no view: the node of a view, and a hook on it, does not run once the view is written in place.
    """
    if block.shape != layout.local:
        block = no_view(block.reshape(layout.local))
    return GlobalTensor._of(block, layout)


def apply(
    op: Callable[[], Op], key: Hashable, x: GlobalTensor, name: str, work: Callable[[], Partition] | None = None,
    weights: Sequence[torch.Tensor | None] = (),
) -> Any:  # fmt: skip
    """Apply an op to a global tensor.

    Args:
        op: makes it; called once for each key and each signature of the tensors.
        work: the workers that compute; those of x if not given.
        weights: tensors that are the same on every worker.
    """
    context, layout, block = x._context, x._layout, block_of(x)
    given = [weight_of(one, context) for one in weights if one is not None]
    made = ready(
        context, key, lambda: (op(), layout.partition if work is None else work()), name, (layout, block),
        *[(None, one) for one in given],
    )  # fmt: skip
    return run(made, block, *given)


def weight_of(weight: torch.Tensor, context: Context) -> torch.Tensor:
    """This worker's own copy of a weight. A global one comes to every worker."""
    if type(weight) is Replica and weight._plain.requires_grad:
        return weight._plain  # (at a glance: most are copies that a model has made)
    return entered(entire(weight), context)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """The dtype in which torch computes products of a tensor on its device, if its autocast is on."""
    if not torch._C._is_any_autocast_enabled():  # (which takes no time to find the name of the device)
        return None
    kind = x.device.type
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)  # (torch has no autocast for meta tensors)
    return torch.get_autocast_dtype(kind) if is_on else None


def widened(x: torch.Tensor, devices: Collection[str]) -> torch.Tensor:
    """A tensor of half precision as float32, under the autocast of one of these types of device."""
    return x.float() if x.dtype in HALVES and _kind(x) in devices and autocast_dtype(x) is not None else x


def cast_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in the dtype of autocast. (Of float64, torch casts nothing.)"""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def _kind(x: torch.Tensor) -> str:
    """The type of a tensor's device."""
    return x.device.type


def zeroed(x: Any) -> Any:
    """Zeros that have the derivative zero, and not none."""
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)


def single(value: Any) -> Any:
    """A sequence of one number as that number, as torch takes it."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def one_by_one(given: Sequence[Any]) -> list[Any]:
    """What is given one by one, or as one list."""
    return list(given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given)


def hashable(value: Any) -> Any:
    """An option as a value that can be a key: lists as tuples."""
    try:
        hash(value)
    except TypeError:
        return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else value
    return value
