"""Loaders of batches that are global tensors: every worker goes through the same samples in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils import data

from distdl.data.blocks import BlockDataset, Blocks, each
from distdl.globals.context import Context
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.sharing import gather_values


class collate:
    """What makes global tensors of the batches of a :class:`BlockDataset`, for torch's own ``DataLoader``.

    ``torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=distdl.data.collate(P))`` gives global tensors where
    it has no worker processes. From those come :class:`Blocks`, for a global tensor cannot be sent between processes;
    call their ``as_global(P)``, or use :class:`DataLoader`, which does.
    """

    @checks_arguments
    def __init__(self, P: Partition) -> None:
        self.P: Partition | None = P

    def __call__(self, batch: Any) -> Any:
        if self.P is None or data.get_worker_info() is not None:
            return batch
        return as_global(batch, self.P)

    def __getstate__(self) -> dict[str, Any]:
        return {"P": None}


class DataLoader(data.DataLoader[Any]):
    """torch's loader, of batches that are global tensors.

    Every worker makes one with the same arguments and goes through it. Samples come in the same order on every worker;
    at the begin of each epoch the workers compare, by two small messages, what it follows from.

    Args:
        dataset: a :class:`BlockDataset`, or a ``torch.utils.data.Subset`` of one, as ``random_split`` gives it.
        seed: of the order, if it is shuffled. Each epoch has another one.
        options: those of ``torch.utils.data.DataLoader``, but for ``collate_fn`` and ``generator``.
    Raises: TypeError for another dataset. At the begin of an epoch ValueError, the same on every worker, if samples,
        batches, the seed, or what is known of a sampler (its generator, its indices, options of torch's) differ.
    """

    @checks_arguments
    def __init__(self, dataset: Any, batch_size: int = 1, *, seed: int = 0, **options: Any) -> None:
        whole, _ = _whole_of(dataset)
        if not isinstance(whole, BlockDataset):
            raise TypeError(
                "DataLoader needs dataset to be a BlockDataset, or a torch.utils.data.Subset of one; got a "
                f"{type(whole).__name__}. (What changes samples is done to batches: each worker has a block of each)"
            )
        if whole.P is None:
            raise ValueError("a DataLoader needs a BlockDataset of a worker; this one has come to a process that loads")
        self._P = whole.P
        generator = torch.Generator().manual_seed(seed)
        super().__init__(dataset, batch_size, collate_fn=collate(whole.P), generator=generator, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # (torch gives a class of its own)
        self._compare()  # (now, not with the first batch, which a thread may ask for that loads ahead)
        return (as_global(batch, self._P) for batch in super().__iter__())

    def _compare(self) -> None:
        """Compare what the order of samples follows from. Collective."""
        context = Context.of(self._P.comm)
        context.comm.where = "an epoch of a DataLoader"
        told = gather_values(context.comm, context.everyone, context.comm.where, self._described())
        for worker, theirs in enumerate(told):
            if theirs != told[0]:
                raise ValueError(
                    "a DataLoader needs the same samples in the same order on every worker; worker 0 goes through "
                    f"{told[0]}, and worker {worker} through {theirs}. Give all of them one seed=, and what draws a "
                    "sampler or a part of a dataset (random_split) a generator of one seed"
                )

    def _described(self) -> str:
        whole, indices = _whole_of(self.dataset)
        found = [torch.as_tensor(one) for one in indices]
        samplers = (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        for sampler in {id(one): one for one in samplers}.values():
            found += _order_of(sampler)
        order = 0
        for one in found:
            order = crc32(one.cpu().numpy().tobytes(), order)
        size = "batches of their sampler" if self.batch_size is None else f"batches of {self.batch_size}"
        count = len(self.dataset)  # type: ignore[arg-type]  # (torch's datasets need not have a length; these have one)
        return f"{count} of {len(whole)} samples in {size} in the order {order:08x}"


_DRAWING = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)


def _order_of(sampler: Any) -> list[torch.Tensor]:
    """What is known of what the order follows from that a sampler gives."""
    found = []
    generator = getattr(sampler, "generator", None)
    if generator is None and isinstance(sampler, _DRAWING):
        generator = torch.default_generator
    if isinstance(generator, torch.Generator):
        found.append(generator.get_state())
    for name in ("indices", "weights"):
        chosen = getattr(sampler, name, None)
        if isinstance(chosen, (Sequence, torch.Tensor, np.ndarray)):
            found.append(torch.as_tensor(chosen))
    if type(sampler).__module__.startswith("torch."):  # (an option of others, as their rank, may mean anything)
        options = [one for one in vars(sampler).values() if isinstance(one, (int, float))]
        found.append(torch.tensor(options, dtype=torch.float64))
    return found


def _whole_of(dataset: Any) -> tuple[Any, list[Any]]:
    """The dataset of which one is a part, and the indices of the parts between."""
    indices = []
    while isinstance(dataset, data.Subset):
        indices.append(dataset.indices)
        dataset = dataset.dataset
    return dataset, indices


def as_global(batch: Any, P: Partition) -> Any:
    """A batch with a global tensor in the place of each of its blocks."""
    return each(batch, lambda one: one.as_global(P) if isinstance(one, Blocks) else one)
