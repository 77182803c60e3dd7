"""``torch.nn.init`` for parameters that are global tensors."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch.nn import init

from distdl.globals.functions.composites import rebuilt
from distdl.globals.tensor.table import TABLE

# The names of torch that these functions use. They find no function of a subclass, so they run on a global tensor.
_TORCH = SimpleNamespace(overrides=SimpleNamespace(has_torch_function_variadic=lambda *_: False), no_grad=torch.no_grad)

for _function in (init.constant_, init.uniform_, init.normal_, init.kaiming_uniform_):
    TABLE[_function] = rebuilt(_function, torch=_TORCH)
