"""Datasets that torch.utils.data makes of others: parts of them, and several joined or side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils import data

from distdl.data.blocks import BlockDataset, each
from distdl.data.sources import Chosen, Joined
from distdl.partition import Partition

_KINDS = "a BlockDataset, or a torch.utils.data.Subset, ConcatDataset or StackDataset of some"


def blocks_of(dataset: Any) -> tuple[Any, Partition]:
    """A dataset that gives the blocks of a batch, with the samples of a dataset; and how batches are split.

    That is the dataset itself, or a part of one, if these read blocks.

    Raises: TypeError for what is no dataset of blocks, or changes samples; ValueError if datasets do not fit together.
    """
    whole = dataset
    while isinstance(whole, data.Subset):
        whole = whole.dataset
    asked = isinstance(whole, BlockDataset)
    found: list[BlockDataset] = []
    sources = _sources_of(dataset, found, asked)
    P = found[0].P
    if P is None:
        raise ValueError("a DataLoader needs a BlockDataset of a worker; this one has come to a process that loads")
    if any(one.P is None or one.me != found[0].me or not np.array_equal(one.workers, P.workers) for one in found):
        raise ValueError("a DataLoader needs datasets whose batches are all split over the same partition")
    return (dataset if asked else BlockDataset(sources, P)), P


def parts_in(dataset: Any) -> tuple[list[torch.Tensor], int]:
    """The numbers of the samples that parts have of what they are parts of, and how many samples there are in all."""
    if isinstance(dataset, data.Subset):
        found, count = parts_in(dataset.dataset)
        return [torch.as_tensor(dataset.indices), *found], count
    if isinstance(dataset, (data.ConcatDataset, data.StackDataset)):
        told = [parts_in(one) for one in _members(dataset)]
        return [part for parts, _ in told for part in parts], sum(count for _, count in told)
    return [], len(dataset)


def _sources_of(dataset: Any, found: list[BlockDataset], asked: bool) -> Any:
    """What the samples of a dataset are read from, as one of blocks takes it; which of these there are is noted.

    Args:
        asked: whether the dataset itself is asked for batches, so that its class may change them.
    Raises: TypeError for what is no dataset of blocks, or changes what is read.
    """
    if not asked:
        _check_unchanged(dataset)
    if isinstance(dataset, BlockDataset):
        _check_reads(dataset, BlockDataset)
        found.append(dataset)
        return dataset.sources
    if isinstance(dataset, data.Subset):
        whole = _sources_of(dataset.dataset, found, asked)
        return each(whole, lambda source: Chosen(source, dataset.indices))
    if type(dataset) is data.ConcatDataset:
        return _joined([_sources_of(one, found, asked) for one in _members(dataset)])
    if type(dataset) is data.StackDataset:
        members = dataset.datasets
        if isinstance(members, dict):
            return {name: _sources_of(one, found, asked) for name, one in members.items()}
        return tuple(_sources_of(one, found, asked) for one in members)
    raise TypeError(
        f"DataLoader needs dataset to be {_KINDS}; got a {type(dataset).__name__}. (What changes samples is done to "
        "batches: each worker has a block of each)"
    )


def _members(dataset: Any) -> list[Any]:
    datasets = dataset.datasets
    return list(datasets.values() if isinstance(datasets, dict) else datasets)


def _check_reads(dataset: Any, known: type) -> None:
    """Check that a class that changes samples also changes blocks of batches, which alone are read.

    Raises: TypeError.
    """
    kind: Any = type(dataset)
    base: Any = known
    if kind.__getitem__ is not base.__getitem__ and kind.__getitems__ is base.__getitems__:
        raise TypeError(
            f"{kind.__name__} overrides __getitem__, of which a DataLoader of blocks does not ask. Override "
            "__getitems__, which gives Blocks, or change batches"
        )


def _check_unchanged(dataset: Any) -> None:
    """Check that the class of a dataset does not change batches: its sources are read, and it is not asked.

    Raises: TypeError.
    """
    kind: Any = type(dataset)
    base: Any = next((one for one in (BlockDataset, data.Subset) if isinstance(dataset, one)), kind)
    if hasattr(base, "__getitems__") and kind.__getitems__ is not base.__getitems__:
        raise TypeError(
            f"{kind.__name__} overrides __getitems__, of which a DataLoader does not ask where datasets are joined or "
            "stacked. Change batches"
        )


def _joined(parts: Sequence[Any]) -> Any:
    """The sources of several datasets behind each other, where all have samples of the same arrays.

    Raises: ValueError if they have not.
    """
    first = parts[0]
    if isinstance(first, tuple) and all(isinstance(one, tuple) and len(one) == len(first) for one in parts):
        return tuple(_joined(place) for place in zip(*parts, strict=True))
    if isinstance(first, Mapping) and all(isinstance(one, Mapping) and one.keys() == first.keys() for one in parts):
        return {name: _joined([one[name] for one in parts]) for name in first}
    if any(isinstance(one, (tuple, Mapping)) for one in parts):
        raise ValueError("datasets that are joined need samples of the same arrays, under the same names")
    return Joined(parts)
