"""AllGather: on every worker, the blocks of all workers along some axes."""

from collections.abc import Sequence

from distdl.agreement.header import Headers
from distdl.nn.layer import Layer
from distdl.nn.module import Option
from distdl.nn.primitive import Movement
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import check_axes
from distdl.partition.layout import Layout
from distdl.plan import Plan
from distdl.plan.planning import copy


class AllGather(Layer):
    r"""Concatenate the blocks of the workers along some axes of a partition, on every worker.

    Forward: y on a worker is the box of the global tensor that has the whole extent in the gathered dims, and the
    worker's own interval in the others.
    Adjoint: :math:`\partial x_s = \sum_t \partial y_t[\text{block of } s]` over the group of s, the workers that differ
    from it only in their index along ``axes``, and s itself: a :class:`ReduceScatter` with the same block sizes.

    Args:
        P_x: the partition; its axis i splits tensor dim i.
        axes: the axes to gather along. Blocks may be unequal.
    Shapes: x local, as many dims as P_x has axes, in elements. Workers outside P_x return a clone of their input.
    Raises: ValueError, on every worker, for axes that do not exist; in forward, on every member, if a tensor's rank is
        not the number of axes of P_x, the blocks form no grid, or dtypes differ.
    Source: Hewett & Grady, arXiv:2006.03108 (as a composition of broadcasts).
    """

    P_x = Option[Partition]()
    axes = Option[tuple[int, ...]]()

    @checks_arguments
    def __init__(self, P_x: Partition, axes: int | Sequence[int]) -> None:
        gathered = check_axes(axes, P_x.workers.ndim, "AllGather")

        def plan(headers: Headers, me: int) -> Plan:
            owned = Layout.tiled(P_x, headers.shapes(P_x, "AllGather", P_x.workers.ndim))
            return copy(owned, owned.gathered(gathered), me)

        movement = Movement(P_x, P_x, plan)
        super().__init__(movement.name("AllGather"), movement.everyone, movement, gathered, (P_x,))
        self.P_x, self.axes = P_x, gathered
