"""The distributed interpolation layer."""

from __future__ import annotations

from operator import index
from typing import Any

from distdl.geometry.boxes import Shape
from distdl.nn.layer import Application, Layer
from distdl.nn.module import Option, check_buffer_manager
from distdl.ops.interpolation import Interpolation
from distdl.ops.resampling import Mode
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments


class DistributedUpsample(Layer):
    r"""Interpolate space to another size. Each worker gets the cells around its block that it needs.

    Forward: :math:`y_o = \sum_k w_{ok} \, x_{i(o, k)}`, dim by dim, with torch's indices and weights for the whole
    tensor. Adjoint: the transpose; the gradients of cells that several workers read add up on the workers that own
    them.

    Args:
        P_x: partition of input and output, ``batch x channels x space...``; any of them may be split.
        buffer_manager: checked for its type; not used.
        size: the whole global shape of y, batch and channels included.
        scale_factor: one positive number, or one for each dim of space. The formula for the indices uses it, as in
            ``torch.nn.functional.interpolate``; y has ``int(extent * factor)`` cells. Exactly one of size and
            scale_factor is given.
        mode: nearest or nearest-exact, linear (any dims of space), or torch's names bilinear, trilinear, bicubic.
        align_corners: whether the centres of the first and the last cells coincide, instead of their outer edges.
    Shapes: x local ``(batch, channels, space...)``, 1 to 3 dims of space, in elements, any split that is a grid. y is
        split as evenly as possible in space, longer blocks first, and in the other dims as x is. Workers outside P_x
        return a clone of their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of the
        wrong rank, batch or number of channels, or of a dtype that torch does not interpolate, and for a result without
        cells.
    """

    P_x = Option[Partition]()
    size = Option[Shape | None]()
    scale_factor = Option[tuple[float, ...] | None]()
    mode = Option[str]()
    align_corners = Option[bool]()

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        buffer_manager: Any = None,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "linear",
        align_corners: bool | None = False,
    ) -> None:
        check_buffer_manager(buffer_manager)
        if (size is None) == (scale_factor is None):
            raise ValueError(
                f"DistributedUpsample needs exactly one of size and scale_factor; got {size} and {scale_factor}"
            )
        options = Mode.of("DistributedUpsample", P_x.workers.ndim - 2, mode, align_corners, scale_factor)
        extents = None if size is None else _shape(size, P_x)
        name = f"DistributedUpsample (P_x: {P_x}; {mode} to {size if scale_factor is None else scale_factor})"
        super().__init__(name, P_x, Application(Interpolation(options, extents), (P_x,), P_x))
        self.P_x, self.size = P_x, extents
        self.scale_factor, self.mode, self.align_corners = options.factors, mode, options.align_corners


def _shape(size: Any, P_x: Partition) -> Shape:
    try:
        extents = tuple(index(extent) for extent in size)
    except TypeError:
        extents = ()
    if len(extents) != P_x.workers.ndim or min(extents) < 0:
        raise ValueError(
            f"DistributedUpsample needs size to be the whole global shape of y, {P_x.workers.ndim} whole numbers; "
            f"got {size!r}"
        )
    return extents
