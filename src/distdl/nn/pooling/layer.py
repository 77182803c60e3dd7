"""What the pooling layers have in common: they also agree on the dtype of the result of torch's operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from distdl.agreement import Headers
from distdl.geometry.boxes import Shape
from distdl.nn.layer import Application, Layer
from distdl.nn.module import Option
from distdl.ops import Op
from distdl.ops.adaptive_pooling import AdaptiveAverage, AdaptiveMaximum
from distdl.ops.pooling import Pooling
from distdl.partition import Partition
from distdl.tensors.connection import outside
from distdl.tensors.dtypes import DTYPES, dtype_code


class ResultTypes:
    """The dtype of the result of torch's operator: it does not accept all dtypes, and autocast changes some.

    Args:
        sample: the operator.
        least: shape of a tensor that it accepts.
    """

    def __init__(self, sample: Callable[[torch.Tensor], torch.Tensor], least: Shape) -> None:
        self._sample = sample
        self._least = least
        self._known: dict[object, int] = {}

    def of(self, x: Any) -> int:
        """1 plus the code of the dtype of the result; 0 where the operator does not take x.

        The operator is tried on zeros, once for each dtype and device, with autocast and without.
        """
        if not isinstance(x, torch.Tensor) or x.is_meta:
            return 0
        key = (x.dtype, x.device, torch.is_autocast_enabled(x.device.type))
        if key not in self._known:
            try:
                y = self._sample(torch.zeros(self._least, dtype=x.dtype, device=x.device))
                self._known[key] = 1 + dtype_code(y.dtype)
            except RuntimeError:
                self._known[key] = 0
        return self._known[key]


class PoolingLayer(Layer):
    """What all pooling layers are.

    Args:
        least: shape of the smallest tensor that torch's operator accepts.
        shown: the main option, for its name.
        options: its public attributes.
    """

    P_x = Option[Partition]()
    space: ClassVar[int]  # dims of space

    def __init__(
        self,
        P_x: Partition,
        op: Pooling | AdaptiveAverage | AdaptiveMaximum,
        least: Shape,
        shown: str,
        **options: Any,
    ) -> None:
        kind = type(self).__name__
        if P_x.workers.ndim != len(least):
            raise ValueError(f"{kind} needs P_x: batch x channels x {len(least) - 2} dims of space; got {P_x}")

        def configure(op: Any, headers: Headers) -> Op:
            dtype = headers.dtype(P_x, kind)
            empty = headers.shapes(P_x, kind, P_x.workers.ndim).prod(axis=-1) == 0
            codes = headers.extras(P_x)[..., 0]
            if not ((codes > 0) | empty).all():
                raise ValueError(f"{kind} needs a dtype that torch's operator takes; got {dtype}")
            code = int(codes.flat[np.argmin(empty)])  # of the first worker that has an element
            configured: Op = replace(op, result=DTYPES[code - 1] if code else dtype)
            return configured

        def alone(x: torch.Tensor) -> Any:
            return (outside(x), torch.zeros_like(x, dtype=torch.int64)) if op.indices else outside(x)

        super().__init__(f"{kind} (P_x: {P_x}; {shown})", P_x, Application(op, (P_x,), P_x, configure), alone=alone)
        self.P_x = P_x
        for option, value in options.items():
            setattr(self, option, value)
        self._results = ResultTypes(op.sample, least)

    def forward(self, x: torch.Tensor) -> Any:
        setup = self.agree(x, extra=(self._results.of(x),))
        return setup(x)
