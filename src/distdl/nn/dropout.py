"""The distributed dropout layers."""

from __future__ import annotations

from typing import ClassVar

import torch

from distdl.agreement import Agreement
from distdl.agreement.header import Headers
from distdl.geometry.boxes import Box, Shape
from distdl.nn.module import Module, Option
from distdl.nn.repeats import CallCount, checked
from distdl.nn.uniform import next_key, uniform_block
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.tensors.connection import outside
from distdl.tensors.dtypes import carries_gradients
from distdl.transport.label import Label


class Dropout(Module):
    r"""Set random parts of a tensor to zero while training, with a mask that does not depend on the partition.

    Forward: :math:`y_c = x_c m_c / (1 - p)`; :math:`m_c` is 0 with probability p, else 1. It follows from the seed of
    torch on the first worker when the layer was made, from how many random layers were made before in this world, from
    how many calls this layer had, and from the global index c. Nothing else goes into it: neither back-end nor
    partition, nor torch's generators, which are not drawn from. No message is sent but the agreement.
    Adjoint: the same product. While evaluating, or with p = 0, y is x, and nothing is agreed.

    Args:
        P_x: partition of input and output; one axis for each dim, any of them may be split.
        p: probability of a zero, from 0 to 1.
        inplace: False.
    Attributes:
        calls.number: how many calls had a mask. Set it to go on where an earlier run ended.
    Shapes: x local, in elements, any split that is a grid; y as x. Workers outside P_x return a clone of their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of
        another rank or of integers. RuntimeError in a backward whose checkpoint repeats another call than the latest:
        see :func:`distdl.nn.repeats.repeat_calls`.
    """

    P_x = Option[Partition]()
    p = Option[float]()
    inplace = Option[bool]()
    leading: ClassVar[int | None] = None  # how many dims the mask has, beginning with the first; None for all

    def __init__(self, P_x: Partition, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        name = type(self).__name__
        if not 0 <= p <= 1:
            raise ValueError(f"{name} needs p from 0 to 1; got {p}")
        if inplace:
            raise ValueError(f"{name} never writes into its input, so it needs inplace=False; got {inplace}")
        self.P_x, self.p, self.inplace = P_x, float(p), False
        self.calls = CallCount()
        seed, kind, place = next_key(P_x.comm, "layer")
        self._marks = (seed // 2**32, seed % 2**32, kind, place)  # a header's integers have a sign
        self.label = Label(f"{name} (P_x: {P_x}; p: {p})")
        self._agreement = Agreement.among(P_x, self.label, (P_x.workers.shape, p), self._derive)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.P_x.comm.rank not in self.P_x:
            return outside(x) if self.training and self.p else x.clone()  # (what saves nothing on the members neither)
        if not self.training or self.p == 0:
            return x
        key, box, extents, dtype = self._agreement.reach((x,), self._marks).outcome
        number = self.calls.next()
        x = checked(x if x.numel() else x.to(dtype), number)
        mask = uniform_block((*key, number), box, extents, lambda u: u >= self.p, torch.bool, x.device)
        mask = mask.reshape(*mask.shape, *[1] * (x.dim() - mask.dim()))
        return x * mask * (1 / (1 - self.p) if self.p < 1 else 0.0)

    def _derive(self, headers: Headers) -> tuple[tuple[int, int, int], Box, Shape, torch.dtype]:
        name, P_x = type(self).__name__, self.P_x
        high, low, kind, place = headers.extras(P_x).reshape(-1, 4)[0].tolist()
        owned = Layout.tiled(P_x, headers.shapes(P_x, name, P_x.workers.ndim))
        dtype = headers.dtype(P_x, name)
        if not carries_gradients(dtype):
            raise ValueError(f"{self.label} needs a tensor of floating-point or complex numbers; got {dtype}")
        key = (high * 2**32 + low, kind, place)
        return key, owned[P_x.comm.rank][: self.leading], owned.extents[: self.leading], dtype

    def extra_repr(self) -> str:
        return f"P_x: {self.P_x}; p={self.p}"


class DistributedDropout(Dropout):
    """Dropout of single elements, as torch's ``Dropout``."""


class ChannelDropout(Dropout):
    """Dropout of whole channels of whole samples: the mask is one number for each of them.

    Args:
        P_x: ``batch x channels x space...``.
    """

    leading = 2
    space: ClassVar[int]

    def __init__(self, P_x: Partition, p: float = 0.5, inplace: bool = False) -> None:
        if P_x.workers.ndim != self.space + 2:
            raise ValueError(
                f"{type(self).__name__} needs P_x: batch x channels x {self.space} dims of space; got {P_x}"
            )
        super().__init__(P_x, p, inplace)


class DistributedDropout1d(ChannelDropout):
    space = 1


class DistributedDropout2d(ChannelDropout):
    space = 2


class DistributedDropout3d(ChannelDropout):
    space = 3
