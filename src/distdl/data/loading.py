"""Loaders of batches that are global tensors: every worker goes through the same samples in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch.utils import data

from distdl.data.blocks import BlockDataset, Blocks, each, leaves
from distdl.data.wrapped import blocks_of, parts_in
from distdl.globals.layouts.context import Context
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.partition import Partition, dims
from distdl.partition.arguments import Split, checks_arguments
from distdl.partition.sharing import gather_values
from distdl.workers.worlds import split_of


class collate:
    """What makes global tensors of the batches of a :class:`BlockDataset`, for torch's own ``DataLoader``.

    ``torch.utils.data.DataLoader(dataset, batch_size=4, collate_fn=distdl.data.collate(P))`` gives global tensors where
    it has no worker processes. From those come :class:`Blocks`, for a global tensor cannot be sent between processes;
    call their ``as_global(P)``, or use :class:`DataLoader`, which does.
    """

    @checks_arguments
    def __init__(self, P: Split) -> None:
        self.P: Partition | None = split_of(P, "collate")

    def __call__(self, batch: Any) -> Any:
        if self.P is None or data.get_worker_info() is not None:
            return batch
        return as_global(batch, self.P)

    def __getstate__(self) -> dict[str, Any]:
        return {"P": None}


class DataLoader(data.DataLoader[Any]):
    """torch's loader, of batches that are global tensors.

    Every worker makes one with the same arguments and goes through it. Samples come in the same order on every worker;
    at the start of each epoch the workers compare, by two small messages, what it follows from.

    Args:
        dataset: a :class:`BlockDataset`; or what ``torch.utils.data`` makes of some: a ``Subset``, as ``random_split``
            gives it, a ``ConcatDataset`` or a ``StackDataset``.
        seed: of the order, if it is shuffled. Each epoch has another one.
        options: those of ``torch.utils.data.DataLoader``, but for ``collate_fn`` and ``generator``.
    Raises: TypeError for another dataset, or one whose class changes samples, and not blocks of batches; ValueError for
        ``in_order=False``. At the begin of an epoch ValueError, the same on every worker, if samples, their shapes or
        dtypes, batches, how these are split, the seed, or what is known of a sampler (its length, its generator, its
        indices, options of torch's) differ.
    """

    @checks_arguments
    def __init__(self, dataset: Any, batch_size: int = 1, *, seed: int = 0, **options: Any) -> None:
        if not options.get("in_order", True):
            raise ValueError(
                "DataLoader needs in_order=True: which batch a process has ready first differs from worker to worker, "
                "and blocks of different batches would meet"
            )
        for name, instead in (("collate_fn", "change batches"), ("generator", "give it seed=")):
            if name in options:
                raise TypeError(f"DataLoader takes no {name}=: {instead}")
        self._given = dataset
        blocks, self._P = blocks_of(dataset)
        generator = torch.Generator().manual_seed(seed)
        super().__init__(blocks, batch_size, collate_fn=collate(self._P), generator=generator, **options)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch names a class of its own
        # compared now: the first batch may be asked for by a thread that loads ahead
        self._compare()
        return (_checked(as_global(batch, self._P), self.dataset) for batch in super().__iter__())

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
        found, whole = parts_in(self._given)
        samplers = (self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        for sampler in {id(one): one for one in samplers}.values():
            found += _order_of(sampler)
        order = 0
        for one in found:
            order = crc32(one.cpu().numpy().tobytes(), order)
        size = "batches of their sampler" if self.batch_size is None else f"batches of {self.batch_size}"
        count = len(self.dataset)  # type: ignore[arg-type]  # these datasets have a length; not all of torch's do
        kinds = ", ".join(f"{dims(one.shape) or '0-d'} {one.dtype}" for one in leaves(_read_by(self.dataset).sources))
        # the text of a partition of many workers shows only some, so the checksum tells them apart
        split = f"over {self._P} ({crc32(self._P.workers.tobytes()):08x})"
        return f"{count} of {whole} samples of {kinds} in {size} {split} in the order {order:08x}"


def _read_by(dataset: Any) -> BlockDataset:
    """The dataset that reads what a loader's dataset gives, which is itself or the whole of which it is a part."""
    while isinstance(dataset, data.Subset):
        dataset = dataset.dataset
    found: BlockDataset = dataset
    return found


_DRAWING = (data.RandomSampler, data.SubsetRandomSampler, data.WeightedRandomSampler)


def _order_of(sampler: Any) -> list[torch.Tensor]:
    """What determines the order of a sampler, as far as that can be known."""
    if isinstance(sampler, (list, tuple, range)):  # samples, or batches, which may differ in length
        batches = [np.ravel(one) for one in sampler]
        lengths = torch.tensor([len(one) for one in batches])
        return [lengths, torch.as_tensor(np.concatenate(batches))] if batches else [lengths]
    if isinstance(sampler, (torch.Tensor, np.ndarray)):
        return [torch.as_tensor(sampler)]
    found = []
    with suppress(TypeError, NotImplementedError):  # not every sampler has a length
        found.append(torch.tensor(len(sampler)))
    generator = getattr(sampler, "generator", None)
    if generator is None and isinstance(sampler, _DRAWING):
        generator = torch.default_generator
    if isinstance(generator, torch.Generator):
        found.append(generator.get_state())
    for name in ("indices", "weights"):
        chosen = getattr(sampler, name, None)
        if isinstance(chosen, (Sequence, torch.Tensor, np.ndarray)):
            found.append(torch.as_tensor(chosen))
    # options of other samplers, such as their rank, may mean anything
    if type(sampler).__module__.startswith("torch."):
        options = [one for one in vars(sampler).values() if isinstance(one, (int, float))]
        found.append(torch.tensor(options, dtype=torch.float64))
    return found


def as_global(batch: Any, P: Partition) -> Any:
    """A batch with a global tensor in the place of each of its blocks."""
    return each(batch, lambda one: one.as_global(P) if isinstance(one, Blocks) else one)


def _checked(batch: Any, dataset: Any) -> Any:
    """A batch that a loader gives.

    Raises: TypeError if nothing in it is a global tensor.
    """
    if not any(type(one) is GlobalTensor for one in leaves(batch)):
        raise TypeError(
            f"DataLoader needs a dataset whose __getitems__ gives the Blocks of a batch, or tuples or dicts of them; "
            f"{type(dataset).__name__} gives a {type(batch).__name__}"
        )
    return batch
