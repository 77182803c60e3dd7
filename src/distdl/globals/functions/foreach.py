"""Functions of lists of tensors, ``torch._foreach_*``, which torch's optimisers and clipping call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from distdl.globals.functions.norms import norm_over
from distdl.globals.functions.pointwise import elementwise
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import block_in, derivatives_of, gather_global
from distdl.globals.moving.buffer_writes import is_of_model
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import TABLE, by_name, handles
from distdl.globals.views.aliasing import check_writable, note_written
from distdl.partition.sharing import reduce_values
from distdl.tensors.derivatives import NONE
from distdl.tensors.private_torch import clipping_foreach_types, optimizer_foreach_types


def elementwise_of_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function of lists that is element by element: to the blocks of all entries of like layouts at once.

    The other entries follow one by one. Functions in place write nothing if they raise for a leaf.
    """
    name = func.__name__
    args, kwargs = _lists_by_position(args, kwargs)
    first, count = args[0], _length_of_lists(args)
    writes = name.endswith("_")
    if writes and any(type(one) is not GlobalTensor for one in first):
        # clipping multiplies plain gradients, too, by a global factor
        args = tuple(one.full_tensor() if type(one) is GlobalTensor and not one.dim() else one for one in args)
    if writes and torch.is_grad_enabled() and any(_is_leaf_with_gradient(one) for one in first):
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if count > 1:  # gather a common factor once, not once for each entry
        args = tuple(one.full_tensor() if type(one) is GlobalTensor and _is_number(one) else one for one in args)
    alike = _aligned_entries(args)
    found = dict(zip(alike, _of_aligned(func, _entries(args, alike), kwargs), strict=True)) if alike else {}
    for place in range(count):
        if place not in found:
            found[place] = _of_one_entry(func, args, kwargs, place)
    return first if writes else tuple(found[place] for place in range(count))


def _entries(args: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """The arguments with the entries of each list at some places. An argument that is no list stays as it is."""
    return tuple([one[place] for place in places] if isinstance(one, (tuple, list)) else one for one in args)


def _aligned_entries(args: Sequence[Any]) -> list[int]:
    """The places at which the entries of all lists are global tensors with dims, of one layout.

    None of them, if there is a tensor beside the lists that is no number.
    """
    if any(isinstance(one, torch.Tensor) and not _is_number(one) for one in args):
        return []
    lists = [one for one in args if isinstance(one, (tuple, list)) and one and isinstance(one[0], torch.Tensor)]
    return [
        place
        for place, (first, *others) in enumerate(zip(*lists, strict=True))
        if type(first) is GlobalTensor
        and first._layout.rulers
        and all(type(one) is GlobalTensor and one._layout is first._layout for one in others)
    ]


def _of_one_entry(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int) -> Any:
    """Apply a function to the entries at one place of the lists.

    Raises: TypeError if it would write a global tensor into a plain one that is no tensor of a model.
    """
    name = func.__name__
    writes = name.endswith("_")
    entries = [one[place] if isinstance(one, (tuple, list)) else one for one in args]
    of_global = [one for one in entries if type(one) is GlobalTensor]
    if writes and type(entries[0]) is GlobalTensor:
        check_writable(entries[0], name)  # torch would raise on some workers only, and the others would write
    elif writes and of_global and is_of_model(entries[0], of_global[0]._context):
        # the gradient of a plain parameter may be global, if it was computed from activations
        entries, of_global = [gather_global(one) for one in entries], []
    if of_global and writes and type(entries[0]) is not GlobalTensor:
        raise TypeError(
            f"{name} would write a global tensor into a plain one, which is the same on every worker; make that "
            "global before, by torch.zeros_like(x) of a global x or by distdl.distribute_tensor"
        )
    of_one = _of_one(func, tuple(isinstance(one, (tuple, list)) for one in args))
    return elementwise(of_one, tuple(entries), kwargs) if of_global else of_one(*entries, **kwargs)


@cache
def _of_one(func: Any, listed: tuple[bool, ...]) -> Callable[..., Any]:
    """A function of lists as one of single tensors. ``listed`` says which arguments are lists."""

    def of_one(*given: Any, **options: Any) -> Any:
        lists = [[one] if is_entry else one for one, is_entry in zip(given, listed, strict=True)]
        y = func(*lists, **options)
        return given[0] if func.__name__.endswith("_") else y[0]

    of_one.__name__ = func.__name__
    return of_one


def _is_number(x: torch.Tensor) -> bool:
    """Whether a global or plain tensor has no dims, and is not differentiated."""
    recorded = x.requires_grad and torch.is_grad_enabled()
    return not x.dim() and not recorded and type(x) in (GlobalTensor, torch.Tensor)


def _of_aligned(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[GlobalTensor]:
    """Apply a function to the blocks of lists whose tensors have one layout at each place."""
    name = func.__name__
    writes = name.endswith("_")
    like = next(one for one in args if isinstance(one, list) and isinstance(one[0], torch.Tensor))
    for x in like if writes else ():
        check_writable(x, name)
    given = [
        [block_of(x) if type(x) is GlobalTensor else x for x in one] if isinstance(one, list) else one for one in args
    ]
    y = func(*given, **kwargs)
    if not writes:
        return tuple(GlobalTensor._of(block, x._layout) for block, x in zip(y, like, strict=True))
    for x in like:
        note_written(x, name)
    return like


def _is_leaf_with_gradient(x: Any) -> bool:
    block = block_of(x) if type(x) is GlobalTensor else x
    return bool(block.requires_grad and block.is_leaf)


def _norm_of_one(x: Any, ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    if isinstance(ord, bool):
        torch._foreach_norm([torch.zeros(1)], ord)  # raises torch's error
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


@handles("_foreach_norm", "torch")
@by_name
def norms(func: Any, self: Sequence[Any], ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    """The norms of a list. Those of gradients, as clipping takes them, need one message for the whole list."""
    is_positive = isinstance(ord, (int, float)) and type(ord) is not bool and ord > 0
    if is_positive and dtype is None and len(self) > 1 and _have_one_kind(self):
        return _norms_in_one_message(self, float(ord))
    return reduce_each(func, (self, ord, dtype), {})


def _have_one_kind(tensors: Sequence[Any]) -> bool:
    """Whether all are global tensors of one world, dtype and device, none empty, none of integers or differentiated."""
    first = tensors[0]
    return all(
        type(one) is GlobalTensor
        and one._context is first._context
        and (one.dtype, one.device) == (first.dtype, first.device)
        and (one.is_floating_point() or one.is_complex())
        and one.numel() > 0
        and derivatives_of(block_of(one)) == NONE
        for one in tensors
    )


def _norms_in_one_message(tensors: Sequence[GlobalTensor], p: float) -> tuple[GlobalTensor, ...]:
    """The p-norm of each tensor, as the p-norm of those of its blocks, for p > 0."""
    context, dtype = tensors[0]._context, tensors[0].dtype.to_real()
    blocks = [block_of(one) for one in tensors]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
    filled = [block for block in blocks if block.numel()]  # torch refuses the maximum norm of an empty block
    found = iter(torch._foreach_norm(filled, p, wide) if filled else ())
    zero = torch.zeros((), dtype=wide or dtype, device=blocks[0].device)
    of_blocks = torch.stack([next(found) if block.numel() else zero for block in blocks])[None]

    def make() -> KnownLayout:
        workers = context.world.workers.reshape(-1, 1)
        return context.layout(workers, [[(n, n + 1) for n in range(len(workers))], [(0, len(blocks))]])

    layout = context.keep(("norms", len(blocks)), make)
    of_tensors: Any = norm_over(GlobalTensor._of(of_blocks, layout), p, 0)
    return tuple(of_tensors.to(dtype).unbind())


_REDUCTIONS: dict[str, Callable[..., Any]] = {"_foreach_norm": _norm_of_one, "_foreach_max": torch.amax}


def reduce_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a reduction to each tensor of a list."""
    args, kwargs = _lists_by_position(args, kwargs)
    of_one, count = _REDUCTIONS[func.__name__], _length_of_lists(args)
    each = [one if isinstance(one, (tuple, list)) else [one] * count for one in args]
    return tuple(of_one(*own, **kwargs) for own in zip(*each, strict=True))


_IN_ORDER = (
    "self", "other", "src", "tensor1", "tensors1", "exponent", "tensor2", "weight", "weights", "scalar",
    "scalars", "value",
)  # fmt: skip


def _lists_by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with all that may be lists given by position, and a tensor of scalars made a list."""
    found = [*args, *(kwargs[name] for name in _IN_ORDER if name in kwargs)]
    if len(found) == 4 and isinstance(found[3], torch.Tensor) and found[3].dim() == 1:
        # only addcmul and addcdiv have four: the last ones are their scalars
        if not found[3].is_contiguous():
            raise RuntimeError("Expected scalars to be contiguous.")
        found[3] = gather_global(found[3]).tolist()
    return tuple(found), {name: one for name, one in kwargs.items() if name not in _IN_ORDER}


def _length_of_lists(args: tuple[Any, ...]) -> int:
    """The length of the lists.

    Raises: RuntimeError if their lengths differ.
    """
    counts = [len(one) for one in args if isinstance(one, (tuple, list))]
    for count in counts:
        if count != counts[0]:
            raise RuntimeError(f"Tensor lists must have the same number of tensors, got {counts[0]} and {count}")
    return counts[0]


def published(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A public function of ``torch.foreach``: torch's code, which calls ``torch._foreach_*``."""
    return func.__wrapped__(*args, **kwargs)


def _is_elementwise(name: str) -> bool:
    """Whether torch's function of one tensor with this name is element by element."""
    found = [getattr(torch.Tensor, one, None) for one in (name, name.removesuffix("_"))]
    return any(TABLE.get(one) is elementwise for one in found)


for _name in dir(torch):
    if _name in _REDUCTIONS and getattr(torch, _name) not in TABLE:
        TABLE[getattr(torch, _name)] = reduce_each
    elif _name.startswith("_foreach_") and _is_elementwise(_name.removeprefix("_foreach_")):
        TABLE[getattr(torch, _name)] = elementwise_of_lists
_published: Any = getattr(torch, "foreach", None)  # torch has it since 2.15
for _name in () if _published is None else _published.__all__:
    TABLE[getattr(_published, _name)] = published


@handles("_amp_foreach_non_finite_check_and_unscale_", "torch")
def unscale(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Multiply gradients by a number, and set ``found_inf`` on every worker if any value is not finite. Collective."""
    tensors, found_inf, by = args
    func([block_of(one) if type(one) is GlobalTensor else one for one in tensors], found_inf, by)
    for context in dict.fromkeys(one._context for one in tensors if type(one) is GlobalTensor):
        found = reduce_values(context.comm, context.everyone, "unscaling of gradients", float(found_inf), "max")
        found_inf.fill_(found)


_LISTS_LIKE_PARAMETERS = {"_fused_sgd_": 3, "_fused_adagrad_": 3, "_fused_adam_": 5, "_fused_adamw_": 5}


@handles(" ".join(_LISTS_LIKE_PARAMETERS), "torch")
def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The step of an optimiser with ``fused=True``: element by element, on blocks, in place.

    The first lists are parameters, gradients and moments; the others are the numbers of steps. Gradients and moments
    are redistributed to the layout of their parameter, and made contiguous, because torch's kernels check no strides.

    Raises: TypeError if one of a parameter, its gradient and its moments is global and another plain; RuntimeError if
        their shapes differ, or if one of them requires a gradient and grad mode is on.
    """
    name = func.__name__
    like = args[: _LISTS_LIKE_PARAMETERS[name]]
    given: list[list[Any]] = [[*one] for one in like]
    written: list[tuple[GlobalTensor, torch.Tensor, GlobalTensor]] = []
    for place, x in enumerate(args[0]):
        for order, (tensors, blocks) in enumerate(zip(like, given, strict=True)):
            if not tensors:  # the optimiser keeps no such moments
                continue
            one = tensors[place]
            if order == 1 and type(x) is not GlobalTensor:
                # the gradient of a plain parameter may be global, if it was computed from activations
                one = blocks[place] = gather_global(one)
            _check_fused(name, x, one)
            if type(one) is GlobalTensor:
                blocks[place] = block_in(one, x._layout, name).contiguous()
                if order != 1 or kwargs.get("grad_scale") is not None:  # torch unscales gradients in place
                    written.append((one, blocks[place], x))
    steps = [[gather_global(one) for one in tensors] for tensors in args[len(like) :]]
    func(*given, *steps, **{key: gather_global(one) for key, one in kwargs.items()})
    for one, block, x in written:
        if block is not one._block:
            one._block.copy_(block_in(GlobalTensor._of(block, x._layout), one._layout, name))
        note_written(one, name)


def _check_fused(name: str, x: Any, one: Any) -> None:
    """Check a gradient or moment of a parameter x, as :func:`fused` says."""
    kinds = ["global" if type(each) is GlobalTensor else "plain" for each in (x, one)]
    if kinds[0] != kinds[1]:
        raise TypeError(
            f"{name} needs gradients and moments that are global as the parameter is, or plain as it is; got a "
            f"{kinds[1]} one beside a {kinds[0]} parameter"
        )
    if one.shape != x.shape:
        raise RuntimeError(
            f"{name} needs gradients and moments of the parameter's shape {tuple(x.shape)}; got {tuple(one.shape)}"
        )
    if torch.is_grad_enabled() and one.requires_grad and type(one) is GlobalTensor:
        raise RuntimeError(f"{name} writes in place into a tensor that requires a gradient; call it in torch.no_grad()")


for _types in (optimizer_foreach_types, clipping_foreach_types):
    if GlobalTensor not in _types:  # by default, clipping and optimisers on a GPU pass lists of these types only
        _types.append(GlobalTensor)
