"""``local_map``: a user's function of blocks as a function of global tensors."""

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
    """Turn a function of blocks into a function of global tensors. Differentiable; nothing moves.

    Every worker calls the result. The function gets plain tensors: this worker's block of each global tensor, which is
    empty on a worker that holds no cells, and other tensors as they are. The caller has to know that

    - blocks are enough: the function needs no neighbours, and no sums over split dims;
    - a result depends on the same arguments in every call with given layouts, or a backward ends in an error. On a
      worker without cells it may depend on fewer, but not in a checkpoint, nor for second derivatives;
    - a tensor that is no argument, as a weight in a closure, gets only this worker's part of its gradient.

    A plain argument is the same on every worker, and its gradient is added up over all of them, as that of a weight of
    a distributed model is. A block of a distributed forward gets its own gradient; outside of a forward, a block that
    requires one is an error. If the function raises on some workers only, all of them raise a CommunicationError that
    says so, sooner or later.

    Args:
        function: takes and returns plain tensors: one, or a tuple or list of them.
        out: the layout of the results. ``"same"``: that of the first global argument. A layout. A partition: the blocks
            tile a tensor over it, of sizes that the workers tell each other once for each combination of layouts,
            dtypes and arguments that require a gradient. Or a function from the layouts of the global arguments to
            one of these; for several results, a tuple of them.
    Raises: TypeError for another ``out``, or if a function in ``out`` returns another. In a call, on every worker:
        ValueError if a result is a global or sparse tensor, an object that is no number, text or constant of torch, or
        tensors in a further structure; if its block has another shape than its layout says; if there are more or fewer
        results than places in ``out``; and if workers differ in the number of results, in which of them are tensors,
        in their dtypes, or in which arguments require a gradient. CommunicationError if workers differ in ``out``. They
        compare all this in the first call with given layouts, dtypes and arguments that require a gradient.
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
        blocks: list[_Argument] = []

        def plain(one: torch.Tensor) -> torch.Tensor:
            if type(one) is GlobalTensor:
                blocks.append(_Argument.of(one))
                one = blocks[-1].given
            elif context is None or type(one) is Block or is_on_blocks():
                one = plain_of(current(one))  # each worker has its own gradient of a block
            else:
                check_no_block(one)
                one = entered(current(one), context)
            curved.append(one.requires_grad and torch.is_grad_enabled())
            if curved[-1]:
                inputs.append(one)
            return one

        given, named = map_tensors((args, kwargs), plain)
        edges = [] if context is None else list(map(edge_of, inputs))  # before the function may write into the inputs
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
            """Return the shapes of the results of another worker, in a rehearsal."""
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


class _Argument(NamedTuple):
    """A global argument, and the plain tensor that the function gets for it.

    Attributes:
        given: the block; outside of the partition, a tensor without cells that has the block's number of dims.
        node, requires_grad, version: the state of this tensor before the function runs.
    """

    of_tensor: GlobalTensor
    given: torch.Tensor
    node: Any
    requires_grad: bool
    version: int

    @staticmethod
    def of(x: GlobalTensor) -> _Argument:
        given = block_of(x)
        if not x._layout.active:
            with torch.inference_mode(given.is_inference()):
                given = zeros_on(given, _block_shape(x._layout, x._context.me))
        return _Argument(x, given, given.grad_fn, given.requires_grad, _version(given))

    def settle(self) -> None:
        """Do to the global tensor what the function did in place to the plain one: write, detach, or require_grad."""
        x, node, wants = self.of_tensor, self.given.grad_fn, self.given.requires_grad
        if node is None and (self.node is not None or wants is not self.requires_grad):
            if not (wants and x._block.is_leaf):
                x.detach_()
            x.requires_grad_(wants)
        if x._layout.active:
            return
        block = x._block
        if node is not None and node is not self.node:  # it was written, and has a new history
            with torch.inference_mode(block.is_inference()):
                block.add_(zeros_on(self.given, block.shape))
        elif _version(self.given) != self.version and not block.is_inference():
            torch.autograd.graph.increment_version(block)


def _version(one: torch.Tensor) -> int:
    return 0 if one.is_inference() else one._version


def _without_values(one: torch.Tensor, worker: int) -> torch.Tensor:
    """Return a meta tensor in the place of the plain tensor that another worker would have."""
    if type(one) is not GlobalTensor:
        return without_memory(plain_of(one))
    return torch.empty(_block_shape(one._layout, worker), dtype=one.dtype, device="meta")


def _block_shape(layout: KnownLayout, worker: int) -> Shape:
    """Return the shape of a worker's block; outside the partition, that of the first worker with extent 0 in dim 0."""
    if worker in layout.partition:
        return layout.shapes[worker]
    return (0, *layout.shapes[int(layout.partition.workers.flat[0])][1:])
