"""Levels of ``torch.vmap``: how a mapped function computes with tensors that are not mapped.

A function that is mapped over elements may know tensors with which no element has to do. What such a tensor needs
before it can be used (a message, an autograd function of ours) is done once for all elements, beneath the levels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

is_batched = torch._C._functorch.is_batchedtensor


class _Here(threading.local):
    mapped = 0  # how many functions run that we map, one in another


_here = _Here()


@contextmanager
def mapping() -> Iterator[None]:
    """While a function runs that every worker maps, as often as the others: what it needs can be done beneath."""
    _here.mapped += 1
    try:
        yield
    finally:
        _here.mapped -= 1


def beneath() -> AbstractContextManager[Any]:
    """Beneath the levels of such a function; where none runs, nothing changes."""
    return temporarily_clear_interpreter_stack() if _here.mapped else _NOTHING


_NOTHING: AbstractContextManager[Any] = nullcontext()
