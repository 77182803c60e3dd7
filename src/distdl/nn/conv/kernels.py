"""What all convolutions have in common: options that can be read, and a forward of three lines."""

from __future__ import annotations

from typing import Any

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


class Kernel:
    """The options of a convolution, and what follows from its weights. Each convolution is a ``Layer`` with these."""

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
    _weights: Weights

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where each parameter lives: which block of the sequential layer's parameter is on which worker."""
        layer: Any = self
        return self._weights.layouts(layer)

    def extra_repr(self) -> str:
        layer: Any = self
        names = ("kernel_size", "stride", "padding", "output_padding", "dilation", "groups", "padding_mode")
        options = [f"{name}={getattr(layer, name)!r}" for name in names if hasattr(layer, name)]
        shown = ("P_x",) if getattr(layer, "P_w", None) is None else ("P_x", "P_y", "P_w")
        partitions = [f"{name}: {getattr(layer, name)}" for name in shown]
        channels = f"{layer.in_channels}, {layer.out_channels}"
        return f"{channels}, {', '.join(options)}, bias={layer.bias is not None}, {'; '.join(partitions)}"


def build(
    layer: Any, P_x: Partition, P_y: Partition, work: Partition, op: Any, weights: Weights, **options: Any
) -> None:
    """Make a layer from an operation and weights.

    Args:
        options: its public attributes, besides the channels and the groups.
    """
    everyone = P_x | P_y | work
    name = f"{type(layer).__name__} (P_x: {P_x}; P_y: {P_y}; {op.in_channels} to {op.out_channels} channels)"
    application = weights.application(op, P_x, work, layer._configure)
    Layer.__init__(layer, name, everyone, application, weights.bias is not None, (work,))
    layer.P_x, layer.P_y = P_x, P_y
    layer.in_channels, layer.out_channels, layer.groups = op.in_channels, op.out_channels, op.groups
    for option, value in options.items():
        setattr(layer, option, value)
    layer._weights, layer._everyone, layer._work = weights, everyone, work
    layer.weight, bias = weights.parameters()
    layer.register_parameter("bias", bias)
    keep_sequential_keys(layer)


def convolve(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Apply the layer to this worker's block of the input."""
    tensors = (x, *given(self.weight, self.bias))
    setup = self.agree(*tensors, extra=self._weights.extra(self, tensors[1]))
    y: torch.Tensor = setup(*tensors)
    return y


def configure(self: Any, op: Any, headers: Headers) -> Op:
    """The operation, from what all members have added to their headers: autocast, and norms of weights."""
    configured: Op = self._weights.configure(op, headers, self._everyone, self.label)
    return configured
