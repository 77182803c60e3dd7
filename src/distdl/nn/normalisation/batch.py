"""The distributed batch norm."""

from __future__ import annotations

from typing import ClassVar

import torch

from distdl.nn.normalisation.state import TrackingLayer
from distdl.nn.parametrised import trained
from distdl.ops.normalisation import BatchNorm
from distdl.partition import Layout, Partition
from distdl.partition.arguments import checks_arguments


class DistributedBatchNorm(TrackingLayer):
    r"""Normalise every channel over batch and space.

    Forward: :math:`y = (x - \mu_c) / \sqrt{v_c + \epsilon} \cdot \gamma_c + \beta_c`, with mean and variance of channel
    c over batch and space: in training mode those of this batch, for which workers with the same channels exchange
    theirs once; in evaluation mode the running ones, which need no exchange. :math:`\gamma, \beta` are copied from
    the workers that store them, as one message. Running statistics take in the batch's mean and unbiased variance with
    weight ``momentum``.
    Adjoint: the same exchanges transposed around the local derivatives.

    Args:
        P_x: the partition of x and y, ``batch x channels x space...``; any axis may be split.
        num_features: global number of channels.
        eps: :math:`\epsilon`.
        momentum: the weight of a new batch in the running statistics; None for their average over all batches.
        affine: whether there are ``gamma`` and ``beta``.
        track_running_stats: whether running statistics are kept; if not, evaluation mode uses the moments of its batch.
    Shapes: x local ``(batch, channels, space...)``, in elements, any split that is a grid; y likewise. ``gamma`` and
        ``beta`` are ``(1, local channels, 1...)``, split as evenly as possible, on workers whose index is 0 in all axes
        except the second; other workers have None. ``running_mean`` and ``running_var`` are ``(local channels,)`` on
        every worker. Workers outside P_x return a clone of their input. ``weight`` and ``bias`` are the same numbers in
        torch's shape ``(local channels,)``, and of zero volume on other workers. They are not parameters of their own,
        but views of ``gamma`` and ``beta``, to read, to fill and to freeze.
    Raises: ValueError, on every worker, for a partition without batch and channels, and if ``weight`` or ``bias`` is
        pruned instead of ``gamma`` or ``beta``; in forward, on every member, for an input of the wrong rank, number of
        channels or dtype, for only one value per channel where moments are taken, or for workers in different modes.
    Source: Ioffe & Szegedy, arXiv:1502.03167.
    """

    sequential_names: ClassVar[dict[str, str]] = {"gamma": "weight", "beta": "bias"}
    gamma: torch.nn.Parameter | None
    beta: torch.nn.Parameter | None

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        if P_x.workers.ndim < 2:
            raise ValueError(f"DistributedBatchNorm needs P_x: batch x channels x space; got {P_x}")
        op = BatchNorm(int(num_features), eps, momentum, bool(track_running_stats))
        super().__init__(P_x, op, affine, ("gamma", "beta"), full=True)
        # what stands for weight and bias where none is stored; kept, so that it stays frozen once it is
        self._absent = {name: torch.nn.Parameter(torch.empty(0)) for name in self.sequential_names}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        return self._normalise(x, self._running(), self.momentum)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where ``gamma`` and ``beta`` live: which block of the sequential layer's parameter is on which worker."""
        return trained(self, self._weights.layouts, everywhere=False)

    @property
    def sequential_layouts(self) -> dict[str, Layout]:
        """The same for ``weight`` and ``bias``."""
        return dict.fromkeys(self.sequential_names.values(), self._weights.layout) if self.affine else {}

    @property
    def weight(self) -> torch.nn.Parameter | None:
        """``gamma`` in torch's shape."""
        return self._flat("gamma")

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """``beta`` in torch's shape."""
        return self._flat("beta")

    def _flat(self, name: str) -> torch.nn.Parameter | None:
        if not self.affine:
            return None
        parameter = getattr(self, name)
        return self._absent[name] if parameter is None else Flat.of(parameter)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As in torch.

        Raises: ValueError, on every worker, if torch is about to prune ``weight`` or ``bias``.
        """
        for own, sequential in self.sequential_names.items():
            if name == f"{sequential}_orig":
                raise ValueError(
                    f"{self.label} needs {own} to be pruned, by the workers on which it is not None; got {sequential}, "
                    "which is no parameter of its own"
                )
        super().register_parameter(name, param)


class Flat(torch.nn.Parameter):
    """A one-dimensional view of a parameter, to which one may also assign.

    Its ``grad`` and its ``requires_grad`` are those of the parameter.
    """

    of_parameter: torch.nn.Parameter

    @classmethod
    def of(cls, parameter: torch.nn.Parameter) -> Flat:
        flat: Flat = parameter.view(-1).as_subclass(cls)
        flat.of_parameter = parameter
        return flat

    @property
    def data(self) -> torch.Tensor:
        return self.of_parameter.data.view(-1)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.of_parameter.data = value.reshape(self.of_parameter.shape)

    @property
    def grad(self) -> torch.Tensor | None:
        grad = self.of_parameter.grad
        return None if grad is None else grad.view(-1)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self.of_parameter.grad = None if value is None else value.reshape(self.of_parameter.shape)

    @property
    def requires_grad(self) -> bool:
        return self.of_parameter.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.of_parameter.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Flat:
        self.of_parameter.requires_grad_(requires_grad)
        return self
