"""The strides that a whole tensor would have in torch, and where torch would copy because of them.

No worker has the whole tensor, and a block tells nothing: one row of a slice is contiguous, the slice is not. A write
into a copy must not change the tensor that was copied, so a copy has to be made where torch makes one. Each view notes
its strides, which torch tells of the same view of a meta tensor. Element-wise functions hand the order of dims on. The
results of all other functions are taken to be contiguous: of convolutions, say, torch's choice differs between devices.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import plain_of
from distdl.globals.tensor.table import METHODS
from distdl.globals.views.aliasing import note_view
from distdl.tensors.modes import uncounted


class View(NamedTuple):
    """One way to take a view: a function that takes it of a meta tensor, and a key that tells it from other ways."""

    key: Hashable
    of: Callable[[torch.Tensor], torch.Tensor]


def strides_of(x: GlobalTensor) -> Shape:
    """Return the strides of the whole tensor; ``()`` means contiguous."""
    strides: Shape = x.__dict__.get("_strides", ())
    return strides


def offset_of(x: GlobalTensor) -> int:
    """Return how many elements would lie before the whole tensor in its memory."""
    offset: int = x.__dict__.get("_offset", 0)
    return offset


def note_strides(x: GlobalTensor, y: GlobalTensor, view: View) -> None:
    """Give y the strides and the offset that torch gives to this view of x."""
    before: Shape = x.__dict__.get("_strides", ())

    def after() -> tuple[Shape, int]:
        seen = view.of(meta_tensor(x.shape, before))
        return strides_if(seen), int(seen.storage_offset())

    strides, offset = x._context.keep(("strides", x.shape, before, view.key), after)
    if strides:
        y._strides = strides
    if offset or "_offset" in x.__dict__:
        y._offset = offset + x.__dict__.get("_offset", 0) * x.dtype.itemsize // y.dtype.itemsize


def same_strides(x: GlobalTensor, y: GlobalTensor) -> None:
    """Give y the strides and the offset of x, of which it is a view of all elements."""
    if "_strides" in x.__dict__:
        y._strides = x._strides
    if "_offset" in x.__dict__:
        y._offset = x._offset


def whole_view(x: GlobalTensor, block: torch.Tensor) -> GlobalTensor:
    """Return a view of all elements of x, made of the given block."""
    y = GlobalTensor._of(block, x._layout)
    note_view(x, y)
    same_strides(x, y)
    return y


def keep_order(operands: Sequence[Any], y: Any, function: Callable[..., Any]) -> None:
    """Give the results y of an element-wise function the strides that a sum of its operands has in torch.

    Torch orders the dims as those of the first operand, and where that leaves it open, of the next. There are no gaps.
    """
    given = [one for one in operands if isinstance(one, torch.Tensor)]
    if not any(map(_steps, given)) or any(one is y for one in given):
        return
    if getattr(function, "__name__", "") in _CONTIGUOUS:
        return
    places = tuple((one.shape, _steps(one)) for one in given if one.dim())

    def summed() -> Shape:
        wholes = [meta_tensor(*place) for place in places]
        return strides_if(reduce(torch.add, wholes, wholes[0]))

    made: Sequence[Any] = (y,) if isinstance(y, torch.Tensor) else y
    for one in made:
        if type(one) is GlobalTensor and (strides := one._context.keep(("order", places), summed)):
            one._strides = strides


def _steps(x: torch.Tensor) -> Shape:
    """Return the strides of a tensor, global or plain; ``()`` means contiguous."""
    return strides_of(x) if type(x) is GlobalTensor else strides_if(plain_of(x))


def note_format(x: GlobalTensor, y: GlobalTensor, wanted: torch.memory_format) -> None:
    """Give y the strides of a new tensor like x in a memory format."""
    if wanted is not torch.contiguous_format:
        y._strides = x._context.keep(
            ("format", x.shape, strides_of(x), wanted),
            lambda: strides_if(torch.empty_like(_on_meta(x), memory_format=wanted)),
        )


def has_format(x: GlobalTensor, wanted: torch.memory_format, function: Callable[..., Any]) -> bool:
    """Whether x has a memory format already, so that torch's ``contiguous`` or ``to`` returns x itself."""
    strides = strides_of(x)
    name = "contiguous" if function.__name__ == "contiguous" else "to"

    def try_it() -> bool:
        whole = meta_tensor(x.shape, strides)
        return getattr(whole, name)(memory_format=wanted) is whole

    if not strides and wanted is torch.contiguous_format:
        return True
    return x._context.keep(("lies in", x.shape, strides, wanted, name), try_it)


def is_copied(x: GlobalTensor, shape: Shape) -> bool:
    """Whether ``x.reshape(shape)`` is a copy in torch."""
    strides = strides_of(x)

    def try_it() -> bool:
        try:
            meta_tensor(x.shape, strides).view(shape)
        except RuntimeError:
            return True
        return False

    return bool(strides) and x._context.keep(("copied", x.shape, strides, shape), try_it)


def call_on_meta(x: GlobalTensor, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the whole tensor that reads its shape or strides and no value. Raises what torch raises."""
    if name == "storage_offset":
        return offset_of(x)
    with uncounted():
        return getattr(_on_meta(x), name)(*args, **kwargs)


def _on_meta(x: torch.Tensor) -> torch.Tensor:
    """Return a meta tensor of the shape, strides and dtype of x."""
    if type(x) is GlobalTensor:
        return meta_tensor(x.shape, strides_of(x), x.dtype)
    plain = plain_of(x)
    return torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device="meta")


def meta_tensor(shape: Shape, strides: Shape, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a meta tensor; ``()`` for strides means contiguous."""
    if not strides:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def strides_if(whole: torch.Tensor) -> Shape:
    """Return the strides of a whole tensor; ``()`` if it is contiguous, whatever they are along dims of extent 1."""
    return () if whole.is_contiguous() else whole.stride()


# element-wise functions whose results are contiguous whatever the strides of their operands
_CONTIGUOUS = frozenset(["log_sigmoid", "mvlgamma", "special_multigammaln", "masked_fill"])

METHODS["whole_view"] = whole_view
