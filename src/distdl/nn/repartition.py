"""Repartition: the same tensor, split in another way."""

from typing import Any

import torch

from distdl.agreement.header import Headers
from distdl.geometry.boxes import Box, shape, slices
from distdl.nn.module import check_buffer_manager
from distdl.nn.primitive import Between, Movement
from distdl.ops import Setup
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import dims
from distdl.partition.layout import Layout
from distdl.plan import Move, Plan
from distdl.plan.planning import copy


class Repartition(Between):
    r"""Move a tensor that is split over ``P_x`` so that it is split over ``P_y``, in one step.

    Forward: :math:`y[c] = x[c]` for every cell c of the global tensor.   Adjoint: the same in the other direction.
    Partition axis i splits tensor dim i. The input may be split unevenly, as long as its blocks form a grid; the output
    is split as evenly as possible, longer blocks first.

    Args:
        P_x, P_y: partitions of one world with the same number of axes. They may overlap, be equal or disjoint, and
            leave out workers.
        preserve_batch: whether workers without output return ``(batch, 0)`` instead of ``(0,)``.
        buffer_manager: checked for its type; not used.
    Shapes: x local, as many dims as P_x has axes, in elements; blocks may be empty. y likewise over P_y. See
        :class:`~distdl.nn.primitive.Movement` for all other workers.
    Raises: ValueError, on every worker, if the partitions differ in their number of axes; in forward, on every member,
        if a tensor's rank is not that number, the blocks form no grid, dtypes differ, or P_y splits a dim whose global
        extent is 1.
    Source: Hewett & Grady, arXiv:2006.03108 (there: scatter and gather; upstream also calls it a transpose).
    """

    @checks_arguments
    def __init__(self, P_x: Partition, P_y: Partition, preserve_batch: bool = True, buffer_manager: Any = None) -> None:
        if P_x.workers.ndim != P_y.workers.ndim:
            raise ValueError(
                f"Repartition needs P_x and P_y to have equally many axes; P_x has {P_x.workers.ndim} and P_y has "
                f"{P_y.workers.ndim} (P_x: {dims(P_x.workers.shape)}, P_y: {dims(P_y.workers.shape)})"
            )
        check_buffer_manager(buffer_manager)

        def plan(headers: Headers, me: int) -> Plan:
            owned = Layout.tiled(P_x, headers.shapes(P_x, "Repartition", P_x.workers.ndim))
            for dim, (extent, parts) in enumerate(zip(owned.extents, P_y.workers.shape, strict=True)):
                if extent == 1 and parts > 1:
                    raise ValueError(
                        f"Repartition cannot split a dim of global extent 1; dim {dim} of the tensor "
                        f"{dims(owned.extents)} is split over {parts} workers (P_y: {dims(P_y.workers.shape)})"
                    )
            return copy(owned, Layout.balanced(P_y, owned.extents), me)

        movement = Movement(P_x, P_y, plan, preserve_batch, copies=False)
        super().__init__("Repartition", movement)
        self._last: Setup | None = None  # that of the latest forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        setup = self.agree(x)
        self.__dict__["_last"] = setup  # torch's way to set an attribute takes longer
        y: torch.Tensor = setup.local(*setup.move_in(x))
        return y

    @property
    def P_x_to_y_overlaps(self) -> list[tuple[Any, Any, Any]]:
        """For each worker of P_y: what this worker sent to it in the latest forward.

        An entry is the slices of the local tensor, their shape, and the worker's rank in the union of the partitions or
        ``"self"``; or three times None, where nothing was sent.
        """
        me = self.P_x.comm.rank
        return self._overlaps(self.P_y, {move.target: move.src for move in self._moves() if move.source == me})

    @property
    def P_y_to_x_overlaps(self) -> list[tuple[Any, Any, Any]]:
        """For each worker of P_x: what this worker received from it in the latest forward, likewise."""
        me = self.P_x.comm.rank
        return self._overlaps(self.P_x, {move.source: move.dst for move in self._moves() if move.target == me})

    def _moves(self) -> tuple[Move, ...]:
        operators = () if self._last is None else self._last.operators
        return tuple(move for op in operators for move in op.plan.moves)

    def _overlaps(self, others: Partition, shared: dict[int, Box]) -> list[tuple[Any, Any, Any]]:
        """For each worker: slices of the local tensor, their shape, its rank in the union or "self"; or three None."""
        if self._last is None or not self._last.operators:
            return []
        me, ranks = self.P_x.comm.rank, (self.P_x | self.P_y).workers.tolist()
        return [
            (slices(shared[w]), shape(shared[w]), "self" if w == me else ranks.index(w))
            if w in shared
            else (None, None, None)
            for w in others.workers.ravel().tolist()
        ]
