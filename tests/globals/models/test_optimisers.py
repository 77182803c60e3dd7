"""Optimisers of parameters in shares, and their state in files."""

import copy
import io

import pytest
import torch
from nets import OPTIMISERS, assert_close, assert_same_state, batch, network, partition, run, sharded
from same import noise
from torch import nn

import distdl
from distdl.transport import Communicator


class Some(Communicator):
    """Some of the workers, as a world of their own."""

    def __init__(self, inner, workers):
        super().__init__()
        self._inner, self._workers = inner, workers
        self.rank, self.size = workers.index(inner.rank), len(workers)

    def exchange(self, sends, receives, tag=0):
        def there(messages):
            return [(self._workers[worker], one) for worker, one in messages]

        return self._inner.exchange(there(sends), there(receives), tag)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("overflows", range(6))
def test_a_gradient_scaler_of_models_of_two_worlds(overflows, turned):
    """A share of one worker that overflows leaves out the step of all, also of those that are not in its world."""

    def work():
        P = distdl.world()
        half = distdl.Partition(Some(P.comm, [[0, 2], [1, 3]][P.rank % 2]))
        models = [distdl.distribute(nn.Linear(3, 1, bias=False), one, "sharded") for one in (P, half)]
        parameters = [one.weight for one in (models[::-1] if turned else models)]
        optimiser, scaler = torch.optim.SGD(parameters), torch.amp.GradScaler("cpu", init_scale=2.0)
        for one in parameters:
            one.grad = torch.zeros_like(one)
        scaler.scale(torch.ones(()))
        which, place = divmod(overflows, 3)
        if which == 0 or P.rank % 2 == 0:  # (the other half has a model of its own)
            models[which].weight.grad[0, place] = torch.inf
        scaler.unscale_(optimiser)
        found = scaler._found_inf_per_device(optimiser)
        return [float(one) for one in found.values()]

    assert distdl.run_workers(work, 4) == [[1.0]] * 4


MORE_OPTIMISERS = {
    **OPTIMISERS,
    # (it scales up the rounding errors that are the gradient of a bias in front of a batch norm)
    "adafactor": lambda parameters: torch.optim.Adafactor([one for one in parameters if one.dim() > 1], 0.01),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.01, momentum=0.9, centered=True),
}


def trained(model, optimiser, steps):
    for step in steps:
        model.zero_grad()
        x, target = batch(step)
        (model(x) - target).square().mean().backward()
        optimiser.step()


@pytest.mark.parametrize("name", MORE_OPTIMISERS)
def test_the_state_of_an_optimiser_can_be_saved_and_loaded(name):
    """Between a model in shares, a sequential one, and one in other shares."""

    def work():
        make = MORE_OPTIMISERS[name]
        sequential = network()
        first = make(sequential.parameters())
        trained(sequential, first, range(2))
        model = sharded(network(seed=1), (2, 1, 2))
        optimiser = make(model.parameters())
        model.load_state_dict(sequential.state_dict())
        distdl.load_optimizer_state_dict(optimiser, first.state_dict())
        for parameter, state in optimiser.state.items():
            for value in state.values():
                if value.shape == parameter.shape and value.dim():
                    assert value.layout is parameter.layout  # (in shares from the beginning)
        for one, steps in ((sequential, first), (model, optimiser)):
            trained(one, steps, range(2, 4))
        assert_same_state(model, sequential)

        with pytest.raises(TypeError, match=r"of an optimiser distdl.optimizer_state_dict\(optimizer\)"):
            torch.save(optimiser.state_dict(), io.BytesIO())
        file = io.BytesIO()
        torch.save(distdl.optimizer_state_dict(optimiser), file)
        loaded = torch.load(io.BytesIO(file.getvalue()))
        other = sharded(model_of(model), (3, 1))
        again = make(other.parameters())
        distdl.load_optimizer_state_dict(again, loaded)
        alone = model_of(model)
        last = make(alone.parameters())
        last.load_state_dict(loaded)  # (which shares its memory)
        for one, steps in ((model, optimiser), (other, again), (alone, last)):
            trained(one, steps, range(4, 6))
        assert_same_state(model, alone)
        assert_same_state(other, alone)

    def model_of(model):
        plain = network()
        plain.load_state_dict(model.state_dict())
        return plain

    run(work)


class Counted(torch.optim.SGD):
    """An optimiser that keeps something of no parameter."""

    def step(self, closure=None):
        super().step(closure)
        self.state["all"]["mean"] = self.state["all"].get("mean", torch.zeros(2)).add_(1)
        self.state["count"] = 1 if self.state["count"] == {} else self.state["count"] + 1


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_what_an_optimiser_keeps_of_no_parameter_is_loaded(weights):
    saved = {}

    def work():
        P = distdl.world().reshape(-1, 1)
        model = distdl.distribute(torch.nn.Linear(3, 2), P, weights=weights)
        first, again = (Counted(model.parameters(), 0.1, momentum=0.9) for _ in range(2))
        model(distdl.distribute_tensor(torch.ones(4, 3), P)).sum().backward()
        first.step()
        state = distdl.optimizer_state_dict(first)
        if P.comm.rank == 0:
            saved.update(state)
        P.allgather_data(0)
        distdl.load_optimizer_state_dict(again, saved)  # (of threads one and the same, of which each has its copy)
        again.step()
        P.allgather_data(0)
        return again.state["count"], again.state["all"]["mean"].tolist(), first.state["all"]["mean"].tolist()

    assert distdl.run_workers(work, 3) == [(2, [2.0, 2.0], [1.0, 1.0])] * 3


@pytest.mark.parametrize("make", [
    lambda given: torch.optim.LBFGS(given, 0.1, max_iter=3), lambda given: torch.optim.AdamW(given, 0.1, foreach=True),
], ids=["lbfgs", "adamw"])  # fmt: skip
def test_an_optimiser_of_shares_and_of_an_unknown_coefficient(make):
    """One that every worker has whole, as where an equation is fitted along with a network."""

    def steps(model, x):
        coefficient = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        optimiser = make([*model.parameters(), coefficient])

        def loss():
            optimiser.zero_grad()
            value = (model(x) * coefficient - 1).square().mean()
            value.backward()
            return value

        for _ in range(3):
            optimiser.step(loss)
        return coefficient.detach(), *model.state_dict().values()

    sequential = torch.nn.Linear(5, 2).double()
    expected = steps(copy.deepcopy(sequential), noise(6, 5))

    def work():
        P = partition((2, 1))
        model = distdl.distribute(copy.deepcopy(sequential), P, weights="sharded")
        for ours, theirs in zip(steps(model, distdl.distribute_tensor(noise(6, 5), P)), expected, strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 3)


def test_copies_of_an_optimiser():
    def work():
        model = sharded(network(), (2, 1, 2))
        optimiser = OPTIMISERS["adamw"](model.parameters())
        trained(model, optimiser, range(1))
        twin, steps = copy.deepcopy((model, optimiser))  # (together: its parameters are those of the copy)
        for one, other in ((model, optimiser), (twin, steps)):
            trained(one, other, range(1, 3))
        assert steps.param_groups[0]["params"][0] is next(twin.parameters())
        assert_same_state(twin, model)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_gradient_that_is_made_of_activations(make, options, weights):
    """It is a global tensor, also where the parameter is a plain one; a backward adds to it."""
    sequential = nn.Linear(5, 3).double()

    def steps(model, x):
        optimiser = make(model.parameters(), 0.1, **options)
        for _ in range(2):
            with torch.no_grad():
                model.bias.grad = model(x).sum(0)
            optimiser.step()
            model(x).square().sum().backward()
        return list(model.state_dict().values()), [one.grad for one in model.parameters()]

    state, gradients = steps(copy.deepcopy(sequential), noise(4, 5))

    def work():
        P = distdl.world()[:2].reshape(2, 1)
        model, x = (
            distdl.distribute(copy.deepcopy(sequential), P, weights=weights),
            distdl.distribute_tensor(noise(4, 5), P),
        )
        if make is torch.optim.Adam and options == {"foreach": True} and weights == "replicated":
            with pytest.raises(TypeError, match="_foreach_lerp_ would write a global tensor into a plain one"):
                steps(model, x)
            return
        ours, theirs = steps(model, x)
        for one, other in zip([*ours, *theirs], [*state, *gradients], strict=True):
            assert_close(one, other)

    distdl.run_workers(work, 3)


def test_the_scaler_of_a_program_in_double_precision():
    def work():
        P = distdl.world().reshape(2, 1)
        model = distdl.distribute(nn.Linear(3, 2), P)
        scaler, optimiser = distdl.amp.GradScaler("cpu", init_scale=8.0), torch.optim.SGD(model.parameters(), 0.1)
        scaler.scale(model(distdl.distribute_tensor(torch.ones(4, 3), P)).sum()).backward()
        scaler.step(optimiser)
        scaler.update()
        return scaler.get_scale()

    torch.set_default_dtype(torch.float64)
    try:
        assert distdl.run_workers(work, 2, "threads") == [8.0, 8.0]
    finally:
        torch.set_default_dtype(torch.float32)
