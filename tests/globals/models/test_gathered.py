"""Weights in shares while they are whole: a forward may only read them, and backward finds what has changed."""

import threading

import pytest
import torch
from launched import on_workers, split
from nets import batch, in_a_row, network, run, sharded
from same import noise
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.globals.models import gathering
from distdl.globals.models.gathered import Gathered
from distdl.globals.models.gathering import Gathering
from distdl.globals.models.saved_weights import SaveWeights

x35 = noise(3, 5)


MAY_ONLY_READ = "in shares, which a forward may only read"


class Halved(nn.Linear):
    """A layer whose forward writes into its weight, which it has read with a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        with torch.no_grad():
            weight.mul_(0.5)
        return super().forward(x)


def test_a_forward_does_not_write_into_shares():
    def work() -> None:
        P = distdl.world()[:2].reshape(2, 1)
        model = distdl.distribute(nn.Sequential(Halved(5, 4)).double(), P, weights="sharded")
        with pytest.raises(RuntimeError, match=r"Halved.forward has written into a weight .* in shares"):
            model(distdl.distribute_tensor(x35, P))

    distdl.run_workers(work, 3)


class Kept(nn.Linear):
    """A layer that writes one element of its weight, by a name that it had before it has read it with a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            kept = self.weight.data
        y = super().forward(x)
        kept[0, 0] = 3
        return y


def test_a_late_write_into_shares_is_one_error():
    def work() -> None:
        P = distdl.world()[1:].reshape(2, 1)
        distributed = distdl.distribute(Kept(5, 4).double(), P, weights="sharded")
        with pytest.raises(RuntimeError, match="has written into a weight that is stored in shares"):
            distributed(distdl.distribute_tensor(x35, P))

    distdl.run_workers(work, 3)


class Reshaped(nn.Linear):
    """A layer that gives its weight data of another shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.zeros(self.extents, dtype=x.dtype)
        return super().forward(x)


@pytest.mark.parametrize("extents", [(3, 5), (1, 5), (4, 5, 1), ()])
@on_workers
def test_data_of_another_shape_is_one_error_with_shares_and_changes_nothing(extents):
    model = Reshaped(5, 4).double()
    model.load_state_dict({"weight": noise(4, 5), "bias": noise(4)})
    model.extents = extents
    distributed = distdl.distribute(model, split(x35).layout.partition, weights="sharded")
    with pytest.raises(RuntimeError, match=MAY_ONLY_READ):
        distributed(split(x35))
    torch.testing.assert_close(distributed.state_dict()["weight"], noise(4, 5))


def _set_without_counting(model):
    for p in model.parameters():
        p.data.mul_(0.5)


def _set_by_name(model):
    model.weight.data = model.weight.data / 3
    _set(model, lambda w: w / 2)


def _look_and_set(model):
    assert model.weight.data.norm() > 0
    _set(model, lambda w: w / 2)


def _write_by_name_and_as_list(model):
    model.weight.data.mul_(2)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.25)


def _write_by_name_and_set(model):
    model.weight.data.mul_(3)
    _set(model, lambda w: w / 2)
    model.weight.data = model.weight.data + 1
    _set_without_counting(model)


def _write_in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


HALVED = {
    "set": lambda model: _set(model, lambda w: w / 2), "its data": _set_without_counting,
    "by name before": _set_by_name, "looked at by name before": _look_and_set, "in place": _write_in_place,
    "by name and as a list": _write_by_name_and_as_list, "by name and set": _write_by_name_and_set,
    "applied": lambda model: model._apply(lambda w: w / 2),
    "loaded": lambda model: model.load_state_dict({name: w / 2 for name, w in model.state_dict().items()}),
}  # fmt: skip


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("change", HALVED.values(), ids=HALVED)
def test_a_forward_that_writes_shares_that_it_has_read_is_an_error(change, graph):
    class Halved(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            change(self)
            return y

    def work() -> None:
        x = split(x35)
        distributed = distdl.distribute(Halved(5, 5).double(), x.layout.partition, weights="sharded")
        with torch.set_grad_enabled(graph), pytest.raises(RuntimeError, match=f"{MAY_ONLY_READ}|been written since"):
            distributed(x)

    distdl.run_workers(work, 3)


class Product(nn.Linear):
    """A layer that reads a view of its weight, as linear maps do, or the weight itself."""

    def __init__(self, itself: bool, frozen: bool) -> None:
        super().__init__(5, 5)
        self.weight.requires_grad_(not frozen)
        self.itself = itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias if self.itself else super().forward(x)


def _set(model, change):
    for p in model.parameters():
        p.data = change(p.data)


BETWEEN = {
    "halved": lambda model: _set(model, lambda w: w / 2),
    "twice": lambda model: [_set(model, lambda w: w / 2) for _ in range(2)],
    "cloned": lambda model: _set(model, torch.clone),
    "the same": lambda model: _set(model, lambda w: w), "transposed": lambda model: _set(model, lambda w: w.t()),
    "moved": lambda model: model.to("cpu"),
    "of another dtype and back": lambda model: model.float().double(),
    "vector": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).detach() / 2, model.parameters()
    ),
}  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("change", BETWEEN.values(), ids=BETWEEN)
@on_workers
def test_other_data_between_a_forward_and_its_backward_is_an_error_with_shares(change, itself, frozen):
    x = split(x35).requires_grad_()
    distributed = distdl.distribute(Product(itself, frozen).double(), x.layout.partition, weights="sharded")
    y = distributed(x).tanh()
    change(distributed)
    with pytest.raises(RuntimeError, match=r"given other data .* since the forward; call backward before"):
        y.square().sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("itself", [False, True])
@on_workers
def test_other_memory_between_a_forward_and_its_backward_is_an_error_with_shares(itself, frozen):
    x = split(x35).requires_grad_()
    for model, given in (
        (Product(itself, frozen).double(), x35.clone().requires_grad_()),
        (distdl.distribute(Product(itself, frozen).double(), x.layout.partition, weights="sharded"), x),
    ):
        y = model(given)
        with torch.no_grad():
            model.weight.set_(model.weight.clone())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.fixture
def apart(monkeypatch):
    """The weights of each module come by themselves."""
    monkeypatch.setattr(gathering, "PREFETCHED", -1)


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
        held = model[0]._parameters.weights.saving.held
        gathered: list[Gathered] = []
        for layer in model:
            layer.frozen.register_forward_hook(
                lambda *given: gathered.extend({one for one, _ in held.values()}), prepend=True
            )

        def whole() -> int:
            return sum(one._values is not None for one in gathered)

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
    monkeypatch.setattr(gathering, "PREFETCHED", 2 * 8 * (48 + 4))
    counts, release = threading.local(), SaveWeights._release

    def counted(self, backward, *number):
        counts.__dict__.setdefault("each", []).append(len(self._present.get(backward, [])))
        release(self, backward, *number)

    monkeypatch.setattr(SaveWeights, "_release", counted)

    def work():
        ours = sharded(in_a_row(12), (1, 1, 2))
        for seed in range(2):
            ours(noise(1, 4, 7, seed=seed)).square().sum().backward()
        assert 2 <= max(counts.each) <= 6, counts.each

    run(work)
