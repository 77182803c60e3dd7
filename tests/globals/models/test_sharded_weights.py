"""Weights of which every worker stores a share: the same training as with whole weights, in a share of the memory."""

import copy
import functools
import io
import threading
import weakref

import pytest
import torch
from covering import in_pairs
from nets import (
    GRIDS,
    OPTIMISERS,
    Checkpointed,
    Regularised,
    assert_close,
    assert_same_state,
    assert_trains_alike,
    backward_of_parameters,
    backward_thrice,
    batch,
    network,
    partition,
    run,
)
from same import noise
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import distdl
from distdl import GlobalTensor
from distdl.globals.models import gathering
from distdl.globals.models.gathered import Gathered, Keep
from distdl.globals.models.gathering import Gathering
from distdl.transport import Communicator


def sharded(model, grid, fallback="error"):
    return distdl.distribute(copy.deepcopy(model), partition(grid), weights="sharded", fallback=fallback)


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_training(optimiser):
    def work():
        for grid in GRIDS[:2]:
            sequential = network()
            model = sharded(sequential, grid)
            assert_trains_alike(model, sequential, optimiser, [True, False, True, False])

    run(work)


class _ReadTwice(nn.Module):
    """A weight that is read without a graph first, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(noise(6, 5))
        self.v = nn.Parameter(noise(5, seed=2), requires_grad=False)

    def forward(self, x):
        with torch.no_grad():
            norm = self.w.square().sum() + self.v.sum()
        return x @ self.w / norm + self.v


def test_a_weight_that_is_read_first_without_a_graph_gets_its_gradient():
    def work():
        sequential, x = _ReadTwice(), noise(4, 6, seed=3)
        model = sharded(sequential, (2, 1))
        for one in (sequential, model):
            one(x).square().sum().backward()
        torch.testing.assert_close(model.w.grad.full_tensor(), sequential.w.grad, rtol=1e-12, atol=1e-12)

    distdl.run_workers(work, 3)


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


def weights_in(book):
    return [one for one in book.entries if one.layer.startswith("weights")]


@pytest.fixture
def apart(monkeypatch):
    """The weights of each module come by themselves."""
    monkeypatch.setattr(gathering, "_ALONG", -1)


@pytest.mark.usefixtures("apart")
def test_weights_come_together_once_for_each_module_and_once_more_in_backward():
    def work():
        model = sharded(network(), (2, 1, 2))
        x, target = batch(0)
        modules = 6 + 1 + 1  # (those with weights, the model's own, and its frozen one, which moves by itself)
        for _ in range(2):
            with distdl.ledger() as book:
                loss = nn.functional.mse_loss(model(x), target)
            assert sum(one.calls for one in weights_in(book)) == modules, str(book)
            with distdl.ledger() as book:
                loss.backward()
            # all again, and back go the gradients of all that has some
            assert sum(one.calls for one in weights_in(book)) == modules + modules - 1, str(book)

    run(work)


@pytest.mark.usefixtures("apart")
def test_a_table_comes_together_once():
    """The gradient of a lookup reads no row. What else a module does may, and then the table comes again."""
    indices = torch.tensor([[1, 2, 0, 2], [8, 3, 3, 1]])

    def model(own):
        made = network(lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 3)).double())
        if own:
            made[0].forward = lambda x: nn.functional.embedding(x, made[0].weight) @ made[0].weight.mT @ made[0].weight
        return made

    def work():
        for own in (False, True):
            alone, ours = model(own), distdl.distribute(model(own), partition((2, 2)), weights="sharded")
            with distdl.ledger() as book:
                y = ours(distdl.distribute_tensor(indices, partition((2, 2))))
            assert sum(one.calls for one in weights_in(book)) == 2, str(book)
            with distdl.ledger() as book:
                y.square().sum().backward()
            assert sum(one.calls for one in weights_in(book)) == 3 + own, str(book)
            alone(indices).square().sum().backward()
            for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
                assert torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12)

    run(work)


@pytest.mark.usefixtures("apart")
def test_autograd_keeps_no_whole_weight(monkeypatch):
    """There is no whole weight between modules, and in backward those of one module at a time."""
    made = threading.local()
    gather = Gathering.gather

    def noted(self, blocks):
        wholes = gather(self, blocks)
        made.storages += [StorageWeakRef(one.untyped_storage()) for one in wholes]
        return wholes

    def alive():
        return sum(not one.expired() for one in made.storages)

    monkeypatch.setattr(Gathering, "gather", noted)

    def work():
        made.storages = []
        model = sharded(network(lambda: nn.Sequential(*(nn.Conv1d(4, 4, 3, padding=1) for _ in range(6)))), (1, 1, 2))
        between, backward = [], []

        def note(module, inputs, result):
            between.append(alive())
            if result.requires_grad:
                result.register_hook(lambda _: backward.append(alive()))

        for layer in model:
            layer.register_forward_hook(note)
        y = model(noise(1, 4, 7))
        assert between == [0] * 6 and len(made.storages) == 12 and alive() == 0
        y.square().sum().backward()
        assert len(made.storages) == 24 and alive() == 0
        assert len(backward) == 6 and max(backward) <= 4  # (weight and bias of one, and of the one before)
        with torch.no_grad():
            model(noise(1, 4, 7))
        assert alive() == 0

    run(work, 3)


@pytest.mark.parametrize("by", ["module", "function", "nested", "whole"])
def test_activation_checkpointing(by):
    def work():
        for grid in GRIDS:
            sequential = network(lambda: Checkpointed(by))
            model = sharded(sequential, grid)
            for one in (model, sequential):
                loss = 0.0
                for step in range(2):
                    x, target = batch(step)
                    y = checkpoint(one, x, use_reentrant=False) if by == "whole" else one(x)
                    loss = loss + (y - target).square().mean()
                loss.backward()
            assert_same_state(model, sequential)

    run(work)


@pytest.mark.parametrize("by", ["inside", "list", "result", "outside", "alone", "twice"])
def test_losses_of_parameters(by):
    def work():
        sequential = network(lambda: Regularised(by))
        model = sharded(sequential, (2, 1, 2))
        x, target = batch(0)
        for one in (model, sequential):
            backward_of_parameters(one, by, x, target)
        assert_same_state(model, sequential)

    run(work)


def test_a_backward_may_run_twice_and_be_differentiated():
    def work():
        sequential = network()
        model = sharded(sequential, (3, 1, 1))
        for one in (model, sequential):
            backward_thrice(one)
        assert_same_state(model, sequential)

    run(work)


def test_weights_that_are_computed():
    def make():
        model = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv1d(6, 2, 3, padding=1))
        nn.utils.parametrizations.weight_norm(model[0])
        nn.utils.parametrizations.spectral_norm(model[2]).eval()
        return model

    def work():
        sequential = network(make)
        distdl.distribute(sequential, partition((1, 1)))  # (only so that buffers are the same on all workers)
        model = sharded(network(make), (2, 1, 2))
        model.load_state_dict(sequential.state_dict())
        for step in range(2):
            x, target = batch(step)
            for one in (model, sequential):
                (one(x) - target).square().mean().backward()
            assert_same_state(model, sequential)

    run(work)


class Places(nn.Module):
    """Weights are read behind the last tensor that is saved."""

    def __init__(self):
        super().__init__()
        self.row, self.column = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4, 1))

    def forward(self, x):
        return x.tanh() + self.row + self.column + self.row

    def checkpointed(self, x):
        return checkpoint(self, x, use_reentrant=False)


def test_a_checkpoint_that_reads_weights_behind_all_that_is_saved():
    def work():
        model = distdl.distribute(Places(), distdl.world(), weights="sharded")
        x = distdl.distribute_tensor(torch.ones(4, 3), distdl.world().reshape(3, 1)).requires_grad_()
        model.checkpointed(x).sum().backward()
        assert torch.equal(model.row.grad.full_tensor(), torch.full((3,), 8.0))
        assert torch.allclose(x.grad.full_tensor(), 1 - torch.ones(4, 3).tanh().square())

    distdl.run_workers(work, 3)


class Directions(nn.Module):
    """A function, which measures x first, and a weight."""

    def __init__(self, function):
        super().__init__()
        self.function, self.row = function, nn.Parameter(torch.arange(1.0, 4, dtype=torch.float64))

    def forward(self, x):
        return checkpoint(lambda x: self.function(x) * self.row, x, use_reentrant=False)


@pytest.mark.parametrize(
    "function",
    [nn.functional.normalize, lambda x: x / torch._foreach_norm([x])[0], lambda x: x.exp() if x.requires_grad else x],
)
def test_a_checkpoint_that_computes_norms_of_its_argument(function):
    given = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)
    x, alone = given.clone().requires_grad_(), Directions(function)
    alone(x)[:, 0].sum().backward()

    def work():
        model = distdl.distribute(Directions(function), distdl.world()[:3].reshape(1, 3), weights="sharded")
        ours = distdl.distribute_tensor(given, distdl.world()[:3].reshape(1, 3)).requires_grad_()
        model(ours)[:, 0].sum().backward()
        assert torch.allclose(ours.grad.full_tensor(), x.grad, rtol=0, atol=1e-12)
        assert torch.allclose(model.row.grad.full_tensor(), alone.row.grad, rtol=0, atol=1e-12)

    distdl.run_workers(work, 4)


def test_checkpoints_are_those_of_the_sequential_model():
    def work():
        saved = network(seed=1).state_dict()
        model = sharded(network(), (3, 1))
        model.load_state_dict(saved)
        sequential = network()
        sequential.load_state_dict(model.state_dict())
        assert_same_state(model, sequential)
        part = model.inner.state_dict()
        assert all(torch.equal(part[name], value) for name, value in sequential.inner.state_dict().items())
        twin = copy.deepcopy(model)
        x, target = batch(0)
        for one in (twin, sequential):
            (one(x) - target).square().mean().backward()
        assert_same_state(twin, sequential)
        assert model.first.weight.grad is None and isinstance(twin.first.weight, nn.Parameter)

    run(work)


def test_writing_what_backward_needs_is_an_error():
    def work():
        model = sharded(network(lambda: nn.Conv1d(3, 2, 3)), (2, 1))
        x, _ = batch(0)
        x.requires_grad_()
        loss = model(x).square().sum()
        with torch.no_grad():
            model.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        y = model(x)
        z = y.exp()
        z += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()

    run(work)


class _WritesItsInput(nn.Module):
    """A linear layer whose input, which its backward needs, is written after it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = self.first(x)
        y = self.second(h)
        h.add_(1)
        return y


@pytest.mark.fault("threads")
def test_a_worker_outside_is_told_what_backward_has_raised_on_the_others():
    def work():
        P = distdl.world()
        model = distdl.distribute(_WritesItsInput().double(), P[:2].reshape(2, 1), weights="sharded")
        try:
            model(noise(6, 4)).sum().backward()
        except Exception as error:
            texts[P.rank] = f"{type(error).__name__}: {error}"
            raise

    texts = {}
    with pytest.raises(RuntimeError, match="modified by an inplace operation: a tensor of shape"):
        distdl.run_workers(work, 3)
    assert len(texts) == 3 and len({*texts.values()}) == 1
    assert texts[2].startswith("CommunicationError: every worker waits for another one")
    assert "a backward that has failed (RuntimeError: one of the variables needed for gradient" in texts[2]


def test_gradient_scaling():
    def work():
        sequential = network()
        model = sharded(sequential, (2, 1, 2))
        for one in (model, sequential):
            optimiser = OPTIMISERS["sgd"](one.parameters())
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
            for step in range(4):
                x, target = batch(step)
                optimiser.zero_grad()
                loss = (one(x) - target).square().mean()
                if step == 1:
                    loss = loss * float("inf")
                scaler.scale(loss).backward()
                scaler.step(optimiser)
                scaler.update()
            one.scale_at_last = scaler.get_scale()
        assert model.scale_at_last == sequential.scale_at_last
        for (name, p), q in zip(model.named_parameters(), sequential.parameters(), strict=True):
            assert_close(p, q, name)

    run(work)


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


def test_what_a_model_in_shares_refuses():
    def work():
        model = sharded(network(), (2, 1))
        saved = network(seed=1).state_dict()
        with pytest.raises(ValueError, match=r"load_state_dict\(assign=True\) would put whole tensors in the places"):
            model.load_state_dict(saved, assign=True)
        assert all(type(one) is distdl.GlobalTensor for one in model.parameters())
        with pytest.raises(ValueError, match="summary needs a model that is not distributed yet"):
            distdl.summary(model, partition((2, 1)), (4, 3, 11))
        replicated = distdl.distribute(network(), partition((2, 1)))
        sequential = network()
        for one in (replicated, sequential):
            one.load_state_dict(saved, assign=True)
        assert_same_state(replicated, sequential)

    run(work)


def test_shares_take_another_dtype_where_they_are():
    """Warnings are errors: nothing comes together for that."""

    def work():
        model, sequential = sharded(network(), (2, 1)), network()
        assert_same_state(model.float(), sequential.float())
        assert_same_state(model.to(torch.float64), sequential.double())
        assert all(type(one) is distdl.GlobalTensor for one in model.parameters())


def test_gradients_take_another_dtype_along_with_their_shares():
    def work():
        model = distdl.distribute(network().double(), partition((2, 1)), weights="sharded")
        model(batch(0)[0].double()).sum().backward()
        trained = [parameter for parameter in model.parameters() if parameter.grad is not None]
        before = [parameter.grad.full_tensor() for parameter in trained]
        model.float()
        for parameter, gradient in zip(trained, before, strict=True):
            assert torch.equal(parameter.grad.full_tensor(), gradient.float())
            parameter.grad.data = gradient.float() + 1
            assert torch.equal(parameter.grad.full_tensor(), gradient.float() + 1)

    distdl.run_workers(work, 3)


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


def test_parametrisations_of_parameters_in_shares():
    def work():
        sequential = network()
        model = sharded(sequential, (2, 1, 2))
        for one in (model, sequential):
            nn.utils.parametrizations.weight_norm(one.first)
            nn.utils.parametrizations.weight_norm(one.last, dim=None)
            nn.utils.parametrize.register_parametrization(one.inner[0], "bias", nn.Tanh())
        for one in (model, sequential):
            x, target = batch(0)
            (one(x) - target).square().mean().backward()
            torch.optim.SGD(one.parameters(), 0.1).step()
        assert_same_state(model, sequential)
        assert type(model.inner[0].parametrizations.bias.original) is distdl.GlobalTensor

    run(work)


@pytest.mark.parametrize("before", [0, 1])
def test_errors_of_pruning_say_how_weights_in_shares_are_pruned(before):
    """The code that they give prunes what ``l1_unstructured`` prunes on one worker."""

    def main():
        P = distdl.world()
        alone = nn.Conv1d(2, 5, 3, padding=1, dtype=torch.float64)
        with torch.no_grad():
            alone.weight.copy_(noise(5, 2, 3))
            alone.bias.copy_(noise(5))
        module, refused = (
            distdl.distribute(copy.deepcopy(alone), P.reshape(1, 1, -1), weights="sharded") for _ in range(2)
        )
        for one in (alone, module, refused) if before else ():
            prune.identity(one, "weight")
        if before:  # (the mask of what is left of the mask before is a tensor that nobody else sees)
            prune.l1_unstructured(module, "weight", 0.5)
        else:
            with pytest.raises(RuntimeError, match="of the whole weight: ") as caught:
                prune.l1_unstructured(refused, "weight", 0.5)
            code = str(caught.value).partition("of the whole weight: ")[2]
            exec(code, {"module": module, "prune": prune, "torch": torch})
        prune.l1_unstructured(alone, "weight", 0.5)
        assert torch.equal(module.weight_mask, alone.weight_mask)
        losses = []
        for one in (alone, module):
            loss = one(noise(2, 2, 7)).square().mean()
            loss.backward()
            losses.append(loss.item())
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        assert_close(module.weight_orig.grad, alone.weight_orig.grad)

    distdl.run_workers(main, 4)


@pytest.mark.parametrize("used", [False, True])
def test_who_refers_to_a_parameter_has_its_share(used):
    """An optimiser that was made before the model was distributed, with its state, and a gradient."""

    def work():
        sequential = network()
        before = copy.deepcopy(sequential)
        models = (before, sequential)
        optimisers = [OPTIMISERS["sgd"](one.parameters()) for one in models]
        held = [one.last.weight for one in models]
        if used:
            for one, optimiser in zip(models, optimisers, strict=True):
                for _ in range(2):
                    one(batch(0)[0]).square().mean().backward()
                    optimiser.step()
        model = distdl.distribute(before, partition((2, 1, 2)), weights="sharded", fallback="error")
        assert model.last.weight is held[0] and type(held[0]) is distdl.GlobalTensor
        assert model.tied.weight is model.inner[0].weight
        for step in (1, 2):
            x, target = batch(step)
            for one, optimiser, weight in zip((model, sequential), optimisers, held, strict=True):
                ((one(x) - target).square().mean() + weight.square().sum()).backward()
                optimiser.step()
        assert_same_state(model, sequential)

    run(work)


@pytest.mark.parametrize("held_by", ["a graph", "a weak reference"])
def test_parameters_that_something_holds_on_to_are_replaced(held_by):
    def work():
        model, x = network(), batch(0)[0]
        before = dict(model.named_parameters())
        kept = model(x).sum() if held_by == "a graph" else weakref.ref(model.scale)
        distdl.distribute(model, partition((3, 1)), weights="sharded")
        if isinstance(kept, torch.Tensor):
            kept.backward()
        model.norm.reset_running_stats()
        model(x).sum().backward()
        for name, one in model.named_parameters():
            assert one is not before[name]
            if held_by == "a graph" and one.grad is not None:
                assert_close(one.grad, before[name].grad)

    run(work)


def test_two_models_may_have_a_parameter_in_common():
    def pair():
        models = [network(lambda: nn.Linear(3, 3), seed) for seed in (1, 2)]
        models[1].weight = models[0].weight
        return models

    def work():
        sequential, models = pair(), pair()
        for one, grid in zip(models, ((3, 1), (1, 2)), strict=True):
            distdl.distribute(one, partition(grid), weights="sharded")
        assert models[0].weight is models[1].weight
        x = noise(5, 3)
        for first, second in (models, sequential):
            optimiser = OPTIMISERS["sgd"]([*first.parameters(), second.bias])
            for _ in range(2):
                optimiser.zero_grad()
                (first(x).sin() * second(x)).mean().backward()
                optimiser.step()
        for ours, theirs in zip(models, sequential, strict=True):
            assert_same_state(ours, theirs)

    run(work)


@pytest.mark.parametrize(
    ("first", "second", "kept"), [("replicated", "sharded", "whole"), ("sharded", "replicated", "in shares")]
)
def test_a_parameter_that_two_models_have_lies_in_both_alike(first, second, kept):
    def work():
        one, other = nn.Linear(3, 3), nn.Linear(3, 3)
        other.weight = one.weight
        distdl.distribute(one, partition((3, 1)), weights=first)
        with pytest.raises(ValueError, match=f"weight is a parameter of another .* has it {kept}"):
            distdl.distribute(other, partition((3, 1)), weights=second)

    run(work)


class _InOneMemory(nn.Module):
    def __init__(self, tie):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.c = nn.Buffer(torch.zeros(4))
        tie(self)


TIES = {
    "tied": ("a.weight and b.weight do", lambda m: setattr(m.b.weight, "data", m.a.weight.data)),
    "transposed": ("a.weight and b.weight", lambda m: setattr(m.b, "weight", nn.Parameter(m.a.weight.data.t()))),
    "row and whole": ("a.weight and b.bias", lambda m: setattr(m.b.bias, "data", m.a.weight.data[3])),
    "buffer": ("b.bias and c do", lambda m: setattr(m, "c", m.b.bias.data)),
}


@pytest.mark.parametrize("tie", TIES)
def test_weights_in_one_memory_are_refused_in_shares(tie):
    text, write = TIES[tie]

    def work():
        with pytest.raises(ValueError, match=text):
            distdl.distribute(_InOneMemory(write), partition((2, 1)), weights="sharded")
        distdl.distribute(_InOneMemory(write), partition((2, 1)))

    run(work)


def test_weights_apart_in_one_memory_are_taken_in_shares():
    def tie(model):
        flat, columns = torch.zeros(8), torch.zeros(4, 8)
        model.a.bias.data, model.b.bias.data = flat[:4], flat[4:]
        model.a.weight.data, model.b.weight.data = columns[:, :4], columns[:, 4:]

    run(lambda: distdl.distribute(_InOneMemory(tie), partition((2, 1)), weights="sharded"))


def test_a_state_dict_of_variables_has_the_parameters_themselves():
    def work():
        model = sharded(network(), GRIDS[0])
        state, named = model.state_dict(keep_vars=True), dict(model.named_parameters(remove_duplicate=False))
        assert all(state[name] is parameter for name, parameter in named.items())
        assert all(type(one) is torch.Tensor for one in model.state_dict().values())

    run(work)


def _keeping(kept):
    """The contexts of a checkpoint that saves what some operators give."""

    def policy(context, operator, *args, **kwargs):
        saves = operator.__name__.split(".")[0] in kept.split()
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy)


def _gradients(model, x):
    """Those of x and of weights that are the same each time, after two backwards."""
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(noise(*parameter.shape, seed=number))
    x.requires_grad_()
    for _ in range(2):
        (model(x) ** 2).sum().backward()
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


# whether what a selective checkpoint saves goes through hooks of users, too: torch 2.14 asks, where there are some
_BY_HOOKS = [{}, *({"respect_saved_tensors_hooks": by} for by in (False, True) if torch.__version__ >= "2.14")]


@pytest.mark.parametrize("by_hooks", _BY_HOOKS)
@pytest.mark.parametrize(("kept", "weights", "grid"), list(in_pairs(
    ("addmm", "addmm gelu", "mm copy_ slice"), ("replicated", "sharded", "plain"), ((2, 1), (1, 3)),
)))  # fmt: skip
def test_selective_checkpoints(kept, weights, grid, by_hooks):
    """They count the operators of a forward, and hand out what some gave: set-ups and messages are none of them."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = torch.nn.Linear(5, 7).double(), torch.nn.Linear(7, 5).double()

        def body(self, x):
            for _ in range(3):  # (what is looked at in the first uses of a weight ends in a region)
                x = x + self.narrow(torch.nn.functional.gelu(self.wide(x)))
            return x

        def forward(self, x):
            made = _keeping(kept)
            return checkpoint(self.body, x, use_reentrant=False, context_fn=made, **by_hooks)

    theirs = _gradients(torch.nn.Sequential(Layer(), Layer()), noise(6, 5))

    def work():
        P = distdl.world().create_partition_inclusive(range(max(grid))).reshape(*grid)
        model = torch.nn.Sequential(Layer(), Layer())
        model = model if weights == "plain" else distdl.distribute(model, P, weights=weights)
        ours = _gradients(model, distdl.distribute_tensor(noise(6, 5), P))
        for one, other in zip(ours, theirs, strict=True):
            whole = one.full_tensor() if type(one) is GlobalTensor else one
            torch.testing.assert_close(whole, other, rtol=1e-9, atol=1e-9)

    distdl.run_workers(work, 4)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_in_selective_ones(reentrant, weights):
    """What the inner one keeps of its arguments, autograd detaches where the outer one sees each operator."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.wide, self.narrow = torch.nn.Linear(5, 7).double(), torch.nn.Linear(7, 5).double()

        def body(self, x):
            inner = checkpoint(lambda x: self.wide(x.sin()), x * 2, use_reentrant=reentrant)
            return checkpoint(self.narrow, inner.tanh(), use_reentrant=False) + x

        def forward(self, x):
            return checkpoint(self.body, x, use_reentrant=False, context_fn=_keeping("tanh mul"))

    theirs = _gradients(Layer(), noise(6, 5))

    def work():
        P = distdl.world().create_partition_inclusive(range(2)).reshape(2, 1)
        ours = _gradients(distdl.distribute(Layer(), P, weights=weights), distdl.distribute_tensor(noise(6, 5), P))
        for one, other in zip(ours, theirs, strict=True):
            whole = one.full_tensor() if type(one) is GlobalTensor else one
            torch.testing.assert_close(whole, other, rtol=1e-9, atol=1e-9)

    distdl.run_workers(work, 3)


def _attention(x):
    x = x.flatten(2).mT
    return nn.functional.scaled_dot_product_attention(x, x, x).mT


def _pooled(x):
    return nn.functional.interpolate(nn.functional.max_pool2d(x, 2), size=x.shape[2:], mode="bilinear").flatten(2)


MIXED = {
    "group norm": lambda x: nn.functional.group_norm(x, 2).flatten(2),
    "instance norm": lambda x: nn.functional.instance_norm(x).flatten(2), "attention": _attention, "pooling": _pooled,
    "windows": lambda x: nn.functional.avg_pool2d(x, 3, 1, 1).flatten(2), "sums": lambda x: (x - x.mean()).flatten(2),
}  # fmt: skip
_PRODUCTS = ["convolution", "bmm", "mm", "_safe_softmax", "native_group_norm", "add", "relu"]
SAVING = {
    "all": lambda name: True, "products": lambda name: name in _PRODUCTS, "copies": lambda name: "copy" in name,
    "all but products": lambda name: name not in _PRODUCTS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("mix", "saving", "grid"), list(in_pairs(list(MIXED), list(SAVING), [(1, 1, 2, 1), (2, 1, 1, 1)]))
)
def test_selective_checkpoints_that_save_nearly_all(mix, saving, grid):
    """Of what our own functions consist of, nothing is counted: workers without cells compute it otherwise."""
    mixes, saves = MIXED[mix], SAVING[saving]

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if saves(operator.__name__.split(".")[0]) else CheckpointPolicy.MUST_RECOMPUTE

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1).double()

        def body(self, x):
            return (x + mixes(self.conv(x).sin()).reshape(x.shape)).relu()

        def forward(self, x):
            made = functools.partial(create_selective_checkpoint_contexts, policy)
            return checkpoint(self.body, x, use_reentrant=False, context_fn=made)

    theirs = _gradients(nn.Sequential(Layer(), Layer()), noise(2, 4, 6, 5))

    def work():
        P = distdl.world().create_partition_inclusive(range(2)).reshape(*grid)
        model = distdl.distribute(nn.Sequential(Layer(), Layer()), P)
        ours = _gradients(model, distdl.distribute_tensor(noise(2, 4, 6, 5), P))
        for one, other in zip(ours, theirs, strict=True):
            whole = one.full_tensor() if type(one) is GlobalTensor else one
            torch.testing.assert_close(whole, other, rtol=1e-10, atol=1e-10)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("kept", ["clone copy_ slice", "linear", ""])
def test_a_selective_checkpoint_of_a_model_and_its_loss(kept, weights):
    """What is compared and made equal before a forward is no part of it; a recomputed one does none of that."""

    made = _keeping(kept)

    def outcome(model, own=0):
        def loss(x, target):
            return (model(x) - target).square().sum()

        with torch.no_grad():
            for number, parameter in enumerate(model.parameters()):
                parameter.copy_(noise(*parameter.shape, seed=number + own))
        for step in range(6):
            checkpoint(loss, noise(6, 5, seed=step), noise(6, 2), use_reentrant=False, context_fn=made).backward()
        return [parameter.grad for parameter in model.parameters()]

    def work():
        sequential = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2)).double()
        model = distdl.distribute(copy.deepcopy(sequential), partition((3, 1)), weights=weights)
        ours = outcome(model, distdl.world().rank if weights == "replicated" else 0)  # (all get those of worker 0)
        for one, other in zip(ours, outcome(sequential), strict=True):
            whole = one.full_tensor() if type(one) is GlobalTensor else one
            torch.testing.assert_close(whole, other, rtol=1e-10, atol=1e-10)

    run(work)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_a_model_that_keeps_what_it_has_computed_is_copied_nowhere():
    layers = [nn.utils.weight_norm(nn.Linear(5, 2).double()) for _ in range(4)]

    def work():
        P = distdl.world()
        model = distdl.distribute(nn.Sequential(layers[P.rank]), P.reshape(2, 2), weights="sharded")
        model(distdl.distribute_tensor(noise(4, 5), P.reshape(2, 2))).sum().backward()
        with pytest.raises(RuntimeError, match="graph leaves"):
            copy.deepcopy(model)

    distdl.run_workers(work, 4)


class Adapted(nn.Module):
    """A layer with a frozen weight, and two small ones that are trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.frozen(x) + self.up(self.down(x))).tanh()


@pytest.mark.usefixtures("apart")
def test_frozen_weights_go_as_soon_as_a_backward_has_read_them():
    def work() -> None:
        P = distdl.world().reshape(2, 1)
        model = distdl.distribute(nn.Sequential(*(Adapted() for _ in range(5))).double(), P, weights="sharded")
        x = distdl.distribute_tensor(noise(4, 16), P)
        held = model[0]._parameters.copies.keep.held
        gathered: list[Gathered] = []
        for layer in model:
            layer.frozen.register_forward_hook(
                lambda *given: gathered.extend({one for one, _ in held.values()}), prepend=True
            )

        def whole() -> int:
            return sum(one._wholes is not None for one in gathered)

        within: list[int] = []
        for place in (3, 1):  # (when the gradient of what goes into a layer is there)
            model[place].register_forward_pre_hook(
                lambda module, given: given[0].register_hook(lambda gradient: within.append(whole())) and None
            )
        losses = [model(x).square().sum() for _ in range(2)]
        losses[0].backward(retain_graph=True)
        assert within == [1, 1] and not whole()
        with pytest.raises(RuntimeError, match="inplace"):
            model[4].frozen.weight.mul_(2)
            losses[0].backward()
        losses.append(model(x).square().sum())  # (which lets go what the failed backward has left)
        losses[2].backward()
        assert len(gathered) == 15 and not whole()

    distdl.run_workers(work, 2)


@pytest.fixture
def whole(monkeypatch):
    """How many messages' weights this worker has whole."""
    made, init = threading.local(), Gathered.__init__

    def noted(self, *given):
        init(self, *given)
        made.__dict__.setdefault("each", []).append(self)

    monkeypatch.setattr(Gathered, "__init__", noted)
    return lambda: sum(one._wholes is not None or one.ready is not None for one in made.each)


def in_a_row(count=6):
    return network(lambda: nn.Sequential(*(nn.Conv1d(4, 4, 3, padding=1) for _ in range(count))))


@pytest.mark.parametrize(("bytes_along", "together"), [(1 << 19, 1), (2 * 8 * (48 + 4), 2), (0, 6)])
def test_weights_of_the_next_modules_come_along(monkeypatch, whole, bytes_along, together):
    """From the second forward on, which expects the order of the first. Their gradients go back together, too."""
    monkeypatch.setattr(gathering, "_ALONG", bytes_along)

    def messages(book):
        return sum(one.calls for one in weights_in(book))

    def work():
        alone, ours = in_a_row(), sharded(in_a_row(), (1, 1, 2))
        for step in range(3):
            x = noise(1, 4, 7, seed=step)
            with distdl.ledger() as book:
                y = ours(x)
            assert messages(book) == (together if step else 6), str(book)
            with distdl.ledger() as book:
                y.square().sum().backward()
            assert messages(book) == together + (together if step else 6), str(book)
            assert not whole()
            alone(x).square().sum().backward()
            for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
                assert torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12)

    run(work)


def test_weights_below_a_module_come_along_in_a_backward(whole):
    """Attention reads those of its projection itself, so they are none of the module's own."""

    def work():
        ours = sharded(network(lambda: nn.TransformerEncoderLayer(8, 2, 8, 0.0, batch_first=True)), (2, 1, 1))
        for step in range(3):
            with distdl.ledger() as book:
                ours(distdl.distribute_tensor(noise(2, 3, 8), distdl.world()[:2].reshape(2, 1, 1))).sum().backward()
            assert sum(one.calls for one in weights_in(book)) == (3 if step else 15), str(book)
            assert not whole()

    run(work)


class Frozen(nn.Module):
    """Layers of which some are trained: each takes another way to its gradient."""

    def __init__(self):
        super().__init__()
        self.layers = in_a_row()
        self.layers[1].requires_grad_(False)
        self.layers[3].weight.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            shift = self.layers[0](x)
        x = self.layers[2](self.layers[1](self.layers[0](x)))
        x = checkpoint(self.layers[3], x, use_reentrant=False) + shift
        self.layers[5].requires_grad_(not self.layers[5].weight.requires_grad)
        return self.layers[5](self.layers[4](x))


def test_gradients_that_go_back_together_are_those_of_what_is_trained(whole):
    def work():
        alone, ours = Frozen(), sharded(Frozen(), (1, 1, 2))
        for step in range(5):
            for model in (alone, ours):
                model.zero_grad()
            x = noise(1, 4, 7, seed=step)
            losses = [model(x).square().sum() for model in (ours, alone)]
            if step == 3:  # (derivatives that are differentiated)
                for number, model in enumerate((ours, alone)):
                    wanted = [one for one in model.parameters() if one.requires_grad]
                    found = torch.autograd.grad(losses[number], wanted, create_graph=True)
                    losses[number] = sum(one.square().sum() for one in found)
            for loss in losses:
                loss.backward()
            for (name, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), (step, name)
                assert mine.grad is None or torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12), name
            assert not whole()

    run(work)


class Middle(nn.Module):
    """Layers of which those in the middle run in checkpoints."""

    def __init__(self):
        super().__init__()
        self.layers = in_a_row()

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:5]:
            x = checkpoint(layer, x, use_reentrant=False).tanh()
        return self.layers[5](x)


def test_only_gradients_that_are_there_go_back_together():
    """What runs in a checkpoint has nodes of its own. A forward without gradients, or a frozen one, changes nothing."""

    def work():
        ours, sent = sharded(Middle(), (1, 1, 2)), []
        for step in range(5):
            if step == 3:
                with torch.no_grad():
                    ours(noise(1, 4, 7))
            if step == 4:
                ours.requires_grad_(False)
                ours(noise(1, 4, 7).requires_grad_()).sum().backward()
                ours.requires_grad_(True)
            loss = ours(noise(1, 4, 7)).square().sum()
            with distdl.ledger() as book:
                loss.backward()
            every = weights_in(book)
            sent.append((sum(one.calls for one in every), sum(one.sent for one in every)))
        calls, nbytes = sent[0]
        assert sent[1:] == [(calls - 1, nbytes)] * 4, sent

    run(work)


class Apart(nn.Module):
    """Heads of which each has a loss of its own."""

    def __init__(self):
        super().__init__()
        self.heads = in_a_row(3)

    def forward(self, x):
        return [head(x).tanh() for head in self.heads]


def of_heads(work):
    """What a function of a model and its input finds, each time and on each worker; and what it finds of torch's."""
    alone = network(Apart)
    want = [work(alone, noise(1, 4, 7)) for _ in range(3)]
    ours = sharded(network(Apart), (1, 1, 2))
    x = distdl.distribute_tensor(noise(1, 4, 7), distdl.world()[:2].reshape(1, 1, 2))
    for theirs in want:
        mine = work(ours, x)
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            assert one == other if isinstance(other, str) else assert_close(one, other) is None


def test_hooks_of_weights_that_a_loss_does_not_reach_are_not_called():
    """Though their gradients go back with others."""

    def each(model, x):
        seen, handles = [], []
        for name, one in model.named_parameters():
            handles.append(one.register_hook(lambda gradient: gradient * 2))
            handles.append(one.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name)))
        losses = [y.square().sum() for y in model(x)]
        losses[0].backward(retain_graph=True)
        seen.append("")
        losses[2].backward()
        for one in handles:
            one.remove()
        losses = [y.square().sum() for y in model(x)]
        losses[0].backward()
        found = [one.grad.clone() for one in model.parameters() if one.grad is not None]
        model.zero_grad()
        return [*sorted(seen[: seen.index("")]), *sorted(seen[seen.index("") :]), *found]

    run(lambda: of_heads(each))


def test_weights_that_follow_from_others_are_differentiated_apart():
    """(A node that led to the graphs of several would let torch go through all of these, and free them.)"""

    def each(model, x):
        made = {name: one.square().exp() for name, one in model.named_parameters()}
        for _ in range(2):
            losses = [y.square().sum() for y in torch.func.functional_call(model, made, (x,))]
        for loss in losses:
            loss.backward()
        found = [one.grad.clone() for one in model.parameters()]
        model.zero_grad()
        return found

    run(lambda: of_heads(each))


def test_weights_that_follow_from_others_go_with_their_graph():
    def work():
        ours = sharded(network(Apart), (1, 1, 2))
        for _ in range(2):
            made = {name: one.square() for name, one in ours.named_parameters()}
            there = [weakref.ref(one) for one in made.values()]
            torch.func.functional_call(ours, made, (noise(1, 4, 7),))
            del made
        assert not any(one() is not None for one in there)

    run(work)


def test_a_gradient_may_be_written_while_a_graph_has_that_of_another_weight():
    def each(model, x):
        sum(y.square().sum() for y in model(x)).backward()
        q = torch.ones((), dtype=torch.float64, requires_grad=True)
        gradients = [one.grad for one in model.parameters()]
        loss = (gradients[0] * q).square().sum()
        for one in gradients[1:]:
            one.zero_()
        loss.backward()
        found = [q.grad, *(one.clone() for one in gradients)]
        model.zero_grad()
        return found

    run(lambda: of_heads(each))


class Seen(TorchFunctionMode):
    """Keeps the names of all functions of torch that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_a_mode_sees_what_the_model_calls():
    """And nothing that brings the weights."""

    def work():
        x, seen = noise(1, 4, 7), []
        ours = sharded(in_a_row(), (1, 1, 2))
        for model, given in ((in_a_row(), x), (ours, distdl.distribute_tensor(x, distdl.world()[:2].reshape(1, 1, 2)))):
            with Seen() as mode:
                model(given)
            seen.append(mode.names)
        assert seen[0] == seen[1] == ["conv1d"] * 6

    run(work)


class Turning(nn.Module):
    """Other layers, in another order, and other weights than what has come along."""

    def __init__(self):
        super().__init__()
        self.layers = in_a_row()
        self.step = -1

    def forward(self, x):
        self.step += 1
        for place in ([0, 1, 2, 3], [0, 1, 3, 2], [0, 5], [0, 5, 5, 1], [0, 5, 5, 1])[self.step]:
            x = self.layers[place](x)
            if self.step == 4 and place == 0:
                with torch.no_grad():
                    next(self.layers[5].parameters()).mul_(0.5)  # (behind what has come along)
                _, bias = self.layers[1].parameters()
                bias.data = bias.data + 1
        return x


def test_what_has_come_along_is_not_read_where_it_does_not_hold(whole):
    def work():
        alone, ours = Turning(), sharded(Turning(), (1, 1, 2))
        for step in range(5):
            for model in (alone, ours):
                model.zero_grad()
            x = noise(1, 4, 7, seed=step).requires_grad_()
            y, expected = ours(x), alone(x)
            assert torch.allclose(y.full_tensor(), expected, 1e-12, 1e-12)
            if step == 2:  # (a part of the backward, which leaves nothing)
                torch.autograd.grad(y.square().sum(), [x], retain_graph=True)
                assert not whole()
            y.square().sum().backward()
            expected.square().sum().backward()
            for (name, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), (step, name)
                assert mine.grad is None or torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12), name

    run(work)


class Watched(nn.Module):
    """Layers, of which the gradient of one's result calls a function of the test."""

    def __init__(self):
        super().__init__()
        self.layers = in_a_row(4)
        self.seen = lambda: None

    def forward(self, x):
        for place, layer in enumerate(self.layers):
            x = layer(x).tanh()
            if place == 2:
                x.register_hook(lambda gradient: self.seen())
        return x


def halve(model):
    model.layers[1].weight.data.mul_(0.5)


def halve_each(model):
    torch._foreach_mul_([one.weight.data for one in model.layers[:2]], 0.5)


@pytest.mark.parametrize("write", [halve, halve_each])
def test_what_is_written_by_data_while_a_backward_runs_is_an_error(write):
    """Torch does not count such writes, and its backward reads what has been written."""

    def work():
        ours = sharded(Watched(), (1, 1, 2))
        ours.seen = lambda: write(ours)
        loss = ours(noise(1, 4, 7)).square().sum()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation, or given other data"):
            loss.backward()

    run(work)


class Shrinking(nn.Module):
    """It writes the weight of another module unseen, each time it runs."""

    def __init__(self, other):
        super().__init__()
        self.weight = other.weight

    def forward(self, x):
        self.weight.data.mul_(0.7)
        return x.tanh() + 1


class Recomputing(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.layers, self.reentrant = in_a_row(3), reentrant
        self.shrinking = Shrinking(self.layers[1])

    def forward(self, x):
        x = checkpoint(self.shrinking, self.layers[1](self.layers[0](x)), use_reentrant=self.reentrant)
        return self.layers[2](x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_has_written_by_data_is_an_error(reentrant):
    def work():
        with pytest.raises(RuntimeError, match=r"Shrinking.forward has written into a weight .* in shares"):
            sharded(Recomputing(reentrant), (1, 1, 2))(noise(1, 4, 7))

    run(work)


class Guided(nn.Module):
    """One layer runs in another mode than the others: what comes along for it does so in theirs."""

    def __init__(self, place):
        super().__init__()
        self.layers, self.place = in_a_row(3), place

    def forward(self, x, y):
        found = []
        for place, layer in enumerate(self.layers):
            if place != self.place:
                found.append(layer(x))
            elif torch.is_inference_mode_enabled():
                with torch.inference_mode(False), torch.enable_grad():
                    layer(y.clone()).square().sum().backward()
            else:
                with torch.inference_mode():
                    layer(x)
        return found[0] + found[1]


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("inference", [False, True])
def test_a_part_in_inference_mode_or_outside_of_it(place, inference):
    def work():
        alone, ours = Guided(place), sharded(Guided(place), (1, 1, 2))
        x = noise(1, 4, 7)
        for _ in range(3):
            found = []
            for model in (alone, ours):
                model.zero_grad()
                if inference:
                    with torch.inference_mode():
                        found.append(model(x, x))
                else:
                    found.append(model(x, x))
                    found[-1].square().sum().backward()
            assert torch.allclose(found[1].full_tensor(), found[0], 1e-12, 1e-12)
            for (name, mine), theirs in zip(ours.named_parameters(), alone.parameters(), strict=True):
                assert (mine.grad is None) == (theirs.grad is None), name
                assert mine.grad is None or torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12), name

    run(work)


class Fading(nn.Module):
    """Layers whose weights it writes, of which one is its own."""

    def __init__(self):
        super().__init__()
        self.layers = in_a_row(3)
        self.scale = nn.Parameter(noise(4, 1, seed=5))

    def forward(self, x):
        with torch.no_grad():
            self.scale.mul_(0.5)
            self.layers[1].weight[0] = 0.1
        return self.layers(x) * self.scale


def test_a_forward_that_writes_shares_in_inference_mode_is_an_error():
    def work():
        ours, x = sharded(Fading(), (1, 1, 2)), noise(1, 4, 7)
        with torch.inference_mode(), pytest.raises(RuntimeError, match=r"Fading.forward has written into a weight"):
            ours(x)

    run(work)


def test_a_backward_keeps_no_list_of_all_that_came_along(monkeypatch):
    """Each module looks through it."""
    monkeypatch.setattr(gathering, "_ALONG", 2 * 8 * (48 + 4))
    counts, release = threading.local(), Keep._release

    def counted(self, backward, *number):
        counts.__dict__.setdefault("each", []).append(len(self._again.get(backward, [])))
        release(self, backward, *number)

    monkeypatch.setattr(Keep, "_release", counted)

    def work():
        ours = sharded(in_a_row(12), (1, 1, 2))
        for seed in range(2):
            ours(noise(1, 4, 7, seed=seed)).square().sum().backward()
        assert 2 <= max(counts.each) <= 6, counts.each

    run(work)


def _train(*models):
    """Three steps, after each of which both models have the same losses, gradients and weights."""
    optimisers = [torch.optim.SGD(one.parameters(), 0.05, momentum=0.9) for one in models]
    for step in range(3):
        x, target = batch(step)
        losses = []
        for one, optimiser in zip(models, optimisers, strict=True):
            optimiser.zero_grad()
            losses.append(nn.functional.mse_loss(one(x), target))
            losses[-1].backward()
            optimiser.step()
        assert_close(*losses)
        assert_same_state(*models)


class _Kept(nn.Module):
    """Its forward uses what it has read before its weights were written or frozen, or without gradients."""

    def __init__(self, by):
        super().__init__()
        self.layer = nn.Conv1d(3, 2, 3, padding=1)
        self.weight = nn.Parameter(noise(2, 3))
        self.by, self.kept = by, []

    def forward(self, x):
        if self.by == "no_grad":
            with torch.no_grad():
                weight, bias = self.weight, self.layer.bias
                assert weight.requires_grad and not weight.detach().requires_grad
        elif self.by in ("step", "data"):
            self.kept = self.kept or [self.weight, self.layer.bias]
            weight, bias = self.kept
        else:
            weight, bias = self.weight, self.layer.bias
        if self.by == "list":
            for parameter in self.parameters():
                parameter.data.mul_(0.9)
        elif self.by == "data":
            for parameter in self.parameters():
                parameter.data = parameter.data * 0.9
        elif self.by == "frozen":
            self.requires_grad_(False)
            x = x + (weight @ x).mean() + bias.sum()
            self.requires_grad_(True)
        return self.layer(x) + weight @ x + torch.stack([bias, bias * 2]).sum(0)[:, None]


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0].exp()


class _KeptFor(nn.Module):
    """Its forward gives what its first forward has read to what is no function of torch."""

    def __init__(self, user):
        super().__init__()
        self.weight, self.user, self.kept = nn.Parameter(noise(3, 1)), user, []

    def forward(self, x):
        self.kept = self.kept or [self.weight]
        x = self.user(x, self.kept[0])
        return x[:, :2] + x[:, 1:]


def _locally(function, *args):
    return distdl.local_map(function)(*args) if type(args[0]) is distdl.GlobalTensor else function(*args)


_USERS = {
    "an autograd function": lambda x, w: x * _Exp.apply(w),
    "an argument of local_map": lambda x, w: _locally(torch.mul, x, w),
    "known to local_map": lambda x, w: _locally(lambda block: block * w[:1], x),
}


@pytest.mark.parametrize("user", _USERS.values(), ids=_USERS)
def test_what_was_read_is_the_weight_for_functions_of_blocks_and_autograd_functions(user):
    def work():
        for grid in ((2, 1, 1), (1, 1, 2)):
            sequential = network(lambda: _KeptFor(user))
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), weights="sharded", fallback="error")
            _train(model, sequential)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("by", ["step", "data", "list", "no_grad", "frozen"])
def test_what_was_read_in_the_place_of_a_weight_stays_the_weight(weights, by):
    if weights == "sharded" and by in ("data", "list"):
        return  # (errors: a forward may only read weights in shares)

    def work():
        for grid in GRIDS:
            sequential = network(lambda: _Kept(by))
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), weights=weights, fallback="error")
            _train(model, sequential)

    run(work)


def test_a_view_of_a_weight_in_shares_that_was_written_since_is_an_error():
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.kept = nn.Parameter(noise(2, 3)), {}

        def forward(self, x):
            if not self.kept:
                self.kept = {
                    "data": self.weight.data,
                    "row": self.weight[:1].detach(),
                    "copy": self.weight.data.clone(),
                }
            return self.weight @ x

    def work():
        x = distdl.distribute_tensor(batch(0)[0], partition((2, 1, 2)))
        model = sharded(network(Views), (2, 1, 2))
        before = model(x)
        kept = model.kept["data"] @ x
        assert_close(kept, before)
        with torch.no_grad():
            model.weight.mul_(2)
        for name in ("data", "row"):
            with pytest.raises(RuntimeError, match="has been written since"):
                model.kept[name] @ x
            with pytest.raises(RuntimeError, match="has been written since"):
                model.kept[name].norm()
        assert_close(model.kept["copy"] @ x, before)
        old, model.weight.data = model.weight.data, torch.zeros(2, 3)
        model.weight.data = old
        assert_close(model(x), 2 * before)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_a_cache_that_asks_whether_a_weight_was_written_is_renewed(weights):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.version, self.made = nn.Parameter(noise(2, 3)), None, 0

        def forward(self, x):
            if self.version != self.weight._version:
                self.version, self.cache = self.weight._version, self.weight.detach() * 2
                self.made += 1
            return (self.weight + self.cache) @ x

    def work():
        sequential = network(Cached)
        model = distdl.distribute(copy.deepcopy(sequential), partition((2, 1, 2)), weights=weights, fallback="error")
        _train(model, sequential)
        with torch.no_grad():
            model(batch(0)[0]), sequential(batch(0)[0])
        assert model.made == sequential.made

    run(work)
