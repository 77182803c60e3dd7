"""Attributes of global tensors. The block or the layout knows each; reading and setting ``data`` is here, too."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from distdl.globals.moving.alignment import local_block
from distdl.globals.moving.conversion import full_tensor
from distdl.globals.tensor.ddp_and_fsdp import check_unwrapped
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import WRITTEN, plain_of
from distdl.globals.tensor.table import REPLICATED, TABLE, Handler, handles, handles_property
from distdl.globals.views.aliasing import base_of, note_copied, note_data_set, note_new_memory, note_same_memory
from distdl.globals.views.strides import call_on_meta, offset_of, same_strides, strides_of, whole_view

_READ = """
is_leaf retains_grad _version output_nr is_cuda is_cpu is_sparse is_quantized is_nested itemsize
is_mkldnn is_xpu is_mps _backward_hooks is_sparse_csr is_vulkan is_ipu is_xla is_maia is_mtia name volatile
grad_dtype
"""
_CALLED = """
retain_grad element_size is_signed is_conj is_neg is_inference get_device is_pinned _is_view is_shared
is_distributed is_coalesced __dlpack_device__
"""


def _attribute_of_block(name: str) -> Handler:
    return lambda func, args, kwargs: getattr(args[0]._block, name)


@handles_property("is_meta")
def is_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if isinstance(args[0], torch.nn.Parameter):
        check_unwrapped()  # FSDP reads this attribute first
    return bool(args[0]._block.is_meta)


@handles_property("nbytes")
def nbytes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The memory that the whole tensor takes, over all workers."""
    x = args[0]
    return int(x.numel() * x._block.element_size())


def _method_of_block(name: str) -> Handler:
    return lambda func, args, kwargs: getattr(args[0]._block, name)(*args[1:], **kwargs)


for _name in _READ.split():
    if hasattr(torch.Tensor, _name):
        TABLE[getattr(torch.Tensor, _name).__get__] = _attribute_of_block(_name)
for _name in _CALLED.split():
    TABLE[getattr(torch.Tensor, _name)] = _method_of_block(_name)
for _name in (
    "is_floating_point", "is_complex", "is_signed", "is_inference", "is_conj", "is_neg", "get_device", "is_distributed",
):  # fmt: skip
    TABLE[getattr(torch, _name)] = _method_of_block(_name)


@handles_property("shape")
def shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].layout.size


_OF_MEMORY = "stride is_contiguous storage_offset dim_order dense_dim sparse_dim"


@handles("numel", "torch")
@handles(f"size dim numel nelement ndimension __len__ is_floating_point is_complex {_OF_MEMORY}", "Tensor")
def size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes, numbers of cells and dims, dtypes and strides of the whole tensor; no message."""
    x, *rest = args
    name = {"nelement": "numel", "ndimension": "dim"}.get(func.__name__, func.__name__)
    if name == "is_contiguous" and isinstance(x, torch.nn.Parameter):
        check_unwrapped()  # fully_shard calls this first
    if name in _OF_MEMORY:
        return call_on_meta(x, name, *rest, **kwargs)
    return getattr(x, name)(*rest, **kwargs)


@handles_property("_base")
def base(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor | None:
    """The tensor of which this one is a view, or None."""
    return base_of(args[0])


@handles("__deepcopy__", "Tensor")
def deep_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy of a leaf, and of its gradient unless it is a parameter. The copy has the same layout and world."""
    x, memo = args
    if type(x) is not GlobalTensor:  # the memo alone holds global tensors
        return deepcopy(plain_of(x), memo)
    found: GlobalTensor | None = memo.get(id(x))
    if found is None:
        found = memo[id(x)] = GlobalTensor._of(deepcopy(block_of(x), memo), x._layout)
        same_strides(x, found)
        if isinstance(x, torch.nn.Parameter):
            found._is_param = True
            found._block.grad = None
    return found


@handles_property("data")
def read_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    return whole_view(args[0], block_of(args[0]).data)


def write_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, value = args
    _check_shape(x, value)
    share_data(x, value)


def _check_shape(x: GlobalTensor, value: Any) -> None:
    """Check a value that is to become the data of x.

    Raises: TypeError if it is not a tensor of x's shape.
    """
    if not isinstance(value, torch.Tensor) or value.shape != x.shape:
        given = tuple(value.shape) if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(f"a global tensor takes a tensor of its shape {tuple(x.shape)} as its data, not {given}")


def _keeps_layout(x: GlobalTensor) -> bool:
    """Whether x keeps its layout when it gets other data: because it has a gradient, or is one."""
    return x._block.requires_grad or x._block.grad is not None or x.__dict__.get("_is_gradient", False)


def share_data(x: GlobalTensor, value: torch.Tensor) -> None:
    """Let x share the memory of a global tensor, as in torch, or hold a copy of a plain one.

    If x has to keep its layout and the value has another, x holds a copy, too.
    """
    note_data_set(x)
    if type(value) is not GlobalTensor:
        x._block.data = local_block(value, x._layout, "data").detach().clone()
        x._strides, x._offset = (), 0
        note_new_memory(x)
        return
    moves = value._layout is not x._layout
    keeps = _keeps_layout(x)
    if not keeps:
        x._block, x._layout = block_of(value).data, value._layout
    else:
        x._block.data = local_block(value, x._layout, "data").detach()
    x._strides, x._offset = strides_of(value), offset_of(value)
    if moves and keeps:
        note_new_memory(x)
        note_copied(value, x)
    else:
        note_same_memory(x, value)


def set_to(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """``x.set_(value)``: share the data, and count it as a write of x: a backward that needs old values raises.

    Raises: TypeError if the value has another shape, and x keeps its layout or the value is plain.
    """
    x: GlobalTensor = args[0]
    value = args[1]
    if type(value) is not GlobalTensor or _keeps_layout(x):
        _check_shape(x, value)
    if not x._block.is_inference():
        torch.autograd.graph.increment_version(x._block)
    share_data(x, value)
    return x


TABLE[torch.ops.aten.set_.source_Tensor] = set_to


_data: Any = torch.Tensor.data
TABLE[_data.__set__] = write_data


def write_data_of_replica(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``self.w.data = x`` in a forward: on every worker, the parameter and its replica get all values of x.

    Raises: RuntimeError if the parameter is sharded.
    """
    replica, value = args
    whole = full_tensor(value).detach() if type(value) is GlobalTensor else plain_of(value)
    parameter = replica.__dict__.get("_variable")
    if type(parameter) is GlobalTensor:
        raise RuntimeError(WRITTEN.format("the data of a weight was set (w.data = ...), which would write"))
    for one in (parameter, replica._plain):
        if one is not None:
            func(one, whole)


REPLICATED[_data.__set__] = write_data_of_replica
