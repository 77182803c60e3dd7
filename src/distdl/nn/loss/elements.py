"""The distributed element-wise losses: torch's losses of a tensor that is split over workers.

All of them are made and called alike. Each has ``P_x``, the partition, and

    reduction: ``none`` (each worker returns the losses of its own elements), ``mean`` or ``sum``.

Forward: :math:`\\ell = c^{-1} \\sum_s f(x_s, t_s)` on the worker of rank 0 in P_x: each worker sums its elements, a
sum-reduce adds them up, and the sum is divided once, by 1 (``sum``), the global number of elements (``mean``) or the
global batch (``batchmean``). All other workers, those outside P_x too, return a 0-d tensor of value 0.
Adjoint: a broadcast of the gradient from rank 0. Every worker calls ``backward()``; what the others pass has no effect.

Input and target are local, equal in shape on each worker, in elements. ``weight`` is a factor for each element, this
worker's block (or what broadcasts to it); ``pos_weight`` is a factor for positive targets, the same global tensor on
every worker; None stands for 1. Both may be replaced between two calls, on every worker.

Raises: ValueError, on every worker, for another reduction; in forward, on every member, if input and target differ in
    shape on some worker, or dtypes between workers, or if a weight does not fit, or only some workers have one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from distdl.agreement import Headers, can_be_read
from distdl.exchange import Together
from distdl.geometry.boxes import runs
from distdl.nn.layer import Layer
from distdl.nn.loss.common import alone, check_reduction, described, finished, is_given, or_absent
from distdl.nn.module import Option
from distdl.ops import Setup, Site
from distdl.ops.loss import ElementLoss, broadcasts
from distdl.ops.setup import same
from distdl.partition import Layout, Partition, Signature
from distdl.partition.arguments import checks_arguments
from distdl.tensors.dtypes import can_be_added
from distdl.transport import Label

_WEIGHT, _POS_WEIGHT = 2, 3  # which of the tensors they are that are agreed on
_OUT_OF_RANGE, _WEIGHTED, _POS_WEIGHTED = 0, 1, 2  # which of the extra integers, each 0 or 1


@dataclass(frozen=True, eq=False)
class _SplitAlike:
    """How the setup of a loss follows from an input and a target that are split alike, and weights.

    Checked here is what only reports tell: whether workers differ, the range of their numbers, and the blocks of each.
    The loss itself checks the signatures.
    """

    op: ElementLoss
    P_x: Partition

    @property
    def read(self) -> Sequence[Partition]:
        return ()

    @property
    def identity(self) -> object:
        return (self.op, self.P_x.workers.shape)

    def __call__(self, headers: Headers, label: Label) -> Setup:
        kind, P_x = label.kind, self.P_x
        headers.check_alike(P_x, kind, "input", "target")
        strays = headers.extras(P_x)[..., _OUT_OF_RANGE].ravel()
        out_of_range = strays.argmax()
        if strays[out_of_range]:
            raise ValueError(
                f"{kind} needs input and target from 0 to 1; on worker {P_x.workers.flat[out_of_range]} they are not"
            )
        weight = pos_weight = None
        if is_given(headers, P_x, kind, "weight", _WEIGHTED):
            self._check_weight(headers, kind)
            weight = self._signature(headers, kind, _WEIGHT)
        if is_given(headers, P_x, kind, "pos_weight", _POS_WEIGHTED):
            self._check_pos_weight(headers, kind)
            pos_weight = self._signature(headers, kind, _POS_WEIGHT)
        in_dims = self.op.reduction == "batchmean" or pos_weight is not None
        x, target = (self._signature(headers, kind, number, in_dims) for number in (0, 1))
        return self.op.setup(Site._make((P_x, headers.members, label)), x, target, weight, pos_weight)

    def _signature(self, headers: Headers, kind: str, number: int, in_dims: bool = False) -> Signature:
        return Signature(
            self._layout(headers, kind, number, in_dims),
            headers.dtype(self.P_x, kind, number),
            headers.derivatives[number],
            headers.own[number],
        )

    def _layout(self, headers: Headers, kind: str, number: int, in_dims: bool) -> Layout:
        """Where a tensor lives: its dims along the axes of P_x; or, as any split will do, its elements in one line."""
        P_x = self.P_x
        if in_dims:
            return Layout.tiled(P_x, headers.shapes(P_x, kind, P_x.workers.ndim, number))
        line = P_x.reshape(P_x.workers.size)
        if number >= _WEIGHT:  # of which nobody asks where it lies
            return Layout.along(line, [[(0, 0)] * P_x.workers.size])
        return Layout.along(line, [runs(headers.shapes(P_x, kind, tensor=number).prod(axis=-1).ravel().tolist())])

    def _check_weight(self, headers: Headers, kind: str) -> None:
        for worker in self.P_x.workers.ravel().tolist():
            weight, x = headers.shape(worker, _WEIGHT), headers.shape(worker)
            if not broadcasts(weight, x):
                raise ValueError(
                    f"{kind} needs a weight that broadcasts to the input's block; on worker {worker} "
                    f"they have {list(weight)} and {list(x)}"
                )

    def _check_pos_weight(self, headers: Headers, kind: str) -> None:
        first = int(self.P_x.workers.flat[0])
        shape = headers.shape(first, _POS_WEIGHT)
        alike = headers.have_shape(self.P_x, shape, _POS_WEIGHT)
        if not alike.all():
            other = int(self.P_x.workers.flat[int(alike.argmin())])
            raise ValueError(
                f"{kind} needs the same pos_weight on all workers; worker {first} has one of shape {list(shape)} and "
                f"worker {other} {list(headers.shape(other, _POS_WEIGHT))}"
            )


class DistributedLossBase(Layer):
    """What all losses of elements are: each is a function of ``torch.nn.functional``, summed up over the workers.

    Args:
        function: its name.
        weight, pos_weight: factors for elements, and for positive targets.
        bounded: whether input and target have to be from 0 to 1.
        options: what the function takes besides; they become attributes.
    Raises: as all losses of elements, and ValueError, on every worker, if there is no such function.
    """

    P_x = Option[Partition]()
    reduction = Option[str]()
    _valid_reductions: ClassVar[tuple[str, ...]] = ("none", "mean", "sum")
    weight: torch.Tensor | None
    pos_weight: torch.Tensor | None

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        function: str,
        reduction: str,
        weight: torch.Tensor | None = None,
        pos_weight: torch.Tensor | None = None,
        bounded: bool = False,
        **options: Any,
    ) -> None:
        kind = type(self).__name__
        check_reduction(kind, reduction, self._valid_reductions)
        op = ElementLoss(function, reduction, tuple(options.items()))
        op.check(kind)
        weights = (weight is not None, None if pos_weight is None else tuple(pos_weight.shape))
        name = f"{kind} (P_x: {P_x}; {reduction})"
        super().__init__(name, P_x, _SplitAlike(op, P_x), weights, alone=alone(reduction))
        self.P_x, self.reduction, self._bounded = P_x, reduction, bounded
        for option, value in options.items():
            setattr(self, option, value)
        self.register_buffer("weight", weight)
        self.register_buffer("pos_weight", pos_weight)
        # of elements nothing has to be agreed on, unless what is global has to be split
        self._by_itself = Setup(Together(), op.elements, same) if self._member else self._alone

    # a loss takes two tensors
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> Any:  # type: ignore[override]
        tensors = (x, target, or_absent(self.weight), or_absent(self.pos_weight))
        if self.reduction == "none" and self.pos_weight is None:
            setup = self._by_itself
        else:
            out_of_range = int(self._bounded and _is_out_of_range(x, target))
            given = int(self.weight is not None), int(self.pos_weight is not None)
            setup = self.agree(*tensors, extra=(out_of_range, *given))
        moved = setup.move_in(*tensors)
        return finished(setup.move_out(setup.local(*moved)), self.reduction)

    extra_repr = described


class DistributedL1Loss(DistributedLossBase):
    r"""Mean absolute error: :math:`f(x, t) = \sum |x - t|`."""

    @checks_arguments
    def __init__(self, P_x: Partition, reduction: str = "mean") -> None:
        super().__init__(P_x, "l1_loss", reduction)


class DistributedMSELoss(DistributedLossBase):
    r"""Mean squared error: :math:`f(x, t) = \sum (x - t)^2`."""

    @checks_arguments
    def __init__(self, P_x: Partition, reduction: str = "mean") -> None:
        super().__init__(P_x, "mse_loss", reduction)


class DistributedSmoothL1Loss(DistributedLossBase):
    r"""Quadratic near zero, :math:`|x - t| - \beta/2` beyond: :math:`\sum \tfrac{1}{2\beta} (x - t)^2` for
    :math:`|x - t| < \beta`.

    Raises: ValueError, on every worker, for a negative beta.
    """

    beta = Option[float]()

    @checks_arguments
    def __init__(self, P_x: Partition, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(P_x, "smooth_l1_loss", reduction, beta=float(beta))


class DistributedHuberLoss(DistributedLossBase):
    r"""Quadratic near zero, linear beyond: :math:`\tfrac12 (x - t)^2` for :math:`|x - t| < \delta`, else
    :math:`\delta (|x - t| - \delta/2)`.

    Raises: ValueError, on every worker, for a delta that is not positive.
    """

    delta = Option[float]()

    @checks_arguments
    def __init__(self, P_x: Partition, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(P_x, "huber_loss", reduction, delta=float(delta))


class DistributedPoissonNLLLoss(DistributedLossBase):
    r"""Negative log-likelihood of Poisson targets: :math:`f(x, t) = \sum e^x - t x`; without ``log_input``
    :math:`\sum x - t \log(x + \epsilon)`; with ``full``, plus Stirling's approximation of :math:`\log t!` where t > 1.
    """

    log_input = Option[bool]()
    full = Option[bool]()
    eps = Option[float]()

    @checks_arguments
    def __init__(
        self, P_x: Partition, reduction: str = "mean", log_input: bool = True, full: bool = False, eps: float = 1e-8
    ) -> None:
        super().__init__(P_x, "poisson_nll_loss", reduction, log_input=log_input, full=full, eps=eps)


class DistributedBCELoss(DistributedLossBase):
    r"""Binary cross-entropy of probabilities: :math:`f(x, t) = -\sum w (t \log x + (1 - t) \log(1 - x))`.

    ``weight`` is this worker's block, as the input is, or broadcasts to it.
    """

    @checks_arguments
    def __init__(self, P_x: Partition, reduction: str = "mean", weight: torch.Tensor | None = None) -> None:
        super().__init__(P_x, "binary_cross_entropy", reduction, weight, bounded=True)


class DistributedBCEWithLogitsLoss(DistributedLossBase):
    r"""Binary cross-entropy of the sigmoid of the input:
    :math:`f(x, t) = -\sum w (p\, t \log \sigma(x) + (1 - t) \log(1 - \sigma(x)))`.

    ``weight`` w is this worker's block, as the input is, or broadcasts to it. ``pos_weight`` p, often one number for
    each class, is the same global tensor on every worker. It broadcasts to the global input, of which P_x then needs
    one axis for each dim, and each worker takes its part.
    """

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        reduction: str = "mean",
        weight: torch.Tensor | None = None,
        pos_weight: torch.Tensor | None = None,
    ) -> None:
        super().__init__(P_x, "binary_cross_entropy_with_logits", reduction, weight, pos_weight)


class DistributedKLDivLoss(DistributedLossBase):
    r"""Kullback-Leibler divergence, x being log-probabilities: :math:`f(x, t) = \sum t (\log t - x)`; with
    ``log_target`` t are log-probabilities, too: :math:`\sum e^t (t - x)`.
    """

    log_target = Option[bool]()
    _valid_reductions = ("none", "mean", "sum", "batchmean")

    @checks_arguments
    def __init__(self, P_x: Partition, reduction: str = "mean", log_target: bool = False) -> None:
        super().__init__(P_x, "kl_div", reduction, log_target=log_target)


def _is_out_of_range(*tensors: Any) -> bool:
    """Whether there are numbers that are not from 0 to 1. It is asked before the members agree, of anything that a
    caller may pass.
    """
    return any(
        one.numel() and not bool(((one >= 0) & (one <= 1)).all())
        for one in tensors
        if can_be_read(one) and can_be_added(one.dtype) and not one.is_complex()
        for one in (one.detach(),)
    )
