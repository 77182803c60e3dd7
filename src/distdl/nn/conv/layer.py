"""What all convolutions are: options that can be read, and a weight and a bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from distdl.agreement import Headers
from distdl.geometry.boxes import Shape
from distdl.nn.layer import Layer, given
from distdl.nn.module import Option
from distdl.nn.placement import keep_sequential_keys
from distdl.nn.weights import Weights
from distdl.ops import Op
from distdl.partition import Layout, Partition

Sizes = Any  # a whole number, or a sequence with one for each dim of space


class ConvolutionLayer(Layer):
    """What all convolutions are.

    Args:
        work: the partition of the work.
        op, weights: the operation, and where its weight and bias live.
        configure: gives the operation, from what all members have added to their headers; if not given, that is what
            weights are about.
        options: its public attributes, besides the channels and the groups.
    """

    space: ClassVar[int]  # dims of space
    P_x = Option[Partition]()
    P_y = Option[Partition]()
    P_w = Option[Partition]()
    in_channels = Option[int]()
    out_channels = Option[int]()
    kernel_size = Option[Shape]()
    stride = Option[Shape]()
    padding = Option[Shape | str]()
    output_padding = Option[Shape]()
    dilation = Option[Shape]()
    groups = Option[int]()
    padding_mode = Option[str]()
    weight: torch.nn.Parameter
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        work: Partition,
        op: Any,
        weights: Weights,
        configure: Callable[[Any, Headers], Op] | None = None,
        **options: Any,
    ) -> None:
        name = f"{type(self).__name__} (P_x: {P_x}; P_y: {P_y}; {op.channels.inputs} to {op.channels.outputs} channels)"
        everyone = P_x | P_y | work
        application = weights.application(op, P_x, work, configure or self._configure)
        super().__init__(name, everyone, application, weights.bias is not None, (work,))
        self.P_x, self.P_y = P_x, P_y
        self.in_channels, self.out_channels = op.channels.inputs, op.channels.outputs
        self.groups = op.channels.groups
        for option, value in options.items():
            setattr(self, option, value)
        self._weights, self._everyone, self._work = weights, everyone, work
        self.weight, bias = weights.parameters()
        self.register_parameter("bias", bias)
        keep_sequential_keys(self)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where each parameter lives: which block of the sequential layer's parameter is on which worker."""
        return self._weights.layouts(self)

    def _convolve(self, x: torch.Tensor, *extra: int) -> torch.Tensor:
        """What it makes of this worker's block.

        Args:
            extra: what this worker adds to its header, behind what weights add.
        """
        tensors = (x, *given(self.weight, self.bias))
        setup = self.agree(*tensors, extra=(*self._weights.extra(self, tensors[1]), *extra))
        y: torch.Tensor = setup(*tensors)
        return y

    def _configure(self, op: Any, headers: Headers) -> Op:
        """The operation, from what all members have added to their headers: autocast, and norms of weights."""
        return self._weights.configure(op, headers, self._everyone, self.label)

    def extra_repr(self) -> str:
        names = ("kernel_size", "stride", "padding", "output_padding", "dilation", "groups", "padding_mode")
        options = [f"{name}={getattr(self, name)!r}" for name in names if hasattr(self, name)]
        shown = ("P_x",) if getattr(self, "P_w", None) is None else ("P_x", "P_y", "P_w")
        partitions = [f"{name}: {getattr(self, name)}" for name in shown]
        channels = f"{self.in_channels}, {self.out_channels}"
        return f"{channels}, {', '.join(options)}, bias={self.bias is not None}, {'; '.join(partitions)}"
