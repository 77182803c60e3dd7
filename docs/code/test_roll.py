"""Tests of your own primitive: its plan without workers, then its values, adjoint and messages on threads."""

import pytest
import torch
from roll import Roll, roll

import distdl
from distdl.geometry import runs
from distdl.partition.layout import Layout
from distdl.testing import Counting, Silent, assert_adjoint, assert_matches_sequential


# [plan]
@pytest.mark.parametrize("by", [0, 2, -3, 7, 100])
def test_the_plan_is_the_cyclic_shift(by):
    P = distdl.Partition(Silent(rank=0, size=4)).reshape(4)
    plan = roll(Layout.of(P, [runs([3, 0, 1, 3])]), dim=0, by=by)
    x = torch.arange(7)
    assert (plan.matrix() @ x.numpy() == torch.roll(x, by).numpy()).all()
    assert (plan.T.matrix() == plan.matrix().T).all()


@pytest.mark.parametrize("me", range(4))
def test_a_workers_plan_has_the_moves_that_touch_it(me):
    P = distdl.Partition(Silent(rank=0, size=4)).reshape(4)
    owned = Layout.balanced(P, (7,))
    touching = [move for move in roll(owned, 0, 2).moves if me in (move.source, move.target)]
    assert sorted(map(repr, roll(owned, 0, 2, me).moves)) == sorted(map(repr, touching))


# [layer]
class Reference(torch.nn.Module):
    def forward(self, x):
        return torch.roll(x, 5, 1)


@pytest.mark.parametrize("blocks", [None, [runs([3, 1]), runs([0, 7])]])
def test_it_matches_torch_and_its_backward_is_its_adjoint(blocks):
    def main():
        P = distdl.world()
        grid = P.create_partition_inclusive([4, 0, 3, 1]).reshape(2, 2)  # worker 2 stays outside
        layer = Roll(grid, dim=1, by=5)
        whole = torch.arange(28.0).double().reshape(4, 7)
        assert_matches_sequential(layer, Reference(), whole, blocks)
        owned = Layout.balanced(grid, (4, 7)) if blocks is None else Layout.of(grid, blocks)
        assert_adjoint(layer, owned.block(whole))

    distdl.run_workers(main, workers=5)


# [count]
def test_a_shift_by_one_cell_sends_one_message_to_the_next_worker():
    def main():
        P = distdl.Partition(Counting(distdl.world().comm))
        layer = Roll(P.reshape(4), dim=0, by=1)
        x = torch.ones(3, requires_grad=True)
        y = layer(x)
        assert P.comm.sent == {(P.rank + 1) % 4: 1} and P.comm.received == {(P.rank - 1) % 4: 1}
        P.comm.reset()
        y.sum().backward()
        assert P.comm.sent == {(P.rank - 1) % 4: 1}

    distdl.run_workers(main)


# [errors]
def test_what_one_worker_has_wrong_is_the_same_error_on_all():
    def main():
        P = distdl.world()
        with pytest.raises(ValueError, match="a dim from 0 to 0"):
            Roll(P.reshape(4), dim=1, by=1)
        layer = Roll(P.reshape(4), dim=0, by=1)
        with pytest.raises(ValueError, match=r"1 dims .* worker 3 has one with 2 dims") as error:
            layer(torch.ones(2, 2) if P.rank == 3 else torch.ones(2))
        texts = P.allgather_data(str(error.value))
        assert texts == [texts[0]] * 4
        return layer(torch.ones(2)).tolist()  # and all of them can go on

    distdl.run_workers(main)
