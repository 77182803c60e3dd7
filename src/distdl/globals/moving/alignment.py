"""Operands: how tensors that stand beside each other in a function come to lie on the same workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from distdl.exchange.nodes import move_all
from distdl.geometry.boxes import slices
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.observers import note_plain
from distdl.globals.tensor.replicas import plain_of
from distdl.globals.tensor.running import is_running
from distdl.tensors.connection import zeros_on
from distdl.tensors.derivatives import NONE, Derivatives, is_differentiated_forward

GRADIENT = Derivatives(gradient=True)

Move = tuple[torch.Tensor, KnownLayout, KnownLayout]
"""A block, and the layouts in which it is and in which it is needed."""


def derivatives_of(block: torch.Tensor) -> Derivatives:
    """What a block carries; the same on every worker, since all blocks of a tensor have the same history."""
    if is_differentiated_forward():
        return Derivatives.of(block, torch.is_grad_enabled())
    return GRADIENT if block.requires_grad and torch.is_grad_enabled() else NONE


def moved(x: GlobalTensor, needed: KnownLayout, name: str) -> torch.Tensor:
    """This worker's box of a tensor in another layout, in which boxes may overlap. Both have as many dims."""
    block, owned = block_of(x), x._layout
    if owned is needed:
        return block
    if not owned.rulers:  # (a message has one dim at least)
        y = moved_block(block.reshape(-1), owned.lifted(1), needed.lifted(1), name)
        return y.reshape(()) if y.numel() else y
    return moved_block(block, owned, needed, name)


def moved_block(block: torch.Tensor, owned: KnownLayout, needed: KnownLayout, name: str) -> torch.Tensor:
    """The same for a block whose layout is given."""
    if owned is needed:
        return block
    operator = owned.context.moving(owned, needed, block.dtype, derivatives_of(block), name)
    y: torch.Tensor = operator(block)
    return y


def moved_blocks(moves: Sequence[Move], name: str) -> list[torch.Tensor]:
    """The same for several blocks. Their messages are under way at the same time, in one autograd node."""
    found = [block for block, _, _ in moves]
    moving = [place for place, (_, owned, needed) in enumerate(moves) if owned is not needed]
    if len(moving) < 2:
        for place in moving:
            found[place] = moved_block(*moves[place], name)
        return found
    operators = [
        owned.context.moving(owned, needed, block.dtype, derivatives_of(block), name)
        for block, owned, needed in (moves[place] for place in moving)
    ]
    for place, (y,) in zip(moving, move_all(operators, [(found[place],) for place in moving]), strict=True):
        found[place] = y
    return found


def taken(plain: torch.Tensor, target: KnownLayout) -> torch.Tensor:
    """What a worker reads of a tensor that is the same everywhere, beside its block of a larger one.

    Dims count from the last, as in broadcasting; along those of extent 1 it is read whole.

    Raises: RuntimeError, on every worker, for a sparse tensor.
    """
    plain = entered(plain, target.context)
    check_dense(plain)
    dims, extents = plain.dim(), target.extents
    if not dims:
        return plain if target.rulers or target.active else plain.reshape(1)[:0]
    first = len(extents) - dims
    if target.local == extents and target.active:
        return plain
    box = tuple(
        (0, 1) if plain.shape[dim] == 1 and extents[first + dim] != 1 else target.box[first + dim]
        for dim in range(dims)
    )
    if all(one == (0, n) for one, n in zip(box, plain.shape, strict=True)):
        return plain  # (of a view, autograd would save the view)
    return plain[slices(box)]


def part_of(value: torch.Tensor, layout: KnownLayout, name: str) -> torch.Tensor:
    """This worker's block of a tensor, global or the same everywhere, in a layout of its shape."""
    block = moved(value, layout, name) if type(value) is GlobalTensor else taken(value, layout)
    return block if block.shape == layout.local else block.reshape(layout.local)


def entire(value: Any) -> Any:
    """What every worker has whole: of a global tensor, all of it, as a plain one. Other values as they are."""
    return value.full_tensor() if type(value) is GlobalTensor else value


def whole(value: Any) -> Any:
    """The same, of a copy as the plain tensor that it is."""
    return plain_of(entire(value))


def number(one: torch.Tensor) -> Any:
    """The value of a tensor that torch takes for a number; on every worker, if it is global. Others as they are."""
    if one.numel() != 1 or one.requires_grad or one.is_meta:
        return one
    return one.item() if type(one) is GlobalTensor else plain_of(one).item()


def sample(plain: torch.Tensor, context: Context) -> None:
    """Keep some values of a plain tensor, outside of models. Every worker calls it, also one that takes no cell."""
    if not is_running():
        note_plain(context, plain)


def check_dense(plain: torch.Tensor) -> None:
    """Check that parts can be taken of a plain tensor.

    Raises: RuntimeError for a sparse one. (Operators of Python would take a TypeError for their own.)
    """
    if plain.layout is not torch.strided:
        raise RuntimeError(
            "a sparse tensor cannot stand beside a global one here, for no part of it can be taken; pass its to_dense()"
        )


def aligned(context: Context, operands: Sequence[Any], lead: int | None, name: str) -> tuple[KnownLayout, list[Any]]:
    """Bring operands that broadcast to each other to the same workers.

    Args:
        operands: global tensors, tensors that are the same everywhere, and numbers.
        lead: the operand whose layout the result has; if not given, the one that covers most of it.
    Returns: the layout of the result, and for each operand this worker's part.
    """
    described = tuple(
        one._layout if type(one) is GlobalTensor else one.shape if isinstance(one, torch.Tensor) else None
        for one in operands
    )
    target, needs = context.keep(("aligned", described, lead), lambda: _align(context, described, lead))
    found: list[Any] = []
    for one, need in zip(operands, needs, strict=True):
        if type(one) is GlobalTensor and need is not None:
            found.append(_part(one, need, target, name))
        elif isinstance(one, torch.Tensor):
            sample(one, context)
            found.append(taken(one, target))
        else:
            found.append(one)
    return target, found


def numbers_of(context: Context, operands: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    """Operands without dims, for a worker that holds none of the result: ones in the place of what is not there.

    So torch says there, too, whether it takes them, and of what dtype the result is.

    Args:
        found: what :func:`aligned` has made of the operands.
    """
    return [
        _one_on(part) if type(one) is GlobalTensor else entered(one, context) if isinstance(one, torch.Tensor) else one
        for one, part in zip(operands, found, strict=True)
    ]


def _one_on(part: torch.Tensor) -> torch.Tensor:
    one = zeros_on(part, ())
    # (what fills a tensor has no second derivative, so a backward of it would go another way here than elsewhere)
    return one + 1 if one.requires_grad else one.fill_(1)


def _part(x: GlobalTensor, need: KnownLayout, target: KnownLayout, name: str) -> torch.Tensor:
    block, owned = block_of(x), x._layout
    if owned is need:
        return block
    dims = max(len(target.rulers), 1)  # (a message has one dim at least)
    lifted = owned.lifted(dims)
    if block.dim() != dims:
        block = block.reshape(lifted.local)
    block = moved_block(block, lifted, need.lifted(dims), name)
    if owned.rulers and target.rulers:
        return block
    # a number stays one beside tensors with dims, so that torch promotes dtypes as it does with the whole tensors
    if block.numel():
        return block.reshape(())
    return zeros_on(block, ()) if target.rulers else block


def _align(
    context: Context, described: Sequence[Any], lead: int | None
) -> tuple[KnownLayout, tuple[KnownLayout | None, ...]]:
    shapes = [one.size if isinstance(one, KnownLayout) else one for one in described]
    try:
        extents = torch.broadcast_shapes(*(shape for shape in shapes if shape is not None))
    except RuntimeError as error:
        if all(isinstance(one, KnownLayout) or not one for one in described):
            raise
        raise RuntimeError(
            f"{error} (a plain tensor beside a global one is a whole one, the same on every worker; of blocks, as "
            "to_local() gives them, GlobalTensor.from_local makes a global tensor)"
        ) from None
    target = _target(extents, described, lead)
    needs: list[KnownLayout | None] = []
    for one in described:
        if not isinstance(one, KnownLayout):
            needs.append(None)
            continue
        lifted = one.lifted(len(extents))
        if not one.rulers and not extents:
            needs.append(target)
            continue
        places = target.partition.workers.shape
        intervals = [
            target.intervals[dim] if lifted.extents[dim] == extents[dim] else ((0, 1),) * places[dim]
            for dim in range(len(extents))
        ]
        need = context.layout(target.partition.workers, intervals)
        needs.append(one if lifted is need and one.rulers else need)
    return target, tuple(needs)


def _target(extents: Sequence[int], described: Sequence[Any], lead: int | None) -> KnownLayout:
    """The layout of a result, which is that of its leading operand where this has all cells of a dim."""
    known = [one for one in described if isinstance(one, KnownLayout)]
    if lead is None:
        chosen = max(known, key=lambda one: (one.size.numel(), len(one.rulers)))  # the first of the largest
    else:
        chosen = described[lead]
        if tuple(chosen.extents) != tuple(extents):
            raise RuntimeError(
                f"output with shape {list(chosen.extents)} doesn't match the broadcast shape {list(extents)}"
            )
    result: KnownLayout = chosen.lifted(len(extents)).resized(extents)
    return result


def own_box(layout: KnownLayout) -> tuple[slice, ...]:
    """The index of this worker's box in the whole tensor."""
    return slices(layout.box)
