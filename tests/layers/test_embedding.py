import copy

import pytest
import torch
from helpers_layers import every_worker_raises, noise, on_workers
from properties_dropout import assert_embeds, indices
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import DistributedEmbedding
from distdl.testing import Counting


@pytest.mark.parametrize(
    ("workers", "x_grid", "work"),
    [
        (1, (1,), (1, 1)),
        (2, (2, 1), (1, 1)),
        (3, (1,), (3, 1)),
        (3, (1, 1), (1, 3)),
        (4, (2,), (2, 1)),
        (4, (1, 2), (1, 2)),
        (6, (1,), (3, 2)),
        (6, (3, 1, 1), (2, 1)),
        (6, (1, 3), (1, 2)),
    ],
)
def test_matches_sequential(workers, x_grid, work):
    """Input, output and work lie on different workers, in another order, with one idle."""
    columns, places = work[1], torch.tensor(x_grid).prod().item()

    def main(P):
        team = P.create_partition_inclusive([(k + 2) % (workers + 1) for k in range(workers + 1)][::-1])
        P_w = team[:workers].reshape(*x_grid, *work)
        P_x = P[workers + 1 - places :].reshape(*x_grid)
        P_y = team[workers + 1 - places * columns :].reshape(*x_grid, columns)
        shape = (5, 4, 3)[: len(x_grid)]
        assert_embeds(P_x, P_y, P_w, indices(*shape))
        assert_embeds(P_x, P_y, P_w, indices(*shape).int(), padding_idx=3)
        assert_embeds(P_x, P_y, P_w, indices(*shape, rows=2), rows=2, columns=1, padding_idx=-1)
        uneven = [runs([0] * (parts - 1) + [n]) for n, parts in zip(shape, x_grid, strict=True)]
        assert_embeds(P_x, P_y, P_w, indices(*shape), blocks=uneven)
        assert_embeds(P_x, P_y, P_w, indices(0, *shape[1:]))
        if set(x_grid) == {1}:
            assert_embeds(P_x, P_y, P_w.reshape(*work), indices(*shape))

    on_workers(workers + 1, main)


def test_initial_values_are_normal_and_do_not_depend_on_the_partition():
    torch.manual_seed(8)
    found = []

    def main(P, rows=1, columns=1):
        layer = DistributedEmbedding(
            P[:1], P[:columns].reshape(1, columns), P.reshape(rows, columns), 300, 7, padding_idx=-1
        )
        blocks = P.allgather_data(layer.weight.detach())
        if P.rank == 0:
            found.append(torch.cat([torch.cat(blocks[columns * r :][:columns], 1) for r in range(rows)]))

    on_workers(1, main)
    on_workers(6, lambda P: main(P, 3, 2))
    on_workers(4, lambda P: main(P, 1, 4))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert not found[0][299].any() and found[0][:299].all()
    assert abs(found[0].mean()) < 0.08 and abs(found[0].std() - 1) < 0.06


def test_messages():
    """Rows and columns: the indices to the three others, partial results to the other of each column, one agreement."""

    def main(P):
        team = distdl.Partition(Counting(P.comm))
        layer = DistributedEmbedding(team[:1], team[:2].reshape(1, 2), team.reshape(2, 2), 8, 4)
        x = indices(3) if P.rank == 0 else torch.zeros(3, 0)
        layer(x)
        team.comm.reset()
        y = layer(x)
        assert [name for name, _ in team.comm.log] == ["all_max", "broadcast", "exchange"]
        team.comm.reset()
        y.sum().backward()
        assert [name for name, _ in team.comm.log] == ["exchange"]
        alone = DistributedEmbedding(team.reshape(4), team.reshape(4, 1), team.reshape(4, 1, 1), 8, 4)
        alone(indices(3))
        team.comm.reset()
        alone(indices(3)).sum().backward()
        assert [name for name, _ in team.comm.log] == ["all_max", "broadcast", "sum"]

    on_workers(4, main)


def test_checkpoint_frozen_weights_copies_and_requires_grad_of_idle_inputs():
    def main(P):
        for P_x, P_y, P_w in [
            (P[:1], P[1:3].reshape(1, 2), P[1:3].reshape(1, 2)),
            (P[:1], P[3:].reshape(1, 1), P[1:3].reshape(2, 1)),
            (P[:2], P[2:].reshape(2, 1), P.reshape(2, 2, 1)),
        ]:
            layer = copy.deepcopy(DistributedEmbedding(P_x, P_y, P_w, 7, 5).double())
            x = indices(4) if P_x.active else torch.zeros(4, 0, requires_grad=True)
            found = []
            for checkpointed in (False, True):
                layer.zero_grad()
                y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
                y.square().sum().backward()
                found.append(layer.weight.grad)
            assert torch.equal(*found) and (P_x.active or x.grad.shape == x.shape)
            layer.weight.requires_grad_(P.rank != 1)
            member = P.rank in (P_x | P_y | P_w)
            if member or P.rank != 1:
                checkpoint(layer, x.detach(), use_reentrant=False).square().sum().backward()
            assert P.rank == 1 or torch.equal(layer.weight.grad, 2 * found[0])
            layer.weight.requires_grad_(False)
            assert not layer(x.detach()).requires_grad

    on_workers(4, main)


def test_autocast_and_the_default_dtype():
    def main(P):
        layer = DistributedEmbedding(P[:1], P[:1].reshape(1, 1), P.reshape(2, 1), 7, 5).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(indices(4) if P.rank == 0 else torch.zeros(4, 0))
        assert y.dtype == torch.bfloat16 and y.shape == ((4, 5) if P.rank == 0 else (4, 0))
        y.sum().backward()

    on_workers(2, main)


def test_a_gradient_that_is_not_finite_stays_in_its_row():
    def main(P):
        layer = DistributedEmbedding(P[:1], P[:1].reshape(1, 1), P.reshape(2, 1), 4, 1).double()
        y = layer(torch.tensor([1, 2]) if P.rank == 0 else torch.zeros(2, 0))
        y.backward(torch.tensor([[torch.inf], [torch.nan]]).double() if P.rank == 0 else torch.zeros(2, 0).double())
        expected = [[[0.0], [torch.inf]], [[torch.nan], [0.0]]][P.rank]
        assert torch.equal(layer.weight.grad.nan_to_num(7.0), torch.tensor(expected).double().nan_to_num(7.0))

    on_workers(2, main)


def layer(P, **options):
    return DistributedEmbedding(P[:1], P[:2].reshape(1, 2), P.reshape(2, 2), 7, 5, **options)


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedEmbedding(P, P.reshape(4, 1), P.reshape(2, 2), 7, 5), "P_x: 4, P_y: 4x1, P_w: 2x2"),
    (lambda P: DistributedEmbedding(P[:1], P[:1].reshape(1, 1), P.reshape(2, 2), 7, 5), "P_y: 1x1, P_w: 2x2"),
    (lambda P: layer(P, max_norm=1.0), "max_norm=None, scale_grad_by_freq=False and sparse=False; got 1.0, False"),
    (lambda P: layer(P, sparse=True), "got None, False and True"),
    (lambda P: layer(P, scale_grad_by_freq=True), "got None, True and False"),
    (lambda P: layer(P, padding_idx=7), "one of 7 rows; got 7"),
    (lambda P: layer(P)(torch.tensor([-1])), "indices from 0 to 6; worker 0 has -1"),
    (lambda P: layer(P)(torch.tensor([1, 0, 99])), "indices from 0 to 6; worker 0 has 99"),
    (lambda P: layer(P)(noise(3)), "indices in int32 or int64; got torch.float64"),
    (lambda P: layer(P)(indices(3, 2)), "1 dims"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(4, make)


def test_an_error_passes():
    """The call after a refused one finds nothing changed."""

    def main(P):
        table = layer(P)
        good, bad = indices(3), torch.full((3,), 7)
        table(good)
        for x in (bad, good, bad, good):
            try:
                table(x)
            except ValueError:
                assert x is bad
            else:
                assert x is good

    on_workers(4, main)
