"""What torch computes once in ``with parametrize.cached():``, for each thread.

Torch has one count and one cache for all threads of the process. So a worker that has left the context would go on with
weights of before, as long as another worker is in it, and exchange other messages than that.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.utils import parametrize


class _Cache(threading.local):
    """The parametrised tensors that this thread has computed."""

    def __init__(self) -> None:
        self.depth = 0
        self.tensors: dict[tuple[int, str], torch.Tensor] = {}

    def get(self, key: tuple[int, str]) -> torch.Tensor | None:
        return self.tensors.get(key)

    def __setitem__(self, key: tuple[int, str], tensor: torch.Tensor) -> None:
        self.tensors[key] = tensor


class _Depth:
    """How many such contexts this thread is in, as torch counts them: ``depth += 1``, ``if depth:``.

    As the last one ends (``depth -= 1``), torch would put a new cache in the place of that of all threads (``if not
    depth:``). So the thread's own is emptied here.
    """

    def __init__(self, cache: _Cache) -> None:
        self._cache = cache
        self._leaving = threading.local()

    def __iadd__(self, n: int) -> _Depth:
        self._cache.depth += n
        return self

    def __isub__(self, n: int) -> _Depth:
        self._cache.depth -= n
        if not self._cache.depth:
            self._cache.tensors.clear()
        self._leaving.is_asked = True
        return self

    def __bool__(self) -> bool:
        if getattr(self._leaving, "is_asked", False):  # torch asks this right after -=
            self._leaving.is_asked = False
            return True
        # Dynamo cannot follow this cache, so compiled code computes the tensors each time
        return self._cache.depth > 0 and not torch.compiler.is_compiling()


def cache_of(torchs: dict[tuple[int, str], torch.Tensor]) -> _Cache:
    """A cache for each thread. That of the calling thread holds what torch's holds.

    Args:
        torchs: that of all threads.
    """
    cache = _Cache()
    cache.tensors.update(torchs)
    return cache


def depth_of(torchs: int) -> _Depth:
    """The count of contexts that belongs to the cache that stands in torch's module. Every place there looks both up.

    Args:
        torchs: in how many the calling thread is.
    """
    cache: Any = parametrize._cache
    cache.depth = torchs
    return _Depth(cache)
