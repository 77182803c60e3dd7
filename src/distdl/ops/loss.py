"""Losses of elements: each worker sums the losses of its elements, and the first one divides the sum.

x, target  --->  sum of the own elements  ---sum-reduce--->  first worker: total / c    the others: 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from math import prod
from operator import or_
from typing import Any

import torch
from torch.nn import functional

from distdl.exchange import Together
from distdl.geometry.boxes import Box, Shape
from distdl.ops.setup import Setup, Site, same
from distdl.partition import Layout, Signature
from distdl.partition.layout import Lookup
from distdl.plan import Plan
from distdl.plan.planning import broadcast
from distdl.tensors.dtypes import HALVES, carries_gradients

# what is passed for a weight that is not given (known by its identity, as a block may have any shape)
ABSENT = torch.empty(0, device="cpu")


@dataclass(frozen=True)
class ElementLoss:
    r"""The loss of an input and a target that are split alike.

    Forward: :math:`\ell = c^{-1} \sum_s f(x_s, t_s)` on the first worker, c being 1 (``sum``), the number of all
    elements (``mean``) or the extent of dim 0 (``batchmean``); on the others 0. With ``none`` each worker has
    :math:`f(x_s, t_s)` of its elements, and nothing moves.

    It is set up for four tensors: input, target, a weight of elements (each worker's own), and a weight of positive
    targets (the same on every worker, and as large as what it stands beside in the whole tensor). Either weight may be
    None, on all workers alike; then it is called with :data:`ABSENT` in its place.

    Attributes:
        function: the name of f in ``torch.nn.functional``.
        reduction: ``none``, ``mean``, ``sum`` or ``batchmean``.
        options: what f takes besides.
    """

    function: str
    reduction: str
    options: tuple[tuple[str, Any], ...] = ()

    def check(self, name: str) -> None:
        """Check the options.

        Raises: ValueError that names the layer.
        """
        if not callable(getattr(functional, self.function, None)):
            raise ValueError(f"{name} needs the name of a function of torch.nn.functional; got {self.function!r}")
        options = dict(self.options)
        if not options.get("beta", 0.0) >= 0:
            raise ValueError(f"{name} needs a beta of at least 0; got {options['beta']}")
        if not options.get("delta", 1.0) > 0:
            raise ValueError(f"{name} needs a positive delta; got {options['delta']}")

    def setup(
        self,
        site: Site,
        x: Signature,
        target: Signature,
        weight: Signature | None = None,
        pos_weight: Signature | None = None,
    ) -> Setup:
        owned, box = x.layout, None
        if pos_weight is not None:
            box = owned.box_of(site.me)
            _check_pos_weight(site, pos_weight.local, owned.extents)
        signatures = (x, target, weight, pos_weight)
        given = [one for one in signatures if one is not None]
        dtypes = [None if one is None else one.dtype for one in signatures]
        moved = self._sum_dtype(site, x.dtype, target.dtype, dtypes)
        derivatives = reduce(or_, (one.derivatives for one in given))
        move_in = Together(site.identity(x.dtype, derivatives, x.local))

        # a tensor without elements may come in another dtype; the others have agreed on theirs
        as_agreed = all(prod(one.local) for one in given)

        def losses(*tensors: torch.Tensor, reduction: str = "none") -> torch.Tensor:
            return self.elements(*(tensors if as_agreed else _cast(tensors, dtypes)), reduction=reduction, box=box)

        if self.reduction == "none":
            return Setup(move_in, losses, same, (owned,))
        half = x.dtype in HALVES  # whose sums overflow, or stop growing, long before the mean does
        add = site.operator(sum_to_first(site, ()), moved, derivatives, [()])
        divisor = self._divisor(owned)

        def total(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
            if half:
                found = losses(*tensors)
                return found.sum(dtype=moved), found.dtype
            found = losses(*tensors, reduction="sum")
            return found if found.dtype is moved else found.to(moved), found.dtype

        def divided(total: tuple[torch.Tensor, torch.dtype]) -> torch.Tensor:
            y: torch.Tensor = add(total[0])
            if not y.numel():
                return y.sum().to(total[1])
            return (y if divisor == 1 else y / divisor).to(total[1])

        return Setup(move_in, total, divided)

    def elements(self, *tensors: torch.Tensor, reduction: str = "none", box: Box | None = None) -> torch.Tensor:
        """torch's loss of local tensors: input, target and both weights.

        Args:
            reduction: ``none`` or ``sum``.
            box: which part of the whole input it is; None if nobody asks for it.
        """
        x, target, weight, pos_weight = tensors
        function, keywords = getattr(functional, self.function), dict(self.options)
        if weight is not ABSENT:
            keywords["weight"] = weight
        if pos_weight is not ABSENT:
            keywords["pos_weight"] = pos_weight if box is None else _part(pos_weight, box)
        found: torch.Tensor = function(x, target, reduction=reduction, **keywords)
        return found

    def _sum_dtype(
        self, site: Site, x: torch.dtype, target: torch.dtype, dtypes: Sequence[torch.dtype | None]
    ) -> torch.dtype:
        """The dtype in which the sums move.

        Args:
            x, target: their dtypes.
            dtypes: of all tensors; None for a weight that is not given.
        Raises: ValueError if torch has no such loss of these dtypes.
        """
        together = torch.promote_types(x, target)
        if self.reduction not in ("none", "sum") and not carries_gradients(together):
            raise ValueError(
                f"{site.label.kind} needs floating-point numbers for the reduction {self.reduction}; got {together}"
            )
        tensors = [ABSENT if dtype is None else torch.zeros(1, dtype=dtype, device="cpu") for dtype in dtypes]
        try:
            with torch.autocast("cpu", enabled=False):
                found = self.elements(*tensors, reduction="sum").dtype
        except (RuntimeError, TypeError) as problem:
            raise ValueError(
                f"{site.label.kind} has no loss of an input of {x} and a target of {target}: {problem}"
            ) from problem
        return torch.float32 if found in HALVES else found

    def _divisor(self, owned: Layout) -> int:
        return {"mean": prod(owned.extents), "batchmean": owned.extents[0] if owned.extents else 1}.get(
            self.reduction, 1
        )


def sum_to_first(site: Site, shape: Shape) -> Plan:
    """The plan that adds tensors of one shape up on the first worker."""
    first = site.partition.create_partition_inclusive([0])
    return broadcast(first, site.partition, Lookup(site.members, lambda worker: shape), site.me).T


def broadcasts(shape: Shape, to: Shape) -> bool:
    """Whether a tensor of one shape broadcasts to another."""
    aligned = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(one in (1, other) for one, other in aligned)


def _check_pos_weight(site: Site, shape: Shape, extents: Shape) -> None:
    if not broadcasts(shape, extents):
        raise ValueError(
            f"{site.label.kind} needs a pos_weight that broadcasts to the global input; they have "
            f"{list(shape)} and {list(extents)}"
        )


def _cast(tensors: tuple[torch.Tensor, ...], dtypes: Sequence[torch.dtype | None]) -> list[torch.Tensor]:
    """The tensors in the dtypes that were agreed on: one that is empty may have come in another."""
    pairs = zip(tensors, dtypes, strict=True)
    return [one if dtype is None else one.to(dtype) for one, dtype in pairs]


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The part of a tensor that belongs to a box of what it broadcasts to."""
    intervals = box[len(box) - tensor.dim() :]
    return tensor[
        tuple(slice(*along) if n > 1 else slice(None) for n, along in zip(tensor.shape, intervals, strict=True))
    ]
