"""The distributed normalisations over the last dims: layer norm, and RMS norm."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

from distdl.nn.module import Option
from distdl.nn.normalisation.state import Agreed, NormalisationLayer, Number, Weights
from distdl.ops.normalisation import LayerNorm, RMSNorm
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import dims


class DistributedLayerNorm(NormalisationLayer):
    r"""Normalise over the last dims.

    Forward: :math:`y = (x - \mu) / \sqrt{v + \epsilon} \cdot w + b`, with mean and variance over the dims of
    ``normalized_shape``, for which workers with the same index along the other axes exchange theirs once; nothing
    moves if these dims are not split. Weight and bias are copied along the other axes, as one message.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, one axis for each dim; any axis may be split.
        normalized_shape: global extents of the last dims.
        eps: :math:`\epsilon`.
        elementwise_affine, bias: whether there is a ``weight``, and whether there is a ``bias`` with it.
    Shapes: x local, in elements, any split that is a grid; y likewise. Weight and bias are this worker's block of
        ``normalized_shape``, split as evenly as possible, on workers at index 0 along the other axes; of zero volume
        elsewhere. Workers outside P_x return a clone of their input.
    Raises: ValueError, on every worker, if P_x has fewer axes than ``normalized_shape``; in forward, on every member,
        for an input of the wrong rank or dtype, or with the wrong extents in the last dims.
    Source: Ba et al., arXiv:1607.06450.
    """

    normalized_shape = Option[tuple[int, ...]]()
    elementwise_affine = Option[bool]()

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-05,
        elementwise_affine: bool = True,
        bias: bool = True,
    ) -> None:
        last = _last_dims("DistributedLayerNorm", P_x, normalized_shape)
        op = LayerNorm(last, eps)
        names = ("weight", "bias")[: (1 + bool(bias)) * bool(elementwise_affine)]
        weights, extents = Weights(P_x, op.extents, names), tuple(op.extents.values())
        super().__init__(f"DistributedLayerNorm (P_x: {P_x}; {dims(extents)})", Agreed(op, weights))
        self.P_x, self.normalized_shape, self.eps = P_x, extents, eps
        self.elementwise_affine = bool(elementwise_affine)


class DistributedRMSNorm(NormalisationLayer):
    r"""Divide by the root of the mean square over the last dims.

    Forward: :math:`y = x / \sqrt{r + \epsilon} \cdot w`, where r is the mean of :math:`x^2` over the dims of
    ``normalized_shape``, for which workers with the same index along the other axes exchange their means once; nothing
    moves if these dims are not split. The weight is copied along the other axes.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, one axis for each dim; any axis may be split.
        normalized_shape: global extents of the last dims.
        eps: :math:`\epsilon`; None for the machine epsilon of x's dtype (of float32, if x is in half precision).
        elementwise_affine: whether there is a ``weight``.
    Shapes: as in :class:`DistributedLayerNorm`.
    Raises: ValueError, as in :class:`DistributedLayerNorm`.
    Source: Zhang & Sennrich, arXiv:1910.07467.
    """

    normalized_shape = Option[tuple[int, ...]]()
    eps = Number(optional=True)
    elementwise_affine = Option[bool]()

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
    ) -> None:
        last = _last_dims("DistributedRMSNorm", P_x, normalized_shape)
        op = RMSNorm(last, eps)
        weights = Weights(P_x, op.extents, ("weight",) if elementwise_affine else ())
        extents = tuple(op.extents.values())
        super().__init__(f"DistributedRMSNorm (P_x: {P_x}; {dims(extents)})", Agreed(op, weights))
        self.P_x, self.normalized_shape, self.eps = P_x, extents, eps
        self.elementwise_affine = bool(elementwise_affine)


def _last_dims(name: str, P_x: Partition, normalized_shape: int | Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The last dims of x, and their extents.

    Raises: ValueError that names the layer.
    """
    try:
        listed = [normalized_shape] if hasattr(normalized_shape, "__index__") else list(normalized_shape)
        extents = [index(extent) for extent in listed]
    except TypeError:
        extents = []
    first = P_x.workers.ndim - len(extents)
    if not extents or first < 0 or min(extents) < 0:
        raise ValueError(
            f"{name} needs a normalized_shape of at least one dim, in whole numbers, and P_x to have an axis for each "
            f"dim; got {P_x} and normalized_shape {normalized_shape!r}"
        )
    return tuple((first + dim, extent) for dim, extent in enumerate(extents))
