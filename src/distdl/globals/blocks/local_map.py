"""Functions of blocks, where the user knows that they are right for them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from distdl.environment.arguments import brief
from distdl.geometry.boxes import Shape
from distdl.globals.blocks.local_results import edge_of, global_of, is_place, layouts_of, needed_of, shapes_of
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.tensor.block import Block, as_blocks
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.failed import meet_in
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.provenance import check_no_block
from distdl.globals.tensor.replicas import plain_of
from distdl.globals.tensor.running import is_on_blocks, on_blocks
from distdl.globals.tensor.stale import current
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import name_of
from distdl.globals.tensor.torch_function import check_one_world
from distdl.partition.arguments import checks_arguments
from distdl.tensors.connection import zeros_on
from distdl.tensors.memory import without_memory


@checks_arguments
def local_map(function: Callable[..., Any], out: Any = "same") -> Callable[..., Any]:
    """The function of global tensors that applies a function to each worker's blocks. Differentiable.

    Every worker calls it, and the function gets plain tensors: this worker's blocks, which are empty where it holds no
    cells, and other tensors as they are. Nothing moves. A plain argument is the same everywhere, and its gradient is
    added up over all workers, as that of a weight of a distributed model; a block of a distributed forward gets its
    own, and outside of a forward such a block with a gradient is an error. What else the function takes from around it,
    as a weight in a closure, gets this worker's part of the gradient: make it an argument. Whether blocks are what the
    function needs (no neighbours, no sums over split dims), the caller knows; and that a result depends on the same
    arguments in every call with given layouts, or a backward ends in an error. (On a worker without cells, it may
    depend on fewer, but in a checkpoint, and for second derivatives.) If the function raises on some workers only, all
    of them raise a CommunicationError that says so, sooner or later.

    Args:
        function: of the arguments.
        out: where the results lie. ``"same"``: as the first global argument does. A layout. A partition: the blocks
            tile a tensor over it, of sizes that the workers tell each other once for each combination of layouts,
            dtypes and arguments that require a gradient. Or a function from the layouts of the global arguments to
            one of these; for several results, a tuple of them.
    Raises: TypeError for another ``out``, also of a function; ValueError if a block has another shape than its layout
        says, or another dtype than others, or is no tensor, or a global or sparse one, or stands in a structure other
        than one tuple or list, or is an object that is no number, text or constant of torch, for results of another
        number than places, or than on other workers, and for arguments that require a gradient on some workers only;
        CommunicationError if the workers differ in ``out``: the same on every worker in the first call with given
        layouts, dtypes and arguments that require a gradient.
    """
    for place in out if isinstance(out, (tuple, list)) else (out,):
        if not (is_place(place) or callable(place)):
            raise TypeError(
                f"local_map needs out to be 'same', a layout, a partition, a function of layouts, or a tuple of these; "
                f"got {brief(place)}"
            )

    @wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        check_one_world("local_map", (args, kwargs))
        found = [one for one in tensors_in((args, kwargs)) if type(one) is GlobalTensor]
        context = found[0]._context if found else None
        inputs: list[torch.Tensor] = []
        curved: list[bool] = []
        blocks: list[_Block] = []

        def plain(one: torch.Tensor) -> torch.Tensor:
            if type(one) is GlobalTensor:
                blocks.append(_Block.of(one))
                one = blocks[-1].given
            elif context is None or type(one) is Block or is_on_blocks():
                one = plain_of(current(one))  # (of a block, each worker has its own gradient)
            else:
                check_no_block(one)
                one = entered(current(one), context)
            curved.append(one.requires_grad and torch.is_grad_enabled())
            if curved[-1]:
                inputs.append(one)
            return one

        given, named = map_tensors((args, kwargs), plain)
        edges = [] if context is None else list(map(edge_of, inputs))  # (the function may write into them)
        try:
            with on_blocks():
                y = map_tensors(function(*given, **named), plain_of)
            for each in blocks:
                each.settle()
        except Exception as error:
            if context is not None and not context.comm.imagined:
                meet_in(error, f"a call of local_map of {name_of(function)}", context)
            raise
        if context is None:
            return as_blocks(y)
        layouts, kinds = tuple(one._layout for one in found), tuple(one.dtype for one in found)

        def shapes_on(worker: int) -> list[Shape | None]:
            """Of the results of another worker that is not there."""
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                given, named = map_tensors((args, kwargs), partial(_without_values, worker=worker))
                y = function(*given, **named)
            return shapes_of(y if isinstance(y, (tuple, list)) else [y])

        several = isinstance(y, (tuple, list))
        ys = list(y) if several else [y]
        form = f"a {type(y).__name__} of {len(ys)}" if several else "one result"
        case = layouts, kinds, tuple(curved)
        needed = partial(needed_of, edges=edges, inputs=inputs)
        known = layouts_of(context, function, out, case, form, ys, needed, shapes_on)
        results = [
            global_of(block, layout, [inputs[number] for number in others], requires_grad)
            for block, (layout, others, requires_grad) in zip(ys, known, strict=True)
        ]
        if not several:
            return results[0]
        return type(y)(*results) if hasattr(y, "_fields") else type(y)(results)

    return mapped


class _Block(NamedTuple):
    """What a function gets for a global tensor: the block, or outside of the partition zeros in its place.

    Attributes:
        given: to the function.
        node, requires_grad, version: those that it had before.
    """

    of_tensor: GlobalTensor
    given: torch.Tensor
    node: Any
    requires_grad: bool
    version: int

    @staticmethod
    def of(x: GlobalTensor) -> _Block:
        given = block_of(x)
        if not x._layout.active:
            with torch.inference_mode(given.is_inference()):  # (in any mode, as a block is what it is)
                given = zeros_on(given, _block_shape(x._layout, x._context.me))
        return _Block(x, given, given.grad_fn, given.requires_grad, _version(given))

    def settle(self) -> None:
        """Let the global tensor be what the function has made of what it got: written, cut off its graph, or a leaf."""
        x, node, wants = self.of_tensor, self.given.grad_fn, self.given.requires_grad
        if node is None and (self.node is not None or wants is not self.requires_grad):
            if not (wants and x._block.is_leaf):
                x.detach_()
            x.requires_grad_(wants)
        if x._layout.active:
            return
        block = x._block
        if node is not None and node is not self.node:  # (it follows from what was written)
            with torch.inference_mode(block.is_inference()):
                block.add_(zeros_on(self.given, block.shape))
        elif _version(self.given) != self.version and not block.is_inference():
            torch.autograd.graph.increment_version(block)


def _version(one: torch.Tensor) -> int:
    return 0 if one.is_inference() else one._version


def _without_values(one: torch.Tensor, worker: int) -> torch.Tensor:
    """What another worker would have, without memory."""
    if type(one) is not GlobalTensor:
        return without_memory(plain_of(one))
    return torch.empty(_block_shape(one._layout, worker), dtype=one.dtype, device="meta")


def _block_shape(layout: KnownLayout, worker: int) -> Shape:
    """Of a worker's block; outside the partition it has no cells, and the first worker's extents along other dims."""
    if worker in layout.partition:
        return layout.shapes[worker]
    return (0, *layout.shapes[int(layout.partition.workers.flat[0])][1:])
