"""Initial values of parameters that are global tensors: ``torch.nn.init``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import init

from distdl.globals.tensor.table import TABLE, Handler, composite

# What these functions ask of torch. For them a global tensor counts as one without functions of its own.
_TORCH = SimpleNamespace(overrides=SimpleNamespace(has_torch_function_variadic=lambda *_: False), no_grad=torch.no_grad)


def _of_others(func: Any) -> Handler:
    rebuilt = composite(func, torch=_TORCH)
    return lambda func, args, kwargs: rebuilt(*args, **kwargs)


for _function in (init.constant_, init.uniform_, init.normal_, init.kaiming_uniform_):
    TABLE[_function] = _of_others(_function)
