"""Apply ops of ``distdl.ops`` to global tensors and replicated weights; and helpers of handlers for their options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from distdl.environment.arguments import known
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.alignment import GRADIENT, derivatives_of, gather_global
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica
from distdl.ops import Op, Setup, Site
from distdl.partition import Partition, Signature
from distdl.tensors.connection import no_view
from distdl.tensors.derivatives import NONE, is_differentiated_forward
from distdl.tensors.dtypes import HALVES
from distdl.tensors.private_torch import is_any_autocast_enabled
from distdl.transport import Label


class Ready(NamedTuple):
    """An op that is set up for tensors of given signatures: its steps on this worker, and its results' layouts."""

    setup: Setup
    results: tuple[KnownLayout, ...]


def set_up(
    context: Context, key: Hashable, choose: Callable[[], tuple[Any, Partition]], name: str,
    *tensors: tuple[KnownLayout | None, torch.Tensor],
) -> Ready:  # fmt: skip
    """Return the setup of an op, made once for each key and each signature of the tensors.

    Args:
        key: all that determines the op, apart from the tensors.
        choose: returns the op, and the partition of the workers that compute.
        tensors: of each, its layout and this worker's block; None and the tensor if it is replicated.
    """
    if is_differentiated_forward():
        described = [(layout, one.shape, one.dtype, derivatives_of(one)) for layout, one in tensors]
    else:  # faster, with one look at the mode for all tensors
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


def execute(made: Ready, *tensors: Any) -> Any:
    """Execute the three steps of a setup on this worker's blocks. Returns a global tensor, or a tuple of them."""
    y = made.setup(*tensors)
    if isinstance(y, tuple):
        return tuple(as_global(one, layout) for one, layout in zip(y, made.results, strict=True))
    return as_global(y, made.results[0])


def as_global(block: torch.Tensor, layout: KnownLayout) -> GlobalTensor:
    """Return the global tensor of a block. A block without cells may have any shape.

    A reshaped block is no view: the node of a view, and a hook on it, does not run once the view is written in place.
    """
    if block.shape != layout.local:
        block = no_view(block.reshape(layout.local))
    return GlobalTensor._of(block, layout)


def apply(
    op: Callable[[], Op], key: Hashable, x: GlobalTensor, name: str, work: Callable[[], Partition] | None = None,
    weights: Sequence[torch.Tensor | None] = (),
) -> Any:  # fmt: skip
    """Apply an op to a global tensor and weights. Returns a global tensor, or a tuple of them.

    Args:
        op: makes the op; called once for each key and each signature of the tensors.
        work: returns the partition of the workers that compute; that of x if not given.
        weights: replicated tensors, global ones, which are gathered, or None, which is left out.
    """
    context, layout, block = x._context, x._layout, block_of(x)
    given = [replicated_weight(one, context) for one in weights if one is not None]
    made = set_up(
        context, key, lambda: (op(), layout.partition if work is None else work()), name, (layout, block),
        *[(None, one) for one in given],
    )  # fmt: skip
    return execute(made, block, *given)


def replicated_weight(weight: torch.Tensor, context: Context) -> torch.Tensor:
    """Return this worker's plain copy of a weight. A global weight is gathered on every worker."""
    if type(weight) is Replica and weight._plain.requires_grad:
        return weight._plain  # the common case, and the fastest way
    return entered(gather_global(weight), context)


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype in which autocast computes products on the device of x; None if it is off."""
    if not is_any_autocast_enabled():  # faster than finding the type of the device
        return None
    kind = x.device.type
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)  # torch has no autocast for meta tensors
    return torch.get_autocast_dtype(kind) if is_on else None


def widened(x: torch.Tensor, devices: Collection[str]) -> torch.Tensor:
    """Cast a tensor of half precision to float32 if it is on one of these types of device and autocast is on there."""
    return x.float() if x.dtype in HALVES and _kind(x) in devices and autocast_dtype(x) is not None else x


def _kind(x: torch.Tensor) -> str:
    """Return the type of the device of x. Tests replace it, as they have no GPU."""
    return x.device.type


def cast_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast a floating-point tensor to the dtype of autocast, but for float64, which torch does not cast either."""
    return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x


def zeroed(x: Any) -> Any:
    """Return zeros like x, whose derivative by x is 0 and not None."""
    return x.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)


def unwrap_single(value: Any) -> Any:
    """Return the number in a tuple of one number, as torch takes it; other values as they are."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def as_list(given: Sequence[Any]) -> list[Any]:
    """Return arguments as a list, whether they were passed one by one or as one list."""
    return list(given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given)


def hashable(value: Any) -> Any:
    """Return an option as a value that can be a key: lists become tuples."""
    try:
        hash(value)
    except TypeError:
        return tuple(map(hashable, value)) if isinstance(value, (list, tuple)) else value
    return value
