"""What goes wrong: arguments of functions, and what one worker does otherwise than the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from programs import Step

ODD: tuple[Any, ...] = (
    None,
    -7,
    99,
    2.5,
    "a",
    2**62,
    -(2**62),
    (),
    (0, 0),
    (5, -9),
    [],
    {},
    True,
    float("nan"),
    object,
)


@st.composite
def spoilt(draw: st.DrawFn, step: Step) -> Step:
    """The step with one argument replaced, left out, or added."""
    how = draw(st.sampled_from(["replace", "replace", "replace", "less", "more", "option"]))
    odd = draw(st.sampled_from(ODD))
    last = len(step.arguments) - 1
    if how == "replace" and last >= 1:
        at = draw(st.integers(1, last))
        old = step.arguments[at]
        if isinstance(old, tuple) and old and draw(st.booleans()):
            inside = draw(st.integers(0, len(old) - 1))
            odd = (*old[:inside], odd, *old[inside + 1 :])
        return replace(step, arguments=(*step.arguments[:at], odd, *step.arguments[at + 1 :]))
    if how == "less" and last >= 1:
        return replace(step, arguments=step.arguments[:-1])
    if how == "option" and step.options:
        at = draw(st.integers(0, len(step.options) - 1))
        changed = (step.options[at][0], odd)
        return replace(step, options=(*step.options[:at], changed, *step.options[at + 1 :]))
    return replace(step, arguments=(*step.arguments, odd))


@dataclass(frozen=True)
class Fault:
    """What one worker does otherwise in a call.

    Attributes:
        kind: one of KINDS.
        number: which dim, or which of several values.
    """

    worker: int
    kind: str
    number: int = 0


KINDS = ("shorter", "longer", "more dims", "fewer dims", "single", "integers", "grad mode", "no tensor", "without data")


def damaged(x: torch.Tensor, fault: Fault) -> Any:
    """What a worker passes for its block."""
    dim = fault.number % max(x.dim(), 1)
    if fault.kind == "shorter":
        return x.narrow(dim, 0, max(x.shape[dim] - 1, 0))
    if fault.kind == "longer":
        return torch.cat([x, x.narrow(dim, 0, min(x.shape[dim], 1))], dim)
    if fault.kind == "more dims":
        return x.unsqueeze(dim)
    if fault.kind == "fewer dims":
        return x.flatten(max(x.dim() - 2, 0))
    if fault.kind == "single":
        return x.float()
    if fault.kind == "integers":
        return x.detach().long()
    if fault.kind == "no tensor":
        return (None, 3.0, "x", [x], x.detach().numpy())[fault.number % 5]
    if fault.kind == "without data":
        return (x.to("meta"), x.detach().to_sparse())[fault.number % 2]
    return x
