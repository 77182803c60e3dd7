r"""A convolution as one autograd node: what it reads comes, torch convolves it, and the gradients go back.

Where blocks are small, what stands between torch's kernels costs more than the kernels: autograd's steps, and Python
in each of them. So fetching, convolving, and the same backward are two steps instead of four::

    x, w, b  ==>  window, w, b  --convolve-->  y                     messages under way at the same time
    dy  --gradients of all three-->  dwindow, dw, db  ==>  dx, dw, db

A window is saved as it is, and of a larger one only what is not the block (see ``distdl.ops.keeping``). Where the
derivative is itself differentiated, the steps by themselves compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import torch

from distdl.exchange import Operator
from distdl.ops.keeping import WORTH, Place
from distdl.ops.kernel import Kernel
from distdl.partition import Layout
from distdl.tensors.derivatives import is_checkpointed
from distdl.tensors.function import Function, gradients_of
from distdl.tensors.modes import unobserved


def are_full(*layouts: Layout) -> bool:
    """Whether no block is empty."""
    return all(start < stop for layout in layouts for ruler in layout.rulers for start, stop in ruler.intervals)


def is_small(windows: Layout, width: int) -> bool:
    """Whether windows are so small that they are saved whole, on every worker.

    Args:
        width: bytes of an element.
    """
    return width * prod(max(stop - start for start, stop in ruler.intervals) for ruler in windows.rulers) < WORTH


@dataclass(frozen=True, eq=False)
class Windowed:
    """A convolution of one worker's window.

    Attributes:
        kernel: of the window.
        fetch: brings the window.
        parameters: bring weight and bias; None where every worker has them.
        by_steps: the same function of x, weight and bias, differentiable any number of times.
    """

    kernel: Kernel
    fetch: Operator
    parameters: Operator | None
    by_steps: Callable[..., torch.Tensor]
    _places: dict[Any, Place | None] = field(default_factory=dict)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        given = (x, weight) if bias is None else (x, weight, bias)
        anchor = None
        # every member takes part in the backward; of a checkpoint, in any (see ``Operator``)
        taken = self.gradient or (self.fetch.derivatives.gradient and is_checkpointed())
        if taken and not (x.requires_grad or weight.requires_grad or given[-1].requires_grad):
            anchor = torch.empty(0, device=x.device, requires_grad=True)
        y: torch.Tensor = _Windowed.apply(self, anchor, *given)
        return y

    def place(self, block: torch.Tensor, window: torch.Tensor) -> Place | None:
        """Where the block is in the window; None if it is less than half of it."""
        shapes = block.shape, window.shape
        if shapes not in self._places:
            self._places[shapes] = Place.of((self.fetch,), block, window)
        return self._places[shapes]

    @cached_property
    def gradient(self) -> bool:
        """Whether anything that moves has a gradient on any member."""
        moving = (self.fetch, self.parameters)
        return any(op is not None and not op.still and op.derivatives.gradient for op in moving)

    def differentiably(
        self, tensors: Sequence[torch.Tensor], dy: torch.Tensor, asked: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradients, such that they can be differentiated; every member goes through the same exchanges."""
        moving = [self.fetch] + [self.parameters] * (len(tensors) - 1)
        given = [
            x.detach().requires_grad_()
            if not x.requires_grad and op is not None and not op.still and op.derivatives.gradient
            else x
            for x, op in zip(tensors, moving, strict=True)
        ]
        gradients = gradients_of(self.by_steps, given, [x.requires_grad for x in given], dy)
        return [one if wanted else None for one, wanted in zip(gradients, asked, strict=True)]


class _Windowed(Function):
    observed = True  # selective checkpoints see torch's convolution, too

    @staticmethod
    def forward(
        ctx: Any, steps: Windowed, anchor: torch.Tensor | None, x: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        fetch, parameters = steps.fetch, steps.parameters
        ctx.steps, ctx.began = steps, fetch.history
        used: Sequence[torch.Tensor] = weights
        with unobserved():
            window, fetched = (x, None) if fetch.still else fetch.begin(x)
            if parameters is not None:
                vector, brought = parameters.begin(parameters.packed(weights))
                brought.wait()
                used = parameters.unpacked(vector)
            if fetched is not None:
                fetched.wait()
            place = steps.place(x, window) if window is not x and window.nbytes >= WORTH else None
        ctx.place = place
        # the arguments are saved as well as the window, because second derivatives need them
        if place is None:
            ctx.save_for_backward(used[0], x, *weights, window)
        else:
            ctx.window = window.shape, window.stride()
            ctx.save_for_backward(used[0], x, *weights, *place.cut(window))
        return steps.kernel(window, *used)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # before any message, as this is where a checkpoint recomputes its forward
        weight, x, *saved = ctx.saved_tensors
        steps, asked, window = ctx.steps, ctx.needs_input_grad, saved[-1]
        anchored = torch.zeros(0, device=dy.device) if asked[1] else None
        count = len(asked) - 3  # of the weights
        if steps.gradient or torch.is_grad_enabled():
            steps.fetch.derive(ctx.began)
        if torch.is_grad_enabled():
            return None, anchored, *steps.differentiably((x, *saved[:count]), dy, asked[2:])
        fetch, parameters = steps.fetch, steps.parameters
        if ctx.place is not None:
            window = torch.empty_strided(*ctx.window, dtype=x.dtype, device=x.device)
            ctx.place.join(window, x, saved[count:])
        # which messages there are follows from what all members agreed on, not from this worker's needs
        of_x = asked[2] if fetch.still else fetch.derivatives.gradient
        of_weights = asked[3] or asked[-1] if parameters is None else parameters.derivatives.gradient
        dx, *found = steps.kernel.backward(dy, window, weight, (of_x, of_weights, of_weights and count > 1))
        returned, vector = [], None
        if of_x and not fetch.still:
            dx, pending = fetch.unrecorded_adjoint.begin(dx)
            returned.append(pending)
        if parameters is not None and of_weights:
            adjoint = parameters.unrecorded_adjoint
            vector, pending = adjoint.begin(adjoint.packed(tuple(found[:count])))
            returned.append(pending)
        for pending in returned:
            pending.wait()
        if vector is not None:
            found = list(adjoint.unpacked(vector))
        return None, anchored, *[one if wanted else None for one, wanted in zip((dx, *found), asked[2:], strict=False)]
