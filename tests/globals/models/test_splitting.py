"""Where shares of parameters lie."""

import torch
from nets import network, run, sharded
from same import noise
from torch import nn

import distdl


def test_parameters_are_global_and_stored_in_shares():
    """No worker stores more than its share of weights, gradients and the optimiser's state."""

    def make():
        return nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1), nn.GroupNorm(3, 24), nn.ReLU(), nn.Conv2d(24, 10, 5, padding=2), nn.PReLU()
        )

    def work():
        workers = distdl.world().comm.size
        sequential = network(make)
        model = sharded(sequential, (2, 1, 2))
        optimiser = torch.optim.AdamW(model.parameters(), 0.01)
        for step in range(2):
            optimiser.zero_grad()
            model(noise(3, 3, 7, 6, seed=step)).square().mean().backward()
            optimiser.step()
        total = sum(one.numel() for one in sequential.parameters())
        for one in model.parameters():
            assert isinstance(one, nn.Parameter) and isinstance(one, distdl.GlobalTensor) and one.is_leaf
            assert isinstance(one.grad, distdl.GlobalTensor) and one.grad.layout is one.layout
            assert one.to_local().untyped_storage().nbytes() == one.to_local().numel() * 8
        stored = [
            [one.to_local() for one in model.parameters()],
            [one.grad.to_local() for one in model.parameters()],
            *([state[key].to_local() for state in optimiser.state.values()] for key in ("exp_avg", "exp_avg_sq")),
        ]
        for blocks in stored:
            assert sum(one.numel() for one in blocks) <= total / workers + len(blocks)

    run(work, 5)


def test_what_does_not_divide_goes_to_different_workers():
    def work():
        model = sharded(nn.ParameterList([nn.Parameter(torch.ones(())) for _ in range(8)]), (2, 2))
        assert sum(one.to_local().numel() for one in model.parameters()) == 2
        model = sharded(nn.ParameterList([nn.Parameter(torch.ones(5, 1, 3)) for _ in range(4)]), (2, 2))
        assert 14 <= sum(one.to_local().numel() for one in model.parameters()) <= 16

    run(work)
