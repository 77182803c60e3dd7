"""Convolutions and transposed convolutions of global tensors."""

from __future__ import annotations

from typing import Any

import torch

from distdl.geometry.channels import Channels
from distdl.geometry.transposed import Transposed
from distdl.geometry.windows import Sliding
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.rules.applying import apply, autocast_dtype, hashable, unwrap_single
from distdl.globals.rules.meta_checks import check_on_meta
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import by_name, handles
from distdl.ops.convolution import Convolution
from distdl.ops.transposed import TransposedConvolution
from distdl.partition import Partition


def _computing(layout: KnownLayout) -> Partition:
    """The workers of an input as (batch, output channels, input channels, space...): input channels are not split."""
    batch, channel, *space = layout.partition.workers.shape
    work: Partition = layout.partition.reshape(batch, channel, 1, *space)
    return work


def _check_bias(bias: torch.Tensor | None, produced: int, kernel: str) -> None:
    """Check the shape of a bias, which torch does not check on meta tensors.

    Raises: RuntimeError, with torch's text, unless the bias has one element for each channel that is produced.
    """
    if bias is not None and tuple(bias.shape) != (produced,):
        raise RuntimeError(
            f"Given {kernel}, expected bias to be 1-dimensional with {produced} elements, but got bias of size "
            f"{list(bias.shape)} instead"
        )


@handles("conv1d conv2d conv3d", "torch functional")
@by_name
def convolution(
    func: Any,
    input: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Each worker computes its block of the output, from its block of the input and a halo around it.

    Without input channels, torch gives no output channels either; that falls back.
    """
    space = weight.dim() - 2
    if type(input) is not GlobalTensor or (input.dim() == space + 2 and not input.shape[1]):
        return NotImplemented
    if input.dim() == space + 1:
        return func(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    produced, taken = weight.shape[0], weight.shape[1] * groups
    key = (*hashable((stride, padding, dilation)), groups, autocast_dtype(input))

    def op() -> Convolution:
        check_on_meta(func, (input, weight, None, stride, padding, dilation, groups), {})
        name = func.__name__
        _check_bias(bias, produced, f"weight of size {list(weight.shape)}")
        sliding = Sliding.of_convolution(name, space, tuple(weight.shape[2:]), *map(unwrap_single, key[:3]))
        channels = Channels(taken, produced, groups)
        made = Convolution(input._layout.partition, channels, sliding, autocast=autocast_dtype(input))
        made.check(name)
        return made

    return apply(op, key, input, func.__name__, lambda: _computing(input._layout), (weight, bias))


@handles("conv_transpose1d conv_transpose2d conv_transpose3d", "torch functional")
@by_name
def transposed_convolution(
    func: Any,
    input: Any,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """Each worker computes its block of the output, from all inputs that add to it."""
    space = weight.dim() - 2
    if type(input) is not GlobalTensor:
        return NotImplemented
    if input.dim() == space + 1:
        y = func(input.unsqueeze(0), weight, bias, stride, padding, output_padding, groups, dilation)
        return y.squeeze(0)
    if weight.shape[0] != input.shape[1]:
        raise RuntimeError(
            f"Given transposed=1, weight of size {list(weight.shape)}, expected input{list(input.shape)} to have "
            f"{weight.shape[0]} channels, but got {input.shape[1]} channels instead"
        )
    key = (*hashable((stride, padding, dilation, output_padding)), groups, autocast_dtype(input))

    def op() -> TransposedConvolution:
        geometry = Transposed.of(func.__name__, space, tuple(weight.shape[2:]), *map(unwrap_single, key[:4]))
        channels = Channels(weight.shape[0], weight.shape[1] * groups, groups)
        _check_bias(bias, channels.outputs, f"transposed=1, weight of size {list(weight.shape)}")
        made = TransposedConvolution(input._layout.partition, channels, geometry, autocast=autocast_dtype(input))
        made.check(func.__name__)
        return made

    return apply(op, key, input, func.__name__, lambda: _computing(input._layout), (weight, bias))
