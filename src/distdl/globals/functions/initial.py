"""Initial values of parameters that are global tensors: ``torch.nn.init``."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch.nn import init

from distdl.globals.functions.drawing import Drawing
from distdl.globals.table import TABLE, by_name
from distdl.globals.tensor import GlobalTensor


@by_name
def _constant(func: Any, tensor: Any, val: float) -> Any:
    with torch.no_grad():
        return tensor.fill_(val)


@by_name
def _uniform(func: Any, tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return tensor.uniform_(a, b, generator=generator)


@by_name
def _normal(func: Any, tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


@by_name
def _kaiming_uniform(
    func: Any,
    tensor: Any,
    a: float = 0,
    mode: Any = "fan_in",
    nonlinearity: Any = "leaky_relu",
    generator: Any = None,
) -> Any:
    """Uniform numbers; how large they are follows from the shape."""
    blank = torch.empty(tensor.shape, device="meta")
    if not blank.numel():
        return tensor
    fan: Any = getattr(init, "_calculate_correct_fan")(blank, mode)  # noqa: B009 (torch does not export it)
    bound = 3**0.5 * init.calculate_gain(nonlinearity, a) / fan**0.5
    return init.uniform_(tensor, -bound, bound, generator)


TABLE[init.constant_] = _constant
TABLE[init.uniform_] = _uniform
TABLE[init.normal_] = _normal
TABLE[init.kaiming_uniform_] = _kaiming_uniform


def install() -> None:
    """Let ``torch.nn.init.sparse_`` look for a global tensor: it draws places as plain tensors, and asks nobody."""
    torch_sparse = init.sparse_

    @wraps(torch_sparse)
    def sparse_(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if type(tensor) is not GlobalTensor:
            return torch_sparse(tensor, *args, **kwargs)
        with Drawing(tensor._context):
            return torch_sparse(tensor, *args, **kwargs)

    setattr(init, "sparse_", sparse_)  # noqa: B010 (a module's function, as torch's types have it)
