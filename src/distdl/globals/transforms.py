"""The transforms of ``torch.func`` (``grad``, ``vjp``, ``jvp``, ``jacrev``, ``hessian``, ``vmap`` ...).

torch wraps the tensors that a transformed function gets. What is split over workers cannot be wrapped, as a wrapper has
no memory that could travel. So functions of it are differentiated by autograd, and samples are taken one by one::

    grad, vjp    x' = an alias of x that requires a gradient,  y = f(x'),  dx = autograd.grad(y, x', dy)
    jvp          the derivative of  dy -> dx,  which is linear in dy
    vmap         f of each sample, stacked; where samples lie whole on workers, torch's vmap of their blocks

A result has a graph if it follows from what has one outside of the transform, as in torch. All else is torch's own
code, in which what wraps and unwraps has been replaced. A function of plain tensors goes to torch first, and comes here
if it meets what is split.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial, wraps
from inspect import unwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch._functorch import vmap as vmapping
from torch._functorch.predispatch import _remove_batch_dim
from torch.utils import _pytree as pytree

from distdl.globals.context import KnownLayout
from distdl.globals.nested import map_tensors, tensors_in
from distdl.globals.operands import block_of
from distdl.globals.replicas import Replica, entered, plain_of, tied_of
from distdl.globals.running import is_on_blocks, is_running, on_blocks
from distdl.globals.table import composite
from distdl.globals.tensor import GlobalTensor
from distdl.partition.sharing import gather_values
from distdl.tensors.derivatives import KEEPS_TENSORS, MADE_BY, saved_tensors_hooks
from distdl.tensors.function import TransformError
from distdl.workers.worlds import launched

_MOST = 4096  # samples of plain tensors that a model takes one by one: of a mask there may be millions

_flat_vmap: Any = vmapping._flat_vmap


class _Here(threading.local):
    def __init__(self) -> None:
        self.calls = 1  # how often the function that runs here is called, by all vmaps around it
        self.open: list[object] = []  # the marks of the transforms whose functions run here, one in another


_here = _Here()


class _Level:
    """One transform of a function: what its arguments become, and what is left of its results."""

    def __init__(self) -> None:
        self._outside = torch.is_grad_enabled()  # (what has a graph there is one more level)
        self._mark = object()  # of the leaves that it makes
        self._given: list[tuple[torch.Tensor, Any]] = []  # what is differentiated by, and its node
        self._duals: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """A transform of torch's, of what need not be wrapped."""
        own = composite(
            unwrap(func),
            grad_increment_nesting=self._open,
            jvp_increment_nesting=self._open,
            _wrap_all_tensors=self._aliases,
            _create_differentiable=self._differentiable,
            _undo_create_differentiable=self._results,
            _autograd_grad=self._gradients,
            JVP_NESTING=0,
            fwAD=SimpleNamespace(_set_fwd_grad_enabled=lambda on: nullcontext(), make_dual=self._dual),
            safe_unpack_dual=composite(eager_transforms.safe_unpack_dual, fwAD=SimpleNamespace(unpack_dual=self._undo)),
        )
        return own(*args, **kwargs)

    @contextmanager
    def _open(self) -> Iterator[_Level]:
        _here.open.append(self._mark)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield self
        finally:
            _here.open.pop()

    def _aliases(self, tree: Any, level: _Level) -> Any:
        def alias(x: Any) -> Any:
            if not (isinstance(x, torch.Tensor) and (x.is_floating_point() or x.is_complex())):
                return x
            if _plain(x).is_inference():
                return x.clone()
            return (x if self._outside else x.detach()).view_as(x)

        return pytree.tree_map(alias, tree)

    def _differentiable(self, tree: Any, level: _Level) -> Any:
        def differentiable(x: Any) -> torch.Tensor:
            if not isinstance(x, torch.Tensor):
                raise ValueError(f"Thing passed to transform API must be Tensor, got {type(x)}")
            if not x.requires_grad:
                _plain(x.requires_grad_()).__dict__[MADE_BY] = self._mark
            self._given.append((_plain(x), _plain(x).grad_fn))
            return x

        return pytree.tree_map(differentiable, tree)

    def _check_unwritten(self) -> None:
        """Raises: RuntimeError, which is torch's, if what is differentiated by has been written."""
        if any(x.grad_fn is not node for x, node in self._given):
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")

    def _follow(self, ys: Sequence[torch.Tensor]) -> list[bool]:
        """Whether each tensor follows from what has a gradient outside, on any worker. Collective."""
        own = [self._outside and y.requires_grad and _leads_beyond(_plain(y), self._mark) for y in ys]
        split = next((y for y in ys if type(y) is GlobalTensor and y.requires_grad), None)
        if split is None or not self._outside or split._context.comm.imagined:
            return own
        told = gather_values(split._context.comm, split._context.everyone, "a transform of torch.func", own)
        return [any(each) for each in zip(*told, strict=True)]

    def _results(self, tree: Any, level: _Level) -> Any:
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
        self._check_unwritten()
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
        x, tangent = self._aliases((x, tangent), self)
        dual: torch.Tensor = self._differentiable(x, self)
        self._duals.append((dual, tangent))
        return dual

    def _undo(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What a result and its tangent are; without one, it does not follow from what has been given tangents."""
        self._check_unwritten()
        if not y.requires_grad:
            return y, None
        dy = self._differentiable(torch.zeros_like(y), self)
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


def _plain(x: torch.Tensor) -> torch.Tensor:
    return block_of(x) if type(x) is GlobalTensor else plain_of(x)


def _leads_beyond(y: torch.Tensor, own: object = None, ends: Sequence[torch.Tensor] = ()) -> bool:
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


def _is_split(values: Any) -> bool:
    """Whether a transform of these is ours.

    Raises: TransformError inside one of torch's.
    """
    if not any(type(one) in (GlobalTensor, Replica) for one in tensors_in(values)):
        return False
    if torch._C._are_functorch_transforms_active():
        raise TransformError
    return not is_on_blocks()


def _transform(name: str) -> None:
    """Let a transform of torch's, by this name there, be ours where it is needed."""
    original = getattr(eager_transforms, name)

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # (which goes on into torch's)
            return original(*args, **kwargs)
        if name == "_jvp_with_argnums":  # (torch counts its levels for all threads together)
            refused = launched() == "threads"
        else:  # (torch takes no hooks around it; ours may be those of weights in shares)
            hooks = saved_tensors_hooks()
            refused = hooks is not None and hasattr(hooks[0], KEEPS_TENSORS)
        if not _is_split((args, kwargs)):
            inside = torch._C._are_functorch_transforms_active()
            if inside and refused:
                raise TransformError
            if inside or (is_on_blocks() and not refused):
                return original(*args, **kwargs)
            if not refused:
                with suppress(TransformError):
                    return original(*args, **kwargs)
        return _Level().run(original, *args, **kwargs)

    setattr(eager_transforms, name, run)


def _vmap(
    func: Callable[..., Any],
    batch_size: int,
    flat_in_dims: list[int | None],
    flat_args: list[Any],
    args_spec: Any,
    out_dims: Any,
    randomness: str,
    **kwargs: Any,
) -> Any:
    """torch's ``_flat_vmap``, which is called for each chunk of samples when all has been checked."""
    torchs = partial(_flat_vmap, func, batch_size, flat_in_dims, flat_args, args_spec, out_dims, randomness)
    if torch.compiler.is_compiling():
        return torchs(**kwargs)
    samples = _Samples(func, batch_size, flat_in_dims, flat_args, args_spec, randomness, kwargs)
    if not _is_split((flat_args, kwargs)):
        if torch._C._are_functorch_transforms_active():
            return torchs(**kwargs)
        try:
            return torchs(**kwargs)
        except TransformError:
            y = samples.one_by_one(_MOST if is_running() else 0)
    else:
        try:
            y = samples.on_blocks()
        except TransformError:
            y = samples.one_by_one()
    return composite(vmapping._unwrap_batched, _maybe_remove_batch_dim=_moved)(y, out_dims, 0, batch_size, func)


def _moved(name: str, y: torch.Tensor, level: int, count: int, out_dim: int | None) -> torch.Tensor:
    """A result of which all samples are there, in dim 0, with these in another dim; or the same one for all."""
    if out_dim is None:
        return y[0]
    if not isinstance(y, torch.Tensor):
        return vmapping._maybe_remove_batch_dim(name, y[0], level, count, out_dim)  # (raises)
    return y.movedim(0, out_dim)


class _Samples:
    """A function of samples, which stand in a dim of some of its arguments."""

    def __init__(
        self,
        func: Callable[..., Any],
        count: int,
        in_dims: list[int | None],
        args: list[Any],
        spec: Any,
        randomness: str,
        kwargs: dict[str, Any],
    ) -> None:
        self._func, self._count, self._spec, self._kwargs = func, count, spec, kwargs
        self._in_dims, self._args, self._randomness = in_dims, args, randomness

    def one_by_one(self, most: int = 0) -> Any:
        """The results, each with its samples in dim 0.

        Args:
            most: how many calls there may be, with those of other vmaps around this one; 0 for any number.
        Raises: ValueError; TransformError if there are more.
        """
        if not self._count:
            raise ValueError("vmap of what is split over workers needs a sample; there are none in the dim it maps")
        around, _here.calls = _here.calls, _here.calls * self._count
        try:
            if 0 < most < _here.calls:
                raise TransformError
            draws = self._draws() if self._randomness == "same" else nullcontext
            each = []
            for number in range(self._count):
                with draws():
                    each.append(pytree.tree_flatten(self._call(number)))
        finally:
            _here.calls = around
        for _, spec in each:
            if spec != each[0][1]:
                raise ValueError(f"vmap needs results of one structure; got {each[0][1]} and {spec}")
        stacked = [_stack(ys) for ys in zip(*(flat for flat, _ in each), strict=True)]
        return pytree.tree_unflatten(stacked, each[0][1])

    def _draws(self) -> Callable[[], AbstractContextManager[None]]:
        """In which each sample draws the same as the others: what is split, by the draws that come next."""
        first = self._call(0)  # (there may be nothing split among the arguments)
        known: list[Any] = tensors_in((self._args, self._kwargs, first))
        found = [one._context.draws for one in known if type(one) in (GlobalTensor, Replica)]
        return partial(found[0].again, found[0].seed, found[0].counted()) if found else nullcontext

    def _call(self, number: int) -> Any:
        given = [x if d is None else x.select(d, number) for x, d in zip(self._args, self._in_dims, strict=True)]
        return self._func(*pytree.tree_unflatten(given, self._spec), **self._kwargs)

    def on_blocks(self) -> Any:
        """The same, of samples that lie whole on workers. Nothing moves.

        Raises: TransformError if they do not, or if the function knows other tensors that are split or have a gradient.
        """
        layout = self._layout()
        if saved_tensors_hooks() is not None:  # (torch's grad takes none around it)
            raise TransformError
        context = layout.context
        start, stop = layout.box[0]

        def own(x: Any, dim: int | None = None) -> Any:
            if not isinstance(x, torch.Tensor) or type(x) is GlobalTensor:
                return block_of(x) if type(x) is GlobalTensor else x
            x = entered(x, context) if type(x) is Replica or x.requires_grad else x
            return x if dim is None else x.narrow(dim, start, stop - start)

        given = [own(x, dim) for x, dim in zip(self._args, self._in_dims, strict=True)]
        named = map_tensors(self._kwargs, own)
        inputs = tensors_in((given, named))
        vmap_of_any = composite(_flat_vmap, _unwrap_batched=_UNWRAP_ANY)
        with on_blocks():
            y = vmap_of_any(self._func, stop - start, self._in_dims, given, self._spec, 0, self._randomness, **named)
        flat, spec = pytree.tree_flatten(y)
        curved = [one for one in inputs if one.requires_grad]
        results: list[Any] = []
        for found in flat:
            if isinstance(found, _Each):
                results.append(found)
                continue
            block = tied_of(found)
            if block.requires_grad and _leads_beyond(block, ends=curved):
                raise TransformError
            rest = [((0, extent),) for extent in block.shape[1:]]
            workers = layout.partition.workers.reshape(-1, *[1] * len(rest))
            results.append(GlobalTensor._of(block, context.layout(workers, [layout.intervals[0], *rest])))
        return pytree.tree_unflatten(results, spec)

    def _layout(self) -> KnownLayout:
        """How samples are split: that of a tensor which has that dim alone."""
        found: set[KnownLayout] = set()
        for x, dim in zip(self._args, self._in_dims, strict=True):
            if type(x) is not GlobalTensor:
                continue
            intervals, workers = x._layout.intervals, x._layout.partition.workers
            if dim is None or workers.size != len(x._context.everyone):
                raise TransformError
            if any(len(along) > 1 for place, along in enumerate(intervals) if place != dim):
                raise TransformError
            found.add(x._context.layout(workers.ravel(), [intervals[dim]]))
        others = any(type(one) is GlobalTensor for one in tensors_in(self._kwargs))
        if len(found) != 1 or others or self._randomness != "error":
            raise TransformError
        layout = found.pop()
        if any(start == stop for start, stop in layout.intervals[0]):
            raise TransformError
        return layout


class _Each(tuple[Any, ...]):
    """Of what is no tensor, that of each sample."""


def _removed(name: str, y: Any, level: int, count: int, out_dim: int) -> Any:
    return _remove_batch_dim(y, level, count, out_dim) if isinstance(y, torch.Tensor) else _Each([y])


_UNWRAP_ANY = composite(vmapping._unwrap_batched, _maybe_remove_batch_dim=_removed)


def _stack(ys: Sequence[Any]) -> Any:
    return torch.stack(list(ys)) if isinstance(ys[0], torch.Tensor) else _Each(ys)


def install() -> None:
    """Let transforms of functions of global tensors be ours: torch asks nobody there."""
    for name in ("grad_and_value_impl", "_vjp_with_argnums", "_jvp_with_argnums"):
        _transform(name)
    patched: Any = vmapping
    patched._flat_vmap = wraps(_flat_vmap)(_vmap)
