"""What an operation is set up for, and what it is set up as: three steps that each worker makes.

tensors  --move_in-->  what this worker computes on  --local-->  its partial results  --move_out-->  results
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from distdl.environment.arguments import built, check_fields, checks_fields
from distdl.environment.types import Count
from distdl.exchange import Operator
from distdl.geometry.boxes import Box, Shape, slices, whole
from distdl.ops.keeping import Place, keeping
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.partition.signature import Signature
from distdl.plan import Plan
from distdl.tensors.derivatives import Derivatives
from distdl.transport.communicator import Communicator, Group, check_group
from distdl.transport.label import Label


@checks_fields
class Site(NamedTuple):
    """Where an operation is carried out, by whom, and in whose name.

    Attributes:
        partition: the workers that compute.
        members: all that take part: they have some of an input or of a result, or compute.
        label: of the layer.
    """

    partition: Partition
    members: Group
    label: Label

    def _check(self) -> None:
        check_group(self.members, self.comm.size, "a Site")

    @property
    def comm(self) -> Communicator:
        return self.partition.comm

    @property
    def me(self) -> int:
        """The worker for which the operation is set up."""
        return self.partition.comm.rank

    def operator(
        self,
        plan: Plan,
        dtype: torch.dtype,
        derivatives: Derivatives,
        inputs: Sequence[Shape],
        blanks: Sequence[Shape] = ((0,),),
        keeps_format: bool = False,
        outputs: Sequence[Shape] | None = None,
        lends: bool = False,
    ) -> Operator:
        """The operator of a plan that moves one tensor, or several of which the results are known.

        Args:
            inputs: shapes of this worker's tensors.
            blanks: shapes of its results where the plan has none for it; of several results, always their shapes.
            outputs: shapes of its results, where they are not those of the plan.
            lends: whether one function of torch's, and nobody else, sees its result.
        """
        planned = plan.outputs.get(self.me)
        if outputs is None:
            outputs = [planned] if planned is not None and len(blanks) == 1 else blanks
        return built(
            Operator, plan, self.comm, self.members, self.label, dtype, derivatives, inputs, outputs, keeps_format,
            lends=lends,
        )  # fmt: skip

    def identity(self, dtype: torch.dtype, derivatives: Derivatives, *shapes: Shape) -> Operator:
        """The operator where nothing moves."""
        return Operator.identity(self.comm, self.members, self.label, dtype, derivatives, shapes)


@dataclass(frozen=True, eq=False)
class Setup:
    """What follows from signatures, for one worker: ``move_out(local(*move_in(*tensors)))``.

    Attributes:
        move_in: brings the tensors to where the work is done, and returns a tuple. :class:`~distdl.exchange.Together`
            and :class:`~distdl.exchange.Chain` also know the operators that they call.
        local: this worker's part of the work.
        move_out: brings the result to where it belongs.
        results: the layout of every result.
    """

    move_in: Callable[..., tuple[Any, ...]]
    local: Callable[..., Any]
    move_out: Callable[..., Any]
    results: tuple[Layout, ...] = ()
    _places: dict[Any, Place | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def operators(self) -> Sequence[Operator]:
        """All operators that move in, in their order; none that are known of where a function does."""
        return getattr(self.move_in, "operators", ())

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """The three steps. Of a window, what is saved for backward is its margins (see ``distdl.ops.keeping``)."""
        moved, block = self.move_in(*tensors), tensors[0]
        window = moved[0]
        if self.local is same and self.move_out is same:  # a primitive computes nothing
            return window
        if window is block or not isinstance(window, torch.Tensor):
            return self.move_out(self.local(*moved))
        with keeping(self._place, block, window):
            y = self.local(*moved)
        return self.move_out(y)

    def _place(self, block: torch.Tensor, window: torch.Tensor) -> Place | None:
        shapes = block.shape, window.shape
        if shapes not in self._places:
            passed = getattr(self.move_in, "first", self.operators)
            self._places[shapes] = Place.of(passed, block, window)
        return self._places[shapes]


class Op(Protocol):
    """What a layer computes, as a value: its options, frozen. It knows no parameters, no agreement and no messages."""

    def setup(self, site: Site, *signatures: Signature) -> Setup:
        """The three steps of one worker, that of ``site``. A pure function.

        Raises: ValueError for signatures that do not fit: the same on every member.
        """


class Beside:
    """A step that takes a first tensor of zero volume to where the second is, as what moves is there, too.

    A worker without a block may pass any tensor of zero volume: of another dtype, or on another device.
    """

    operators: tuple[Operator, ...] = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x.to(others[0].device if others else x.device, self._dtype), *others)


class Parts:
    """A step that cuts this worker's parts out of the tensors behind the first, which every worker has whole.

    Nobody sends anything for them, and their gradients are this worker's terms of a sum over all workers. A worker that
    computes nothing takes empty parts, on which its result depends all the same.

    Args:
        boxes: of each tensor, this worker's part.
        extents: the shapes of the whole tensors.
    """

    operators: tuple[Operator, ...] = ()

    def __init__(self, boxes: Sequence[Box], extents: Sequence[Shape]) -> None:
        self._parts = [slices(box, whole(shape)) for box, shape in zip(boxes, extents, strict=True)]

    def __call__(self, x: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x, *self.of(others))

    def of(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The parts of whole tensors."""
        return [one[part] if part else one for one, part in zip(tensors, self._parts, strict=True)]

    def each(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same part of several tensors."""
        (part,) = self._parts
        return [one[part] if part else one for one in tensors]


def blank_shape(x: Sequence[Count], preserve_batch: bool = True) -> tuple[int, ...]:
    """Shape of the tensor of zero volume that a worker without output returns for an input of the given shape."""
    return (x[0], 0) if preserve_batch and len(x) else (0,)


def same(y: Any) -> Any:
    """y: where nothing is computed, or nothing moves out."""
    return y
