"""Buckets: parameters whose gradients travel as one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

import torch

from distdl.globals.layouts.context import Context

BUCKET = 4 << 20
"""The most bytes of gradients in one message. A larger tensor has a message of its own."""


class Bucket(NamedTuple):
    """Parameters whose gradients travel as one message."""

    context: Context
    parameters: list[torch.Tensor]
    use: Callable[[], tuple[torch.Tensor, ...]]  # gives their replicas; called once, when the first of them is read


def buckets_of(parameters: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Split parameters into buckets: neighbours of one dtype and device, up to :data:`BUCKET` bytes.

    Args:
        parameters: in the order of the model. One that is listed several times counts where it stands first.
    Returns: for each bucket, the places of its parameters in the list.
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


def common_path(paths: Iterable[str]) -> str:
    """The path of the smallest module that contains all parameters of these paths; empty for the model itself."""
    levels = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))
