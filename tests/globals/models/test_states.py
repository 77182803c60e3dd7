"""The state of a model in shares: whole tensors, which are written into, saved and loaded."""

import copy

import pytest
import torch
from nets import GRIDS, assert_close, assert_same_state, batch, network, run, sharded


def test_what_is_written_into_a_state_dict_reaches_the_parameters():
    """In torch they share memory; averages of weights are often kept so."""

    def work():
        sequential = network()
        model = sharded(sequential, (2, 1, 2))
        models, averages = (model, sequential), (copy.deepcopy(model), copy.deepcopy(sequential))
        x, target = batch(0)
        for decay in (0.9, 0.5):
            for one, average in zip(models, averages, strict=True):
                (one(x) - target).square().mean().backward()
                torch.optim.SGD(one.parameters(), 0.1).step()
                values = one.state_dict()
                for name, value in average.state_dict().items():
                    if value.is_floating_point():
                        value.mul_(decay).add_(values[name], alpha=1 - decay)
            assert_same_state(*averages)
            assert_close(*(average(x) for average in averages))
        for one in models:
            found = one.state_dict()
            found["scale"].zero_()  # (the dict is there when the parameter is used)
            assert_close(one.scale, torch.zeros((), dtype=torch.float64))
            found["scale"].add_(1)
            found = one.state_dict()
            assert found["scale"] == 1
        assert not model.scale.__dict__["_ties"][:-1]

    run(work)


def test_what_is_written_into_an_outdated_state_dict_is_an_error():
    def work():
        model = sharded(network(), (3, 1))
        found = model.state_dict()
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(2)
        assert_close(model.scale, 2 * found["scale"])
        found["scale"].zero_()
        del found
        with pytest.raises(RuntimeError, match="call it again"):
            model(batch(0)[0])

    run(work)


def test_a_state_dict_of_variables_has_the_parameters_themselves():
    def work():
        model = sharded(network(), GRIDS[0])
        state, named = model.state_dict(keep_vars=True), dict(model.named_parameters(remove_duplicate=False))
        assert all(state[name] is parameter for name, parameter in named.items())
        assert all(type(one) is torch.Tensor for one in model.state_dict().values())

    run(work)
