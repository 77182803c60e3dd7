"""Weights that every worker has whole: whether they are still the same on all of them.

Whatever writes into weights has to write the same on every worker, and nobody sees it do so. So in each forward that
has a graph, one parameter is looked at, each in its turn. Sixteen bits that follow from all of its bits travel behind
the gradients, so there is no message more. The sum of a bit over n workers is 0 or n if all have the same. Only if it
is not, the workers compare the parameter itself, and all raise the same error.

Differences of rounding are none: processors that are not of one kind round otherwise in the step of an optimiser.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from distdl.globals.context import Context
from distdl.globals.models.equality import bytes_of
from distdl.partition.sharing import gather_values

_BITS = 16
_PLAIN = (torch.Tensor, torch.nn.Parameter)  # (those of quantised weights know their own functions only)
_MIXING = 0x9E3779B97F4A7C15 - (1 << 64)  # (odd: the highest bits of a product follow from all bits)
_LONGEST = 1023
_WHOLE_NUMBERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Drift:
    """Looks at the parameters of a model, one in each forward."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = weakref.ref(module)  # (a graph keeps what is looked at, and a model the graph of its weights)
        self._turn = 0  # how often it has looked
        self._wait = 0  # for how many forwards it does not
        self._pause = 0  # for how many after each: for more, each time that there was rounding

    def look(self, context: Context, parameters: Sequence[torch.Tensor], dtype: torch.dtype) -> Look:
        """At the next of some parameters.

        Args:
            dtype: in which the bits travel.
        """
        one = parameters[self._turn % len(parameters)]
        exact = len(context.everyone) * torch.finfo(dtype).eps <= 2  # (else a sum of ones may be rounded)
        there = type(one) in _PLAIN and one.layout is torch.strided and one.device.type != "meta" and one.numel()
        if self._wait:
            self._wait, there = self._wait - 1, False
        else:
            self._wait, self._turn = self._pause, self._turn + 1
        if not exact or not there or context.comm.imagined:
            return Look(self, context, one, torch.zeros(_BITS, dtype=torch.int64, device=one.device))
        return Look(self, context, one, _bits_of(one.detach()))

    def compare(self, context: Context, one: torch.Tensor) -> None:
        """Compare a parameter with that of worker 0. Collective.

        Raises: ValueError, the same on every worker, if they differ by more than rounding.
        """
        module = self._module()
        named = () if module is None else module.named_parameters()
        name = next((name for name, other in named if other is one), "a parameter")
        context.comm.where = "comparing weights"
        cells = bytes_of(one)
        context.comm.through.broadcast(context.everyone, cells).wait()
        wide = torch.complex128 if one.is_complex() else torch.float64
        mine, first = one.detach().cpu().to(wide), cells.view(one.dtype).reshape(one.shape).to(wide)
        same = (mine == first) | (mine.isnan() & first.isnan())
        apart = (mine - first).abs().nan_to_num(torch.inf).masked_fill(same, 0).max()
        told = gather_values(context.comm, context.everyone, "comparing weights", float(apart))
        largest = float(first.abs().nan_to_num(0.0, 0.0, 0.0).max())
        worker = max(range(len(told)), key=told.__getitem__)
        rounding = torch.finfo(one.dtype).eps ** 0.5 if one.is_floating_point() or one.is_complex() else 0.0
        if told[worker] > rounding * largest:
            raise ValueError(
                f"a distributed model needs the same weights on every worker; {name} of worker {worker} differs from "
                f"that of worker 0 by {told[worker]:.3g}, where its largest value is {largest:.3g}. What writes into "
                "weights after the first forward has to write the same everywhere: initial values that are drawn again "
                "come from one seed, or from one state_dict. (DISTDL_DEBUG=1 compares all weights before each forward)"
            )
        self._wait = self._pause = min(2 * self._pause + 1, _LONGEST)


class Look:
    """A parameter that is looked at, and what travels of it.

    Attributes:
        bits: 0 or 1 each.
    """

    def __init__(self, drift: Drift, context: Context, one: torch.Tensor, bits: torch.Tensor) -> None:
        self._drift, self._context, self._one = drift, context, one
        self.bits = bits

    def compare(self) -> None:
        """Compare the parameter itself. Collective."""
        self._drift.compare(self._context, self._one)


def _bits_of(one: torch.Tensor) -> torch.Tensor:
    """Some that follow from all bits of a tensor. (It waits for no device.)"""
    one = one.resolve_conj().resolve_neg()
    cells = torch.view_as_real(one) if one.is_complex() else one
    numbers = cells.view(_WHOLE_NUMBERS[cells.element_size()])
    total = numbers.sum(
        dtype=None if numbers.dtype is torch.int8 else numbers.dtype
    )  # (of a wider kind: ten times longer)
    shifts = torch.arange(64 - _BITS, 64, device=one.device)
    return ((total.to(torch.int64) * _MIXING) >> shifts) & 1
