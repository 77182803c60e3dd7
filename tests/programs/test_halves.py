"""A backward that begins in another way than it was recorded: all workers replay it, or none does."""

from collections import Counter

import pytest
import torch
from compiled_pairs import Pair, on_threads

import distdl
from distdl.transport.recording import Recording


def squares(model, x):
    y = model(x)
    y.square().sum().backward()
    return y, x.grad


def mean(model, x):
    """The gradient of the result is one number, which stands for all."""
    y = model(x)
    y.mean().backward()
    return y, x.grad


def row(model, x):
    """It is one number on the worker that has this row alone, as on worker 1 of three. The others have zeros."""
    y = model(x)
    y.narrow(2, 1, 1).sum().backward()
    return y, x.grad


class Rows(Pair):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def x(self, seed=0):
        return distdl.distribute_tensor(
            super().x(seed).full_tensor().detach()[:, :, : self.rows], self.grid
        ).requires_grad_()


@pytest.mark.parametrize("rows", [2, 5])  # on three workers: one of them idle, and blocks of two rows and one
@pytest.mark.parametrize(("first", "then"), [(mean, squares), (row, squares), (squares, row), (mean, row)])
def test_workers_whose_line_would_do_go_with_those_whose_line_does_not(rows, first, then):
    def work():
        pair = Rows(rows)
        for seed in range(5):
            pair.both(first, seed)
        assert pair.model.programs[0].replays == 2, pair.model.explain()
        for seed in range(5, 8):
            pair.both(then, seed, rounds=True)  # gradients that lie otherwise may add up in another order

    on_threads(work, 3)


@pytest.mark.parametrize(("use", "asked"), [(squares, 0), (mean, 1), (row, 1)])
def test_a_backward_asks_only_where_a_line_may_not_do(use, asked):
    def work():
        pair = Rows(3)
        for seed in range(4):
            pair.both(use, seed)
        x, sent, comm = pair.x(9), Counter(), pair.P.comm
        comm.recorder = Recording(comm, begun=lambda call: sent.update([call.operation, *map(str, call.sends)]))
        use(pair.model, x)
        comm.recorder = None
        assert pair.model.programs[0].replays == 2, pair.model.explain()
        assert sent["all_max"] == 1 + asked

    on_threads(work, 3)


def test_all_workers_replay_again_once_gradients_come_as_in_the_recordings():
    """One number for all, but in memory of its own."""

    def spread(model, x):
        y = model(x)
        torch.autograd.backward([y], [torch.ones_like(y) / 60])
        return y, x.grad

    def work():
        pair = Rows(3)
        for seed in range(4):
            pair.both(spread, seed)
        pair.both(mean, 5, rounds=True)
        assert pair.lines() == [True], pair.model.explain()

    on_threads(work, 3)
