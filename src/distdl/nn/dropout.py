"""The distributed dropout layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from distdl.agreement import Headers
from distdl.nn.keys import next_key
from distdl.nn.layer import Application, Layer
from distdl.nn.module import Option
from distdl.ops.dropout import Dropout
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.tensors.connection import outside
from distdl.tensors.repeats import CallCount


class _DropoutLayer(Layer):
    """What dropouts of elements and of channels share: see :class:`DistributedDropout`."""

    P_x = Option[Partition]()
    p = Option[float]()
    inplace = Option[bool]()
    leading: ClassVar[int | None] = None  # how many dims the mask has, beginning with the first; None for all

    @checks_arguments
    def __init__(self, P_x: Partition, p: float = 0.5, inplace: bool = False) -> None:
        kind = type(self).__name__
        op = Dropout(float(p), self.leading)
        op.check(kind)
        if inplace:
            raise ValueError(f"{kind} never writes into its input, so it needs inplace=False; got {inplace}")
        seed, number, place = next_key(P_x.comm, "layer")

        def configured(op: Dropout, headers: Headers) -> Dropout:
            """The dropout with the first worker's key of random numbers."""
            high, low, *rest = headers.extras(P_x).reshape(-1, 4)[0].tolist()
            return replace(op, key=(high * 2**32 + low, *rest))

        derive = Application(op, (P_x,), P_x, configured)
        super().__init__(f"{kind} (P_x: {P_x}; p: {p})", P_x, derive, alone=_alone)
        self.P_x, self.p, self.inplace = P_x, float(p), False
        self.calls = CallCount()
        # a header's integers have a sign
        self._marks: tuple[int, ...] = (seed // 2**32, seed % 2**32, number, place)

    def forward(self, x: torch.Tensor) -> Any:
        if not self.training or self.p == 0:
            # also outside of P_x: the graph would note a clone as the result of a layer, and x is none
            return x
        setup = self.agree(x, extra=self._marks)
        moved = setup.move_in(x)
        return setup.move_out(setup.local(*moved, self.calls))

    @property
    def random_state(self) -> tuple[int, ...]:
        """What the next mask follows from: the layer's key as this worker has it, and how many calls had a mask."""
        return (*self._marks, self.calls.number)

    @random_state.setter
    def random_state(self, state: tuple[int, ...]) -> None:
        *marks, self.calls.number = state
        self._marks = tuple(marks)


class DistributedDropout(_DropoutLayer):
    r"""Dropout of single elements: set random ones to zero in training mode, with a mask that does not depend on the
    partition.

    Forward: :math:`y_c = x_c m_c / (1 - p)`; :math:`m_c` is 0 with probability p, else 1. It follows from torch's seed
    on the first worker when the layer was made, from how many random layers were made before in this world, from how
    many calls this layer has had, and from the global index c. It depends on nothing else: neither on the back-end nor
    on the partition, nor on torch's generators, which are not used. The agreement is the only message.
    Adjoint: the same product. In evaluation mode, or with p = 0, y is x on every worker, and nothing is agreed on.

    Args:
        P_x: partition of input and output, with one axis for each dim; any of them may be split.
        p: probability of a zero, from 0 to 1.
        inplace: only False is accepted.
    Attributes:
        calls.number: how many calls have had a mask. Set it to resume an earlier training run.
        random_state: integers from which the next mask follows; to be set alike on all workers (checkpoints do).
    Shapes: x local, in elements, any split that is a grid; y as x. In training mode, workers outside P_x return a
        clone of their input.
    Raises: ValueError, on every worker, for options that do not fit; in forward, on every member, for an input of the
        wrong rank or of integers. RuntimeError in the backward of a checkpoint with ``use_reentrant=True``.
    """


class _ChannelDropout(_DropoutLayer):
    """Dropout of whole channels, as :class:`DistributedDropout`: the mask has one number for each channel of a sample.

    Args:
        P_x: ``batch x channels x space``, with as many dims of space as the name says.
    """

    space: ClassVar[int]  # dims of space
    leading = 2

    @checks_arguments
    def __init__(self, P_x: Partition, p: float = 0.5, inplace: bool = False) -> None:
        if P_x.workers.ndim != self.space + 2:
            kind = type(self).__name__
            raise ValueError(f"{kind} needs P_x: batch x channels x {self.space} dims of space; got {P_x}")
        super().__init__(P_x, p, inplace)


def _alone(x: torch.Tensor, calls: CallCount) -> torch.Tensor:
    return outside(x)


class DistributedDropout1d(_ChannelDropout):
    __doc__ = _ChannelDropout.__doc__
    space = 1


class DistributedDropout2d(_ChannelDropout):
    __doc__ = _ChannelDropout.__doc__
    space = 2


class DistributedDropout3d(_ChannelDropout):
    __doc__ = _ChannelDropout.__doc__
    space = 3
