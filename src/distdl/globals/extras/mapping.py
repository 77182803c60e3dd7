"""``torch.vmap`` of functions of global tensors.

Where each worker has its samples whole, torch's own vmap maps the blocks, without a message. Else the function is
called for one sample after another, and the results are stacked.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from distdl.globals.extras.transforms import is_split, leads_beyond
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.running import is_running, on_blocks
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import composite, name_of, original_of
from distdl.tensors.derivatives import saved_tensors_hooks
from distdl.tensors.draws import Draws
from distdl.tensors.function import TransformError
from distdl.tensors.private_torch import are_functorch_transforms_active
from distdl.tensors.private_transforms import (
    flat_vmap_as_patched,
    maybe_remove_batch_dim,
    remove_batch_dim,
    tree_flatten,
    tree_unflatten,
    unwrap_batched,
)
from distdl.transport.callsite import current_place, users_call

_MANY = 256  # with more calls than that, a warning tells that samples are taken one by one
_MOST = 4096  # with more calls than that, a model refuses plain samples: a mask may have millions

torchs_flat_vmap = original_of(flat_vmap_as_patched)


class _Calls(threading.local):
    def __init__(self) -> None:
        self.count = 1  # how often the function that runs on this thread is called, by all vmaps around it
        self.warned: set[tuple[str, int]] = set()  # the lines that were warned of many calls


_calls = _Calls()


def flat_vmap(
    original: Any,
    func: Callable[..., Any],
    batch_size: int,
    flat_in_dims: list[int | None],
    flat_args: list[Any],
    args_spec: Any,
    out_dims: Any,
    randomness: str,
    **kwargs: Any,
) -> Any:
    """Map a function over samples; called for each chunk of them when torch has checked all.

    Args:
        original: torch's ``_flat_vmap``, with whose arguments.
    """
    torchs = partial(original, func, batch_size, flat_in_dims, flat_args, args_spec, out_dims, randomness)
    samples = _Samples(func, batch_size, flat_in_dims, flat_args, args_spec, randomness, kwargs)
    if not is_split((flat_args, kwargs)):
        if are_functorch_transforms_active():
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
    return composite(unwrap_batched, _maybe_remove_batch_dim=_samples_to)(y, out_dims, 0, batch_size, func)


def _samples_to(name: str, y: torch.Tensor, level: int, count: int, out_dim: int | None) -> torch.Tensor:
    """A result with its samples in ``out_dim``, given it with all samples in dim 0; the first sample if that is None.

    Raises: what torch raises for a result that is no tensor.
    """
    if out_dim is None:
        return y[0]
    if not isinstance(y, torch.Tensor):
        return maybe_remove_batch_dim(name, y[0], level, count, out_dim)
    return y.movedim(0, out_dim)


@dataclass(frozen=True)
class _Samples:
    """A function and its arguments: a flat list of the structure ``spec``, some of which have samples in a dim.

    That is their entry of ``in_dims``, or None. Keyword arguments have no samples; ``randomness`` is ``torch.vmap``'s.
    """

    func: Callable[..., Any]
    count: int
    in_dims: list[int | None]
    args: list[Any]
    spec: Any
    randomness: str
    kwargs: dict[str, Any]

    def one_by_one(self, most: int = 0) -> Any:
        """Call the function for one sample after another. Returns: its results, each with all samples in dim 0.

        Args:
            most: the most calls, counted with those of vmaps around this one; 0 for any number.
        Raises: TransformError if there would be more calls; ValueError if the results differ in structure.
        """
        if not self.count:
            return self._without_samples()
        around, _calls.count = _calls.count, _calls.count * self.count
        try:
            if 0 < most < _calls.count:
                raise TransformError
            if _calls.count > _MANY:
                _warn_of_calls(self.func, _calls.count)
            draws = self._draws() if self.randomness == "same" else nullcontext
            each = []
            for number in range(self.count):
                with draws():
                    each.append(tree_flatten(self._call(number)))
        finally:
            _calls.count = around
        for _, spec in each:
            if spec != each[0][1]:
                raise ValueError(f"vmap needs results of one structure; got {each[0][1]} and {spec}")
        stacked = [_stack(ys) for ys in zip(*(flat for flat, _ in each), strict=True)]
        return tree_unflatten(stacked, each[0][1])

    def _without_samples(self) -> Any:
        """The results for no samples: empty, in the shapes and dtypes of the results for a sample of zeros."""

        def with_zeros(x: torch.Tensor, d: int) -> torch.Tensor:
            zeros = x.new_zeros([1 if place == d % x.dim() else size for place, size in enumerate(x.shape)])
            return torch.cat([x, zeros], d)  # by cat, so that results are in the graph of x

        args = [x if d is None else with_zeros(x, d) for x, d in zip(self.args, self.in_dims, strict=True)]
        return map_tensors(replace(self, count=1, args=args).one_by_one(), lambda y: y[:0])

    def _draws(self) -> Callable[[], AbstractContextManager[None]]:
        """Contexts in which each sample draws the same numbers: those that the world of global tensors draws next.

        If the arguments are plain, the function is called once more, to find global tensors in its result.
        """
        first = self._call(0)
        known: list[Any] = tensors_in((self.args, self.kwargs, first))
        found = [one._context.own(Draws) for one in known if type(one) in (GlobalTensor, Replica)]
        return partial(found[0].again, found[0].seed, found[0].counted()) if found else nullcontext

    def _call(self, number: int) -> Any:
        given = [x if d is None else x.select(d, number) for x, d in zip(self.args, self.in_dims, strict=True)]
        return self.func(*tree_unflatten(given, self.spec), **self.kwargs)

    def on_blocks(self) -> Any:
        """Map this worker's samples by torch's vmap, without a message. Returns: the results, with samples in dim 0.

        Raises: TransformError if a worker does not have its samples whole; if hooks for saved tensors are set, which
            torch's ``grad`` refuses; or if results depend on other tensors with gradients than the arguments.
        """
        layout = self._samples_layout()
        if saved_tensors_hooks() is not None:
            raise TransformError
        context = layout.context
        start, stop = layout.box[0]

        def local(x: Any, dim: int | None = None) -> Any:
            if not isinstance(x, torch.Tensor) or type(x) is GlobalTensor:
                return block_of(x) if type(x) is GlobalTensor else x
            x = entered(x, context)
            return x if dim is None else x.narrow(dim, start, stop - start)

        given = [local(x, dim) for x, dim in zip(self.args, self.in_dims, strict=True)]
        named = map_tensors(self.kwargs, local)
        trained = [one for one in tensors_in((given, named)) if one.requires_grad]
        vmap_of_any = composite(torchs_flat_vmap, _unwrap_batched=_UNWRAP_ANY)
        with on_blocks():
            y = vmap_of_any(self.func, stop - start, self.in_dims, given, self.spec, 0, self.randomness, **named)
        flat, spec = tree_flatten(y)
        results: list[Any] = []
        for found in flat:
            if isinstance(found, _PerSample):
                results.append(found)
                continue
            block = plain_of(found)
            if block.requires_grad and leads_beyond(block, ends=trained):
                raise TransformError
            rest = [((0, extent),) for extent in block.shape[1:]]
            workers = layout.partition.workers.reshape(-1, *[1] * len(rest))
            results.append(GlobalTensor._of(block, context.layout(workers, [layout.intervals[0], *rest])))
        return tree_unflatten(results, spec)

    def _samples_layout(self) -> KnownLayout:
        """How samples are split over all workers: the layout of a tensor that has the dim of samples alone.

        Raises: TransformError if another dim is split, if arguments split their samples in different ways, if a worker
            has none, or if a keyword argument is global or the function may draw random numbers.
        """
        found: set[KnownLayout] = set()
        for x, dim in zip(self.args, self.in_dims, strict=True):
            if type(x) is not GlobalTensor:
                continue
            intervals, workers = x._layout.intervals, x._layout.partition.workers
            if dim is None or workers.size != len(x._context.everyone):
                raise TransformError
            if any(len(along) > 1 for place, along in enumerate(intervals) if place != dim):
                raise TransformError
            found.add(x._context.layout(workers.ravel(), [intervals[dim]]))
        others = any(type(one) is GlobalTensor for one in tensors_in(self.kwargs))
        if len(found) != 1 or others or self.randomness != "error":
            raise TransformError
        layout = found.pop()
        if any(start == stop for start, stop in layout.intervals[0]):
            raise TransformError
        return layout


def _warn_of_calls(func: Callable[..., Any], calls: int) -> None:
    """Warn, once for each line that calls vmap, that it calls the function for many samples one by one."""
    frame, level = users_call()
    site = (frame.f_code.co_filename, frame.f_lineno)
    if site not in _calls.warned and current_place().fallback != "silent":
        _calls.warned.add(site)
        warnings.warn(
            f"vmap of {name_of(func)} takes its samples one by one, in {calls} calls: it knows tensors that are split, "
            "or has a gradient of others than its arguments. Give it weights as arguments and samples that lie whole "
            f"on workers, or batches to functions that take them (called at {site[0]}:{site[1]})",
            stacklevel=level,
        )


class _PerSample(tuple[Any, ...]):
    """A result that is no tensor, for each sample."""


def _unwrapped(name: str, y: Any, level: int, count: int, out_dim: int) -> Any:
    return remove_batch_dim(y, level, count, out_dim) if isinstance(y, torch.Tensor) else _PerSample([y])


_UNWRAP_ANY = composite(unwrap_batched, _maybe_remove_batch_dim=_unwrapped)


def _stack(ys: Sequence[Any]) -> Any:
    return torch.stack(list(ys)) if isinstance(ys[0], torch.Tensor) else _PerSample(ys)
