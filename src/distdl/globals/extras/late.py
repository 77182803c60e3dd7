"""Functions that take functions: vmap and the transforms, linearize, control flow and flex_attention of global tensors.

Most of them do not call ``__torch_function__``, so ours replace them. Few programs call any, so a stub comes first: its
first call imports ours (see :mod:`distdl.globals.extras.installing`), which then take the places of all stubs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from threading import RLock
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch._functorch import vmap as vmapping
from torch._higher_order_ops import utils

from distdl.environment.importing import behind
from distdl.globals.tensor.table import copied, lend

_PLACES: list[tuple[Any, str]] = [
    (eager_transforms, "grad_and_value_impl"), (eager_transforms, "_vjp_with_argnums"),
    (eager_transforms, "_jvp_with_argnums"), (vmapping, "_flat_vmap"), (utils, "_hop_compile_and_call"),
]  # fmt: skip
_distdl_linearize: Any  # (for type checkers: it is set in torch's module, whose globals the lambda below gets)
_turn = RLock()  # (workers may be threads, of which one imports)
_opened: list[bool] = []


def install() -> None:
    """Let the first call of one of these functions import ours."""
    for module, name in _PLACES:
        setattr(module, name, _importing(getattr(module, name), partial(getattr, module, name)))
    linearize = _importing(copied(eager_transforms.linearize), lambda: eager_transforms.linearize)
    lend(eager_transforms.linearize, linearize, lambda *a, **k: _distdl_linearize(*a, **k))  # noqa: F821
    # (with torch 2.14 it imports sympy, which takes as long as all of distdl)
    behind("torch.nn.attention.flex_attention", lambda: import_module("distdl.globals.extras.flex"))


def original_of(function: Any) -> Any:
    """What stood in the place of a function before :func:`install`."""
    return getattr(function, "_torchs", function)


def _importing(original: Any, now: Callable[[], Any]) -> Callable[..., Any]:
    """What imports ours, and then calls what stands in the place by now."""

    @wraps(original)
    def first(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():  # (which goes on into torch's)
            return original(*args, **kwargs)
        with _turn:
            if not _opened:
                import_module("distdl.globals.extras.installing").install()
                _opened.append(True)
        return now()(*args, **kwargs)

    first._torchs = original  # type: ignore[attr-defined]
    return first
