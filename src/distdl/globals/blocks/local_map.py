"""``local_map``: a user's function of blocks as a function of global tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NamedTuple

import torch

from distdl.environment.arguments import brief
from distdl.geometry.boxes import Shape
from distdl.globals.blocks.local_results import Case, edge_of, is_place, results_of, shapes_of
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
from distdl.tensors.private_torch import DisableTorchFunction, disable_current_modes


@checks_arguments
def local_map(function: Callable[..., Any], out: Any = "same") -> Callable[..., Any]:
    """Turn a function of blocks into a function of global tensors. Differentiable; nothing moves.

    Every worker calls it. The function gets plain tensors: this worker's block of each global tensor, which is empty on
    a worker that holds no cells, and other tensors as they are. It is the caller who knows that blocks are enough: that
    the function needs no neighbours, and no sums over split dims. A result has to depend on the same arguments in every
    call with given layouts, or a backward ends in an error. On a worker without cells it may depend on fewer, but not
    in a checkpoint, nor for second derivatives.

    A plain argument is the same on every worker, and its gradient is added up over all of them, as that of a weight of
    a distributed model. A block of a distributed forward gets its own gradient; outside of a forward, a block that
    requires one is an error. A tensor that is no argument, as a weight in a closure, gets this worker's part of its
    gradient only. If the function raises on some workers only, all of them raise a CommunicationError that says so,
    sooner or later.

    Args:
        function: takes plain tensors; returns one, or a tuple or list of them.
        out: the layout of the results. ``"same"``: that of the first global argument. A layout. A partition: the blocks
            tile a tensor over it, of sizes that the workers tell each other once for each combination of layouts,
            dtypes and arguments that require a gradient. Or a function from the layouts of the global arguments to
            one of these; for several results, a tuple of them.
    Raises: TypeError for another ``out``, also of a function. In a call, on every worker: ValueError if a result is a
        global or sparse tensor, an object that is no number, text or constant of torch, or tensors in a further
        structure; if its block has another shape than its layout says; if ``out`` has places for more or fewer results;
        and if workers differ in the number of results, in which of them are tensors, in their dtypes, or in which
        arguments require a gradient. CommunicationError if workers differ in ``out``. They compare all this in the
        first call with given layouts, dtypes and arguments that require a gradient.
    """
    for place in out if isinstance(out, (tuple, list)) else (out,):
        if not (is_place(place) or callable(place)):
            raise TypeError(
                f"local_map needs out to be 'same', a layout, a partition, a function of layouts, or a tuple of these; "
                f"got {brief(place)}"
            )

    @wraps(function)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        return _Call(function, args, kwargs).results(out)

    return mapped


class _Call:
    """One call of a function on blocks. Its context is None if no argument is global."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_one_world("local_map", (args, kwargs))
        self.function, self.given = function, (args, kwargs)
        self.context = next((one._context for one in tensors_in(self.given) if type(one) is GlobalTensor), None)
        self.found: list[_Argument] = []  # the global arguments
        self.inputs: list[torch.Tensor] = []  # the plain tensors that require a gradient
        self.curved: list[bool] = []  # for each tensor argument, whether it requires one

    def results(self, out: Any) -> Any:
        """Run the function, and make its results global. See :func:`local_map`."""
        args, kwargs = map_tensors(self.given, self._plain)
        edges = [] if self.context is None else list(map(edge_of, self.inputs))  # the function may write the inputs
        y = self._run(args, kwargs)
        if self.context is None:
            return as_blocks(y)
        tensors = [one.of_tensor for one in self.found]
        layouts, dtypes = tuple(one._layout for one in tensors), tuple(one.dtype for one in tensors)
        case = Case(layouts, dtypes, tuple(self.curved))
        return results_of(self.context, self.function, out, case, y, self.inputs, edges, self._shapes_on)

    def _plain(self, one: torch.Tensor) -> torch.Tensor:
        """Return the plain tensor that the function gets for an argument."""
        if type(one) is GlobalTensor:
            self.found.append(_Argument.of(one))
            one = self.found[-1].given
        elif self.context is None or type(one) is Block or is_on_blocks():
            one = plain_of(current(one))  # each worker has its own gradient of a block
        else:
            check_no_block(one)
            one = entered(current(one), self.context)
        self.curved.append(one.requires_grad and torch.is_grad_enabled())
        if self.curved[-1]:
            self.inputs.append(one)
        return one

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function. If it raises, the other workers learn of it."""
        try:
            with on_blocks():
                y = map_tensors(self.function(*args, **kwargs), plain_of)
            for one in self.found:
                one.settle()
        except Exception as error:
            if self.context is not None and not self.context.comm.imagined:
                meet_in(error, f"a call of local_map of {name_of(self.function)}", self.context)
            raise
        return y

    def _shapes_on(self, worker: int) -> list[Shape | None]:
        """Return the shapes of the results of another worker, in a rehearsal."""
        with disable_current_modes(), DisableTorchFunction():
            args, kwargs = map_tensors(self.given, partial(_without_values, worker=worker))
            y = self.function(*args, **kwargs)
        return shapes_of(y if isinstance(y, (tuple, list)) else [y])


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
