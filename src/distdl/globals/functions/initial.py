"""Initial values of parameters that are global tensors: ``torch.nn.init``."""

from __future__ import annotations

from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import init

from distdl.globals.functions.plain_random import Drawing
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import TABLE, Handler, composite

# What these functions ask of torch. For them a global tensor counts as one without functions of its own.
_TORCH = SimpleNamespace(overrides=SimpleNamespace(has_torch_function_variadic=lambda *_: False), no_grad=torch.no_grad)


def _of_others(func: Any) -> Handler:
    rebuilt = composite(func, torch=_TORCH)
    return lambda func, args, kwargs: rebuilt(*args, **kwargs)


for _function in (init.constant_, init.uniform_, init.normal_, init.kaiming_uniform_):
    TABLE[_function] = _of_others(_function)


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
