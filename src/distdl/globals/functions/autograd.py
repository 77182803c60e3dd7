"""What global tensors know of differentiation: their blocks carry the graph."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from distdl.globals.context import KnownLayout
from distdl.globals.entry import NO_TANGENTS, full_tensor
from distdl.globals.functions.drawing import redrawing
from distdl.globals.operands import block_of, moved, taken
from distdl.globals.parts import summed, variable_of
from distdl.globals.replicas import parameter_of, plain_of
from distdl.globals.strides import of_memory, same_strides, strides_of, whole_view
from distdl.globals.table import REPLICATED, TABLE, Handler, composite, handles, handles_property
from distdl.globals.tensor import GlobalTensor, note_requires
from distdl.globals.ties import base_of
from distdl.tensors.connection import zeros_on

# (as they are without what takes them to a mode, which would then be off inside)
_backward, _grad = composite(torch.autograd.backward), composite(torch.autograd.grad)


def seed_of(y: GlobalTensor, gradient: Any) -> torch.Tensor:
    """This worker's block of the gradient with which a backward begins."""
    if gradient is None:
        if y.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        return torch.ones_like(block_of(y))
    if gradient.shape != y.shape:
        raise RuntimeError(
            f"Mismatch in shape: a gradient has a shape of {tuple(gradient.shape)} and its output has a shape of "
            f"{tuple(y.shape)}"
        )
    return part_of(gradient, y._layout, "backward")


def part_of(value: torch.Tensor, layout: KnownLayout, name: str) -> torch.Tensor:
    """This worker's block of a tensor, global or the same everywhere, in a layout of its shape."""
    block = moved(value, layout, name) if type(value) is GlobalTensor else taken(value, layout)
    return block if block.shape == layout.local else block.reshape(layout.local)


@handles("backward", "Tensor")
def backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Every worker goes through its part of the graph; gradients end in ``.grad`` of leaves, as blocks."""

    def run(
        self: Any,
        gradient: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        backward_of_all(torch.autograd.backward, (self, gradient, retain_graph, create_graph), {"inputs": inputs})

    run(*args, **kwargs)


@handles("backward", "autograd")
def backward_of_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The same for several tensors, global ones and plain ones."""

    def run(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        outputs = _listed(tensors)
        seeds = [None] * len(outputs) if grad_tensors is None else _listed(grad_tensors)
        with redrawing(outputs):
            _backward(
                [_output(y) for y in outputs],
                [_seed(y, dy) for y, dy in zip(outputs, seeds, strict=True)],
                retain_graph,
                create_graph,
                inputs=None if inputs is None else [_plain(one) for one in _listed(inputs)],
            )

    run(*args, **kwargs)


@handles("grad", "autograd")
def grad(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    def run(
        outputs: Any,
        inputs: Any,
        grad_outputs: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        only_inputs: bool = True,
        allow_unused: bool | None = None,
        is_grads_batched: bool = False,
        materialize_grads: bool = False,
    ) -> tuple[Any, ...]:
        outputs = _listed(outputs)
        inputs = _listed(inputs)
        seeds = [None] * len(outputs) if grad_outputs is None else _listed(grad_outputs)
        if is_grads_batched:  # (torch takes all of them at once, by vmap)
            counts = {len(dy) for dy in seeds if dy is not None}
            if len(counts) != 1 or 0 in counts:
                raise ValueError(
                    f"is_grads_batched needs gradients of one first dim that is not 0; got {sorted(counts)}"
                )
            last, kept = max(counts) - 1, create_graph if retain_graph is None else retain_graph
            options = {"allow_unused": allow_unused, "materialize_grads": materialize_grads}
            each = []
            for place in range(last + 1):
                own = [None if dy is None else dy[place] for dy in seeds]
                each.append(grad(func, (outputs, inputs, own, kept or place < last, create_graph), options))
            return tuple(None if dx[0] is None else torch.stack(dx) for dx in zip(*each, strict=True))
        with redrawing(outputs):
            found = _grad(
                [_output(y) for y in outputs],
                [_plain(x) for x in inputs],
                [_seed(y, dy) for y, dy in zip(outputs, seeds, strict=True)],
                retain_graph,
                create_graph,
                allow_unused=allow_unused,
                materialize_grads=materialize_grads,
            )
        return tuple(_gradient_of(x, dx) for x, dx in zip(inputs, summed(inputs, found), strict=True))

    return run(*args, **kwargs)


for _function, _handler in ((torch.Tensor.backward, backward), (torch.autograd.backward, backward_of_all),
                            (torch.autograd.grad, grad)):  # fmt: skip
    REPLICATED[_function] = _handler


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _plain(x: Any) -> Any:
    """The plain tensor by which torch differentiates: of a copy, its parameter, which may have other copies, too."""
    if isinstance(x, GradientEdge):
        raise TypeError(
            "a gradient by a gradient edge would be a worker's block of it, or a part that others add to; give the "
            "tensor"
        )
    x = parameter_of(x)
    return block_of(x) if type(x) is GlobalTensor else plain_of(x)


def _gradient_of(x: Any, dx: torch.Tensor | None) -> torch.Tensor | None:
    """What torch has found by the plain tensor of x, as a tensor of the kind of x."""
    variable = parameter_of(x)
    if dx is None or type(variable) is not GlobalTensor:
        return dx
    found = GlobalTensor._of(dx, variable._layout)
    return found if x is variable else found.full_tensor()


def _output(y: Any) -> Any:
    """The plain tensor that torch differentiates."""
    return block_of(y) if type(y) is GlobalTensor else variable_of(y)


def _seed(y: Any, dy: Any) -> Any:
    return seed_of(y, dy) if type(y) is GlobalTensor else dy if dy is None else variable_of(dy)


_READ = """
grad_fn is_leaf retains_grad _version output_nr is_cuda is_cpu is_meta is_sparse is_quantized is_nested itemsize
is_mkldnn is_xpu is_mps names _backward_hooks is_sparse_csr is_vulkan is_ipu is_xla is_maia is_mtia name volatile
grad_dtype
"""
_CALLED = """
retain_grad element_size is_signed is_conj is_neg is_inference get_device is_pinned _is_view is_shared
is_distributed is_coalesced __dlpack_device__
"""


def _attribute(name: str) -> Handler:
    return lambda func, args, kwargs: getattr(args[0]._block, name)


@handles_property("nbytes")
def bytes_of_all(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of all cells, wherever they are."""
    x = args[0]
    return int(x.numel() * x._block.element_size())


def _method(name: str) -> Handler:
    return lambda func, args, kwargs: getattr(args[0]._block, name)(*args[1:], **kwargs)


for _name in _READ.split():
    if hasattr(torch.Tensor, _name):
        TABLE[getattr(torch.Tensor, _name).__get__] = _attribute(_name)
for _name in _CALLED.split():
    TABLE[getattr(torch.Tensor, _name)] = _method(_name)
for _name in [
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "is_conj",
    "is_neg",
    "get_device",
    "is_distributed",
]:
    TABLE[getattr(torch, _name)] = _method(_name)


@handles_property("shape")
def shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size:
    size: torch.Size = args[0].layout.size
    return size


_OF_MEMORY = "stride is_contiguous storage_offset dim_order dense_dim sparse_dim"


@handles(f"size dim numel nelement ndimension __len__ is_floating_point is_complex {_OF_MEMORY}", "Tensor")
def size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What is known of the whole tensor."""
    x, *rest = args
    name = {"nelement": "numel", "ndimension": "dim"}.get(func.__name__, func.__name__)
    if name in _OF_MEMORY:
        return of_memory(x, name, *rest, **kwargs)
    return getattr(x, name)(*rest, **kwargs)


@handles_property("_base")
def base(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor | None:
    """What a tensor is a view of."""
    return base_of(args[0])


@handles("numel", "torch")
def numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int(args[0].numel())


@handles("requires_grad_", "Tensor")
def requires_grad_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    x._block.requires_grad_(*rest, **kwargs)
    note_requires(x)
    return x


@handles("detach_", "torch Tensor")
def detach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    block = block_of(x)
    if block._is_view() and base_of(x) is None:  # (of memory that nobody else has: in torch it is no view)
        x._block = block.detach()
    else:
        block.detach_()
    note_requires(x)
    return x


@handles("__deepcopy__", "Tensor")
def copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy of a leaf, and of its gradient if it is no parameter. Layout and context are values of the world."""
    x, memo = args
    if type(x) is not GlobalTensor:  # (one beside those that the memo has)
        return deepcopy(plain_of(x), memo)
    found: GlobalTensor | None = memo.get(id(x))
    if found is None:
        found = memo[id(x)] = GlobalTensor._of(deepcopy(block_of(x), memo), x._layout)
        same_strides(x, found)
        if isinstance(x, torch.nn.Parameter):
            found._is_param = True
            found._block.grad = None
    return found


@handles_property("grad")
def read_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor | None:
    x = args[0]
    found = x._block.grad
    return None if found is None else GlobalTensor._of(found, x._layout)


def write_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, value = args
    if value is None:
        x._block.grad = None
        return
    if type(x) is not GlobalTensor:
        raise TypeError("the grad of a plain tensor is a plain tensor; got a global one")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of type {type(value).__name__}")
    if value.shape != x.shape or value.dtype != x.dtype:
        raise RuntimeError(
            f"assigned grad has shape {tuple(value.shape)} and dtype {value.dtype}; the tensor has {tuple(x.shape)} "
            f"and {x.dtype}"
        )
    part = part_of(value, x._layout, "grad")
    x._block.grad = part.clone() if type(value) is not GlobalTensor else part


def delete_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    args[0]._block.grad = None


_gradient: Any = torch.Tensor.grad  # (an attribute that is computed, whose type says what it gives)
TABLE[_gradient.__set__] = write_gradient
TABLE[_gradient.__delete__] = delete_gradient


@handles_property("data")
def read_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    return whole_view(args[0], args[0]._block.data)


def write_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, value = args
    if not isinstance(value, torch.Tensor) or value.shape != x.shape:
        raise TypeError(f"x.data of a global tensor takes a tensor of its shape {tuple(x.shape)}")
    part = part_of(value, x._layout, "data").detach()
    x._block.data = part if type(value) is GlobalTensor else part.clone()
    x._strides = strides_of(value) if type(value) is GlobalTensor else ()


_data: Any = torch.Tensor.data
TABLE[_data.__set__] = write_data


def write_data_of_replica(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``self.w.data = x``: the parameter gets the values, all of them on every worker, and so does its copy."""
    replica, value = args
    whole = full_tensor(value).detach() if type(value) is GlobalTensor else plain_of(value)
    for one in (replica.__dict__.get("_variable"), replica._plain):
        if one is not None:
            func(one, whole)


REPLICATED[_data.__set__] = write_data_of_replica


def _hooking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, hook = args
    layout = x._layout

    def on_block(gradient: torch.Tensor) -> torch.Tensor | None:
        changed = hook(GlobalTensor._of(gradient, layout))
        return None if changed is None else moved(changed, layout, "a hook")

    return x._block.register_hook(on_block)


TABLE[torch.Tensor.register_hook] = _hooking
TABLE[torch.Tensor.register_post_accumulate_grad_hook] = lambda func, args, kwargs: args[
    0
]._block.register_post_accumulate_grad_hook(lambda block: args[1](args[0]))


@handles("_make_dual _unpack_dual", "torch")
def refuse_tangents(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What moves follows from what all workers know, and whether a block has a tangent its worker alone knows."""
    raise NotImplementedError(f"{func.__name__.removeprefix('_')} of a global tensor: {NO_TANGENTS}")


def connected(block: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """A block that depends on others, too, in the autograd graph."""
    for other in others:
        block = block + zeros_on(other, ()).to(block.dtype)
    return block
