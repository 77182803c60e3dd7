"""Bring the operands of a function to the same workers."""

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
"""A block, the layout in which it is, and the layout in which it is needed."""


def derivatives_of(block: torch.Tensor) -> Derivatives:
    """Return which derivatives a block carries; all blocks of a tensor carry the same, for they have one history."""
    if is_differentiated_forward():
        return Derivatives.of(block, torch.is_grad_enabled())
    return GRADIENT if block.requires_grad and torch.is_grad_enabled() else NONE


def block_in(x: GlobalTensor, needed: KnownLayout, name: str) -> torch.Tensor:
    """Redistribute x to a layout of its shape, in which boxes may overlap, and return this worker's block of it."""
    block, owned = block_of(x), x._layout
    if owned is needed:
        return block
    if not owned.rulers:  # a message needs a dim
        y = redistribute_block(block.reshape(-1), owned.lifted(1), needed.lifted(1), name)
        return y.reshape(()) if y.numel() else y
    return redistribute_block(block, owned, needed, name)


def redistribute_block(block: torch.Tensor, owned: KnownLayout, needed: KnownLayout, name: str) -> torch.Tensor:
    """Redistribute a block from the layout in which it is to the one in which it is needed."""
    if owned is needed:
        return block
    operator = owned.context.moving(owned, needed, block.dtype, derivatives_of(block), name)
    y: torch.Tensor = operator(block)
    return y


def redistribute_blocks(moves: Sequence[Move], name: str) -> list[torch.Tensor]:
    """Redistribute several blocks at once: their messages travel at the same time, from one autograd node."""
    found = [block for block, _, _ in moves]
    moving = [place for place, (_, owned, needed) in enumerate(moves) if owned is not needed]
    if len(moving) < 2:
        for place in moving:
            found[place] = redistribute_block(*moves[place], name)
        return found
    operators = [
        owned.context.moving(owned, needed, block.dtype, derivatives_of(block), name)
        for block, owned, needed in (moves[place] for place in moving)
    ]
    for place, (y,) in zip(moving, move_all(operators, [(found[place],) for place in moving]), strict=True):
        found[place] = y
    return found


def local_slice(plain: torch.Tensor, target: KnownLayout) -> torch.Tensor:
    """Return the part of a plain tensor or replica that broadcasts to this worker's block in the target layout.

    The tensor enters first. Dims count from the last, as in broadcasting. A dim that is broadcast is not sliced.

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
        return plain  # not a view of all of it, which autograd would save
    return plain[slices(box)]


def local_block(value: torch.Tensor, layout: KnownLayout, name: str) -> torch.Tensor:
    """Return this worker's block, in a layout of its shape, of a tensor that is global or replicated."""
    block = block_in(value, layout, name) if type(value) is GlobalTensor else local_slice(value, layout)
    return block if block.shape == layout.local else block.reshape(layout.local)


def gather_global(value: Any) -> Any:
    """Gather a global tensor on every worker, as a plain tensor. Other values are returned as they are."""
    return value.full_tensor() if type(value) is GlobalTensor else value


def gather_plain(value: Any) -> Any:
    """Gather a global tensor, and unwrap a replica: either becomes a plain tensor. Others are returned as they are."""
    return plain_of(gather_global(value))


def number(one: torch.Tensor) -> Any:
    """Return the number in a tensor of one element that requires no gradient; other tensors as they are. Collective."""
    if one.numel() != 1 or one.requires_grad or one.is_meta:
        return one
    return one.item() if type(one) is GlobalTensor else plain_of(one).item()


def keep_sample(plain: torch.Tensor, context: Context) -> None:
    """Keep some values of a plain tensor, for workers to compare later; not in a model's forward.

    Every worker calls it, also one that reads no cell of the tensor.
    """
    if not is_running():
        note_plain(context, plain)


def check_dense(plain: torch.Tensor) -> None:
    """Raise RuntimeError for a sparse tensor, which cannot be sliced; Python's operators would catch a TypeError."""
    if plain.layout is not torch.strided:
        raise RuntimeError(
            "a sparse tensor cannot stand beside a global one here, for it cannot be sliced; pass its to_dense()"
        )


def aligned(context: Context, operands: Sequence[Any], lead: int | None, name: str) -> tuple[KnownLayout, list[Any]]:
    """Bring operands that broadcast to each other to the same workers.

    Args:
        operands: global tensors, replicated tensors, and numbers.
        lead: the place of the operand whose layout the result has; if None, the largest operand.
    Returns: the layout of the result, and of each operand what this worker computes with.
    Raises: torch's RuntimeError if the shapes do not broadcast, or not to that of the lead.
    """
    described = tuple(
        one._layout if type(one) is GlobalTensor else one.shape if isinstance(one, torch.Tensor) else None
        for one in operands
    )
    target, needs = context.keep(("aligned", described, lead), lambda: _align(context, described, lead))
    found: list[Any] = []
    for one, need in zip(operands, needs, strict=True):
        if type(one) is GlobalTensor and need is not None:
            found.append(_local_operand(one, need, target, name))
        elif isinstance(one, torch.Tensor):
            keep_sample(one, context)
            found.append(local_slice(one, target))
        else:
            found.append(one)
    return target, found


def operands_without_dims(context: Context, operands: Sequence[Any], found: Sequence[Any]) -> list[Any]:
    """For a result without dims: the operands with which a worker that does not hold it calls torch's function.

    Each global tensor becomes a 1 without dims. So torch refuses here what it refuses on the worker that holds the
    result, and tells the result's dtype.

    Args:
        found: the operands that :func:`aligned` returned.
    """
    return [
        _one_on(part) if type(one) is GlobalTensor else entered(one, context) if isinstance(one, torch.Tensor) else one
        for one, part in zip(operands, found, strict=True)
    ]


def _one_on(block: torch.Tensor) -> torch.Tensor:
    """Return a 1 without dims that depends on a block in the autograd graph."""
    one = zeros_on(block, ())
    # fill_ has no second derivative, so a backward of the backward would differ from that on other workers
    return one + 1 if one.requires_grad else one.fill_(1)


def _local_operand(x: GlobalTensor, need: KnownLayout, target: KnownLayout, name: str) -> torch.Tensor:
    """Return this worker's block of an operand, in the layout that broadcasts to the target."""
    block, owned = block_of(x), x._layout
    if owned is need:
        return block
    dims = max(len(target.rulers), 1)  # a message needs a dim
    lifted = owned.lifted(dims)
    if block.dim() != dims:
        block = block.reshape(lifted.local)
    block = redistribute_block(block, lifted, need.lifted(dims), name)
    if owned.rulers and target.rulers:
        return block
    # a tensor without dims stays without, so that torch promotes dtypes as it does with the whole tensors
    if block.numel():
        return block.reshape(())
    return zeros_on(block, ()) if target.rulers else block


def _align(
    context: Context, described: Sequence[Any], lead: int | None
) -> tuple[KnownLayout, tuple[KnownLayout | None, ...]]:
    """Return the layout of a result, and for each global operand the layout that broadcasts to it.

    Args:
        described: of each operand its layout, its shape if it is a replicated tensor, or None if it is a number.
    """
    shapes = [one.size if isinstance(one, KnownLayout) else one for one in described]
    try:
        extents = torch.broadcast_shapes(*(shape for shape in shapes if shape is not None))
    except RuntimeError as error:
        if all(isinstance(one, KnownLayout) or not one for one in described):
            raise
        raise RuntimeError(
            f"{error} (a plain tensor beside a global one counts as whole, and as the same on every worker; "
            "GlobalTensor.from_local makes a global tensor of blocks, as to_local() gives them)"
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
    """Return the layout of a result: its leading operand's. Dims along which that is broadcast are split evenly."""
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
