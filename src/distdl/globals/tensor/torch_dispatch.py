"""Operators below autograd that reach a global tensor: a few that C++ code asks for, and an error for all others.

A function of a global tensor is looked up in the table (see :mod:`distdl.globals.tensor.torch_function`), and its
handler calls torch with blocks. So torch calls ``__torch_dispatch__`` only where code asks no subclass of tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from distdl.globals.tensor.ddp_and_fsdp import check_unwrapped
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import TABLE
from distdl.globals.tensor.torch_function import DIFFERENTIATING, handled
from distdl.tensors.derivatives import recorded
from distdl.tensors.function import TransformError

NO_BLOCKS = (
    "of which no worker can have a block. Make it of x.full_tensor(); or in the place of a nested tensor, pad tensors "
    "to one length, stack them, and keep a mask"
)
_ops = torch.ops.aten
_DEVICE, _DETACH = torch.ops.prim.device.default, _ops.detach.default
# of torch.tensor(x), torch.as_tensor(x), torch.asarray(x, copy=True) and torch.Tensor(x)
_COPIES = frozenset([_ops._to_copy.default, _ops.clone.default, _ops.alias.default])


def dispatch(cls: type[GlobalTensor], func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """What an operator gives for global tensors.

    Raises: RuntimeError or TypeError, which says what to call in its place.
    """
    if func is _DEVICE:  # C++ code groups tensors by their devices
        return args[0]._block.device
    if func is _DETACH:  # autograd hands out what it has saved for a checkpoint
        return cls._of(args[0]._block.detach(), args[0]._layout)
    if func in _COPIES:
        with recorded():
            return cls._of(func(args[0]._block, *args[1:], **(kwargs or {})), args[0]._layout)
    if func is _ops.set_.source_Tensor and type(args[0]) is cls:  # parametrisations set tensors
        return TABLE[func](func, args, kwargs or {})
    if func is _ops._local_scalar_dense.default:  # a number is asked for, as by torch.full((2, 3), x.max())
        return _number(args[0])
    if func is _ops.copy_.default and type(args[0]) is not GlobalTensor:
        raise RuntimeError(
            "a global tensor would be written into a plain tensor, which is the same on every worker, by code that "
            "asks no subclass of tensors, as plain.real = x does; make the plain tensor global first"
        )
    if func is _ops._nested_tensor_from_tensor_list.default:
        raise TypeError(f"nested_tensor of a global tensor: its result is a nested tensor, {NO_BLOCKS}")
    check_unwrapped()
    raise TransformError(
        f"{func} has reached a global tensor without passing through its table of functions (as scripted "
        "functions, C++ code, and transforms of torch.func do); a block would be taken for the whole tensor. Call "
        "it on x.to_local() or x.full_tensor(), or through distdl.local_map"
    )


def _number(x: GlobalTensor) -> Any:
    """The value of a tensor without dims, which torch's own code takes for a number; it comes to every worker.

    Raises: TypeError inside of a function of global tensors, where not every worker may get as far as this.
    """
    func = handled.func
    if func is not None and func not in DIFFERENTIATING:
        name = getattr(func, "__name__", "a function")
        raise TypeError(f"{name} of a global tensor needs a number where it got another one; pass its .item()")
    return x.item()


def _under_mode(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for a dispatch mode that has got an operator and calls it itself, as a selective checkpoint does."""
    return dispatch(GlobalTensor, func, (GlobalTensor,), args, kwargs)


type.__setattr__(GlobalTensor, "__torch_dispatch__", classmethod(dispatch))
TABLE.update(dict.fromkeys((_DEVICE, _DETACH, *_COPIES), _under_mode))
