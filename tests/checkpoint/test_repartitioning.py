"""What one kind of model has saved, on some workers, any other kind loads, on any number of them: to the last bit."""

import copy

import pytest
import torch
from saved_models import KINDS, OPTIMISERS, assert_equal, equip, make, noise, train
from torch import nn

import distdl
from distdl.checkpoint.converting import convert


def saved(path, kind, workers, optimiser="adamw"):
    """Train two steps, and save; returns the state of the sequential model and optimiser, and of the scheduler."""

    def work():
        P = distdl.world()
        model = make(kind, P)
        steps, schedule = equip(model, optimiser)
        train(model, steps, schedule, P, 0, 2)
        distdl.save(path, model, steps, schedule, step=2)
        return *distdl.export_state(model, steps), schedule.state_dict()

    return distdl.run_workers(work, workers)[0]


def loaded(path, kind, workers, optimiser="adamw"):
    def work():
        P = distdl.world()
        model = make(kind, P, seed=1)
        steps, schedule = equip(model, optimiser)
        step = distdl.load(path, model, steps, schedule)
        state = (*distdl.export_state(model, steps), schedule.state_dict())
        return step, state, train(model, steps, schedule, P, 2, 3)

    return distdl.run_workers(work, workers)


@pytest.mark.parametrize("kind", KINDS)
def test_all_kinds_load_what_one_has_saved(kind, tmp_path):
    expected = saved(tmp_path, kind, 1 if kind == "plain" else 3)
    losses = {}
    for other, workers in (("plain", 1), ("replicated", 2), ("sharded", 4), ("modules", 2)):
        for step, state, found in loaded(tmp_path, other, workers):
            assert step == 2
            assert_equal(state, expected)
            losses[other, workers] = found
    for found in losses.values():
        assert found == pytest.approx(losses["plain", 1], rel=1e-10)


@pytest.mark.parametrize("optimiser", [name for name in OPTIMISERS if name not in ("adamw", "adafactor")])
def test_other_optimisers(optimiser, tmp_path):
    expected = saved(tmp_path, "modules", 4, optimiser)
    for kind, workers in (("plain", 1), ("sharded", 3), ("modules", 2)):
        for _, state, _ in loaded(tmp_path, kind, workers, optimiser):
            assert_equal(state, expected)


def test_an_optimiser_whose_state_has_other_shapes(tmp_path):
    """Adafactor's means over rows and columns: right of global tensors, and refused of blocks, whose rows are parts."""
    expected = saved(tmp_path, "sharded", 3, "adafactor")
    for kind, workers in (("plain", 1), ("replicated", 2), ("sharded", 4)):
        for _, state, _ in loaded(tmp_path, kind, workers, "adafactor"):
            assert_equal(state, expected)

    def work():
        model = make("modules", distdl.world())
        stored = [one for one in model.parameters() if one.numel()]
        steps = torch.optim.Adafactor(stored)
        for parameter in stored:
            parameter.grad = torch.ones_like(parameter)
        steps.step()
        with pytest.raises(ValueError, match=r"keeps of a parameter that is split to be one number, .*row_var has"):
            distdl.save(tmp_path, model, steps)

    distdl.run_workers(work, 2)


class Counting(torch.optim.SGD):
    """An optimiser that keeps something of no parameter: in its state, and beside it."""

    def __init__(self, parameters):
        super().__init__(parameters, 0.01, momentum=0.9)
        self.slow = {}

    def step(self, closure=None):
        super().step(closure)
        self.state["all"] = {"count": self.state["all"].get("count", 0) + 1, "mean": torch.tensor([0.5, 2.0])}
        self.slow = {"seen": [self.state["all"]["count"]], "mean": torch.tensor(3.0)}

    def state_dict(self):
        return {**super().state_dict(), "slow": self.slow}

    def load_state_dict(self, state_dict):
        self.slow = state_dict["slow"]
        super().load_state_dict({key: one for key, one in state_dict.items() if key != "slow"})


def test_what_an_optimiser_keeps_of_no_parameter(tmp_path, monkeypatch):
    monkeypatch.setitem(OPTIMISERS, "counting", lambda groups: Counting(groups))
    expected = saved(tmp_path / "ours", "sharded", 2, "counting")
    assert expected[1]["slow"]["seen"] == [2] and expected[1]["state"]["all"]["count"] == 2
    for kind, workers in (("plain", 1), ("replicated", 3), ("sharded", 3), ("modules", 2)):
        for _, state, _ in loaded(tmp_path / "ours", kind, workers, "counting"):
            assert_equal(state, expected)
    assert "left out: random numbers, all of the optimiser, slow of the optimiser" in convert(
        tmp_path / "ours", tmp_path / "torch's"
    )

    def differs():
        model = make("replicated", distdl.world())
        optimiser = Counting(model.parameters())
        optimiser.state["all"] = {"count": distdl.world().rank}
        with pytest.raises(
            ValueError, match=r"besides its parameters .*state is .*0.* on worker 0 and .*1.* on worker"
        ):
            distdl.save(tmp_path / "other", model, optimiser)

    distdl.run_workers(differs, 2)


class Listing(torch.optim.SGD):
    """An optimiser that keeps a list of tensors of each parameter."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["past"] = [torch.zeros_like(parameter)]


def test_lists_of_blocks_are_refused(tmp_path):
    """Also where all blocks are alike, which would be loaded as the whole tensor."""

    def work():
        model = make("modules", distdl.world())
        optimiser = Listing([one for one in model.parameters() if one.numel()])
        optimiser.step()
        with pytest.raises(ValueError, match=r"is split to be no list or dict of tensors; .*/past/0 is in one"):
            distdl.save(tmp_path, model, optimiser)

    distdl.run_workers(work, 2)


def test_lbfgs_of_shares_is_saved_without_its_optimiser(tmp_path):
    """Which is refused, and says how: the training goes on as the sequential one."""

    def stepped(model, optimiser, x, steps):
        def closure():
            optimiser.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        for _ in range(steps):
            optimiser.step(closure)

    def work():
        P, x = distdl.world().reshape(-1, 1), noise(6, 4)
        alone = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
        for number, parameter in enumerate(alone.parameters()):
            parameter.data.copy_(noise(*parameter.shape, seed=number))
        first, second = (distdl.distribute(copy.deepcopy(alone), P, weights="sharded") for _ in range(2))
        of_alone, mine, other = (torch.optim.LBFGS(one.parameters(), max_iter=3) for one in (alone, first, second))
        stepped(alone, of_alone, x, 4)
        stepped(first, mine, distdl.distribute_tensor(x, P), 2)
        with pytest.raises(ValueError, match=r"no list or dict of global tensors, as LBFGS has them; .*optimizer"):
            distdl.save(tmp_path, first, mine)
        distdl.save(tmp_path, first)
        distdl.load(tmp_path, second)
        distdl.load_optimizer_state_dict(other, distdl.optimizer_state_dict(mine))
        stepped(second, other, distdl.distribute_tensor(x, P), 2)
        for ours, theirs in zip(second.state_dict().values(), alone.state_dict().values(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)

    distdl.run_workers(work, 2)


class Numbers(nn.Module):
    """Parameters that are a number, and that have no element."""

    def __init__(self, fill):
        super().__init__()
        self.number, self.nothing = nn.Parameter(torch.tensor(fill)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return (x * self.number).sum() + self.nothing.sum()


def test_parameters_of_one_element_or_none(tmp_path):
    """What an optimiser counts stays a plain number, and it comes back for a parameter without elements, too."""

    def work(before, after):
        P = distdl.world().reshape(distdl.world().size, 1)
        first, second = (distdl.distribute(Numbers(1.0), P, weights=one) for one in (before, after))
        mine, other = (torch.optim.Adam(one.parameters()) for one in (first, second))
        first(distdl.distribute_tensor(torch.ones(4, 3), P)).backward()
        mine.step()
        distdl.save(tmp_path, first, mine)
        distdl.load(tmp_path, second, other)
        assert [type(one["step"]) for one in other.state.values()] == [torch.Tensor, torch.Tensor]
        assert_equal(distdl.export_state(second, other), distdl.export_state(first, mine))
        assert list(distdl.export_state(second, other)[1]["state"]) == [0, 1]

    for before, after in (("replicated", "sharded"), ("sharded", "sharded"), ("sharded", "replicated")):
        distdl.run_workers(lambda before=before, after=after: work(before, after), 3)


def test_the_state_is_that_of_the_sequential_training(tmp_path):
    """Where the arithmetic is the same, on one worker, training in torch alone ends with the same state_dicts."""
    state, optimiser_state, schedule = saved(tmp_path, "sharded", 1)
    model = make("plain", None)
    steps, other = equip(model)
    train(model, steps, other, None, 0, 2)
    assert_equal(state, dict(model.state_dict()))
    assert_equal(optimiser_state, steps.state_dict())
    assert_equal(schedule, other.state_dict())
