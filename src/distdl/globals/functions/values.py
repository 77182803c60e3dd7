"""Functions that give Python values of a tensor. Every worker gathers the whole tensor, so all decide alike."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from distdl.globals.moving.conversion import gather_blocks
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import handles
from distdl.tensors.modes import uncounted
from distdl.transport.calls import VALUE


@handles("item __float__ __int__ __bool__ __index__ __complex__ tolist __contains__ __format__", "Tensor")
@handles("equal allclose is_nonzero _assert_async", "torch Tensor")
def value(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply torch's function to gathered tensors: the same value, decision or assertion on every worker. Collective."""
    return func(*map(_gather, args), **{name: _gather(one) for name, one in kwargs.items()})


@handles("numpy __array__", "Tensor")
def array(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole tensor as a NumPy array. Collective.

    Raises: RuntimeError, torch's own, if the tensor requires a gradient and ``force`` is not set.
    """
    if args[0].requires_grad and not kwargs.get("force"):
        torch.zeros((), device="cpu", requires_grad=True).numpy()
    return value(func, args, kwargs)


def _gather(value: Any) -> Any:
    """The whole of a global tensor, as a plain one without a gradient; other values as they are. Collective."""
    if type(value) is not GlobalTensor:
        return value
    return gather_blocks(block_of(value).detach(), value._layout, VALUE)


def to_tensor_of(to_tensor: Any) -> Any:
    """What ``torch.testing.assert_close`` compares of what it is given: whole tensors, on every worker.

    Args:
        to_tensor: torch's own method of a pair.
    """

    @wraps(to_tensor)
    def whole(pair: Any, given: Any) -> Any:
        return to_tensor(pair, _gather(given))

    return whole


@handles("result_type is_same_size", "torch Tensor")
def known(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply torch's function to tensors without memory: its result follows from shapes and dtypes."""
    with uncounted():
        blank = [
            torch.empty(one.shape, dtype=one.dtype, device="meta") if type(one) is GlobalTensor else one for one in args
        ]
        return func(*blank)


@handles("_has_compatible_shallow_copy_type", "torch")
def known_of_blocks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply torch's function to blocks: ``module.to`` asks it of a parameter and of the tensor that replaces it."""
    return func(*(one._block if type(one) is GlobalTensor else one for one in args))


@handles("__repr__", "Tensor")
def show(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Shape, dtype, partition and this worker's block. A tensor without dims shows its value: that is collective."""
    x = args[0]
    if not x.dim():
        shown = repr(_gather(x)).removeprefix("tensor(").removesuffix(")")
        return f"GlobalTensor({shown}, on worker {int(x.layout.partition.workers)})"
    me = x._context.me
    cells = ", ".join(f"{start}:{stop}" for start, stop in x._layout.box)
    gradient = ", requires_grad=True" if x.requires_grad else ""
    held = f"worker {me} holds [{cells}]:\n{x._block.detach()!r}" if x._layout.active else f"worker {me} holds nothing"
    return f"GlobalTensor(shape={tuple(x.shape)}, dtype={x.dtype}, over {x._layout.partition}{gradient}; {held})"


@handles(
    "data_ptr const_data_ptr untyped_storage storage storage_type set_ share_memory_ __dlpack__ "
    "__cuda_array_interface__",
    "Tensor",
)
def memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raises: TypeError, because no worker has the memory of the whole tensor."""
    raise TypeError(
        f"{func.__name__} asks for the memory of a global tensor, of which each worker has a block; ask x.to_local() "
        f"or x.full_tensor() for it"
    )


@handles("fused_moving_avg_obs_fake_quant", "torch")
def observing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raises: NotImplementedError, because torch's schema does not say which tensors this function writes."""
    raise NotImplementedError(
        f"{func.__name__} of a global tensor would leave other extremes and scales on each worker; take "
        "torch.ao.quantization.FakeQuantize in the place of FusedMovingAvgObsFakeQuantize"
    )
