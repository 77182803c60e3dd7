"""Indices that are out of range: the worker that reads one raises what torch raises, and the others learn of it."""

import pytest
import torch
from launched import assert_close, on_workers, split
from torch.nn import functional as F

import distdl
from distdl import GlobalTensor

labels = torch.arange(20).reshape(4, 5) % 3
scores = torch.arange(60.0, dtype=torch.float64).reshape(4, 3, 5).sin()

FUNCTIONS = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "nll_loss": lambda x, t: F.nll_loss(x, t, reduction="sum"),
    "embedding": lambda x, t: F.embedding(t, x.new_zeros(3, 2) if type(t) is torch.Tensor else torch.zeros(3, 2)),
    "one_hot": lambda x, t: F.one_hot(t, 3),
    "gather": lambda x, t: x.gather(1, t.unsqueeze(1)),
    "take_along_dim": lambda x, t: x[0, :, 0].take_along_dim(t),
    "scatter": lambda x, t: torch.zeros_like(x).scatter_(1, t.unsqueeze(1), 1.0),
    "table": lambda x, t: torch.zeros(3)[t],
    "table of two": lambda x, t: torch.arange(9.0).reshape(3, 3)[t, t],
    "index": lambda x, t: x[0, t],
    "index_put": lambda x, t: torch.zeros_like(x[0]).index_put_((t,), torch.ones(5).double()),
    "index_select": lambda x, t: x.index_select(1, t.flatten()),
    "index_add": lambda x, t: x.index_add(-2, t.flatten(), torch.ones(4, 20, 5).double()),
    "index_fill": lambda x, t: x.index_fill(1, t.flatten(), 2.0),
}


@pytest.mark.parametrize("index", [7, -1, -4, 2**40])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_worker_raises_an_error_that_says_what_torch_says(name, index):
    function, wrong = FUNCTIONS[name], labels.clone()
    wrong[3, 4] = index  # which one worker reads
    try:
        expected = function(scores, wrong)
    except (IndexError, RuntimeError) as error:
        expected = error

    def assert_told(grid, place):
        told = []

        def work():
            try:
                x = split(scores, *grid)
                t = {"as x": split(wrong, 2), "in columns": split(wrong, 1, 2), "plain": wrong}[place]
                found = function(x, t)
                whole = found.full_tensor() if type(found) is GlobalTensor else found
            except (IndexError, RuntimeError) as error:
                told.append(error)
                raise
            told.append(whole)

        if not isinstance(expected, Exception):
            distdl.run_workers(work, 3)
            assert all(torch.equal(one, expected) for one in told)
            return
        with pytest.raises((type(expected), distdl.CommunicationError)):
            distdl.run_workers(work, 3)
        text = str(expected).split(" for dimension")[0]
        assert all(isinstance(one, (type(expected), distdl.CommunicationError)) and text in str(one) for one in told)
        assert len(told) == 3

    nothing_is_global = name in ("embedding", "one_hot", "table", "table of two")
    for grid in ((2, 1, 1), (1, 3, 1)):
        for place in ("as x", "in columns") if nothing_is_global else ("as x", "in columns", "plain"):
            assert_told(grid, place)


@on_workers
def test_places_to_ignore():
    x = split(scores)
    for mark in (255, -100, -1, 5):
        marked = torch.where(labels == 2, mark, labels)
        expected = F.cross_entropy(scores, marked, ignore_index=mark)
        entered = split(marked, 2)
        blocks = GlobalTensor.from_local(entered.to_local(), entered.layout.partition)
        for target in (entered, marked, blocks):
            assert_close(F.cross_entropy(x, target, ignore_index=mark), expected)
        none = torch.full_like(labels, mark)
        assert F.cross_entropy(x, split(none), ignore_index=mark).isnan()


@pytest.mark.parametrize("grid", [(2, 1, 1), (1, 3, 1)])
def test_a_class_beside_those_to_ignore_that_is_out_of_range(grid):
    marked = torch.where(labels == 0, 255, labels)
    marked[3, 4] = 7
    with pytest.raises((IndexError, distdl.CommunicationError), match="Target 7 is out of bounds"):
        distdl.run_workers(lambda: F.cross_entropy(split(scores, *grid), split(marked, 2), ignore_index=255), 3)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64])
def test_what_is_ignored_by_default_is_no_class_number_of_a_byte(dtype):
    """-100 would be 156 among them."""
    marked = labels.to(dtype)
    marked[3, 4] = 156
    with pytest.raises((IndexError, distdl.CommunicationError), match="Target 156 is out of bounds"):
        distdl.run_workers(lambda: F.nll_loss(split(scores[..., 0], 1, 3), split(marked[:, 4], 2)), 3)
