"""The warning of workers that get no cell of a tensor that has enough for all."""

import re
import warnings

import numpy as np
import pytest
import torch
from same import noise
from torch.nn import functional as F

import distdl

SPLITS = {
    "one channel of an image": ((1, 1, 64, 64), (2, 2), "leaves 3 of 4 .*: dim 0 .*of axis 0, dim 1 .*of axis 1"),
    "one channel of a volume": ((1, 1, 8, 16, 16), (1, 2, 2), "leaves 2 of 4 .*: dim 1 has extent 1 for the 2 workers"),
    "a batch smaller than its axis": ((2, 3, 8, 8), (4, 1, 1, 1), "leaves 2 of 4 .*: dim 0 has extent 2 for the 4"),
    "an odd number of workers": ((2, 3, 8, 8), (3, 1, 1, 1), "leaves 1 of 3"),
    "two dims": ((3, 8), (6,), "leaves 3 of 6"),
}


def told(work, workers):
    """What is warned of while this work is done."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        distdl.run_workers(work, workers)
    return [str(one.message) for one in found]


@pytest.mark.parametrize(("shape", "grid", "text"), SPLITS.values(), ids=SPLITS)
def test_the_warning_names_the_axis(shape, grid, text):
    workers = torch.Size(grid).numel()

    def work():
        distdl.distribute_tensor(noise(*shape), grid)
        distdl.distribute_tensor(noise(*shape), grid)

    (found,) = told(work, workers)
    assert re.search(text, found) and "distdl.suggest(model, workers, shape) ranks" in found


def test_the_warning_stands_at_the_line_of_the_user():
    with pytest.warns(UserWarning) as found:
        distdl.run_workers(lambda: distdl.distribute_tensor(noise(1, 8), (2, 1)), 2)
    assert [one.filename for one in found] == [__file__]


def test_a_partition_of_some_workers():
    (found,) = told(lambda: distdl.distribute_tensor(noise(1, 8), distdl.world()[1:].reshape(2, 1)), 3)
    assert "leaves 1 of 2" in found
    (found,) = told(lambda: distdl.distribute_tensor(noise(3, 3), (7, 1)), 7)
    assert "leaves 4 of 7" in found and "take fewer workers" in found
    (found,) = told(lambda: distdl.distribute_tensor(noise(1, 8), (1, 2, 1), axes=(1, 2)), 2)
    assert "dim 0 has extent 1 for the 2 workers of axis 1. axes=(None, 2) leaves this dim whole" in found


class Bottleneck(torch.nn.Module):
    def forward(self, x, mask):
        return F.interpolate(F.adaptive_avg_pool2d(x * mask, 1), size=4)


def test_what_no_one_wonders_about():
    def work():
        me, P = distdl.world().comm.rank, distdl.world().reshape(1, 1, 2, 2)
        distdl.distribute_tensor(torch.arange(3), (4,))  # fewer cells than workers
        distdl.distribute_tensor(noise(2, 8, 8), P, axes=(0, 2, 3))
        distdl.distribute_tensor(torch.empty(0, 8), (4, 1))
        distdl.GlobalTensor.from_local(torch.ones(0 if me else 8), (4,))
        distdl.distribute(Bottleneck(), P)(noise(1, 8, 8, 8), noise(1, 8, 1, 1))
        distdl.distribute_tensor(noise(1, 8), (1, 4)).redistribute((4, 1))
        distdl.summary(Bottleneck(), (4, 1, 1, 1), [(1, 8, 8, 8), (1, 8, 1, 1)])

    assert told(work, 4) == []


def test_a_plain_input_of_a_model():
    (found,) = told(lambda: distdl.distribute(torch.nn.ReLU(), (4, 1))(noise(2, 8)), 4)
    assert "a distributed model leaves 2 of 4" in found and "dim 0 has extent 2 for the 4 workers" in found


def test_the_last_batch_of_a_loader():
    def work():
        dataset = distdl.data.BlockDataset((np.ones((6, 8)), np.ones(6)), (4, 1))
        return [image.shape[0] for image, _ in distdl.data.DataLoader(dataset, batch_size=4)]

    (found,) = told(work, 4)
    assert "a batch leaves 2 of 4" in found and "drop_last=True" in found
