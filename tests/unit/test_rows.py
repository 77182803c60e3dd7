import numpy as np
import pytest
from contract import CHECKS

import distdl
from distdl.agreement import rows
from distdl.agreement.rows import UNREAD, Listed, Marginal, bring_together
from distdl.partition import Partition
from distdl.testing import Silent


@pytest.fixture
def along_axes(monkeypatch):
    """Rows come together along axes in small groups, too."""
    monkeypatch.setattr(rows, "FEW", 0)


def bring(table, read=None):
    """The rows of a 2x3x2 grid on twelve workers in another order, brought together; and what all rows are."""

    def main():
        P = distdl.world()
        grid = P.create_partition_inclusive(np.random.default_rng(1).permutation(12)).reshape(2, 3, 2)
        everyone = np.stack([table(*grid.index_of(worker)) for worker in range(12)])
        mine = np.ones(everyone.shape[1:], dtype=bool) if read is None else read(*grid.index_of(P.rank))
        found = bring_together(P.comm, tuple(range(12)), everyone[P.rank], mine, grid)
        return type(found), found.of(np.arange(12).reshape(3, 4)).reshape(12, -1), everyone

    return distdl.run_workers(main, 12)


def test_numbers_that_follow_from_a_place_along_an_axis(along_axes):
    for kind, found, everyone in bring(lambda i, j, k: np.array([7, 10 + i, j * j, -k, 3 - j])):
        assert kind is Marginal and (found == everyone).all()


@pytest.mark.parametrize("table", [lambda i, j, k: np.array([1, i + j]), lambda i, j, k: np.array([i * j * k, 0])])
def test_numbers_that_do_not_follow_are_all_gathered(along_axes, table):
    for kind, found, everyone in bring(table):
        assert kind is Listed and (found == everyone).all()


def test_one_worker_that_differs_makes_all_of_them_gather(along_axes):
    for kind, found, everyone in bring(lambda i, j, k: np.array([i, 5 - ((i, j, k) == (1, 2, 1))])):
        assert kind is Listed and (found == everyone).all()


def test_numbers_that_nobody_reads_need_not_follow(along_axes):
    def read(i, j, k):
        return np.array([True, (i, k) == (0, 0)])

    for kind, found, everyone in bring(lambda i, j, k: np.array([i, 4 + j if (i, k) == (0, 0) else 99 * k]), read):
        assert kind is Marginal and (found[:, 0] == everyone[:, 0]).all()
        assert sorted(found[:, 1].tolist()) == sorted(4 * [4, 5, 6])


def test_keys_tell_rows_apart(along_axes):
    def keys(number):
        def main():
            P = distdl.world()
            row, read = np.array([number, P.rank]), np.ones(2, dtype=bool)
            return bring_together(P.comm, (0, 1), row, read, P.reshape(1, 2)).key

        return distdl.run_workers(main, 2)

    assert len(set(keys(1) + keys(1))) == 1 and set(keys(1)).isdisjoint(keys(2))


class Alone(Silent):
    """The only worker that says anything, among many. It notes how long its messages are."""

    def all_max(self, group, words):
        self.lengths = [*getattr(self, "lengths", []), len(words)]
        return words


@pytest.mark.parametrize("shape", [(16, 8, 8), (64, 64, 32)])
def test_messages_grow_with_the_axes_and_not_with_the_workers(shape):
    size = int(np.prod(shape))
    comm = Alone(5, size)
    grid = Partition(comm).reshape(*shape)
    found = bring_together(comm, tuple(range(size)), np.arange(9), np.ones(9, dtype=bool), grid)
    assert comm.lengths == [9 * sum(shape), 9 * len(shape)]
    assert (found.of(np.array([5])) == np.arange(9)).all() and found.of(np.array([size - 1]))[0, 0] in (0, UNREAD)


@pytest.mark.parametrize("check", [name for name in CHECKS if "sequential" in name or "shapes" in name])
def test_layers_agree_along_axes(along_axes, check):
    distdl.run_workers(CHECKS[check], 4, "threads")
