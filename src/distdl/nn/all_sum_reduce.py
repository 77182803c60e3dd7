"""AllSumReduce: the sum of tensors along axes of a partition, on every worker."""

from collections.abc import Sequence

from distdl.agreement.header import Headers
from distdl.nn.layer import Layer
from distdl.nn.module import Option
from distdl.nn.primitive import Movement
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import check_axes
from distdl.plan import Plan
from distdl.plan.planning import all_sum


class AllSumReduce(Layer):
    r"""Add up the tensors of a partition along some of its axes and leave the sum on every worker.

    Forward: :math:`y_t = \sum_{s \in L(t)} x_s`, where L(t) are the workers that differ from t only in their index
    along the reduced axes, and t itself.
    Adjoint: the same map, :math:`\partial x_s = \sum_{t \in L(s)} \partial y_t`.

    Args:
        P_x: the partition.
        axes_reduce: the partition axes to sum along; with none, y is a copy of x.
        axes_keep: instead, the axes not to sum along.
    Shapes: x local, any shape and rank, in elements, equal along the reduced axes; y has that shape. Workers outside
        P_x return a clone of their input.
    Raises: ValueError, on every worker, unless exactly one of the two is given and its axes exist; in forward, on every
        member, if tensors that are added differ in shape, or if dtypes differ.
    Source: Hewett & Grady, arXiv:2006.03108.
    """

    P_x = Option[Partition]()
    axes = Option[tuple[int, ...]]()

    @checks_arguments
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
        workers = P_x.workers
        if axes_reduce is not None:
            axes = check_axes(axes_reduce, workers.ndim, "AllSumReduce")
        else:
            kept = check_axes(axes_keep if axes_keep is not None else (), workers.ndim, "AllSumReduce")
            axes = tuple(axis for axis in range(workers.ndim) if axis not in kept)
        first = workers[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(workers.ndim))]

        def plan(headers: Headers, me: int) -> Plan:
            headers.check_equal(workers, first, "AllSumReduce")
            return all_sum(P_x, axes, headers.local_shapes, me)

        movement = Movement(P_x, P_x, plan, adds=True)
        super().__init__(movement.name("AllSumReduce"), movement.everyone, movement, axes, (P_x,))
        self.P_x, self.axes = P_x, axes
