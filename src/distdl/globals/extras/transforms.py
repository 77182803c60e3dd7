"""The transforms of ``torch.func`` that differentiate: ``grad``, ``vjp``, ``jvp``, ``jacrev``, ``hessian`` ...

torch wraps the tensors that a transformed function gets. A global tensor cannot be wrapped, as a wrapper has no memory
that could be sent. So functions of global tensors are differentiated by autograd::

    grad, vjp    x' = an alias of x that requires a gradient,  y = f(x'),  dx = autograd.grad(y, x', dy)
    jvp          the derivative of  dy -> dx,  which is linear in dy

As in torch, a result has a graph if it depends on a tensor outside of the transform that requires a gradient. All else
is torch's own code, in which the functions that wrap and unwrap are replaced. A function of plain tensors runs by
torch's transform first, and by ours if it meets global tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import torch

from distdl.globals.tensor.block import Block
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import own_of
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.running import is_on_blocks, tells_blocks
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.tensor.table import composite
from distdl.globals.tensor.torch_function import TRANSFORMED
from distdl.globals.views.aliasing import base_of
from distdl.partition.sharing import gather_values
from distdl.tensors.derivatives import KEEPS_TENSORS, MADE_BY, saved_tensors_hooks
from distdl.tensors.function import TransformError
from distdl.tensors.private_torch import are_functorch_transforms_active
from distdl.tensors.private_transforms import autograd_grad, safe_unpack_dual, tree_flatten, tree_map, tree_unflatten
from distdl.workers.worlds import launched


class _OpenTransforms(threading.local):
    def __init__(self) -> None:
        self.marks: list[object] = []  # of the transforms whose functions run on this thread, one inside another


_open = _OpenTransforms()


class Transform:
    """One call of a transform: it makes aliases of the arguments, and detaches results from graphs of its own."""

    def __init__(self) -> None:
        self._has_graph_outside = torch.is_grad_enabled()
        self._mark = object()  # of the leaves that it makes
        self._inputs: list[tuple[torch.Tensor, Any]] = []  # the tensors to differentiate by, and their nodes
        self._duals: list[tuple[torch.Tensor, torch.Tensor]] = []  # primals with their tangents
        self._constant: list[torch.Tensor] = []  # arguments that require no gradient

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a transform of torch with functions of this object in place of those that wrap and unwrap tensors."""
        own = composite(
            unwrap(func),
            grad_increment_nesting=self.opened,
            jvp_increment_nesting=self.opened,
            _wrap_all_tensors=self.aliases,
            _create_differentiable=self.differentiable,
            _undo_create_differentiable=self._detached,
            _autograd_grad=self._gradients,
            JVP_NESTING=0,
            fwAD=SimpleNamespace(_set_fwd_grad_enabled=lambda on: nullcontext(), make_dual=self._dual),
            safe_unpack_dual=composite(safe_unpack_dual, fwAD=SimpleNamespace(unpack_dual=self._unpack_dual)),
        )
        y = own(*args, **kwargs)
        self.detach_written()
        return y

    def detach_written(self) -> None:
        """Detach arguments into which the function has written, unless these depend on a graph outside.

        Views stay as they are, as torch detaches none in place.
        """
        written = [x for x in self._constant if x.requires_grad and _base(x) is None]
        for x, depends in zip(written, self._depend_on_outside(written), strict=True):
            if not depends:
                x.detach_()

    @contextmanager
    def opened(self) -> Iterator[Transform]:
        """While the function runs: graphs are made, and this transform is the innermost open one."""
        _open.marks.append(self._mark)
        threads = torch.autograd.is_multithreading_enabled()  # the end of inference mode would switch it on
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(threads):
                yield self
        finally:
            _open.marks.pop()

    def aliases(self, tree: Any, level: Any = None) -> Any:
        """Aliases of the floating-point tensors in a structure, which the function gets; other values as they are."""

        def alias(x: Any) -> Any:
            if not (isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())):
                return x
            if own_of(x).is_inference():
                return x.clone()
            if not x.requires_grad:
                self._constant.append(x)
            return (x if self._has_graph_outside else x.detach()).view_as(x)

        return tree_map(alias, tree)

    def differentiable(self, tree: Any, level: Any = None) -> Any:
        """The tensors in a structure, which require gradients now: those to differentiate by.

        Raises: ValueError for a value that is no tensor.
        """

        def differentiable(x: Any) -> torch.Tensor:
            if not isinstance(x, torch.Tensor):
                raise ValueError(f"Thing passed to transform API must be Tensor, got {type(x)}")
            if not x.requires_grad:
                own_of(x.requires_grad_()).__dict__[MADE_BY] = self._mark
            self._inputs.append((own_of(x), own_of(x).grad_fn))
            return x

        return tree_map(differentiable, tree)

    def check_unwritten(self) -> None:
        """Raises: torch's RuntimeError if the function has written a tensor that it is differentiated by."""
        if any(x.grad_fn is not node for x, node in self._inputs):
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    def _depend_on_outside(self, ys: Sequence[torch.Tensor]) -> list[bool]:
        """Whether each tensor depends, on any worker, on a tensor outside that requires a gradient. Collective."""
        here = [self._has_graph_outside and y.requires_grad and leads_beyond(own_of(y), self._mark) for y in ys]
        split = next((y for y in ys if type(y) is GlobalTensor and y.requires_grad), None)
        if split is None or not self._has_graph_outside or split._context.comm.imagined:
            return here
        gathered = gather_values(split._context.comm, split._context.everyone, "a transform of torch.func", here)
        return [any(each) for each in zip(*gathered, strict=True)]

    def _detached(self, tree: Any, level: Transform) -> Any:
        """The results in a structure, detached unless they depend on a tensor outside that requires a gradient.

        Raises: RuntimeError for a result that is no tensor.
        """
        ys, spec = tree_flatten(tree)
        for y in ys:
            if not isinstance(y, torch.Tensor):
                raise RuntimeError(f"Expected tensors, got unsupported type {type(y)}")
        found = zip(ys, self._depend_on_outside(ys), strict=True)
        return tree_unflatten([y if depends or not y.requires_grad else y.detach() for y, depends in found], spec)

    def _gradients(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        grad_outputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
        create_graph: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """torch's ``_autograd_grad``, which makes a graph of the gradients only if anything depends on it.

        The graph is retained, too, if it belongs to tensors outside. Gradients keep their graph if the adjoint that
        ``vjp`` gave is differentiated, and ``vjp`` itself was called without gradients.
        """
        self.check_unwritten()
        shared = any(self._depend_on_outside(outputs))
        makes_graph = create_graph and (shared or any(dy.requires_grad for dy in grad_outputs or ()))
        found = autograd_grad(outputs, inputs, grad_outputs, retain_graph or shared or makes_graph, makes_graph)
        return tuple(found) if makes_graph and not self._has_graph_outside else tuple(self._detached(found, self))

    def _dual(self, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        """A primal as a tensor to differentiate by, whose tangent is noted. Raises: RuntimeError for other shapes."""
        if tangent.shape != x.shape:
            raise RuntimeError(
                f"jvp needs tangents of the shapes of the primals; got one of {tuple(tangent.shape)} for "
                f"{tuple(x.shape)}"
            )
        x, tangent = self.aliases((x, tangent), self)
        dual: torch.Tensor = self.differentiable(x, self)
        self._duals.append((dual, tangent))
        return dual

    def _unpack_dual(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A result and its tangent; None if the result depends on no primal.

        The tangent is the derivative of the backward  dy -> dx,  which is linear, applied to the primals' tangents.
        """
        self.check_unwritten()
        if not y.requires_grad:
            return y, None
        dy = self.differentiable(torch.zeros_like(y), self)
        found = torch.autograd.grad(y, [x for x, _ in self._duals], dy, create_graph=True, allow_unused=True)
        used = [
            (dx, tangent)
            for dx, (_, tangent) in zip(found, self._duals, strict=True)
            if dx is not None and dx.requires_grad
        ]
        if not used:
            return y, None
        outputs, seeds = zip(*used, strict=True)
        (tangent,) = torch.autograd.grad(outputs, dy, seeds, create_graph=True, materialize_grads=True)
        return y, tangent


def _base(x: torch.Tensor) -> torch.Tensor | None:
    """The tensor of which x is a view; None if it is no view."""
    return base_of(x) if type(x) is GlobalTensor else plain_of(x)._base


def leads_beyond(y: torch.Tensor, own: object = None, ends: Sequence[torch.Tensor] = ()) -> bool:
    """Whether the graph of y leads beyond a transform: to leaves of the program, or of transforms around it.

    Args:
        own: the mark of the transform, whose own leaves do not count; None for no transform.
        ends: tensors at which the walk through the graph stops.
    """
    known = {id(one) for one in ends if one.grad_fn is None}

    def is_outside(leaf: torch.Tensor) -> bool:
        mark = leaf.__dict__.get(MADE_BY, leaf)
        return id(leaf) not in known and (mark is leaf or (mark in _open.marks and mark is not own))

    if y.grad_fn is None:
        return y.requires_grad and is_outside(y)
    seen: set[Any] = {None, *[one.grad_fn for one in ends]}
    rest: list[Any] = [y.grad_fn]
    while rest:
        node = rest.pop()
        if node in seen:
            continue
        seen.add(node)
        if type(node).__name__ != "AccumulateGrad":
            rest.extend([before for before, _ in node.next_functions])
        elif is_outside(node.variable):
            return True
    return False


def is_split(values: Any) -> bool:
    """Whether values have global tensors or replicas in them that a transform of ours has to take.

    In a function on blocks, replicas are plain tensors, so the answer is no.

    Raises: TransformError for them inside of a transform of torch; RuntimeError for a block of a distributed forward.
    """
    kinds = set(map(type, tensors_in(values)))
    if Block in kinds and tells_blocks():
        raise RuntimeError(TRANSFORMED)
    if GlobalTensor not in kinds and Replica not in kinds:
        return False
    if are_functorch_transforms_active():
        raise TransformError
    return not is_on_blocks()


def transformed(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a transform of torch's, or ours where it is needed.

    Args:
        original: torch's own.
    """
    if original.__name__ == "_jvp_with_argnums":  # torch counts its levels for all threads together
        refused = launched() == "threads"
    else:  # torch takes no hooks for saved tensors around it, as sharded weights set
        hooks = saved_tensors_hooks()
        refused = hooks is not None and hasattr(hooks[0], KEEPS_TENSORS)
    if not is_split((args, kwargs)):
        inside = are_functorch_transforms_active()
        if inside and refused:
            raise TransformError
        if inside or (is_on_blocks() and not refused):
            return original(*args, **kwargs)
        if not refused:
            with suppress(TransformError):
                return original(*args, **kwargs)
    return Transform().run(original, *args, **kwargs)
