"""The transforms of ``torch.func`` that differentiate: ``grad``, ``vjp``, ``jvp``, ``jacrev``, ``hessian`` ...

torch wraps the tensors that a transformed function gets. What is split over workers cannot be wrapped, as a wrapper has
no memory that could travel. So functions of it are differentiated by autograd, and samples are taken one by one (see
``extras.mapping``)::

    grad, vjp    x' = an alias of x that requires a gradient,  y = f(x'),  dx = autograd.grad(y, x', dy)
    jvp          the derivative of  dy -> dx,  which is linear in dy

A result has a graph if it follows from what has one outside of the transform, as in torch. All else is torch's own
code, in which what wraps and unwraps has been replaced. A function of plain tensors goes to torch first, and comes here
if it meets what is split.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import wraps
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.utils import _pytree as pytree

from distdl.globals.extras.late import original_of
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
from distdl.workers.worlds import launched


class _Here(threading.local):
    def __init__(self) -> None:
        self.open: list[object] = []  # the marks of the transforms whose functions run here, one in another


_here = _Here()


class Level:
    """One transform of a function: what its arguments become, and what is left of its results."""

    def __init__(self) -> None:
        self._outside = torch.is_grad_enabled()  # (what has a graph there is one more level)
        self._mark = object()  # of the leaves that it makes
        self._given: list[tuple[torch.Tensor, Any]] = []  # what is differentiated by, and its node
        self._duals: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._constant: list[torch.Tensor] = []  # what is given without a gradient

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """A transform of torch's, of what need not be wrapped."""
        own = composite(
            unwrap(func),
            grad_increment_nesting=self.opened,
            jvp_increment_nesting=self.opened,
            _wrap_all_tensors=self.aliases,
            _create_differentiable=self.differentiable,
            _undo_create_differentiable=self._results,
            _autograd_grad=self._gradients,
            JVP_NESTING=0,
            fwAD=SimpleNamespace(_set_fwd_grad_enabled=lambda on: nullcontext(), make_dual=self._dual),
            safe_unpack_dual=composite(eager_transforms.safe_unpack_dual, fwAD=SimpleNamespace(unpack_dual=self._undo)),
        )
        y = own(*args, **kwargs)
        self.release()
        return y

    def release(self) -> None:
        """Cut off what the function has written into tensors that it was given, unless that has a graph outside.

        Views stay as they are: torch detaches none in place.
        """
        written = [x for x in self._constant if x.requires_grad and _base(x) is None]
        for x, follows in zip(written, self._follow(written), strict=True):
            if not follows:
                x.detach_()

    @contextmanager
    def opened(self) -> Iterator[Level]:
        _here.open.append(self._mark)
        on_device = torch.autograd.is_multithreading_enabled()  # (an end of inference mode would switch it on)
        try:
            with torch.inference_mode(False), torch.enable_grad(), torch.autograd.set_multithreading_enabled(on_device):
                yield self
        finally:
            _here.open.pop()

    def aliases(self, tree: Any, level: Any = None) -> Any:
        def alias(x: Any) -> Any:
            if not (isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())):
                return x
            if own_of(x).is_inference():
                return x.clone()
            if not x.requires_grad:
                self._constant.append(x)
            return (x if self._outside else x.detach()).view_as(x)

        return pytree.tree_map(alias, tree)

    def differentiable(self, tree: Any, level: Any = None) -> Any:
        def differentiable(x: Any) -> torch.Tensor:
            if not isinstance(x, torch.Tensor):
                raise ValueError(f"Thing passed to transform API must be Tensor, got {type(x)}")
            if not x.requires_grad:
                own_of(x.requires_grad_()).__dict__[MADE_BY] = self._mark
            self._given.append((own_of(x), own_of(x).grad_fn))
            return x

        return pytree.tree_map(differentiable, tree)

    def check_unwritten(self) -> None:
        """Raises: RuntimeError, which is torch's, if what is differentiated by has been written."""
        if any(x.grad_fn is not node for x, node in self._given):
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    def _follow(self, ys: Sequence[torch.Tensor]) -> list[bool]:
        """Whether each tensor follows from what has a gradient outside, on any worker. Collective."""
        own = [self._outside and y.requires_grad and leads_beyond(own_of(y), self._mark) for y in ys]
        split = next((y for y in ys if type(y) is GlobalTensor and y.requires_grad), None)
        if split is None or not self._outside or split._context.comm.imagined:
            return own
        told = gather_values(split._context.comm, split._context.everyone, "a transform of torch.func", own)
        return [any(each) for each in zip(*told, strict=True)]

    def _results(self, tree: Any, level: Level) -> Any:
        ys, spec = pytree.tree_flatten(tree)
        for y in ys:
            if not isinstance(y, torch.Tensor):
                raise RuntimeError(f"Expected tensors, got unsupported type {type(y)}")
        found = zip(ys, self._follow(ys), strict=True)
        return pytree.tree_unflatten(
            [y if follows or not y.requires_grad else y.detach() for y, follows in found], spec
        )

    def _gradients(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        grad_outputs: Sequence[torch.Tensor] | None = None,
        retain_graph: bool = False,
        create_graph: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        self.check_unwritten()
        shared = any(self._follow(outputs))  # (the graph is that of what is outside, too)
        curved = create_graph and (shared or any(dy.requires_grad for dy in grad_outputs or ()))
        find: Any = eager_transforms._autograd_grad
        found = find(outputs, inputs, grad_outputs, retain_graph or shared or curved, curved)
        if curved and not self._outside:  # (the function is differentiated elsewhere than it has been called)
            return tuple(found)
        return tuple(self._results(found, self))

    def _dual(self, x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        if tangent.shape != x.shape:
            raise RuntimeError(
                f"jvp needs tangents of the shapes of the primals; got one of {tuple(tangent.shape)} for "
                f"{tuple(x.shape)}"
            )
        x, tangent = self.aliases((x, tangent), self)
        dual: torch.Tensor = self.differentiable(x, self)
        self._duals.append((dual, tangent))
        return dual

    def _undo(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a result and its tangent are; without one, it does not follow from what has been given tangents."""
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
    """What a tensor is a view of."""
    return base_of(x) if type(x) is GlobalTensor else plain_of(x)._base


def leads_beyond(y: torch.Tensor, own: object = None, ends: Sequence[torch.Tensor] = ()) -> bool:
    """Whether the graph of a tensor leads out of a transform: to a program's leaves, or those of transforms around it.

    Args:
        own: the mark of the transform.
        ends: tensors beyond which it is not followed.
    """
    known = {id(one) for one in ends if one.grad_fn is None}

    def is_outside(leaf: torch.Tensor) -> bool:
        mark = leaf.__dict__.get(MADE_BY, leaf)
        return id(leaf) not in known and (mark is leaf or (mark in _here.open and mark is not own))

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
    """Whether a transform of these is ours.

    Raises: TransformError inside one of torch's; RuntimeError for a block inside of a distributed forward.
    """
    kinds = set(map(type, tensors_in(values)))
    if Block in kinds and tells_blocks():
        raise RuntimeError(TRANSFORMED)
    if GlobalTensor not in kinds and Replica not in kinds:
        return False
    if torch._C._are_functorch_transforms_active():
        raise TransformError
    return not is_on_blocks()


def _transform(name: str) -> None:
    """Let a transform of torch's, by this name there, be ours where it is needed."""
    original = original_of(getattr(eager_transforms, name))

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # (which goes on into torch's)
            return original(*args, **kwargs)
        if name == "_jvp_with_argnums":  # (torch counts its levels for all threads together)
            refused = launched() == "threads"
        else:  # (torch takes no hooks around it; ours may be those of weights in shares)
            hooks = saved_tensors_hooks()
            refused = hooks is not None and hasattr(hooks[0], KEEPS_TENSORS)
        if not is_split((args, kwargs)):
            inside = torch._C._are_functorch_transforms_active()
            if inside and refused:
                raise TransformError
            if inside or (is_on_blocks() and not refused):
                return original(*args, **kwargs)
            if not refused:
                with suppress(TransformError):
                    return original(*args, **kwargs)
        return Level().run(original, *args, **kwargs)

    setattr(eager_transforms, name, run)


def install() -> None:
    """Let transforms of functions of global tensors be ours: torch asks nobody there."""
    for name in ("grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums"):
        _transform(name)
