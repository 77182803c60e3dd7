"""Batches of blocks that are read from files, against whole batches that are split."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import zarr
from launchers import forked

import distdl
from distdl.data import BlockDataset, Blocks, DataLoader, collate
from distdl.testing import Silent

SAMPLES = 7
IMAGES = np.random.default_rng(0).normal(size=(SAMPLES, 2, 5, 9))
MASKS = np.random.default_rng(1).integers(0, 3, (SAMPLES, 5, 9))
LABELS = np.arange(SAMPLES) % 4


class Recorded:
    """An array that takes note of what is read of it."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.shape, self.dtype = array, array.shape, array.dtype
        self.read: list[tuple[Any, ...]] = []

    def __getitem__(self, index: Any) -> Any:
        found = self.array[index]
        self.read.append((index, found.size))
        return found


def grid_of(grid: tuple[int, ...], root: Any = None) -> Any:
    root = root or distdl.world()
    return root.create_partition_inclusive(range(int(np.prod(grid)))).create_cartesian_topology_partition(grid)


def on_worker(worker: int, grid: tuple[int, ...], size: int = 5) -> Any:
    """A partition as one of its workers sees it, without the others; a message is an error."""
    return grid_of(grid, distdl.Partition(Silent(worker, size)))


def written(kind: str, folder: Path, name: str, array: np.ndarray) -> Any:
    if kind == "array":
        return array
    if kind == "npy":
        np.save(folder / f"{name}.npy", array)
        return folder / f"{name}.npy"
    if kind == "memmap":
        np.save(folder / f"{name}.npy", array)
        return np.load(folder / f"{name}.npy", mmap_mode="r")
    if kind == "h5":
        with h5py.File(folder / "all.h5", "a") as file:
            file.create_dataset(f"train/{name}", data=array, chunks=True)
        return f"{folder / 'all.h5'}:train/{name}"
    if kind == "zarr":
        zarr.open_group(folder / "all.zarr", mode="a").create_array(name, data=array)
        return f"{folder / 'all.zarr'}:{name}"
    paths = []
    for place, sample in enumerate(array):
        paths.append(folder / f"{name}{place}.npy")
        np.save(paths[-1], sample)
    return paths


KINDS = ["array", "npy", "memmap", "h5", "zarr", "list of files"]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_whole_arrays(kind, tmp_path):
    source = tuple(written(kind, tmp_path, name, one) for name, one in (("x", IMAGES), ("y", MASKS)))

    def work() -> None:
        for grid in [(1, 1, 2, 2), (2, 1, 1, 2), (3, 1, 1, 1), (1, 2, 1, 2)]:
            P = grid_of(grid)
            batches = list(DataLoader(BlockDataset(source, P), batch_size=3))
            assert len(batches) == 3
            for place, (x, y) in enumerate(batches):
                own = slice(3 * place, 3 * place + 3)
                expected = distdl.distribute_tensor(torch.from_numpy(IMAGES[own].copy()), P)
                assert type(x) is distdl.GlobalTensor and x.layout is expected.layout
                assert torch.equal(x.to_local(), expected.to_local())
                # a mask has no channels: it lies with the first of them, split over space as the images are
                assert torch.equal(y.full_tensor(), torch.from_numpy(MASKS[own]))
                assert tuple(y.layout.partition.workers.shape) == (grid[0], *grid[2:])

    distdl.run_workers(work, 5)


@pytest.mark.parametrize("worker", range(5))
def test_only_the_own_block_is_read(worker):
    images, labels = Recorded(IMAGES), Recorded(LABELS)
    P = on_worker(worker, (2, 1, 1, 2))
    x, label = BlockDataset((images, labels), P).__getitems__([6, 0, 3])
    place = np.argwhere(P.workers == worker)
    if worker == 4:  # which is outside
        assert images.read == labels.read == [] and x.block.shape == (0, 0, 0, 0) and label.block.shape == (0,)
        return
    (batch, _, _, column), columns = place[0], [slice(0, 5), slice(5, 9)]
    own = [6, 0] if batch == 0 else [3]
    box = (slice(0, 2), slice(0, 5), columns[column])
    assert [index for index, _ in images.read] == [(index, *box) for index in own]
    assert sum(size for _, size in images.read) == x.block.numel() < 3 * IMAGES[0].size
    assert torch.equal(x.block, torch.from_numpy(IMAGES[own][(slice(None), *box)]))
    assert [index for index, _ in labels.read] == ([(index,) for index in own] if column == 0 else [])


def test_a_sample_alone():
    for worker in range(4):
        images = Recorded(IMAGES)
        dataset = BlockDataset({"image": images}, on_worker(worker, (2, 1, 1, 2)))
        assert len(dataset) == SAMPLES
        expected = IMAGES[-2][:, :, :5] if worker % 2 == 0 else IMAGES[-2][:, :, 5:]
        assert torch.equal(dataset[-2]["image"], torch.from_numpy(expected))
    assert BlockDataset(IMAGES, on_worker(4, (2, 1, 1, 2)))[0].numel() == 0
    with pytest.raises(IndexError, match="sample 7 of 7"):
        dataset[7]


def test_order_is_the_same_on_every_worker_and_another_in_each_epoch():
    def work() -> list[list[int]]:
        torch.manual_seed(distdl.world().rank)
        loader = DataLoader(BlockDataset((IMAGES, LABELS), grid_of((1, 1, 2, 2))), 2, shuffle=True, drop_last=True)
        return [[int(i) for _, label in loader for i in label.full_tensor()] for _ in range(2)]

    found = distdl.run_workers(work, 5)
    assert all(one == found[0] for one in found)
    assert found[0][0] != found[0][1] and len(found[0][0]) == 6


def test_parts_of_a_dataset():
    """As a split into samples for training and validation makes them."""

    def work() -> None:
        dataset = BlockDataset((IMAGES, LABELS), grid_of((2, 1, 1, 2)))
        parts = torch.utils.data.random_split(dataset, [5, 2], torch.Generator().manual_seed(1))
        part = torch.utils.data.Subset(parts[0], [4, 0, 2])
        for given, indices in ((parts[1], parts[1].indices), (part, [parts[0].indices[i] for i in (4, 0, 2)])):
            images, labels = zip(*DataLoader(given, 2), strict=True)
            assert torch.equal(torch.cat([one.full_tensor() for one in images]), torch.from_numpy(IMAGES[indices]))
            assert torch.equal(torch.cat([one.full_tensor() for one in labels]), torch.from_numpy(LABELS[indices]))

    distdl.run_workers(work, 5)


def _split_by(seed: int) -> Any:
    return lambda whole: torch.utils.data.random_split(whole, [5, 2], torch.Generator().manual_seed(seed))[0]


def _drawn_by(seed: int) -> Any:
    return torch.utils.data.SubsetRandomSampler(range(7), torch.Generator().manual_seed(seed))


def _weighted(weights: torch.Tensor) -> Any:
    return torch.utils.data.WeightedRandomSampler(weights, 7, generator=torch.Generator().manual_seed(1))


class First(torch.utils.data.Sampler[int]):
    """The first so many samples: a sampler of one's own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(range(self.count))

    def __len__(self) -> int:
        return self.count


@pytest.mark.parametrize(
    "loader",
    [
        lambda whole, rank: DataLoader(whole, 2, seed=rank, shuffle=True),
        lambda whole, rank: DataLoader(whole, 2 + rank),
        lambda whole, rank: DataLoader(_split_by(rank)(whole), 2),
        lambda whole, rank: DataLoader(whole, 2, sampler=_drawn_by(rank)),
        lambda whole, rank: DataLoader(whole, batch_sampler=torch.utils.data.BatchSampler(_drawn_by(rank), 2, False)),
        lambda whole, rank: DataLoader(torch.utils.data.Subset(whole, range(3 + rank)), 2),
        lambda whole, rank: DataLoader(whole, 2, drop_last=bool(rank)),
        lambda whole, rank: DataLoader(whole, 2, sampler=torch.utils.data.DistributedSampler(whole, 3, rank)),
        lambda whole, rank: DataLoader(whole, batch_sampler=torch.utils.data.BatchSampler(range(7), 2 + rank, False)),
        lambda whole, rank: DataLoader(whole, 2, sampler=_weighted(torch.ones(7) + rank)),
        lambda whole, rank: DataLoader(whole, 2, sampler=[3, 1, 4 + rank]),
        lambda whole, rank: DataLoader(whole, batch_sampler=[[0, 3], [1]] if rank else [[0], [3, 1]]),
        lambda whole, rank: DataLoader(whole, batch_sampler=[torch.tensor([0, 3]), np.array([1 + rank])]),
        lambda whole, rank: DataLoader(whole, 3, sampler=First(5 - rank)),
        lambda whole, rank: DataLoader(torch.utils.data.ConcatDataset([_split_by(rank)(whole), whole]), 2),
        lambda whole, rank: DataLoader(BlockDataset(IMAGES[..., : 8 - rank], whole.P), 2),
        lambda whole, rank: DataLoader(BlockDataset(IMAGES.astype(np.float32) if rank else IMAGES, whole.P), 2),
        lambda whole, rank: DataLoader(BlockDataset(IMAGES, grid_of((1, 1, 1 + rank, 2 - rank))), 2),
    ],
)
def test_another_order_on_one_worker(loader):
    """Blocks of different samples would meet, in silence."""

    def work() -> str:
        whole, rank = BlockDataset(IMAGES, grid_of((1, 1, 1, 2))), int(distdl.world().rank == 1)
        with pytest.raises(ValueError, match=r"the same order on every worker; .*, and worker 1 through") as raised:
            list(loader(whole, rank))
        assert len(list(loader(whole, 0))) > 1
        return str(raised.value)

    assert len(set(distdl.run_workers(work, 3))) == 1


def drawn_by_torchs_generator() -> list[torch.Tensor]:
    whole = BlockDataset(LABELS, grid_of((2,)))
    loader = DataLoader(whole, 2, sampler=torch.utils.data.RandomSampler(whole))
    torch.manual_seed(distdl.world().rank)
    with pytest.raises(ValueError, match="the same order on every worker"):
        list(loader)
    torch.manual_seed(3)
    return [one.full_tensor() for one in loader]


def test_a_sampler_without_a_generator():
    """It draws from that of torch, of which each process has one."""
    for one in zip(*forked(drawn_by_torchs_generator, 2), strict=True):
        assert torch.equal(*one)


def test_a_thread_that_loads_ahead():
    """It may go through batches while the worker computes: only the begin of an epoch sends messages."""

    def work() -> list[torch.Tensor]:
        P, found = grid_of((2, 1, 1, 1)), []
        batches = iter(DataLoader(BlockDataset(IMAGES, P), 2))
        thread = threading.Thread(target=lambda: found.extend(batches))
        thread.start()
        for _ in range(30):
            distdl.world().allgather_data(0)
        thread.join()
        return [one.full_tensor() for one in found]

    for found in distdl.run_workers(work, 3):
        assert torch.equal(torch.cat(found), torch.from_numpy(IMAGES))


def test_what_is_no_dataset_of_blocks():
    with pytest.raises(TypeError, match=r"to be a BlockDataset, or a .* of some; got a TensorDataset"):
        DataLoader(torch.utils.data.TensorDataset(torch.ones(3)))
    with pytest.raises(TypeError, match=r"to be a BlockDataset, or a .* of some; got a TensorDataset"):
        DataLoader(torch.utils.data.ConcatDataset([torch.utils.data.TensorDataset(torch.ones(3))]))


class Brighter(BlockDataset):
    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * 2


class BrighterBatches(BlockDataset):
    def __getitems__(self, indices: Any) -> Any:
        found = super().__getitems__(indices)
        return Blocks(found.block * 2, found.shape)


class Listed(torch.utils.data.Subset[Any]):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) * 2

    def __getitems__(self, indices: Any) -> Any:
        return [self[index] for index in indices]


def test_a_class_that_changes_samples():
    """A loader asks for blocks of batches alone, so it would not be heard, or give blocks for whole tensors."""
    P = distdl.world("serial").create_cartesian_topology_partition((1, 1, 1, 1))
    with pytest.raises(TypeError, match=r"Brighter overrides __getitem__, of which .* does not ask"):
        DataLoader(Brighter(IMAGES, P))
    with pytest.raises(TypeError, match=r"BrighterBatches overrides __getitems__, .* joined or stacked"):
        DataLoader(torch.utils.data.ConcatDataset([BrighterBatches(IMAGES, P)]))
    with pytest.raises(TypeError, match=r"BrighterBatches overrides __getitems__, .* joined or stacked"):
        DataLoader(torch.utils.data.ConcatDataset([torch.utils.data.Subset(BrighterBatches(IMAGES, P), [1])]))
    with pytest.raises(TypeError, match=r"Listed overrides __getitems__, .* joined or stacked"):
        DataLoader(Listed(torch.utils.data.ConcatDataset([BlockDataset(IMAGES, P)]), [1, 2]))
    with pytest.raises(TypeError, match=r"whose __getitems__ gives the Blocks of a batch, .*; Listed gives a list"):
        next(iter(DataLoader(Listed(BlockDataset(IMAGES, P), [1, 2]), 2)))
    (x,) = DataLoader(BrighterBatches(IMAGES, P), 7)
    assert torch.equal(x.full_tensor(), torch.from_numpy(2 * IMAGES))


def test_datasets_that_are_joined():
    """As of several files that have many samples each, and of parts of them."""

    def work() -> None:
        P = grid_of((2, 1, 1, 2))
        first, second = BlockDataset((IMAGES, LABELS), P), BlockDataset((IMAGES[:3] + 9, LABELS[:3] + 9), P)
        part = torch.utils.data.Subset(first, np.array([5, -1]))
        images, labels = np.concatenate([IMAGES[[5, -1]], IMAGES[:3] + 9, IMAGES]), [1, 2, 9, 10, 11, *LABELS]
        both = torch.utils.data.ConcatDataset([part, second, first])
        parts = torch.utils.data.random_split(both, [8, 4], torch.Generator().manual_seed(1))
        for given, chosen in ((both, list(range(12))), (parts[1], parts[1].indices)):
            x, y = zip(*DataLoader(given, 5), strict=True)
            assert torch.equal(torch.cat([one.full_tensor() for one in x]), torch.from_numpy(images[chosen]))
            assert torch.cat([one.full_tensor() for one in y]).tolist() == [labels[place] for place in chosen]

    distdl.run_workers(work, 5)


def test_datasets_side_by_side():
    def work() -> None:
        P = grid_of((2, 1, 1, 2))
        both, masks = BlockDataset({"x": IMAGES, "label": LABELS}, P), BlockDataset(MASKS, P)
        for stacked in (torch.utils.data.StackDataset(both, masks), torch.utils.data.StackDataset(a=both, b=masks)):
            (batch,) = DataLoader(stacked, 7)
            first, second = batch.values() if isinstance(batch, dict) else batch
            assert torch.equal(first["x"].full_tensor(), torch.from_numpy(IMAGES))
            assert torch.equal(first["label"].full_tensor(), torch.from_numpy(LABELS))
            assert torch.equal(second.full_tensor(), torch.from_numpy(MASKS))

    distdl.run_workers(work, 5)


def test_datasets_that_do_not_fit_together():
    P, other = on_worker(0, (1, 1, 2, 2)), on_worker(0, (2, 1, 1, 2))
    for second, message in (
        (BlockDataset(IMAGES[:, :1], P), r"the first has 2x5x9 float64, and another 1x5x9 float64"),
        (BlockDataset((IMAGES, LABELS), P), "the same arrays, under the same names"),
        (BlockDataset(IMAGES, other), "over the same partition"),
    ):
        with pytest.raises(ValueError, match=message):
            DataLoader(torch.utils.data.ConcatDataset([BlockDataset(IMAGES, P), second]))


def test_a_zarr_group_without_a_name(tmp_path):
    zarr.save_group(str(tmp_path / "all.zarr"), field=IMAGES, mask=MASKS)
    with pytest.raises(ValueError, match=r"all.zarr:NAME, where NAME is one of field, mask"):
        BlockDataset(tmp_path / "all.zarr", on_worker(0, (1, 1, 2, 2)))


@pytest.mark.parametrize(("context", "kinds"), [("fork", ["h5", "npy"]), ("spawn", ["h5", "zarr", "memmap"])])
def test_worker_processes(context, kinds, tmp_path):
    source = tuple(written(kind, tmp_path, f"x {kind}", IMAGES) for kind in kinds)
    source = (*source, *(written(kind, tmp_path, f"y {kind}", LABELS) for kind in kinds))
    P = distdl.world("serial").create_cartesian_topology_partition((1, 1, 1, 1))
    dataset = BlockDataset(source, P)
    assert torch.equal(dataset[0][0], torch.from_numpy(IMAGES[0]))  # the files are open in this process, too
    loader = DataLoader(dataset, 3, num_workers=1, multiprocessing_context=context)
    batches = list(loader)
    assert all(type(one) is distdl.GlobalTensor for batch in batches for one in batch)
    for place, parts in enumerate(zip(*batches, strict=True)):
        expected = IMAGES if place < len(kinds) else LABELS
        assert torch.equal(torch.cat([one.full_tensor() for one in parts]), torch.from_numpy(expected))


def test_worker_processes_of_two_workers():
    def work() -> None:
        P = grid_of((1, 1, 1, 2))
        loader = DataLoader(BlockDataset(IMAGES, P), 4, num_workers=1, multiprocessing_context="spawn")
        assert torch.equal(torch.cat([x.full_tensor() for x in loader]), torch.from_numpy(IMAGES))

    distdl.run_workers(work, 2)


def loads_by_a_process() -> bool:
    loader = DataLoader(BlockDataset(IMAGES, grid_of((1, 1, 1, 2))), 4, num_workers=1, multiprocessing_context="spawn")
    return torch.equal(torch.cat([x.full_tensor() for x in loader]), torch.from_numpy(IMAGES))


def test_worker_processes_of_workers_that_are_processes():
    assert forked(loads_by_a_process, 2) == [True, True]


def test_blocks_of_another_partition_are_refused():
    """With the same error on every worker, also where a block has the right shape."""

    def work() -> str:
        rows, columns = grid_of((1, 1, 2, 1)), grid_of((1, 1, 1, 2))
        loader = torch.utils.data.DataLoader(BlockDataset(IMAGES, rows), 2, collate_fn=collate(columns))
        with pytest.raises(ValueError, match=r"read over 1x1x2x1 on workers \[0 1\] cannot be made .* over 1x1x1x2 "):
            next(iter(loader))
        turned = grid_of((2, 1, 1, 1))[::-1]
        loader = torch.utils.data.DataLoader(BlockDataset(IMAGES, turned), 2, collate_fn=collate(turned[::-1]))
        with pytest.raises(ValueError, match=r"on workers \[1 0\] cannot be made global over 2x1x1x1 ") as error:
            next(iter(loader))
        with pytest.raises(ValueError, match="needs a block of 1x3 on worker"):
            Blocks(torch.zeros(2, 3), (2, 3)).as_global(turned)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 2))) == 1


def test_torchs_own_loader():
    P = distdl.world("serial").create_cartesian_topology_partition((1, 1, 1, 1))
    make = partial(torch.utils.data.DataLoader, BlockDataset({"x": IMAGES}, P), batch_size=4, collate_fn=collate(P))
    assert [one["x"].shape for one in make()] == [(4, 2, 5, 9), (3, 2, 5, 9)]
    (first, _) = make(num_workers=1)
    assert type(first["x"]) is Blocks
    assert torch.equal(first["x"].as_global(P).full_tensor(), torch.from_numpy(IMAGES[:4]))


def test_a_pickled_dataset_holds_no_cells(tmp_path):
    P = on_worker(1, (1, 1, 2, 2))
    for kind in ("npy", "memmap", "h5", "zarr"):
        large = np.zeros((2, 2, 64, 64)) + 3
        (tmp_path / kind).mkdir()
        dataset = BlockDataset(written(kind, tmp_path / kind, "x", large), P)
        dataset[0]
        pickled = pickle.dumps(dataset)
        assert len(pickled) < 5000
        assert torch.equal(pickle.loads(pickled)[1], dataset[1]) and dataset[1].shape == (2, 32, 32)


def test_an_open_hdf5_array_and_a_view_of_a_map(tmp_path):
    P = on_worker(3, (1, 1, 2, 2))
    path, _, name = written("h5", tmp_path, "x", IMAGES).rpartition(":")
    with h5py.File(path) as file:
        dataset = BlockDataset(file[name], P)
    assert torch.equal(dataset[2], torch.from_numpy(IMAGES[2][:, 3:, 5:]))
    view = written("memmap", tmp_path, "z", IMAGES)[1:, :, ::2]
    assert torch.equal(
        pickle.loads(pickle.dumps(BlockDataset(view, P)))[2], torch.from_numpy(IMAGES[3][:, ::2][:, 2:, 5:])
    )


def test_foreign_byte_order_becomes_this_machines():
    block = BlockDataset(IMAGES.astype(">f4"), on_worker(0, (1, 1, 2, 2)))[1]
    assert block.dtype == torch.float32
    assert torch.equal(block, torch.from_numpy(IMAGES[1][:, :3, :5].astype(np.float32)))


@pytest.mark.parametrize(
    ("numbers", "kind", "words"),
    [([0, 1, SAMPLES], IndexError, "sample 7 of 7"), ([0, 1, 2.5], TypeError, "a whole one; got 2.5")],
)
def test_what_is_no_sample_is_an_error_on_every_worker(numbers, kind, words):
    """Also where the batch is split, and the sample would be another worker's."""

    def work() -> None:
        dataset = BlockDataset(LABELS, grid_of((3,)))
        with pytest.raises(kind, match=words):
            list(DataLoader(dataset, 3, sampler=numbers))
        with pytest.raises(kind, match=words):
            dataset[numbers[-1]]
        assert len(list(DataLoader(dataset, 3, sampler=[0, torch.tensor(-1), np.int32(3)]))) == 1

    distdl.run_workers(work, 3)


def test_errors(tmp_path):
    P = on_worker(0, (1, 1, 2, 2))
    with pytest.raises(ValueError, match="one number of samples; got 7, 6"):
        BlockDataset((IMAGES, LABELS[:6]), P)
    with pytest.raises(ValueError, match="a path, a list of paths, or an array; got int"):
        BlockDataset(3, P)
    with pytest.raises(ValueError, match=r"reads \.npy, \.h5, \.hdf5 and \.zarr"):
        BlockDataset(tmp_path / "x.txt", P)
    paths = written("list of files", tmp_path, "x", IMAGES)
    np.save(paths[4], IMAGES[4, :, :4])
    with pytest.raises(ValueError, match=r"x0.npy has 2x5x9 float64 and .*x4.npy 2x4x9"):
        BlockDataset(paths, P)[4]
    for name in ("x", "y"):
        source = written("h5", tmp_path, name, IMAGES)
    assert len(BlockDataset(source, P)) == SAMPLES
    with h5py.File(tmp_path / "two.h5", "w") as file:
        file["a"], file["b"] = IMAGES, MASKS
    with pytest.raises(ValueError, match=r"two.h5:NAME, where NAME is one of a, b"):
        BlockDataset(tmp_path / "two.h5", P)
    with pytest.raises(ValueError, match="needs in_order=True"):  # (else each worker takes what is ready first)
        DataLoader(BlockDataset(IMAGES, P), num_workers=1, in_order=False)
    with pytest.raises(TypeError, match=r"DataLoader needs dataset to be a BlockDataset, or .* of some; got a list"):
        DataLoader([1, 2])


def test_what_cannot_be_read_is_named(tmp_path):
    """As one of many files; and what no batch can be made of, before a batch is."""
    P = on_worker(0, (1, 1, 2, 2))
    paths = written("list of files", tmp_path, "x", IMAGES)
    paths[2].write_bytes(paths[3].read_bytes()[:-8])
    paths[4].write_bytes(b"")
    np.save(tmp_path / "texts.npy", np.array(["a", "b"]))
    (tmp_path / "no.h5").write_bytes(b"no")
    group = written("h5", tmp_path, "x", IMAGES).rpartition("/")[0]
    for given, words in (
        (paths[2], "x2.npy cannot be read: mmap length is greater than file size"),
        (f"{paths[1]}:name", "x1.npy:name cannot be read: it has one array, without a name"),
        (tmp_path / "no.h5", "no.h5 cannot be read: "),
        (group, "NAME is one of train/x"),
        (f"{group}/y", "train/y cannot be read: "),
        (tmp_path / "texts.npy", "of a dtype that torch has; got <U1"),
        (torch.zeros(2, dtype=torch.bfloat16), "of a dtype that NumPy has; got torch.bfloat16"),
        ([IMAGES[0]], "a list to have paths; got a ndarray in one"),
        ((), "an array at least"),
    ):
        with pytest.raises(ValueError, match=words):
            BlockDataset(given, P)
    with pytest.raises(ValueError, match=r"x4.npy cannot be read: No data left in file"):
        BlockDataset(paths, P)[4]
    for name, value in (("collate_fn", list), ("generator", torch.Generator())):
        with pytest.raises(TypeError, match=f"DataLoader takes no {name}="):
            DataLoader(BlockDataset(IMAGES, P), **{name: value})


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    import builtins

    def missing(name: str, *rest: Any) -> Any:
        if name in ("h5py", "zarr"):
            raise ImportError(name)
        return found(name, *rest)

    found = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ImportError, match=r"HDF5 needs h5py: pip install 'distdl\[data\]'"):
        BlockDataset(tmp_path / "x.h5", on_worker(0, (1, 1, 2, 2)))
