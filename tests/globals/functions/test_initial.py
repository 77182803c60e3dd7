"""Initial values of parameters that are global tensors."""

import torch
from nets import assert_same_state, run, sharded
from torch import nn


def _conv():
    return nn.Conv2d(3, 6, 3).double()


def test_initial_values_of_parameters_in_shares():
    def work():
        sequential = _conv()
        model = sharded(sequential, (3, 1, 1, 1))
        for one in (model, sequential):
            nn.init.constant_(one.bias, 0.3)
            nn.init.dirac_(one.weight)
        assert_same_state(model, sequential)
        bound = 1 / 27**0.5
        for fill, expected in (
            (nn.init.uniform_, 0.5),
            (lambda w: nn.init.uniform_(w, a=-3, b=-1), 2),
            (lambda w: nn.init.normal_(w, mean=5, std=0.1), 5),
            (lambda w: nn.init.kaiming_uniform_(w, a=5**0.5), bound / 2),
            (lambda w: nn.init.kaiming_uniform_(w, nonlinearity="relu", mode="fan_out"), (6 / 54) ** 0.5 / 2),
            (nn.init.xavier_normal_, (2 / 81) ** 0.5 * (2 / torch.pi) ** 0.5),
            (nn.init.trunc_normal_, (2 / torch.pi) ** 0.5),
        ):
            nn.init.zeros_(model.weight)
            assert fill(model.weight) is model.weight
            found = model.weight.full_tensor()
            assert found.unique().numel() == found.numel()
            assert abs(float(found.detach().abs().mean()) / expected - 1) < 0.25

    run(work)
