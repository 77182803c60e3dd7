"""Errors in a replay: they end all workers, and name what was called, the module and the line."""

import warnings
from time import monotonic

import pytest
import torch
from compiled_nets import noise, weighted
from torch import nn
from torch.nn import functional

import distdl


class Picks(nn.Module):
    def forward(self, x, places):
        table = torch.arange(8.0)
        return x * table[places]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.picks, self.last = nn.Conv2d(1, 2, 3, padding=1), Picks(), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x, places):
        return self.last(self.picks(self.first(x), places))


def failing(wrap, failed):
    """Train; in the fifth call worker 1 gets a place that is not there."""

    def work():
        P = distdl.world()
        grid = (1, 1, P.comm.size, 1)
        model = distdl.distribute(weighted(Net()), grid)

        @wrap
        def step(x, y, places):
            loss = functional.mse_loss(model(x, places), y)
            loss.backward()
            return loss

        x, y = (distdl.distribute_tensor(noise((2, 1, 12, 8), seed), grid) for seed in (1, 2))
        for number in range(5):
            model.zero_grad()
            places = torch.arange(8) + (9 if number == 4 and P.comm.rank == 1 else 0)
            try:
                step(x, y, places)
            except Exception as error:
                failed[P.comm.rank] = error
                raise

    with warnings.catch_warnings(), pytest.raises(IndexError, match="index 9 is out of bounds") as caught:
        warnings.simplefilter("ignore")
        begun = monotonic()
        distdl.run_workers(work, 3)
    assert monotonic() - begun < 30
    return caught.value


def test_a_worker_that_fails_in_a_replay_ends_the_others_as_in_the_step():
    eager, replayed = {}, {}
    theirs, mine = failing(lambda step: step, eager), failing(distdl.compile, replayed)
    assert str(mine) == str(theirs)
    assert {rank: type(one) for rank, one in replayed.items()} == {rank: type(one) for rank, one in eager.items()}
    assert 1 in replayed
    notes = [note for note in mine.__notes__ if "replay" in note]
    assert len(notes) == 1
    assert "in a replay of step, which repeats aten.index.Tensor (module model.picks, test_errors.py:18)" in notes[0]


def test_a_worker_that_gives_up_in_a_replay_names_the_module():
    replayed = {}
    failing(distdl.compile, replayed)
    told = [str(error) for rank, error in replayed.items() if rank != 1]
    assert len(told) == 2
    for text in told:
        assert "gave up in conv2d" in text and "at test_errors.py:27 (module model." in text
