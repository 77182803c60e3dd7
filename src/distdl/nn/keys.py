"""Keys of random numbers: each parameter and each random layer of a world has its own."""

from __future__ import annotations

from collections import Counter
from weakref import WeakKeyDictionary

import torch

from distdl.tensors.uniform import Key
from distdl.transport.communicator import Communicator

_made: WeakKeyDictionary[Communicator, Counter[str]] = WeakKeyDictionary()
_KINDS = ("parameter", "layer")


def next_key(comm: Communicator, kind: str) -> Key:
    """The key of the next ``parameter`` or random ``layer`` of this world: the seed, the kind, and how many came
    before.

    Every worker makes the parameters and layers of a network in the same order. The seed is that of
    ``torch.manual_seed``, which has to be the same on all workers.
    """
    made = _made.setdefault(comm, Counter())
    made[kind] += 1
    return (torch.initial_seed(), _KINDS.index(kind), made[kind])
