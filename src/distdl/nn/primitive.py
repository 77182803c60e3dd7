"""What the primitives have in common: each is a layer with one operator."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distdl.agreement import Headers
from distdl.environment.arguments import check_fields
from distdl.exchange import Together
from distdl.nn.layer import Layer
from distdl.nn.module import Option
from distdl.ops import Setup, Site
from distdl.ops.setup import blank_shape, same
from distdl.partition import Partition
from distdl.plan import Plan
from distdl.tensors.dtypes import can_be_added
from distdl.transport import Label


@dataclass(frozen=True, eq=False)
class Movement:
    """A linear map from the tensors of the workers of ``P_x`` to those of the workers of ``P_y``, by one plan.

    What a worker gets back:

    =============  =============  ==================================================================================
    in ``P_x``     in ``P_y``     returns
    =============  =============  ==================================================================================
    yes or no      yes            its part of y, in the dtype of the tensors on ``P_x``
    yes            no             a tensor of zero volume: shape ``(batch, 0)`` with ``preserve_batch``, else ``(0,)``
    no             no             a clone of its input
    =============  =============  ==================================================================================

    A worker outside ``P_x`` passes any tensor of zero volume. Inputs and gradients are never written or returned. The
    gradient of an input has that input's shape and dtype, even if the input has zero volume.

    Attributes:
        plan: gives the plan for one worker, from what the members reported. A pure function: if it raises an error, all
            members raise it.
        adds: whether the forward adds tensors up.
        copies: whether results may be copies of one tensor. The backward then adds up the parts of its gradient that
            the workers have. The gradient of a tensor that one worker alone has may be whole.
    """

    P_x: Partition
    P_y: Partition
    plan: Callable[[Headers, int], Plan]
    preserve_batch: bool = True
    adds: bool = False
    copies: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

    def name(self, kind: str) -> str:
        """The name of a primitive of this kind, for people to read."""
        return f"{kind} (P_x: {self.P_x}; P_y: {self.P_y})"

    @property
    def everyone(self) -> Partition:
        """All workers that take part."""
        everyone: Partition = self.P_x | self.P_y
        return everyone

    @property
    def read(self) -> Sequence[Partition]:
        return (self.P_x,)

    @property
    def identity(self) -> object:
        """What distinguishes this movement from one between other partitions."""
        return [(P.workers.shape, zlib.crc32(P.workers.tobytes())) for P in (self.P_x, self.P_y)]

    def __call__(self, headers: Headers, label: Label) -> Setup:
        dtype = headers.dtype(self.P_x, label.kind)
        if self.adds and not can_be_added(dtype):
            raise ValueError(f"{label.kind} adds tensors, and torch does not add tensors of {dtype}")
        site, (own,) = Site._make((self.P_x, headers.members, label)), headers.own
        blank = blank_shape(own, self.preserve_batch)
        plan = self.plan(headers, site.me)
        if not isinstance(plan, Plan):
            raise TypeError(f"{label} needs a distdl.plan.Plan of its function plan; got {plan!r}")
        return Setup(Together(site.operator(plan, dtype, headers.derivatives[0], [own], [blank])), same, same)


class Between(Layer):
    """A layer that executes one movement from one partition to another.

    Args:
        kind: the name of the primitive.
        options: what distinguishes it from others of its kind between the same partitions.
    """

    P_x = Option[Partition]()
    P_y = Option[Partition]()
    preserve_batch = Option[bool]()

    def __init__(self, kind: str, movement: Movement, options: object = ()) -> None:
        P_x, P_y = movement.P_x, movement.P_y
        super().__init__(movement.name(kind), movement.everyone, movement, options, (P_x, P_y))
        self.P_x, self.P_y, self.preserve_batch = P_x, P_y, movement.preserve_batch
