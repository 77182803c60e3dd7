"""Writes of global tensors into plain ones, as in ``torch.zeros(...).scatter_(1, labels, 1)``."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import swap_tensors

from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import gather_global, local_slice
from distdl.globals.moving.buffer_writes import check_gradient, is_itself_of_model, is_of_model
from distdl.globals.tensor.block import relabel
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.stale import assigned
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import TABLE, name_of
from distdl.globals.views.aliasing import PRUNING, note_new_memory
from distdl.tensors.connection import zeros_on
from distdl.tensors.private_torch import DisableTorchFunctionSubclass, storage_use_count


def write_into_plain(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, beside: Any, name: str | None = None
) -> Any:
    """Call a function that writes global tensors into a plain tensor, the target.

    A target that is a parameter, a buffer of a model, or a view of one, is written whole on every worker. So is
    ``buffer.data``, which then gets a graph, as in torch, while the buffer itself has none.

    Any other target becomes global: it is the same on every worker, so each keeps its block, in the layout of the
    largest global tensor. If the target is a view, its base becomes global, too. A target that was computed from
    parameters, as by ``mask_token.repeat(...)``, keeps its graph. But if all global tensors are without dims and
    gradients, a target that is a view, or must not become global, stays plain, and every worker writes all of it.

    Args:
        target: the argument that is written.
        beside: the structure of values whose global tensors are written; it has one at least.
        name: of the function, in errors.
    Returns: what the function returns: most often the target.
    Raises: RuntimeError if the target must not become global: if it shares memory with another tensor, or requires a
        gradient; and for a parameter or buffer, if the values that are written require one.
    """
    called = name or name_of(func)
    if is_of_model(target, _largest(beside)._context):
        return _write_whole(func, args, kwargs, target, beside, called)
    if why_not_global(target) and _are_numbers((args, kwargs)):
        given, named = map_tensors((args, kwargs), gather_global)
        return func(*given, **named)
    why = _adopt(target, beside)
    if not why:
        return TABLE.get(func, TABLE[None])(func, args, kwargs)
    raise RuntimeError(
        f"{called} would write values of a global tensor into a plain tensor, which is the same on every worker "
        f"and cannot become global, because {why}. Make the tensor global before, by torch.zeros_like(x) of a "
        f"global x or by distdl.distribute_tensor. {PRUNING}"
    )


def _write_whole(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, beside: Any, called: str
) -> Any:
    """Call the function with a global tensor of the target's values, gather the result, and copy it to the target."""
    owner = target._base if type(target) is torch.Tensor and target._is_view() else target
    copied = type(target) is Replica and not target.requires_grad  # the data of a replica of a parameter
    alias = copied or (type(owner) is torch.Tensor and not is_itself_of_model(owner, _largest(beside)._context))
    if not alias:
        check_gradient((target, beside), called)
    made = _own_beside(plain_of(target).detach(), beside)
    given = tuple([made if one is target else one for one in args])
    named = {key: made if one is target else one for key, one in kwargs.items()}
    y = TABLE.get(func, TABLE[None])(func, given, named)
    if alias and made.requires_grad and torch.is_grad_enabled():
        # buffer.data has the gradient of the values that were written into it
        plain_of(target).copy_(entered(made.full_tensor(), made._context))
        for one in {id(target): target, id(owner): owner}.values():
            relabel(one, Replica, _context=made._context)
        return target if y is made else y
    with torch.no_grad():
        plain_of(target).copy_(made.full_tensor())
    return assigned(target) if y is made else y


class Arguments:
    """Plain tensors that users' autograd functions were given which run now in a world, and that they may write."""

    given: tuple[torch.Tensor, ...] = ()


def _adopt(target: Any, beside: Any) -> str:
    """Make a plain tensor global, and its base if it is a view. Returns why that must not be; empty if it is done."""
    if type(target) is torch.Tensor and target._is_view() and _references_to_base(target) > _NO_OTHER:
        return _adopt_both(target, target._base, beside)
    why = why_not_global(target)
    # the data of an argument of an autograd function, which torch does not call a view of the argument
    for one in _largest(beside)._context.own(Arguments).given if why else ():
        if type(target) is type(one) is torch.Tensor and target is not one and target.data_ptr() == one.data_ptr():
            return _adopt_both(target, one, beside, 1)
    return why or _become(target, _own_beside(target, beside))


def _become(target: torch.Tensor, made: torch.Tensor) -> str:
    """Let all references to one tensor be to another. Returns why that must not be; empty if it is done."""
    try:
        with DisableTorchFunctionSubclass():
            swap_tensors(target, made)
    except RuntimeError:
        return "others refer to it"
    return ""


def _adopt_both(part: torch.Tensor, base: Any, beside: Any, others: int = 0) -> str:
    """Make a plain tensor and a part of it global, for ``z[i] += x``. Returns why that must not be; empty if done.

    Besides the two, as many ``others`` may share their memory.
    """
    index = _index_of(part, base)
    if index is None or type(base) is not torch.Tensor or base.requires_grad or part.requires_grad:
        return "it is a view of a tensor that requires a gradient, or no z[i] of integers and slices"
    storage = base.untyped_storage()
    # three references to the storage are those of the part, of the base, and ours
    if storage_use_count(storage._cdata) > 3 + others or not storage.resizable():
        return "it shares its memory with others than the tensor of which it is a view"
    del storage
    why = _become(part, torch.empty(0, device="cpu"))  # the base cannot become global while it has a view
    if why:
        return why
    why = _become(base, _own_beside(base, beside))
    return _become(part, base[index]) or why


def _index_of(part: torch.Tensor, base: torch.Tensor) -> tuple[int | slice, ...] | None:
    """Return the integers and slices that index a part in its contiguous base; None if no such index gives the part."""
    if part.dtype != base.dtype or part.is_conj() or part.is_neg() or not (part.numel() and base.is_contiguous()):
        return None
    offset, dims = int(part.storage_offset() - base.storage_offset()), list(zip(part.shape, part.stride(), strict=True))
    index: list[int | slice] = []
    for n, step in zip(base.shape, base.stride(), strict=True):
        start, offset = divmod(offset, step)
        if dims and dims[0][1] >= step:
            extent, stride = dims.pop(0)
            index.append(slice(start, start + (extent - 1) * (stride // step) + 1, stride // step))
        else:
            index.append(min(start, n - 1))
    return tuple(index) if base[tuple(index)].is_set_to(part) else None


def _are_numbers(values: Any) -> bool:
    """Whether all global tensors in a structure are without dims, and none of them has a gradient."""
    recorded = torch.is_grad_enabled()
    found = [one for one in tensors_in(values) if type(one) is GlobalTensor]
    return all(not one.dim() and not (recorded and one.requires_grad) for one in found)


def _own_beside(plain: torch.Tensor, beside: Any) -> GlobalTensor:
    """Make a plain tensor global as :func:`split_beside` does, in memory of its own."""
    made = split_beside(plain, beside)
    made._block = made._block.clone()
    return made


def split_beside(plain: torch.Tensor, beside: Any) -> GlobalTensor:
    """Make a replicated tensor global, in the layout of the largest global tensor among others. Nothing moves."""
    layout = _beside(_largest(beside)._layout, tuple(plain.shape))
    if not layout.active:
        return GlobalTensor._of(zeros_on(entered(plain, layout.context), layout.local), layout)
    return GlobalTensor._of(local_slice(plain, layout), layout)


def _largest(beside: Any) -> GlobalTensor:
    found = (one for one in tensors_in(beside) if type(one) is GlobalTensor)
    return max(found, key=lambda one: one.numel())


def write_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with ``out=``: compute its results, and copy them into the given tensors.

    Raises: RuntimeError if one of these has another dtype than its result, or has cells and another shape, or if an
        argument requires a gradient.
    """
    out = kwargs["out"]
    name = name_of(func)
    y = func(*args, **{key: value for key, value in kwargs.items() if key != "out"})
    results = (y,) if isinstance(y, torch.Tensor) else tuple(y)
    has_derivative = any(one.is_floating_point() or one.is_complex() for one in results)
    if has_derivative and torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in((args, kwargs))):
        raise RuntimeError(
            f"{name}(): functions with out=... arguments don't support automatic differentiation, but one of the "
            "arguments requires grad."
        )
    for target, result in zip((out,) if isinstance(out, torch.Tensor) else out, results, strict=True):
        if target.dtype != result.dtype:
            raise RuntimeError(f"{name} needs out= of the result's dtype {result.dtype}; got one of {target.dtype}")
        if not target.numel() and type(target) is GlobalTensor is type(result):
            target._block, target._layout, target._strides = result._block.to(target.dtype), result._layout, ()
            note_new_memory(target)
            continue
        if not target.numel() and type(target) is torch.Tensor:
            target.resize_(result.shape)
        if target.shape != result.shape:
            raise RuntimeError(
                f"{name} needs out= of the result's shape {tuple(result.shape)}; got one of shape {tuple(target.shape)}"
            )
        if type(result) is GlobalTensor and type(target) is not GlobalTensor:
            write_into_plain(torch.Tensor.copy_, (target, result), {}, target, result, name)
        else:
            with torch.no_grad():
                target.copy_(result)
    return out


TABLE["out"] = write_out


def why_not_global(target: Any) -> str:
    """Return why a plain tensor must not become global; empty if it may."""
    replica = type(target) is Replica and "_plain" in target.__dict__  # not a plain tensor that was retyped in place
    if type(target) not in (torch.Tensor, Replica):
        return f"it is a {type(target).__name__}"
    if target.requires_grad and type(target) is torch.Tensor:
        return "it requires a gradient"
    if "_since" in target.__dict__:
        return 'it is stored in shares, which a forward may only read unless it is distributed with "replicated"'
    with DisableTorchFunctionSubclass():
        plain = target._plain if replica else target
        view = plain._is_view()
        if view and (replica or _references_to_base(plain) > _NO_OTHER):
            return "it is a view of another tensor"
        storage = plain.untyped_storage()
    # references to the storage: the tensor's, ours, and one of the replica around it or of its base
    if storage_use_count(storage._cdata) > 2 + replica + view or not storage.resizable():
        return "it shares its memory with another tensor or with an array"
    return ""


def _references_to_base(view: torch.Tensor) -> int:
    """Return the number of references to the base of a view."""
    base = view._base
    return sys.getrefcount(base)


# the count for a base to which only its view refers, as in ``torch.zeros(6).view(2, 3)``
_NO_OTHER = _references_to_base(torch.empty(1, device="cpu").view(1))


def _beside(like: KnownLayout, extents: tuple[int, ...]) -> KnownLayout:
    """Return a layout for a tensor of these extents: its dims are split as the dims of equal extent of another are."""

    def make() -> KnownLayout:
        context, workers = like.context, like.partition.workers
        dims = len(like.extents)
        if len(extents) == dims:
            return like.resized(extents)
        pairs, first = [-1] * len(extents), 0  # for each dim, the dim of ``like`` with its extent, in order; or -1
        for dim, n in enumerate(extents):
            match = next((k for k in range(first, dims) if like.extents[k] == n), None)
            if match is not None:
                pairs[dim], first = match, match + 1
        places = [workers.shape[k] if k >= 0 else 1 for k in pairs]
        rest = [k for k in range(dims) if k not in pairs]
        # along dims of ``like`` that the tensor lacks, the workers at place 0 hold it
        kept = workers[tuple(0 if k in rest else slice(None) for k in range(dims))]
        intervals = [like.intervals[k] if k >= 0 else ((0, n),) for k, n in zip(pairs, extents, strict=True)]
        return context.layout(kept.reshape(places), intervals)

    return like.context.keep(("adopted", like, extents), make)
