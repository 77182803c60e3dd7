"""SumReduce: on each worker, the sum of the tensors of all the workers that match it."""

from distdl.agreement.header import Headers
from distdl.nn.primitive import Between, Movement
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import check_spread, first_of_each
from distdl.partition.layout import Lookup
from distdl.plan import Plan
from distdl.plan.planning import broadcast


class SumReduce(Between):
    r"""Add up the tensors of the workers of ``P_x`` on the workers of ``P_y``, along the axes where P_y has one worker.

    Forward: :math:`y_t = \sum_{s:\,t(s)=t} x_s`, where t(s) is the worker of P_y at s's index, with 0 along the axes
    where P_y is 1.   Adjoint: :math:`\partial x_s = \partial y_{t(s)}` (a broadcast).

    P_y is extended on the left with ones to as many axes as P_x has; then each of its axes is 1 or equals P_x's.

    Args:
        P_x, P_y: partitions of one world. They may overlap, be equal or disjoint, and leave out workers. A worker that
            is in both does not always add to its own sum.
        transpose_src, transpose_dest: reverse the axes of P_x, or of P_y: the worker at index (i, j, k) gets the index
            (k, j, i). The axes are reversed before the extension with ones. Tensors are not transposed.
        preserve_batch: whether workers without output return ``(batch, 0)`` instead of ``(0,)``.
    Shapes: x local, any shape, in elements, equal on workers whose tensors are added; y has that shape. See
        :class:`~distdl.nn.primitive.Movement` for all other workers.
    Raises: ValueError, on every worker, if an axis does not match; in forward, on every member, if tensors that are
        added differ in shape, or if dtypes differ.
    Source: Hewett & Grady, arXiv:2006.03108.
    """

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        transpose_src: bool = False,
        transpose_dest: bool = False,
        preserve_batch: bool = True,
    ) -> None:
        source, target = P_x.T if transpose_src else P_x, P_y.T if transpose_dest else P_y
        check_spread(target.workers.shape, source.workers.shape, "SumReduce", ("P_y", "P_x"))
        first = first_of_each(target.workers.shape, source.workers)
        first_of = first.reshape(target.workers.shape)

        def plan(headers: Headers, me: int) -> Plan:
            headers.check_equal(source.workers, first, "SumReduce")
            shapes = Lookup(headers.members, lambda worker: headers.shape(int(first_of[target.index_of(worker)])))
            return broadcast(target, source, shapes, me).T

        movement = Movement(P_x, P_y, plan, preserve_batch, adds=True, copies=False)
        super().__init__("SumReduce", movement, (transpose_src, transpose_dest))
