"""ReduceScatter: the sum of the tensors of a group, each worker keeping its block."""

from collections.abc import Iterable, Mapping, Sequence
from operator import index

from distdl.agreement.header import Headers
from distdl.geometry.boxes import balanced, runs
from distdl.nn.layer import Layer
from distdl.nn.module import Option
from distdl.nn.primitive import Movement
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import check_axes
from distdl.partition.layout import Layout
from distdl.plan import Plan
from distdl.plan.planning import copy


class ReduceScatter(Layer):
    r"""Add up the tensors of the workers along some axes of a partition; each worker keeps one block of the sum.

    Forward: :math:`y_t = \sum_s x_s[\text{block of } t]` over the group of t, the workers that differ from it only in
    their index along ``axes``, and t itself.
    Adjoint: :math:`\partial x_s` is the concatenation of the blocks :math:`\partial y_t`: an :class:`AllGather`.

    Args:
        P_x: the partition; its axis i belongs to tensor dim i.
        axes: the axes to sum along. The sum is scattered along their dims.
        sizes: the extents of the blocks along an axis, in elements, by the number of the axis (a dict, or its items);
            the other axes are split as evenly as possible.
    Shapes: x local, as many dims as P_x has axes, in elements, equal along the axes. Workers outside P_x return a clone
        of their input.
    Raises: ValueError, on every worker, for axes that do not exist, or unless there is one size for each worker; in
        forward, on every member, if a tensor's rank is not the number of axes of P_x, the tensors of a group differ in
        shape, sizes do not add up to their extent, or dtypes differ.
    Source: Hewett & Grady, arXiv:2006.03108 (as a composition of sum-reductions).
    """

    P_x = Option[Partition]()
    axes = Option[tuple[int, ...]]()
    sizes = Option[dict[int, tuple[int, ...]]]()

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        axes: int | Sequence[int],
        sizes: Mapping[int, Sequence[int]] | Iterable[tuple[int, Sequence[int]]] | None = None,
    ) -> None:
        scattered = check_axes(axes, P_x.workers.ndim, "ReduceScatter")
        try:
            given = {index(axis): tuple(map(index, extents)) for axis, extents in dict(sizes or {}).items()}
        except (TypeError, ValueError):
            raise TypeError(
                f"ReduceScatter needs sizes to be a dict from axes to the sizes of the blocks; got {sizes!r}"
            ) from None
        for axis, extents in given.items():
            if axis not in scattered or len(extents) != P_x.workers.shape[axis] or min(extents) < 0:
                raise ValueError(
                    f"ReduceScatter needs sizes for axes that it scatters along, one for each worker along the axis; "
                    f"got {extents} for axis {axis} of {P_x}, scattered along {list(scattered)}"
                )

        def plan(headers: Headers, me: int) -> Plan:
            owned = _scattered(P_x, scattered, given, headers)
            return copy(owned, owned.gathered(scattered), me).T

        movement = Movement(P_x, P_x, plan, adds=True, copies=False)
        options = scattered, sorted(given.items())
        super().__init__(movement.name("ReduceScatter"), movement.everyone, movement, options, (P_x,))
        self.P_x, self.axes, self.sizes = P_x, scattered, given


def _scattered(P_x: Partition, axes: Sequence[int], sizes: Mapping[int, tuple[int, ...]], headers: Headers) -> Layout:
    """The layout of the blocks that workers keep."""
    workers = P_x.workers
    shapes = headers.shapes(P_x, "ReduceScatter", workers.ndim)
    first = tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(workers.ndim))
    headers.check_equal(workers, workers[first], "ReduceScatter")
    kept = Layout.tiled(P_x.reshape(workers.shape)[first], shapes[first])
    return Layout.along(
        P_x,
        [
            _blocks(axis, kept.extents[axis], workers.shape[axis], sizes.get(axis)) if axis in axes else ruler.intervals
            for axis, ruler in enumerate(kept.rulers)
        ],
    )


def _blocks(axis: int, extent: int, parts: int, sizes: tuple[int, ...] | None) -> Sequence[tuple[int, int]]:
    if sizes is None:
        return balanced(extent, parts)
    if sum(sizes) != extent:
        raise ValueError(
            f"ReduceScatter needs sizes that add up to the extent of their dim; in dim {axis} the sizes "
            f"{list(sizes)} add up to {sum(sizes)}, and the tensors have {extent} elements"
        )
    return runs(sizes)
