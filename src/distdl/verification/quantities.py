"""Names for what a program computes, and the comparison of what two programs computed under one name."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from distdl.globals import GlobalTensor
from distdl.partition import Layout

# the factor by which a difference may exceed what perturbed runs show, and rounding of the tensor's largest value
_MARGIN = 32
_SHOWN = 3  # cells that an error shows

PLURAL = {
    "result": "results",
    "output": "outputs",
    "loss": "losses",
    "gradient of the output": "gradients of outputs",
    "gradient of input": "gradients of inputs",
    "gradient of weight": "gradients of weights",
    "weight": "weights",
    "buffer": "buffers",
}
"""The kinds of tensors that are compared, and how a certificate counts them."""


class Quantity(NamedTuple):
    """One tensor that a step of training computes.

    Attributes:
        step: counted from 1.
        kind: one of :data:`PLURAL`.
        name: the path of the module, the name of the parameter, the number of the input.
        call: which call of the module in this step, from 1.
        part: which tensor of the result.
    """

    step: int
    kind: str
    name: str
    call: int = 1
    part: int = 0

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call > 1 else ""
        part = f", tensor {self.part}" if self.part else ""
        of = f" of {self.name}" if self.name else ""
        return f"the {self.kind}{of}{call}{part} (step {self.step})"


class Value(NamedTuple):
    """A whole tensor.

    Attributes:
        layout: which worker held which cells of it.
        copies: those of other workers, with their numbers, if they are not the same.
    """

    tensor: torch.Tensor
    layout: Layout | None = None
    copies: tuple[tuple[int, torch.Tensor], ...] = ()


def gather(value: torch.Tensor) -> Value:
    """The whole tensor on worker 0 (on others, one without cells if it was split); every worker calls it.

    Args:
        value: a global tensor, a DTensor of torch, or a plain tensor, of which worker 0's counts.
    """
    if isinstance(value, GlobalTensor):
        with torch.no_grad():
            return Value(value.full_tensor(on=0), value.layout)
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it
    if module is not None and isinstance(value, module.DTensor):
        return Value(value.detach().full_tensor())
    return Value(value.detach())


@dataclass(frozen=True)
class Difference:
    """How far two tensors that should be equal are apart.

    Attributes:
        largest: of all elements.
        cell: where it is.
        scale: the largest value in the tensor that is right.
        allowed: up to where rounding explains it.
        problem: what is wrong in one sentence; an empty text if the tensors are equal to rounding.
    """

    largest: float
    cell: tuple[int, ...]
    scale: float
    allowed: float
    problem: str


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The absolute difference of each two elements, in float64. Equal infinities and two NaNs are equal.

    Whole numbers that float64 cannot tell apart differ by 1 at least.
    """
    exact = one.detach().cpu() == other.detach().cpu()
    wide = torch.complex128 if one.is_complex() or other.is_complex() else torch.float64
    one, other = one.detach().to("cpu", wide), other.detach().to("cpu", wide)
    equal = exact | (one.isnan() & other.isnan())
    apart = (one - other).abs()
    apart = torch.where(apart == 0, 1.0, apart)
    return torch.where(equal, 0.0, torch.where(apart.isnan(), torch.inf, apart))


def compare(right: torch.Tensor, found: Value, noise: float) -> Difference:
    """Compare a tensor with the one that is right.

    Args:
        noise: by how much the right one changes when its inputs change by their last bit.
    """
    other = found.tensor
    if right.shape != other.shape or right.dtype != other.dtype:
        problem = f"is {_kind(right)} in the sequential program and {_kind(other)} in the distributed one"
        return Difference(torch.inf, (), 0.0, 0.0, problem)
    if not right.numel():
        return Difference(0.0, (), 0.0, 0.0, "")
    apart = distance(right, other)
    largest, at = apart.max().item(), int(apart.argmax())
    cell = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), right.shape))
    finite = right.detach().to("cpu", torch.complex128 if right.is_complex() else torch.float64).abs()
    scale = finite[finite.isfinite()].max().item() if finite.isfinite().any() else 0.0
    exact = not (right.dtype.is_floating_point or right.dtype.is_complex)
    allowed = _MARGIN * (noise + (0.0 if exact else torch.finfo(right.dtype).eps * scale))
    problem = "" if largest <= allowed else _problem(right, found, apart, allowed)
    for worker, copy in () if problem else found.copies:
        one = compare(right, Value(copy), noise)
        if one.problem:
            return replace(one, problem=f"on worker {worker} {one.problem}")
    return Difference(largest, cell, scale, allowed, problem)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _problem(right: torch.Tensor, found: Value, apart: torch.Tensor, allowed: float) -> str:
    wrong = (apart > allowed).nonzero()
    order = apart[apart > allowed].argsort(descending=True)
    cells = [tuple(wrong[i].tolist()) for i in order[:_SHOWN]]
    shown = "; ".join(
        "cell {}{} is {} sequentially and {} distributed".format(
            cell, _holder(found.layout, cell), *_numbers(right[cell].item(), found.tensor[cell].item())
        )
        for cell in cells
    )
    return f"differs in {len(wrong)} of {right.numel()} cells by more than {allowed:.2g}: {shown}"


def _numbers(one: Any, other: Any) -> tuple[str, str]:
    """Both as texts that differ, with as many digits as that needs."""
    if isinstance(one, int):
        return str(one), str(other)
    texts = ((f"{one:.{digits}g}", f"{other:.{digits}g}") for digits in (6, 9, 12, 17))
    return next((pair for pair in texts if pair[0] != pair[1]), (str(one), str(other)))


def _holder(layout: Layout | None, cell: Sequence[int]) -> str:
    if layout is None:
        return ""
    holders = [
        int(worker)
        for worker in layout.partition.workers.flat
        if all(start <= i < stop for i, (start, stop) in zip(cell, layout[int(worker)], strict=True))
    ]
    return f", which worker {holders[0]} holds," if holders else ""


def noise(right: Mapping[Quantity, Value], perturbed: Sequence[Mapping[Quantity, Value]]) -> dict[Quantity, float]:
    """For each tensor, by how much it changes at most in the perturbed runs; 0 for one that they lack.

    Cells that become infinite or NaN do not count: any difference would be allowed in the others.
    """
    found = dict.fromkeys(right, 0.0)
    for key, value in right.items():
        for run in perturbed:
            if key in run and run[key].tensor.shape == value.tensor.shape:
                apart = distance(value.tensor, run[key].tensor)
                found[key] = max(found[key], apart.nan_to_num(posinf=0.0).amax().item() if apart.numel() else 0.0)
    return found
