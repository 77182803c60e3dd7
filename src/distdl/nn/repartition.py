"""Repartition: the same tensor, cut up another way."""

from typing import Any

from distdl.boxes import Box, shape, slices, within
from distdl.groups import dims
from distdl.header import Headers
from distdl.layout import Layout
from distdl.nn.module import Primitive, check_buffer_manager
from distdl.partition import Partition
from distdl.plan import Plan
from distdl.planning import copy


class Repartition(Primitive):
    r"""Move a tensor that is cut up over ``P_x`` so that it is cut up over ``P_y``, in one hop.

    Forward: :math:`y[c] = x[c]` for every cell c of the global tensor.   Adjoint: the same in the other direction.
    Partition axis i splits tensor dim i. The input may be split unevenly, as long as its blocks form a grid; the output
    is split as evenly as possible, longer blocks first.

    Args:
        P_x, P_y: partitions of one world with equally many axes. They may overlap, be equal or disjoint, and leave
            workers out.
        preserve_batch: whether workers without output return ``(batch, 0)`` instead of ``(0,)``.
        buffer_manager: checked for its type; not used.
    Shapes: x local, as many dims as P_x has axes, in elements; blocks may be empty. y likewise over P_y. See
        :class:`Primitive` for all other workers.
    Raises: ValueError, on every worker, if the partitions differ in dimension; in forward, on every member, if a
        tensor's rank is not that dimension, the blocks form no grid, dtypes differ, or P_y splits a dim whose global
        extent is 1.
    Source: Hewett & Grady, arXiv:2006.03108 (there: scatter and gather; upstream also calls it a transpose).
    """

    def __init__(self, P_x: Partition, P_y: Partition, preserve_batch: bool = True, buffer_manager: Any = None) -> None:
        if P_x.workers.ndim != P_y.workers.ndim:
            raise ValueError(
                f"Repartition needs P_x and P_y to have equally many axes; P_x has {P_x.workers.ndim} and P_y has "
                f"{P_y.workers.ndim} (P_x: {dims(P_x.workers.shape)}, P_y: {dims(P_y.workers.shape)})"
            )
        check_buffer_manager(buffer_manager)
        super().__init__(P_x, P_y, preserve_batch)
        self._layouts: tuple[Layout, Layout] | None = None

    def plan(self, headers: Headers) -> Plan:
        shapes = headers.shapes(self.P_x, "Repartition", self.P_x.workers.ndim)
        owned = Layout.tiled(self.P_x, shapes)
        for dim, (extent, parts) in enumerate(zip(owned.extents, self.P_y.workers.shape, strict=True)):
            if extent == 1 and parts > 1:
                raise ValueError(
                    f"Repartition cannot split a dim of global extent 1; dim {dim} of the tensor {dims(owned.extents)} "
                    f"is split over {parts} workers (P_y: {dims(self.P_y.workers.shape)})"
                )
        needed = Layout.balanced(self.P_y, owned.extents)
        self._layouts = (owned, needed)
        return copy(owned, needed, self.P_x.comm.rank)

    @property
    def P_x_to_y_overlaps(self) -> list[tuple[Any, Any, Any]]:
        """For each worker of P_y: what this worker sends it, after a forward (see :func:`_overlaps`)."""
        return [] if self._layouts is None else self._overlaps(*self._layouts)

    @property
    def P_y_to_x_overlaps(self) -> list[tuple[Any, Any, Any]]:
        """For each worker of P_x: what this worker receives from it, after a forward."""
        return [] if self._layouts is None else self._overlaps(*reversed(self._layouts))

    def _overlaps(self, own: Layout, other: Layout) -> list[tuple[Any, Any, Any]]:
        """For each worker: slices of the local tensor, their shape, its rank in the union or "self"; or three None."""
        me = self.P_x.comm.rank
        if me not in own.partition:
            return [(None, None, None)] * len(other)
        ranks = (self.P_x | self.P_y).workers.tolist()
        shared: dict[int, Box] = {worker: box for worker, _, box in other.meeting(own[me])}
        return [
            (slices(within(shared[w], own[me])), shape(shared[w]), "self" if w == me else ranks.index(w))
            if w in shared
            else (None, None, None)
            for w in other
        ]
