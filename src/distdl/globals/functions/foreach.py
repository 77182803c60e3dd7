"""Functions of lists of tensors, which stock optimisers call: what the function of one tensor does, for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import _foreach_supported_types as _STEPPED
from torch.utils._foreach_utils import _foreach_supported_types as _CLIPPED

from distdl.globals.functions.norms import norm_over
from distdl.globals.functions.pointwise import elementwise
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import derivatives_of, entire, moved
from distdl.globals.moving.buffer_writes import is_of_model
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import TABLE, by_name, handles
from distdl.globals.views.aliasing import check_written, note_written
from distdl.partition.sharing import reduce_values
from distdl.tensors.derivatives import NONE


def of_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply ``torch._foreach_*`` to each tensor by itself, on blocks."""
    name = func.__name__
    args, kwargs = _by_position(args, kwargs)
    first, count = args[0], _entries(args)
    writes = name.endswith("_")
    if writes and any(type(one) is not GlobalTensor for one in first):  # (a factor of gradients, as of clipping)
        args = tuple(one.full_tensor() if type(one) is GlobalTensor and not one.dim() else one for one in args)
    if writes and torch.is_grad_enabled() and any(_is_leaf_with_gradient(one) for one in first):  # (before any is)
        raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    if count > 1:  # (a factor for all of them comes once)
        args = tuple(one.full_tensor() if type(one) is GlobalTensor and _is_number(one) else one for one in args)
    alike = _alike(args)
    found = dict(zip(alike, _at_once(func, _of_places(args, alike), kwargs), strict=True)) if alike else {}
    for place in range(count):
        if place not in found:
            found[place] = _at_one_place(func, args, kwargs, place)
    return first if writes else tuple(found[place] for place in range(count))


def _of_places(args: Sequence[Any], places: Sequence[int]) -> tuple[Any, ...]:
    """The arguments for some places of the lists; what is no list goes with every place."""
    return tuple([one[place] for place in places] if isinstance(one, (tuple, list)) else one for one in args)


def _alike(args: Sequence[Any]) -> list[int]:
    """The places at which all tensors of the lists lie on the same workers. (Those of optimisers do at most.)"""
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


def _at_one_place(func: Any, args: Sequence[Any], kwargs: dict[str, Any], place: int) -> Any:
    """Apply a function to the entries at one place of the lists."""
    name = func.__name__
    writes = name.endswith("_")
    own = [one[place] if isinstance(one, (tuple, list)) else one for one in args]
    whole = [one for one in own if type(one) is GlobalTensor]
    if writes and type(own[0]) is GlobalTensor:
        check_written(own[0], name)  # (torch sees it in some blocks alone: the others would be written)
    elif writes and whole and is_of_model(own[0], whole[0]._context):  # (by a gradient made of activations)
        own, whole = [entire(one) for one in own], []
    if whole and writes and type(own[0]) is not GlobalTensor:
        raise TypeError(
            f"{name} would write a global tensor into a plain one, which is the same on every worker; make that "
            "global before, by torch.zeros_like(x) of a global x or by distdl.distribute_tensor"
        )
    of_one = _of_one(func, tuple(isinstance(one, (tuple, list)) for one in args))
    return elementwise(of_one, tuple(own), kwargs) if whole else of_one(*own, **kwargs)


@cache
def _of_one(func: Any, listed: tuple[bool, ...]) -> Callable[..., Any]:
    """The function of one tensor that a function of lists is for each.

    Args:
        listed: which arguments are entries of lists.
    """

    def of_one(*given: Any, **options: Any) -> Any:
        lists = [[one] if is_entry else one for one, is_entry in zip(given, listed, strict=True)]
        y = func(*lists, **options)
        return given[0] if func.__name__.endswith("_") else y[0]

    of_one.__name__ = func.__name__
    return of_one


def _is_number(x: torch.Tensor) -> bool:
    """Whether a tensor stands for a number that is not differentiated."""
    recorded = x.requires_grad and torch.is_grad_enabled()
    return not x.dim() and not recorded and type(x) in (GlobalTensor, torch.Tensor)


def _at_once(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Sequence[GlobalTensor]:
    """Apply a function to the blocks of lists whose tensors lie alike at each place."""
    name = func.__name__
    writes = name.endswith("_")
    like = next(one for one in args if isinstance(one, list) and isinstance(one[0], torch.Tensor))
    for x in like if writes else ():
        check_written(x, name)
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


def _norm(x: Any, ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    if isinstance(ord, bool):
        torch._foreach_norm([torch.zeros(1)], ord)  # (for torch's error)
    return torch.linalg.vector_norm(x, ord, dtype=dtype)


@handles("_foreach_norm", "torch")
@by_name
def norms(func: Any, self: Sequence[Any], ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    """The norms of a list: as clipping takes them of gradients, those of all blocks come together as one message."""
    counted = isinstance(ord, (int, float)) and type(ord) is not bool and ord > 0 and dtype is None
    if counted and len(self) > 1 and _are_alike(self):
        return _norms_of(self, float(ord))
    return by_itself(func, (self, ord, dtype), {})


def _are_alike(tensors: Sequence[Any]) -> bool:
    """Whether tensors are global over one world, have cells, and are of one kind; and none is differentiated."""
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


def _norms_of(tensors: Sequence[GlobalTensor], p: float) -> tuple[GlobalTensor, ...]:
    """Their norms, as norms of the norms of all blocks."""
    context, dtype = tensors[0]._context, tensors[0].dtype.to_real()
    blocks = [block_of(one) for one in tensors]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
    filled = [block for block in blocks if block.numel()]  # (there is no largest cell of none)
    found = iter(torch._foreach_norm(filled, p, wide) if filled else ())
    nothing = torch.zeros((), dtype=wide or dtype, device=blocks[0].device)
    parts = torch.stack([next(found) if block.numel() else nothing for block in blocks])[None]

    def make() -> KnownLayout:
        workers = context.world.workers.reshape(-1, 1)
        return context.layout(workers, [[(n, n + 1) for n in range(len(workers))], [(0, len(blocks))]])

    layout = context.keep(("norms", len(blocks)), make)
    whole: Any = norm_over(GlobalTensor._of(parts, layout), p, 0)
    return tuple(whole.to(dtype).unbind())


_BY_ITSELF: dict[str, Callable[..., Any]] = {"_foreach_norm": _norm, "_foreach_max": torch.amax}


def by_itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same for functions that are not element by element."""
    args, kwargs = _by_position(args, kwargs)
    of_one, count = _BY_ITSELF[func.__name__], _entries(args)
    each = [one if isinstance(one, (tuple, list)) else [one] * count for one in args]
    return tuple(of_one(*own, **kwargs) for own in zip(*each, strict=True))


_IN_ORDER = (
    "self", "other", "src", "tensor1", "tensors1", "exponent", "tensor2", "weight", "weights", "scalar",
    "scalars", "value",
)  # fmt: skip


def _by_position(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments; all that may be lists are given by their positions."""
    found = [*args, *(kwargs[name] for name in _IN_ORDER if name in kwargs)]
    if len(found) == 4 and isinstance(found[3], torch.Tensor) and found[3].dim() == 1:
        if not found[3].is_contiguous():
            raise RuntimeError("Expected scalars to be contiguous.")
        found[3] = entire(found[3]).tolist()  # (the scalars of addcmul and addcdiv)
    return tuple(found), {name: one for name, one in kwargs.items() if name not in _IN_ORDER}


def _entries(args: tuple[Any, ...]) -> int:
    """How many entries each list has.

    Raises: RuntimeError if these are different numbers.
    """
    counts = [len(one) for one in args if isinstance(one, (tuple, list))]
    for count in counts:
        if count != counts[0]:
            raise RuntimeError(f"Tensor lists must have the same number of tensors, got {counts[0]} and {count}")
    return counts[0]


def published(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of ``torch.foreach``, which is made of these."""
    return func.__wrapped__(*args, **kwargs)


def _is_elementwise(name: str) -> bool:
    """Whether a function of one tensor is: then that of lists is, too."""
    found = [getattr(torch.Tensor, one, None) for one in (name, name.removesuffix("_"))]
    return any(TABLE.get(one) is elementwise for one in found)


for _name in dir(torch):
    if _name in _BY_ITSELF and getattr(torch, _name) not in TABLE:
        TABLE[getattr(torch, _name)] = by_itself
    elif _name.startswith("_foreach_") and _is_elementwise(_name.removeprefix("_foreach_")):
        TABLE[getattr(torch, _name)] = of_each
_published: Any = getattr(torch, "foreach", None)  # (since 2.15)
for _name in () if _published is None else _published.__all__:
    TABLE[getattr(_published, _name)] = published


@handles("_amp_foreach_non_finite_check_and_unscale_", "torch")
def unscaled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Multiply gradients by a number, and take note on every worker if any of them is not finite. Collective."""
    tensors, found_inf, by = args
    func([block_of(one) if type(one) is GlobalTensor else one for one in tensors], found_inf, by)
    for context in dict.fromkeys(one._context for one in tensors if type(one) is GlobalTensor):
        found = reduce_values(context.comm, context.everyone, "unscaling of gradients", float(found_inf), "max")
        found_inf.fill_(found)


_LISTS_LIKE_PARAMETERS = {"_fused_sgd_": 3, "_fused_adagrad_": 3, "_fused_adam_": 5, "_fused_adamw_": 5}


@handles(" ".join(_LISTS_LIKE_PARAMETERS), "torch")
def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The step of an optimiser with ``fused=True``, element by element: on blocks, which it all writes in place.

    The first lists (parameters, gradients, moments) have tensors of equal shapes, which come to the parameter's layout;
    then come lists of numbers of steps. Torch's kernels read memory without asking for shapes or strides.

    Raises: TypeError if a global parameter has a plain gradient or moment, or the other way round; RuntimeError if
        shapes differ, or if a parameter requires a gradient and grad mode is on.
    """
    name = func.__name__
    like = args[: _LISTS_LIKE_PARAMETERS[name]]
    given: list[list[Any]] = [[*one] for one in like]
    written: list[tuple[GlobalTensor, torch.Tensor, GlobalTensor]] = []
    for place, x in enumerate(args[0]):
        for order, (tensors, blocks) in enumerate(zip(like, given, strict=True)):
            if not tensors:  # (moments that this optimiser does not keep)
                continue
            one = tensors[place]
            if order == 1 and type(x) is not GlobalTensor:  # (a gradient may have been made of activations)
                one = blocks[place] = entire(one)
            _check_fused(name, x, one)
            if type(one) is GlobalTensor:
                blocks[place] = moved(one, x._layout, name).contiguous()
                if order != 1 or kwargs.get("grad_scale") is not None:  # (gradients are written if they are unscaled)
                    written.append((one, blocks[place], x))
    steps = [[entire(one) for one in tensors] for tensors in args[len(like) :]]
    func(*given, *steps, **{key: entire(one) for key, one in kwargs.items()})
    for one, block, x in written:
        if block is not one._block:
            one._block.copy_(moved(GlobalTensor._of(block, x._layout), one._layout, name))
        note_written(one, name)


def _check_fused(name: str, x: Any, one: Any) -> None:
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


for _types in (_STEPPED, _CLIPPED):
    if GlobalTensor not in _types:  # (so clipping takes lists where nobody says otherwise, and optimisers on a GPU do)
        _types.append(GlobalTensor)
