"""Weights: where a linear layer or a convolution works, and where it stores its weight and its bias."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Any

import torch

from distdl.agreement import Headers
from distdl.geometry.boxes import Shape, balanced
from distdl.nn.layer import Application, Place
from distdl.nn.parametrised import check_unfit, trained, unfit
from distdl.nn.placement import uniform_parameter
from distdl.ops import Op
from distdl.partition import Layout, Partition, dims
from distdl.tensors.dtypes import DTYPES, dtype_code
from distdl.transport import Label

Parameters = tuple[torch.nn.Parameter, torch.nn.Parameter | None]


@dataclass(frozen=True, eq=False)
class Weights:
    """The weight and the bias of a layer, as blocks on the workers that store them.

    Attributes:
        weight, bias: their layouts; None where there is no bias.
        path: path of the module that has the parameters, in front of their names.
    """

    weight: Layout
    bias: Layout | None
    path: str = ""

    def parameters(self) -> Parameters:
        """This worker's blocks, with torch's initial values; of zero volume where it stores none."""
        bound = 1 / sqrt(max(prod(self.weight.extents[1:]), 1))
        weight = uniform_parameter(self.weight, bound)
        return weight, None if self.bias is None else uniform_parameter(self.bias, bound)

    def layouts(self, module: torch.nn.Module) -> dict[str, Layout]:
        """The layouts, by the names that the parameters have in a module now."""
        layouts = {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}
        return trained(module, {self.path + name: layout for name, layout in layouts.items()})

    def application(
        self, op: Op, place: Place, work: Partition, configure: Callable[[Any, Headers], Op]
    ) -> Application:
        """An operation applied to x, the weight and the bias, with where each of them lives."""
        places = (place, self.weight) if self.bias is None else (place, self.weight, self.bias)
        return Application(op, places, work, configure)

    def extra(self, holder: torch.nn.Module, weight: torch.Tensor) -> tuple[int, int, int]:
        """What this worker adds to its header: whether autocast is on, and norms that do not work block by block."""
        kind = weight.device.type
        autocast = 1 + dtype_code(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else 0
        of_bias = 0 if self.bias is None else unfit(holder, "bias", self.bias)
        return autocast, unfit(holder, "weight", self.weight), of_bias

    def configure(self, op: Any, headers: Headers, everyone: Partition, label: Label) -> Op:
        """The operation, from what all members have added to their headers.

        Raises: ValueError if autocast differs, or if torch has put a norm on a parameter that is split.
        """
        autocast, of_weight, of_bias = headers.extras(everyone)[:, :3].T
        check_unfit(str(label), "weight", int(of_weight.max()), self.weight)
        if self.bias is not None:
            check_unfit(str(label), "bias", int(of_bias.max()), self.bias)
        if (autocast != autocast[0]).any():
            raise ValueError(f"{label} needs autocast to be on or off, and of one dtype, on all workers alike")
        configured: Op = replace(op, autocast=DTYPES[autocast[0] - 1] if autocast[0] else None)
        return configured


def stored_on(work: Partition, lead: int) -> Partition:
    """The workers that store weights, out x in: those at index 0 in the batch (the first axes) and in space (the last).

    Args:
        lead: number of axes of the batch, the first axes of the partition of the work.
    """
    first, axes = slice(0, 1), work.workers.shape
    stored = work[(*[first] * lead, slice(None), slice(None), *[first] * (len(axes) - lead - 2))]
    grid: Partition = stored.reshape(*axes[lead : lead + 2])
    return grid


def weights_on(
    stored: Partition, inputs: int, outputs: int, taps: Shape = (), bias: bool = True, path: str = ""
) -> Weights:
    """The blocks of a weight (outputs x inputs x taps) over out x in, and of a bias (outputs) where in is 0."""
    out, inner = stored.workers.shape
    intervals = [balanced(outputs, out), balanced(inputs, inner), *[[(0, tap)] for tap in taps]]
    weight = Layout.along(stored.reshape(out, inner, *[1] * len(taps)), intervals)
    return Weights(weight, Layout.along(stored[:, :1].reshape(out), intervals[:1]) if bias else None, path)


def own_work(name: str, space: int, groups: int, P_x: Partition) -> Partition:
    """The partition of the work of a convolution whose input and output are split alike.

    Raises: ValueError that names the layer, if P_x does not fit.
    """
    shape = P_x.workers.shape
    if len(shape) != space + 2 or (shape[1] != 1 and groups == 1):
        raise ValueError(
            f"{name} needs P_x: batch x 1 x {space} dims of space, or with groups: batch x channels x {space} dims of "
            f"space; got {dims(shape)} and groups {groups}"
        )
    work: Partition = P_x.reshape(*shape[:2], 1, *shape[2:])
    return work


def shared_work(name: str, space: int, groups: int, P_x: Partition, P_y: Partition, P_w: Partition) -> Partition:
    """The partition of the work of a convolution that is given P_w. With groups, in is 1: a worker reads the channels
    of its own groups, wherever they are.

    Raises: ValueError that names the layer, if the partitions do not fit.
    """
    work: Partition = P_w.reshape(1, *P_w.workers.shape) if P_w.workers.ndim == space + 2 else P_w
    p_x, p_y, (batch, *p_w) = (P.workers.shape for P in (P_x, P_y, work))
    inner = p_x[1:2] if groups > 1 and p_w[1:2] == [1] else p_w[1:2]
    if len(p_w) != space + 2 or p_x != (batch, *inner, *p_w[2:]) or p_y != (batch, p_w[0], *p_w[2:]):
        raise ValueError(
            f"{name} needs P_x: batch x p_in x space, P_y: batch x p_out x space and P_w: batch x p_out x p_in x space "
            f"(without batch if that is 1) with {space} dims of space; "
            f"got P_x: {dims(p_x)}, P_y: {dims(p_y)}, P_w: {dims(P_w.workers.shape)}"
        )
    return work if groups == 1 else work[:, :, :1]
