"""The functions of torch by which a line calls operators: they take a shorter way to an operator than ``torch.ops``.

``torch.ops.aten.view.default`` converts its arguments as TorchScript does, ``torch.Tensor.view`` in code of its own.
Below autograd both call the same operator, with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# operators that stand in many lines, and are so short that the time of their calls matters
_FUNCTIONS = """
    add.Tensor addcmul as_strided cat clone convolution div.Tensor empty_strided mm mul.Tensor permute relu relu_ rsqrt_
    select.int stack sub.Tensor sum.dim_IntList t transpose.int unbind.int unsqueeze zero_
"""
_METHODS = "add_.Tensor copy_ div_.Tensor mul_.Tensor new_empty scatter_add_ squeeze_.dim sub_.Tensor view"


def _bindings(owner: Any, operators: str) -> dict[Any, Callable[..., Any]]:
    found = {}
    for operator in operators.split():
        name, _, overload = operator.partition(".")
        found[getattr(getattr(torch.ops.aten, name), overload or "default")] = getattr(owner, name)
    return found


BINDINGS: dict[Any, Callable[..., Any]] = _bindings(torch, _FUNCTIONS) | _bindings(torch.Tensor, _METHODS)


def binding_of(operator: Any) -> Callable[..., Any]:
    """What calls an operator in the least time."""
    return BINDINGS.get(operator) or getattr(operator, "_op", operator)
