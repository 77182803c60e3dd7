"""Broadcast: copies of each worker's tensor, on all the workers that match it."""

from distdl.agreement.header import Headers
from distdl.nn.primitive import Between, Movement
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import check_spread
from distdl.plan import Plan
from distdl.plan.planning import broadcast


class Broadcast(Between):
    r"""Copy the tensors of the workers of ``P_x`` to the workers of ``P_y``, along the axes where P_x has one worker.

    Forward: :math:`y_t = x_{s(t)}`, where s(t) is the worker of P_x at t's index, with 0 along the axes where P_x is 1.
    Adjoint: :math:`\partial x_s = \sum_{t:\,s(t)=s} \partial y_t`.

    P_x is extended on the left with ones to as many axes as P_y has; then each of its axes is 1 or equals P_y's.
    The shapes of tensors may differ between the workers of P_x.

    Args:
        P_x, P_y: partitions of one world. They may overlap, be equal or disjoint, and leave out workers.
        transpose_src, transpose_dest: reverse the axes of P_x, or of P_y: the worker at index (i, j, k) gets the index
            (k, j, i). The axes are reversed before the extension with ones. Tensors are not transposed.
        preserve_batch: whether workers without output return ``(batch, 0)`` instead of ``(0,)``.
    Shapes: x local, any shape, in elements; y has the shape of x on s(t). All other workers: see
        :class:`~distdl.nn.primitive.Movement`.
    Raises: ValueError, on every worker, if an axis does not match; in forward, on every member, if dtypes differ.
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
        check_spread(source.workers.shape, target.workers.shape)

        def plan(headers: Headers, me: int) -> Plan:
            return broadcast(source, target, headers.local_shapes, me)

        movement = Movement(P_x, P_y, plan, preserve_batch)
        super().__init__("Broadcast", movement, (transpose_src, transpose_dest))
