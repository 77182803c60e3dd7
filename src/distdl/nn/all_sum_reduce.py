"""AllSumReduce: the sum of tensors along axes of a partition, on every worker."""

from collections.abc import Sequence

from distdl.agreement.header import Headers
from distdl.nn.module import Primitive
from distdl.partition import Partition
from distdl.partition.groups import check_axes
from distdl.plan import Plan
from distdl.plan.planners import all_sum


class AllSumReduce(Primitive):
    r"""Add up the tensors of a partition along some of its axes and leave the sum on every worker.

    Forward: :math:`y_t = \sum_{s \in L(t)} x_s`, L(t) being the workers that one reaches from t along the reduced axes.
    Adjoint: the same map, :math:`\partial x_s = \sum_{t \in L(s)} \partial y_t`.

    Args:
        P_x: the partition.
        axes_reduce: the partition axes to sum along; none of them is the identity.
        axes_keep: instead, the axes not to sum along.
    Shapes: x local, any shape and rank, in elements, equal along the reduced axes; y has that shape. Workers outside
        P_x return a clone of their input.
    Raises: ValueError, on every worker, unless exactly one of the two is given and its axes exist; in forward, on every
        member, if shapes that are to be added differ, or dtypes.
    Source: Hewett & Grady, arXiv:2006.03108.
    """

    adds = True

    def __init__(
        self,
        P_x: Partition,
        axes_reduce: int | Sequence[int] | None = None,
        axes_keep: int | Sequence[int] | None = None,
    ) -> None:
        if (axes_reduce is None) == (axes_keep is None):
            raise ValueError(
                f"AllSumReduce needs exactly one of axes_reduce and axes_keep; got {axes_reduce} and {axes_keep}"
            )
        dim = P_x.workers.ndim
        if axes_reduce is not None:
            axes = check_axes(axes_reduce, dim, "AllSumReduce")
        else:
            kept = check_axes(axes_keep if axes_keep is not None else (), dim, "AllSumReduce")
            axes = tuple(axis for axis in range(dim) if axis not in kept)
        super().__init__(P_x, P_x, options=axes)
        self.axes = axes

    def plan(self, headers: Headers) -> Plan:
        workers = self.P_x.workers
        first = workers[tuple(slice(0, 1) if axis in self.axes else slice(None) for axis in range(workers.ndim))]
        headers.check_equal(workers, first, "AllSumReduce")
        return all_sum(self.P_x, self.axes, headers.local_shapes, self.P_x.comm.rank)
