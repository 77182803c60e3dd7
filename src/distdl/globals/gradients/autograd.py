"""What global tensors know of differentiation: their blocks carry the graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from distdl.globals.functions.plain_random import redrawing
from distdl.globals.gradients.parts import summed, variable_of
from distdl.globals.moving.alignment import entire, part_of
from distdl.globals.moving.conversion import NO_TANGENTS
from distdl.globals.tensor.failed import meet_in
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.graph_state import note_requires
from distdl.globals.tensor.local import block_of, own_of
from distdl.globals.tensor.replicas import Replica, parameter_of, plain_of
from distdl.globals.tensor.running import is_on_blocks
from distdl.globals.tensor.structures import map_tensors
from distdl.globals.tensor.table import REPLICATED, TABLE, Handler, by_name, composite, handles, handles_property
from distdl.globals.views.aliasing import base_of
from distdl.nn.placement import distributed_models
from distdl.tensors.failures import forgetting

# (as they are without what takes them to a mode, which would then be off inside)
_backward, _grad = composite(torch.autograd.backward), composite(torch.autograd.grad)


@handles("backward", "Tensor")
@by_name
def backward(
    func: Any,
    self: Any,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Every worker goes through its part of the graph; gradients end in ``.grad`` of leaves, as blocks."""
    backward_of_all(torch.autograd.backward, (self, gradient, retain_graph, create_graph), {"inputs": inputs})


@handles("backward", "autograd")
@by_name
def backward_of_all(
    func: Any,
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """The same for several tensors, global ones and plain ones."""
    outputs = _listed(tensors)
    seeds = [None] * len(outputs) if grad_tensors is None else _listed(grad_tensors)
    wanted = None if inputs is None else _listed(inputs)
    try:
        with redrawing(outputs), forgetting():
            _backward(
                [_output(y) for y in outputs],
                [_seed(y, dy) for y, dy in zip(outputs, seeds, strict=True)],
                True if wanted is not None and _leaves_out(outputs, wanted) else retain_graph,
                create_graph,
                inputs=None if wanted is None else [_plain(one) for one in wanted],
            )
    except Exception as error:
        _meet_in(error, outputs)
        raise


@handles("grad", "autograd")
@by_name
def grad(
    func: Any,
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
        options = {"allow_unused": allow_unused, "materialize_grads": materialize_grads}
        return _one_by_one(func, outputs, inputs, seeds, retain_graph, create_graph, options)
    try:
        with redrawing(outputs), forgetting():
            found = _grad(
                [_output(y) for y in outputs],
                [_plain(x) for x in inputs],
                [_seed(y, dy) for y, dy in zip(outputs, seeds, strict=True)],
                True if _leaves_out(outputs, inputs) else retain_graph,
                create_graph,
                allow_unused=allow_unused,
                materialize_grads=materialize_grads,
            )
    except Exception as error:
        _meet_in(error, outputs)
        raise
    return tuple(_gradient_of(x, dx) for x, dx in zip(inputs, summed(inputs, found), strict=True))


def _leaves_out(outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether gradients by some of a model's weights are asked for, and not by all.

    Weights come to a forward together, so a backward goes on to where the first of those is used that travel with one.
    What lies there torch would not reach, and so not free: the graph stays.
    """
    wanted = {id(one) for one in map(parameter_of, inputs) if isinstance(one, torch.nn.Parameter)}
    contexts = {one._context for one in (*outputs, *inputs) if type(one) in (GlobalTensor, Replica)} if wanted else ()
    for model in (model for context in contexts for model in distributed_models(context.comm)):
        trained = {id(one) for one in model.parameters() if one.requires_grad}
        if not (trained.isdisjoint(wanted) or trained <= wanted):
            return True
    return False


def _meet_in(error: Exception, outputs: Sequence[Any]) -> None:
    """Find out that a backward has failed on every worker.

    What one worker computes on may have been written in place while what another computes on was moved, so is a copy:
    torch raises on the first alone.
    """
    context = next((y._context for y in outputs if type(y) is GlobalTensor), None)
    if context is not None:
        meet_in(error, "a backward", context)


def _one_by_one(
    func: Any,
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    seeds: Sequence[Any],
    retain_graph: bool | None,
    create_graph: bool,
    options: dict[str, Any],
) -> tuple[Any, ...]:
    """The gradients of several seeds, which lie beside each other in dim 0."""
    counts = {len(dy) for dy in seeds if dy is not None}
    if len(counts) != 1 or 0 in counts:
        raise ValueError(f"is_grads_batched needs gradients of one first dim that is not 0; got {sorted(counts)}")
    last, kept = max(counts) - 1, create_graph if retain_graph is None else retain_graph
    each = []
    for place in range(last + 1):
        own = [None if dy is None else dy[place] for dy in seeds]
        each.append(grad(func, (outputs, inputs, own, kept or place < last, create_graph), options))
    return tuple(None if dx[0] is None else torch.stack(dx) for dx in zip(*each, strict=True))


def _of_blocks_or(handler: Handler) -> Handler:
    """In a function on blocks, a worker differentiates what it computes there, also where a weight's type says more."""

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not is_on_blocks():
            return handler(func, args, kwargs)
        given, named = map_tensors((args, kwargs), plain_of)
        return func(*given, **named)

    return run


for _function, _handler in ((torch.Tensor.backward, backward), (torch.autograd.backward, backward_of_all),
                            (torch.autograd.grad, grad)):  # fmt: skip
    REPLICATED[_function] = _of_blocks_or(_handler)


def _listed(tensors: Any) -> list[Any]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _plain(x: Any) -> Any:
    """The plain tensor by which torch differentiates: of a copy, its parameter, which may have other copies, too."""
    if isinstance(x, GradientEdge):
        raise TypeError(
            "a gradient by a gradient edge would be a worker's block of it, or a part that others add to; give the "
            "tensor"
        )
    return own_of(parameter_of(x))


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


def _seed(y: Any, dy: Any) -> torch.Tensor | None:
    """This worker's part of the gradient with which a backward begins."""
    if type(y) is not GlobalTensor:
        # (a checkpoint with re-entry gives the copies that it has made as global tensors, and gets such gradients)
        return None if dy is None else variable_of(entire(dy))
    if dy is None:
        if y.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs")
        if y.is_complex():
            raise RuntimeError(f"grad can be implicitly created only for real scalar outputs but got {y.dtype}")
        return torch.ones_like(block_of(y))
    if dy.shape != y.shape:
        raise RuntimeError(
            f"Mismatch in shape: a gradient has a shape of {tuple(dy.shape)} and its output has a shape of "
            f"{tuple(y.shape)}"
        )
    return part_of(dy, y._layout, "backward")


@handles("requires_grad_", "Tensor")
def requires_grad_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    if x._block._is_view() and not x._block.requires_grad:  # (else the graph of its views begins at what it is one of)
        _own_memory(x)
    x._block.requires_grad_(*rest, **kwargs)
    note_requires(x)
    return x


def _own_memory(x: Any) -> bool:
    """Let a block be no view where in torch the tensor is none: of memory that nobody else has."""
    alone = base_of(x) is None
    if alone:
        x._block = x._block.detach()
    return alone


@handles("detach_", "torch Tensor")
def detach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    block = block_of(x)
    if not (block._is_view() and _own_memory(x)):
        _detach(x, block)
    note_requires(x)
    return x


def _detach(x: Any, block: torch.Tensor) -> None:
    """Cut a block, of which there may be views, off its graph.

    Those without cells, of which this block may have some, torch makes anew by the functions that have made them, once
    the block is written. It takes for granted that they get a graph so, as they do from as_strided elsewhere. So what
    they are views of stays a leaf, which nobody sees any more. (It takes that for an error where views were made
    without gradients.)
    """
    memory = x.__dict__.get("_memory") if block.requires_grad else None
    leaf = block.is_leaf
    dtype = block.grad_dtype if leaf else block.dtype
    block.detach_()
    if memory is not None and not memory.has_plain_views and not block._is_view():
        x._block = block.detach()
        x._block.grad_dtype = dtype
        x._block.grad, block.grad = block.grad, None
        if leaf and block._backward_hooks is not None:  # (they are called again if it requires a gradient again)
            x._block._backward_hooks, block._backward_hooks = block._backward_hooks, None
        later = block._post_accumulate_grad_hooks
        if later is not None:  # (None would leave the hooks that C++ has: an empty dict takes their place)
            x._block._post_accumulate_grad_hooks, block._post_accumulate_grad_hooks = later, {}
        block.requires_grad_()


@handles_property("grad")
def read_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor | None:
    x = args[0]
    found = x._block.grad
    if found is None:
        return None
    y = GlobalTensor._of(found, x._layout)
    y.__dict__["_is_gradient"] = True
    return y


def write_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, value = args
    if value is None:
        x._block.grad = None
        return
    if type(x) is not GlobalTensor:
        raise TypeError("the grad of a plain tensor is a plain tensor; got a global one")
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"assigned grad expected to be a Tensor or None but got grad of type {type(value).__name__}")
    wanted = x._block.grad_dtype if x._block.is_leaf else x.dtype  # (that of others cannot be read in torch 2.13)
    if value.shape != x.shape or wanted not in (None, value.dtype):
        raise RuntimeError(
            f"assigned grad has shape {tuple(value.shape)} and dtype {value.dtype}; the tensor has {tuple(x.shape)} "
            f"and {wanted}"
        )
    part = part_of(value, x._layout, "grad")
    x._block.grad = part.clone() if type(value) is not GlobalTensor else part


def delete_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    args[0]._block.grad = None


def write_gradient_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    args[0]._block.grad_dtype = args[1]


_dtype: Any = torch.Tensor.grad_dtype
TABLE[_dtype.__set__] = write_gradient_dtype
_gradient: Any = torch.Tensor.grad  # (an attribute that is computed, whose type says what it gives)
TABLE[_gradient.__set__] = write_gradient
TABLE[_gradient.__delete__] = delete_gradient


def _hooking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, hook = args
    layout, name = x._layout, getattr(hook, "__name__", "<unknown>")

    def on_block(gradient: torch.Tensor | None) -> Any:
        if gradient is None:  # (it has come with others to a forward, and this backward reaches only those)
            return None
        changed = hook(GlobalTensor._of(gradient, layout))
        if not isinstance(changed, torch.Tensor):
            return changed  # (of what is not None, torch raises)
        if changed.shape != layout.size:
            raise RuntimeError(f"hook '{name}' has changed the size of value")
        return part_of(changed, layout, "a hook")

    on_block.__name__ = name  # (which is in torch's errors)
    return x._block.register_hook(on_block)


TABLE[torch.Tensor.register_hook] = _hooking


def _hooking_later(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, hook = args
    layout, itself = x._layout, weakref.ref(x)  # (the block keeps the hook, in C++, and so would keep x and itself)
    came = True

    def look(gradient: torch.Tensor | None) -> None:
        nonlocal came
        came = gradient is not None

    def on_block(block: torch.Tensor) -> None:
        if not came:  # (see above; torch calls this one even so)
            return
        leaf = itself()
        leaf = GlobalTensor._of(block, layout) if leaf is None else leaf
        if hook(leaf) is not None:  # (of which torch says one thing or another, as the block may be)
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")

    handle = x._block.register_post_accumulate_grad_hook(on_block)
    x._block.register_hook(look)
    first = x._block._backward_hooks
    first[handle.id] = first.popitem()[1]  # (so that both go by one handle)
    handle.extra_dict_ref = (weakref.ref(first),)
    return handle


TABLE[torch.Tensor.register_post_accumulate_grad_hook] = _hooking_later


@handles("_make_dual _unpack_dual", "torch")
def refuse_tangents(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """What moves follows from what all workers know, and whether a block has a tangent its worker alone knows."""
    raise NotImplementedError(f"{func.__name__.removeprefix('_')} of a global tensor: {NO_TANGENTS}")
