import pytest
import torch
from helpers_layers import every_worker_raises, noise, on_workers, penalty, share
from properties_padding import Sequential
from torch.nn import functional

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import DistributedPad
from distdl.testing import Counting, assert_adjoint, assert_matches_sequential

MODES = [("constant", 0.0), ("constant", 2.5), ("reflect", 0.0), ("replicate", 0.0), ("circular", 0.0)]
PADDINGS = [(1, 1), (3, 0), (0, 4), (4, 5), (-2, 3), (2, -1), (-3, -1), (5, 5), (0, 6), (6, 0), (0, 0)]


def check(P, x, padding, mode, value, blocks=None):
    assert_matches_sequential(DistributedPad(P, padding, mode, value), Sequential(padding, mode, value), x, blocks)


@pytest.mark.parametrize("of", [2, pytest.param(1, marks=pytest.mark.every_case)])
@pytest.mark.parametrize(("number", "workers"), list(enumerate([1, 2, 3, 4, 6])))
@pytest.mark.parametrize(("mode", "value"), MODES)
def test_every_mode_over_blocks_of_any_size(number, workers, mode, value, of):
    """With 6 cells, padding reaches over several blocks."""

    def main(P):
        P = P.reshape(1, 1, workers)
        sizes = {1: [[6]], 2: [[0, 6], [5, 1]], 3: [[1, 4, 1], [0, 0, 6]], 4: [[1, 0, 4, 1], [6, 0, 0, 0]]}
        for padding in share(PADDINGS, number, of):
            if mode == "reflect" and max(padding) == 6:
                continue
            check(P, noise(2, 2, 6), padding, mode, value)
            for uneven in sizes.get(workers, [[0, 1, 0, 4, 1, 0]]):
                check(P, noise(2, 2, 6), padding, mode, value, [runs([2]), runs([2]), runs(uneven)])

    on_workers(workers, main)


@pytest.mark.parametrize(("mode", "value"), MODES)
def test_several_dims_and_workers_that_are_left_out(mode, value):
    def main(P):
        team = P.create_partition_inclusive([3, 1, 4, 0])
        check(team.reshape(1, 1, 2, 2), noise(2, 1, 5, 4), (1, 2, 2, 1), mode, value)
        check(
            team.reshape(2, 1, 1, 2),
            noise(3, 1, 5, 4),
            (-1, 2, 3, 0),
            mode,
            value,
            [runs([0, 3]), runs([1]), runs([5]), runs([4, 0])],
        )
        check(team.reshape(1, 2, 2, 1, 1), noise(1, 3, 4, 3, 3), (1, 1, 0, 2, 2, 3), mode, value)
        check(team.reshape(2, 2, 1), noise(3, 3, 0), (0, 0), "constant", value)
        y = DistributedPad(team[:1].reshape(1, 1), (1, 1))(torch.ones(2, 2) if P.rank == 3 else torch.zeros(2, 0))
        assert y.shape == ((2, 4) if P.rank == 3 else (2, 0))

    on_workers(5, main)


def test_any_dims_and_dtypes():
    def main(P):
        grid = P.reshape(2, 2)
        for dtype in (torch.int32, torch.bool, torch.complex64, torch.bfloat16):
            whole = noise(4, 4).round().to(dtype)
            block = whole[2 * (P.rank // 2) :, 2 * (P.rank % 2) :][:2, :2]
            for mode, expected in (("constant", functional.pad(whole, (1, 1, 2, 0), value=1)), ("replicate", None)):
                y = DistributedPad(grid, (1, 1, 2, 0), mode, 1.0 if mode == "constant" else 0.0)(block)
                assert y.dtype == dtype and y.shape == (3, 3)
                if expected is not None:
                    assert torch.equal(y, expected[3 * (P.rank // 2) :, 3 * (P.rank % 2) :][:3, :3])
        for mode in ("constant", "reflect", "circular"):
            assert_adjoint(DistributedPad(grid, (2, 1, -1, 1), mode), noise(3, 4, seed=P.rank))

    on_workers(4, main)


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_double_backward_checkpoint_and_no_gradient_on_some_workers(mode):
    def main(P):
        layer = DistributedPad(P.reshape(1, 3), (2, 1), mode)
        whole = noise(2, 5).requires_grad_()

        penalty(Sequential((2, 1), mode), whole).backward()
        x = whole.detach()[:, slice(*runs([2, 0, 3])[P.rank])].clone().requires_grad_()
        penalty(layer, x).backward()
        assert torch.allclose(x.grad, whole.grad[:, slice(*runs([2, 0, 3])[P.rank])], rtol=1e-10)
        expected, x.grad = x.grad, None
        penalty(lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False), x).backward()
        assert torch.equal(expected, x.grad)
        y = layer(x.detach().requires_grad_(P.rank == 2))
        assert y.requires_grad
        y.sum().backward()

    on_workers(3, main)


def test_parts_that_go_to_one_worker_are_one_message():
    """In a circle of two, each has the other on both sides."""

    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedPad(team.reshape(1, 2, 2), (1, 1, 1, 1), "circular")
        x = torch.ones(1, 4, 4, requires_grad=True)
        layer(x)
        team.comm.reset()
        y = layer(x)
        assert [name for name, _ in team.comm.log] == ["all_max", "exchange"]
        assert team.comm.sent == team.comm.received and list(team.comm.sent.values()) == [1, 1, 1]
        team.comm.reset()
        y.sum().backward()
        assert [name for name, _ in team.comm.log] == ["exchange"] and list(team.comm.sent.values()) == [1, 1, 1]

    on_workers(4, main)


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedPad(P, (1,)), "two whole numbers for each padded dim"),
    (lambda P: DistributedPad(P, (1, 1) * 3), "the last dim first, of at most 2 dims; got (1, 1, 1, 1, 1, 1)"),
    (lambda P: DistributedPad(P, 1), "got 1"),
    (lambda P: DistributedPad(P, (1, 1.5)), "got (1, 1.5)"),
    (lambda P: DistributedPad(P, (1, 1), "mirror"), "constant, reflect, replicate, circular; got 'mirror'"),
    (lambda P: DistributedPad(P, (1, 1), "reflect", 2.0), "a value in the mode 'constant' only; got 2.0"),
    (lambda P: DistributedPad(P, (3, 1), "reflect")(torch.ones(1, 1)), "in dim 1 the padding is 3 and 1 and the ext"),
    (lambda P: DistributedPad(P, (0, 4), "circular")(torch.ones(1, 1)), "to be at most what it repeats"),
    (lambda P: DistributedPad(P, (3, -1), "circular")(torch.ones(1, 1)), "is 3 and -1 and the extent 3"),
    (lambda P: DistributedPad(P, (-2, -2))(torch.ones(1, 1)), "not to cut off more than there is"),
    (lambda P: DistributedPad(P, (1, 1), "replicate")(torch.ones(1, 0)), "to have a cell to repeat"),
    (lambda P: DistributedPad(P, (1, 1))(torch.ones(1, 1, 1)), "2 dims on all workers"),
    (lambda P: DistributedPad(P, (1, 1))(torch.ones(1, 1, dtype=torch.int32 if P.rank else torch.int64)), "one dtype"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(3, lambda P: make(P.reshape(1, 3)), (ValueError, TypeError))
