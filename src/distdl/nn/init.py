"""Initial values of parameters that are split: torch's distributions, with the fans of the whole parameter.

Every worker calls each function, with its block and the parameter's layout. The function fills the block with its
values of the global parameter, which are the same on any partition (see :func:`distdl.nn.placement.random_block`), and
returns the parameter::

    for name, layout in sequential_layouts(network).items():
        init.kaiming_normal_(network.get_parameter(name), layout, nonlinearity="relu")
"""

from __future__ import annotations

from math import prod, sqrt
from typing import Any

import torch
from torch.nn.init import calculate_gain

from distdl.nn.placement import normal, random_block
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import dims
from distdl.partition.layout import Layout
from distdl.tensors.uniform import Value


@checks_arguments
def constant_(parameter: torch.Tensor, layout: Layout, value: float) -> torch.Tensor:
    """Set all elements to one value."""
    _check(parameter, layout)
    with torch.no_grad():
        return parameter.fill_(value)


@checks_arguments
def uniform_(parameter: torch.Tensor, layout: Layout, a: float = 0.0, b: float = 1.0) -> torch.Tensor:
    """Uniform numbers from a to b."""
    return _set(parameter, layout, lambda u: a + (b - a) * u)


@checks_arguments
def normal_(parameter: torch.Tensor, layout: Layout, mean: float = 0.0, std: float = 1.0) -> torch.Tensor:
    """Normal numbers."""
    return _set(parameter, layout, lambda u: mean + std * normal(u))


@checks_arguments
def trunc_normal_(
    parameter: torch.Tensor, layout: Layout, mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> torch.Tensor:
    """Normal numbers that lie between a and b."""
    low, high = (torch.special.ndtr(torch.tensor((end - mean) / std, dtype=torch.float64)).item() for end in (a, b))
    return _set(parameter, layout, lambda u: (mean + std * normal(low + (high - low) * u)).clamp(a, b))


@checks_arguments
def xavier_uniform_(parameter: torch.Tensor, layout: Layout, gain: float = 1.0) -> torch.Tensor:
    """Uniform numbers of standard deviation ``gain * sqrt(2 / (fan_in + fan_out))``."""
    bound = gain * sqrt(6 / sum(fans(layout)))
    return uniform_(parameter, layout, -bound, bound)


@checks_arguments
def xavier_normal_(parameter: torch.Tensor, layout: Layout, gain: float = 1.0) -> torch.Tensor:
    """Normal numbers of standard deviation ``gain * sqrt(2 / (fan_in + fan_out))``."""
    return normal_(parameter, layout, 0.0, gain * sqrt(2 / sum(fans(layout))))


@checks_arguments
def kaiming_uniform_(
    parameter: torch.Tensor, layout: Layout, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu"
) -> torch.Tensor:
    """Uniform numbers of standard deviation ``gain / sqrt(fan)``; the gain is that of the nonlinearity."""
    bound = sqrt(3) * _kaiming(layout, a, mode, nonlinearity)
    return uniform_(parameter, layout, -bound, bound)


@checks_arguments
def kaiming_normal_(
    parameter: torch.Tensor, layout: Layout, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu"
) -> torch.Tensor:
    """Normal numbers of standard deviation ``gain / sqrt(fan)``; the gain is that of the nonlinearity."""
    return normal_(parameter, layout, 0.0, _kaiming(layout, a, mode, nonlinearity))


@checks_arguments
def fans(layout: Layout) -> tuple[int, int]:
    """fan_in and fan_out of the whole parameter: the number of inputs of an output, and of outputs of an input.

    Raises: ValueError for a parameter of fewer than two dims.
    """
    outputs_and_inputs, taps = layout.extents[:2], prod(layout.extents[2:])
    if len(outputs_and_inputs) < 2:
        raise ValueError(f"fans need a parameter with at least 2 dims; got one of shape {dims(layout.extents)}")
    return outputs_and_inputs[1] * taps, outputs_and_inputs[0] * taps


def _kaiming(layout: Layout, a: float, mode: str, nonlinearity: Any) -> float:
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"a Kaiming distribution needs mode fan_in or fan_out; got {mode!r}")
    return float(calculate_gain(nonlinearity, a)) / sqrt(fans(layout)[mode == "fan_out"])


def _set(parameter: torch.Tensor, layout: Layout, value: Value) -> torch.Tensor:
    _check(parameter, layout)
    block = random_block(layout, value, parameter.dtype)
    with torch.no_grad():
        return parameter.copy_(block.view_as(parameter))


def _check(parameter: torch.Tensor, layout: Layout) -> None:
    me = layout.partition.comm.rank
    elements = prod(layout.shapes[me]) if me in layout.partition else 0
    if parameter.numel() != elements:
        raise ValueError(
            f"worker {me} stores {elements} elements of the parameter of shape {dims(layout.extents)}; "
            f"got one of shape {list(parameter.shape)}"
        )
