"""``backward``, ``autograd.grad``, ``.grad`` and hooks of global tensors, whose blocks carry the graph."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from distdl.globals.functions.plain_random import redrawing
from distdl.globals.gradients.parts import sum_partial_gradients, variable_of
from distdl.globals.moving.alignment import gather_global, local_block
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

# torch's own, which dispatch to no mode: a mode would be off inside
_backward, _grad = composite(torch.autograd.backward), composite(torch.autograd.grad)


@handles("backward", "Tensor")
@by_name
def backward(
    func: Any, self: Any, gradient: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    inputs: Any = None,
) -> None:  # fmt: skip
    """``y.backward(...)``: every worker runs it on its blocks, and each leaf gets the block of its gradient."""
    backward_of_all(torch.autograd.backward, (self, gradient, retain_graph, create_graph), {"inputs": inputs})


@handles("backward", "autograd")
@by_name
def backward_of_all(
    func: Any, tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
    inputs: Any = None,
) -> None:  # fmt: skip
    """``torch.autograd.backward`` of several tensors, global and plain. If it fails on one worker, it does on all."""
    outputs = _listed(tensors)
    seeds = [None] * len(outputs) if grad_tensors is None else _listed(grad_tensors)
    wanted = None if inputs is None else _listed(inputs)
    try:
        with redrawing(outputs), forgetting():
            _backward(
                [_plain_output(y) for y in outputs],
                [_seed(y, dy) for y, dy in zip(outputs, seeds, strict=True)],
                True if wanted is not None and _leaves_out(outputs, wanted) else retain_graph,
                create_graph,
                inputs=None if wanted is None else [_plain_input(one) for one in wanted],
            )
    except Exception as error:
        _meet_in(error, outputs)
        raise


@handles("grad", "autograd")
@by_name
def grad(
    func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, retain_graph: bool | None = None,
    create_graph: bool = False, only_inputs: bool = True, allow_unused: bool | None = None,
    is_grads_batched: bool = False, materialize_grads: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    """``torch.autograd.grad``: gradients by global tensors are global, others whole. If one worker fails, all do."""
    outputs = _listed(outputs)
    inputs = _listed(inputs)
    seeds = [None] * len(outputs) if grad_outputs is None else _listed(grad_outputs)
    if is_grads_batched:
        options = {"allow_unused": allow_unused, "materialize_grads": materialize_grads}
        return _one_by_one(func, outputs, inputs, seeds, retain_graph, create_graph, options)
    try:
        with redrawing(outputs), forgetting():
            found = _grad(
                [_plain_output(y) for y in outputs],
                [_plain_input(x) for x in inputs],
                [_seed(y, dy) for y, dy in zip(outputs, seeds, strict=True)],
                True if _leaves_out(outputs, inputs) else retain_graph,
                create_graph,
                allow_unused=allow_unused,
                materialize_grads=materialize_grads,
            )
    except Exception as error:
        _meet_in(error, outputs)
        raise
    return tuple(_gradient_of(x, dx) for x, dx in zip(inputs, sum_partial_gradients(inputs, found), strict=True))


def _leaves_out(outputs: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Whether gradients are wanted by some weights of a model, but not by all: then the graph has to be retained.

    Weights enter a forward in groups, so a backward by one weight also goes through the graph between the uses of the
    others. In torch it would not go there, and so not free that part, which a later backward may need.
    """
    wanted = {id(one) for one in map(parameter_of, inputs) if isinstance(one, torch.nn.Parameter)}
    contexts = {one._context for one in (*outputs, *inputs) if type(one) in (GlobalTensor, Replica)} if wanted else ()
    for model in (model for context in contexts for model in distributed_models(context.comm)):
        trained = {id(one) for one in model.parameters() if one.requires_grad}
        if not (trained.isdisjoint(wanted) or trained <= wanted):
            return True
    return False


def _meet_in(error: Exception, outputs: Sequence[Any]) -> None:
    """Let every worker learn that a backward has failed on this one.

    Torch may raise on some workers only: a block may share memory that was written in place, where another is a copy.
    """
    context = next((y._context for y in outputs if type(y) is GlobalTensor), None)
    if context is not None:
        meet_in(error, "a backward", context)


def _one_by_one(
    func: Any, outputs: Sequence[Any], inputs: Sequence[Any], seeds: Sequence[Any], retain_graph: bool | None,
    create_graph: bool, options: dict[str, Any],
) -> tuple[Any, ...]:  # fmt: skip
    """Return ``autograd.grad`` of each place along dim 0 of the seeds, stacked; their extents there must be equal."""
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
    """Return a handler that in a function on blocks calls torch's function with plain tensors, and else the handler."""

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


def _plain_input(x: Any) -> Any:
    """Return the tensor by which torch differentiates: a block, or a replica's parameter. Refuses a gradient edge."""
    if isinstance(x, GradientEdge):
        raise TypeError(
            "a gradient by a gradient edge would be a block of it, or what one worker adds to it; give the tensor"
        )
    return own_of(parameter_of(x))


def _gradient_of(x: Any, dx: torch.Tensor | None) -> torch.Tensor | None:
    """Return dx, the gradient by the plain tensor of x, as a tensor of the kind of x: global, or whole."""
    variable = parameter_of(x)
    if dx is None or type(variable) is not GlobalTensor:
        return dx
    found = GlobalTensor._of(dx, variable._layout)
    return found if x is variable else found.full_tensor()


def _plain_output(y: Any) -> Any:
    """Return the plain tensor that torch differentiates."""
    return block_of(y) if type(y) is GlobalTensor else variable_of(y)


def _seed(y: Any, dy: Any) -> torch.Tensor | None:
    """Return the gradient of an output that this worker passes to torch. Raises torch's errors if dy does not fit y."""
    if type(y) is not GlobalTensor:
        # a checkpoint with re-entry turns replicas into global tensors, and gets such gradients of them
        return None if dy is None else variable_of(gather_global(dy))
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
    return local_block(dy, y._layout, "backward")


@handles("requires_grad_", "Tensor")
def requires_grad_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, *rest = args
    if x._block._is_view() and not x._block.requires_grad:  # else the graph of its views would begin at its base
        _detach_from_base(x)
    x._block.requires_grad_(*rest, **kwargs)
    note_requires(x)
    return x


def _detach_from_base(x: Any) -> bool:
    """Make the block of x no view, in the same memory, if x is no view itself. Returns whether that is so."""
    alone = base_of(x) is None
    if alone:
        x._block = x._block.detach()
    return alone


@handles("detach_", "torch Tensor")
def detach_(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (x,) = args
    block = block_of(x)
    if not (block._is_view() and _detach_from_base(x)):
        _detach(x, block)
    note_requires(x)
    return x


def _detach(x: Any, block: torch.Tensor) -> None:
    """Detach the block of x in place; if it has views, let x have a new block in the same memory.

    Once a block is written, torch makes its views without cells anew by the functions that have made them, and expects
    them to get a graph so. Therefore their old base stays a leaf that requires a gradient, and the new block gets the
    gradient and the hooks of the old one. Torch would raise if one of the views was made without gradients; then the
    block is only detached.
    """
    memory = x.__dict__.get("_memory") if block.requires_grad else None
    leaf = block.is_leaf
    dtype = block.grad_dtype if leaf else block.dtype
    block.detach_()
    if memory is not None and not memory.has_plain_views and not block._is_view():
        x._block = block.detach()
        x._block.grad_dtype = dtype
        x._block.grad, block.grad = block.grad, None
        if leaf and block._backward_hooks is not None:  # they run again once the tensor requires a gradient again
            x._block._backward_hooks, block._backward_hooks = block._backward_hooks, None
        later = block._post_accumulate_grad_hooks
        if later is not None:  # an empty dict replaces the hooks that C++ holds; None would leave them
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
    wanted = x._block.grad_dtype if x._block.is_leaf else x.dtype  # torch 2.13 reads grad_dtype of leaves only
    if value.shape != x.shape or wanted not in (None, value.dtype):
        raise RuntimeError(
            f"assigned grad has shape {tuple(value.shape)} and dtype {value.dtype}; the tensor has {tuple(x.shape)} "
            f"and {wanted}"
        )
    part = local_block(value, x._layout, "grad")
    x._block.grad = part.clone() if type(value) is not GlobalTensor else part


def write_gradient_dtype(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    args[0]._block.grad_dtype = args[1]


_dtype: Any = torch.Tensor.grad_dtype
TABLE[_dtype.__set__] = write_gradient_dtype
_gradient: Any = torch.Tensor.grad
TABLE[_gradient.__set__] = write_gradient
TABLE[_gradient.__delete__] = lambda func, args, kwargs: write_gradient(func, (*args, None), kwargs)


def _register_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.register_hook``: the hook gets the global gradient. It may return another, global or the same everywhere."""
    x, hook = args
    layout, name = x._layout, getattr(hook, "__name__", "<unknown>")

    def on_block(gradient: torch.Tensor | None) -> Any:
        if gradient is None:  # x has entered a forward with other weights, and this backward reaches only those
            return None
        changed = hook(GlobalTensor._of(gradient, layout))
        if not isinstance(changed, torch.Tensor):
            return changed  # torch raises, unless it is None
        if changed.shape != layout.size:
            raise RuntimeError(f"hook '{name}' has changed the size of value")
        return local_block(changed, layout, "a hook")

    on_block.__name__ = name  # torch's errors name the hook
    return x._block.register_hook(on_block)


TABLE[torch.Tensor.register_hook] = _register_hook


def _register_post_accumulate_grad_hook(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.register_post_accumulate_grad_hook``: the hook gets x, after a backward that has reached x."""
    x, hook = args
    layout, itself = x._layout, weakref.ref(x)  # a reference to x in the hook, which its block keeps, would be a cycle
    came = True

    def look(gradient: torch.Tensor | None) -> None:
        nonlocal came
        came = gradient is not None

    def on_block(block: torch.Tensor) -> None:
        if not came:  # torch calls this hook also where the backward has reached other weights only
            return
        leaf = itself()
        leaf = GlobalTensor._of(block, layout) if leaf is None else leaf
        if hook(leaf) is not None:  # torch's error would differ between blocks
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")

    handle = x._block.register_post_accumulate_grad_hook(on_block)
    x._block.register_hook(look)
    first = x._block._backward_hooks
    first[handle.id] = first.popitem()[1]  # so one handle removes both
    handle.extra_dict_ref = (weakref.ref(first),)
    return handle


TABLE[torch.Tensor.register_post_accumulate_grad_hook] = _register_post_accumulate_grad_hook


@handles("_make_dual _unpack_dual", "torch")
def refuse_tangents(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise NotImplementedError: all workers plan the messages, but only its own would know of a block's tangent."""
    raise NotImplementedError(f"{func.__name__.removeprefix('_')} of a global tensor: {NO_TANGENTS}")
