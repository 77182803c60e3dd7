"""Buckets: parameters whose gradients travel as one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch

from distdl.globals.layouts.context import Context

BUCKET = 4 << 20
"""Bytes of gradients that travel as one message, at most (of one tensor, as many as it has)."""


class Bucket(NamedTuple):
    """Parameters whose gradients travel together, and what gives their copies."""

    context: Context
    parameters: list[torch.Tensor]
    use: Callable[[], tuple[torch.Tensor, ...]]


def buckets_of(parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """The places of parameters whose gradients travel together: those behind each other, of one dtype and device.

    One that is there several times has the first of its places.
    """
    bucket: list[int] = []
    nbytes = 0
    places = {id(parameter): place for place, parameter in reversed(list(enumerate(parameters)))}
    for place, parameter in enumerate(parameters):
        if places[id(parameter)] != place:
            continue
        first = parameters[bucket[0]] if bucket else parameter
        alike = (first.dtype, first.device) == (parameter.dtype, parameter.device)
        if bucket and (nbytes + parameter.nbytes > BUCKET or not alike):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(place)
        nbytes += parameter.nbytes
    if bucket:
        yield bucket


def path_around(paths: Iterable[str]) -> str:
    """The path of the smallest module in which modules are."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))
