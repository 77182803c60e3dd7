"""Summaries against what really runs: messages, bytes and memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.globals.models import buckets
from distdl.globals.summary.rehearsal import on_meta
from distdl.globals.summary.results import GRADIENTS, Summary
from distdl.partition import Layout
from distdl.testing import Silent
from distdl.workers.footprint import Footprint


class UNet(nn.Module):
    """Two levels, with every kind of layer of such networks, and a function that has no op."""

    def __init__(self, channels: int = 6, odd: bool = False) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(2, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)
        )
        self.deep = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.InstanceNorm2d(2 * channels), nn.ReLU()
        )
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.head = nn.Conv2d(channels, 3, 1)
        self.odd = odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = x + self.up(self.deep(x))
        if self.odd:
            y = torch.alias_copy(y)
        return self.head(y)


SHAPE = (3, 2, 22, 26)


class Attention(nn.Module):
    """Products of matrices of activations, which lie otherwise than their blocks do: torch is asked about them."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(16, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous()
        query, key, value = self.inputs(x).chunk(3, -1)
        return (query @ key.transpose(1, 2)).softmax(-1) @ value


def really(
    model: nn.Module,
    grid: tuple[int, ...],
    workers: int,
    weights: str = "replicated",
    shape: tuple[int, ...] = SHAPE,
) -> list[dict[str, object]]:
    """What each worker of a real run has sent, forward and backward, and held at once."""

    def work() -> dict[str, object]:
        root = distdl.world()
        P = root.create_partition_inclusive(range(torch.Size(grid).numel())).create_cartesian_topology_partition(grid)
        own = distdl.distribute(copy.deepcopy(model), P, weights, fallback="silent")
        x = distdl.distribute_tensor(torch.ones(shape), P)
        sent = []
        with Footprint() as footprint:
            held = (*own.parameters(), *own.buffers(), x)
            footprint.count(*(one.to_local() if isinstance(one, distdl.GlobalTensor) else one for one in held))
            with distdl.ledger(comm=root.comm) as book:
                y = own(x).to_local()
            sent.append(_sum(book))
            with distdl.ledger(comm=root.comm) as book:
                y.backward(torch.ones_like(y))
            sent.append(_sum(book))
        return {"forward": sent[0], "backward": sent[1], "peak": footprint.peak}

    return distdl.run_workers(work, workers)


def _sum(book: distdl.ledger) -> tuple[int, int]:
    return sum(one.messages for one in book.entries), sum(one.sent for one in book.entries)


@pytest.mark.parametrize(
    ("grid", "odd"), [((1, 1, 2, 2), False), ((2, 1, 2, 1), False), ((1, 2, 1, 2), False), ((1, 1, 3, 1), True)]
)
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_messages_bytes_and_memory_are_those_of_a_real_run(grid, odd, weights):
    model = UNet(odd=odd)
    size = 5  # one worker is idle, at least
    for worker, real in enumerate(really(model, grid, size, weights)):
        told = told_of(model, grid, size, worker, weights=weights).totals
        if not odd:  # (what runs on one worker tells the others the shape of its result, too)
            assert (told.forward, told.backward) == (real["forward"], real["backward"]), f"worker {worker}"
        # (when a thread lets go of what another has sent depends on which is faster: real peaks differ from run to run)
        assert 0.9 * real["peak"] <= told.peak <= 1.25 * real["peak"], f"worker {worker}"


def test_messages_and_bytes_of_gradients_in_several_messages(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", 400)
    model = UNet(odd=False)
    for worker, real in enumerate(really(model, (1, 1, 2, 2), 5, "replicated")):
        told = told_of(model, (1, 1, 2, 2), 5, worker, weights="replicated").totals
        assert (told.forward, told.backward) == (real["forward"], real["backward"]), f"worker {worker}"


def test_memory_has_no_whole_tensors_that_torch_is_only_asked_about():
    shape = (64, 32, 16)
    for worker, real in enumerate(really(Attention(), (8, 1, 1), 8, shape=shape)):
        told = distdl.summary(Attention(), (8, 1, 1), shape, worker=worker).totals
        assert 0.9 * real["peak"] <= told.peak <= 1.25 * real["peak"], f"worker {worker}"


class Checkpointed(UNet):
    """The deep level is computed again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(x + self.up(checkpoint(self.deep, x, use_reentrant=False)))


def test_messages_and_memory_of_a_model_that_recomputes():
    model, grid = Checkpointed(), (1, 1, 2, 2)
    for worker, real in enumerate(really(model, grid, 5)):
        told = told_of(model, grid, 5, worker).totals
        assert (told.forward, told.backward) == (real["forward"], real["backward"]), f"worker {worker}"
        assert 0.9 * real["peak"] <= told.peak <= 1.25 * real["peak"], f"worker {worker}"
    recomputing, keeping = distdl.summary(model, grid, SHAPE).totals, distdl.summary(UNet(), grid, SHAPE).totals
    assert recomputing.activations < 0.7 * keeping.activations


class Steps(torch.autograd.Function):
    """Steps of a flow whose backward differentiates each step anew, as those of continuous networks do."""

    @staticmethod
    def forward(ctx, flow, x, *weights):
        ctx.flow = flow
        ctx.save_for_backward(x, *weights)
        with torch.no_grad():
            return x + flow(x)

    @staticmethod
    def backward(ctx, dy):
        x, *weights = ctx.saved_tensors
        found = [dy]
        with torch.enable_grad():
            for _ in range(2):
                again = x.detach().requires_grad_()
                dx, *dws = torch.autograd.grad(ctx.flow(again), (again, *weights), dy / 2)
                found = [found[0] + dx, *(a + b for a, b in zip(found[1:] or [0] * len(dws), dws, strict=True))]
        return None, *found


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.flow = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Steps.apply(self.flow, x, *self.flow.parameters())
        return y


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_a_function_whose_backward_goes_through_weights_more_than_once(weights):
    for worker, real in enumerate(really(Flow(), (1, 1, 3, 1), 3, weights)):
        told = distdl.summary(Flow(), (1, 1, 3, 1), SHAPE, worker=worker, weights=weights).totals
        assert (told.forward, told.backward) == (real["forward"], real["backward"]), f"worker {worker}"


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.mean().item(), lambda x: x.nonzero().sum(), lambda x: x[x > 0].sum(), lambda x: len(x.cpu()),
        lambda x: float(f"{x.mean():.2f}"), lambda x: torch.linalg.lstsq(x[0, 0], x[0, 1]).solution.mean(),
    ],
)  # fmt: skip
def test_a_forward_that_asks_for_values_is_refused_with_the_reason(ask):
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * ask(x)

    with pytest.raises(
        RuntimeError, match=r"from shapes alone, on meta tensors; its forward asks for values: .*(?i:meta|format)"
    ):
        distdl.summary(Asks(), (1, 1, 2, 2), SHAPE)


def told_of(model: nn.Module, grid: tuple[int, ...], size: int, worker: int, **options: str) -> Summary:
    """The summary, from a world in which every message is an error."""
    root = distdl.Partition(Silent(worker, size))
    P = root.create_partition_inclusive(range(torch.Size(grid).numel())).create_cartesian_topology_partition(grid)
    return distdl.summary(model, P, SHAPE, worker=worker, **options)


class Tables(nn.Module):
    """A model with sparse tables, and a function that reads values or that torch does not know without memory."""

    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))
        self.register_buffer("table", torch.eye(5).to_sparse())
        self.other = torch.eye(5).to_sparse_csr()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.function(self, x * self.weight)
        return y


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    window = torch.hann_window(4)
    return torch.istft(torch.stft(x, 4, 1, window=window, return_complex=True), 4, 1, window=window)


def column_by_column(x: torch.Tensor) -> torch.Tensor:
    y = torch.zeros(42).view(7, 6)
    y[:, 0] = 1.0  # (while nobody knows yet what will be written into it)
    for t in range(5):
        y[:, t + 1] = y[:, t].clone() * x[:, t]
    return y


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize(
    "function",
    [
        lambda model, x: column_by_column(x), lambda model, x: torch.zeros(7, 5).copy_(x) * 2,
        lambda model, x: torch.zeros(3, 5).index_add_(0, torch.arange(7) % 3, x),
        lambda model, x: torch.sparse.mm(model.table, x.mT), lambda model, x: model.other @ x.mT,
        lambda model, x: torch.mm(x, torch.eye(5).to_sparse_csc()), lambda model, x: torch.cov(x),
        lambda model, x: there_and_back(x), lambda model, x: x[:, torch.tensor([0, 2, 1])],
        lambda model, x: x.index_select(0, torch.tensor([3, 0])),
        lambda model, x: x.quantile(torch.tensor([0.3, 0.4]), 0),
        lambda model, x: x.index_put((torch.tensor([0, 2]),), x[:2]),
        lambda model, x: nn.functional.adaptive_avg_pool1d(x, 3),
    ],
)  # fmt: skip
def test_models_that_are_hard_to_run_without_memory(function):
    for grid in ((2, 1), (1, 3)):
        real = _sent(function, grid)
        for worker, sent in enumerate(real):
            told = distdl.summary(Tables(function), grid, (7, 5), worker=worker)
            assert (told.totals.forward, told.totals.backward) == sent
            # (a weight, and of the buffer the places and values of five cells)
            assert told.totals.weights == told.sequential.weights == 20 + 5 * (2 * 8 + 4)
            assert told.sequential.peak > 7 * 5 * 4


def halves(x: torch.Tensor) -> torch.Tensor:
    return x[:, ::2]


def doubled(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([x, y], 1), x


@pytest.mark.parametrize(
    "function",
    [
        lambda x, P: distdl.local_map(torch.exp)(x), lambda x, P: distdl.local_map(halves, out=P)(x),
        lambda x, P: distdl.local_map(doubled, out=(P, "same"))(x, x)[0],
    ],
)  # fmt: skip
def test_functions_of_blocks(function):
    """Others' blocks are of the shapes that the function gives. (Real workers tell each other in their first call.)"""

    class Mapped(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = function(x, x.layout.partition)
            return y + y.sum()

    def work():
        P = distdl.world().reshape(3, 1)
        own, x = distdl.distribute(Mapped(), P), distdl.distribute_tensor(torch.ones(7, 5), P)
        own(x)
        with distdl.ledger(comm=P.comm) as book:
            y = own(x)
        return _sum(book), tuple(y.to_local().shape)

    for worker, (sent, shape) in enumerate(distdl.run_workers(work, 3)):
        told = distdl.summary(Mapped(), (3, 1), (7, 5), worker=worker, dtype=torch.float32)
        assert (told.totals.forward, told.rows[0].block) == (sent, shape)


PLACES = {
    "a partition": lambda P: P,
    "a layout": lambda P: Layout.balanced(P, (7, 5)),
    "the layout of a tensor": lambda P: distdl.distribute_tensor(torch.ones(7, 5), P).layout,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_model_that_says_where_its_tensors_lie(place):
    """By what is of the world that is summed up; the sequential model has all on one worker."""

    class Turned(nn.Module):
        def __init__(self, P) -> None:
            super().__init__()
            self.columns = PLACES[place](P)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = distdl.local_map(torch.sin, out=self.columns)(x.redistribute(self.columns))
            return (x * y).exp()

    def work():
        P = distdl.world()
        model = Turned(P.reshape(1, 3))
        told = distdl.summary(model, P.reshape(3, 1), (7, 5), dtype=torch.float32, worker=P.rank)
        x = distdl.distribute_tensor(torch.ones(7, 5), P.reshape(3, 1))
        model(x)
        with distdl.ledger(comm=P.comm) as book:
            model(x)
        assert told.totals.forward == _sum(book)

    distdl.run_workers(work, 3)


def test_what_asks_other_workers_is_refused_with_the_reason():
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return distdl.local_map(distdl.nn.AllSumReduce(x.layout.partition, [0]))(x)

    with pytest.raises(RuntimeError, match=r"its forward asks the others what they have: AllSumReduce"):
        distdl.summary(Sums(), (2, 1), (7, 5), dtype=torch.float32)


@pytest.mark.parametrize("ask", [distdl.summary, distdl.suggest])
def test_layers_of_workers_that_are_there_are_refused(ask):
    def work() -> None:
        P = distdl.world().reshape(1, 2)
        model = nn.Sequential(nn.Linear(4, 4), distdl.nn.DistributedDropout(P))
        with pytest.raises(ValueError, match=r"own modules, as it sends no message; its 1 is a DistributedDropout"):
            ask(model, P if ask is distdl.summary else 2, (3, 4))

    distdl.run_workers(work, 2)


def _sent(function, grid: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """What each worker of a real run has sent, forward and backward."""

    def work() -> tuple[tuple[int, int], tuple[int, int]]:
        P = distdl.world().reshape(grid)
        own = distdl.distribute(Tables(function), P, fallback="error")
        x = distdl.distribute_tensor(torch.ones(7, 5), P)
        with distdl.ledger(comm=P.comm) as forward:
            y = own(x).to_local()
        with distdl.ledger(comm=P.comm) as backward:
            y.backward(torch.ones_like(y))
        return _sum(forward), _sum(backward)

    return distdl.run_workers(work, grid[0] * grid[1])


def test_rows_are_modules():
    told = distdl.summary(UNet(odd=True), (1, 1, 2, 2), SHAPE)
    rows = {row.path: row for row in told.rows}
    assert {"", "first.0", "first.1", "deep.1", "up", "head", GRADIENTS} <= set(rows)
    conv = rows["first.0"]
    assert (conv.kind, conv.shape, conv.split, conv.block) == ("Conv2d", (3, 6, 22, 26), (1, 1, 2, 2), (3, 6, 11, 13))
    assert conv.weights == 4 * (6 * 2 * 9 + 6)
    # a convolution of small blocks saves the block, and the window (with padding); the halo goes to three
    assert conv.activations == 4 * 3 * 2 * (11 * 13 + 13 * 15)
    assert conv.forward == (3, 4 * 3 * 2 * (11 + 13 + 1))
    assert conv.backward == (0, 0)  # the input needs no gradient
    assert rows["deep.1"].forward[0] == rows["deep.1"].backward[0] == 3
    assert [row.path for row in told.falls_back] == [""]
    assert rows[""].notes[0] == "alias_copy runs on one worker (40.2 KiB): no op"
    assert not any("alias_copy" in note for row in told.rows for note in row.notes if row.path)
    assert sum(row.weights for row in told.rows) == told.totals.weights == told.sequential.weights
    # each of four workers adds up a quarter of the gradients, or sends all of them to each other one if they are short
    assert rows[GRADIENTS].backward[0] == 3


def test_a_later_worker_sends_what_its_place_asks_for():
    first, second = (distdl.summary(UNet(), (1, 1, 3, 1), SHAPE, worker=worker) for worker in (0, 1))
    halo = [next(row for row in told.rows if row.path == "first.0").forward[0] for told in (first, second)]
    assert halo == [1, 2]


def test_the_sequential_model_is_that_of_torch():
    model = UNet()
    with Footprint() as footprint:
        x = torch.ones(SHAPE)
        footprint.count(*model.parameters(), *model.buffers(), x)
        y = model(x)
        y.backward(torch.ones_like(y))
    told = distdl.summary(model, (1, 1, 2, 2), SHAPE)
    assert abs(told.sequential.peak - footprint.peak) <= 0.02 * footprint.peak
    assert told.sequential.forward == told.sequential.backward == (0, 0)
    assert told.totals.peak < 0.5 * told.sequential.peak


def test_what_a_model_writes_into_tables_of_others():
    """They are what they were: a summary only looks."""
    kept = torch.ones(7, 5)

    def function(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        kept.copy_(x.detach())
        kept.view(35).view(7, 5).copy_(x.detach())
        kept[:, 1] = x.detach()[:, 1]
        return x + kept

    distdl.summary(Tables(function), (2, 1), (7, 5))
    assert kept.device.type == "cpu" and kept.eq(1).all()


def test_the_text_is_a_table():
    lines = str(distdl.summary(UNet(), (1, 1, 2, 2), SHAPE)).splitlines()
    assert lines[0].split() == [
        "module", "output", "split", "block", "activations", "weights", "forward", "backward",
    ]  # fmt: skip
    conv = next(line for line in lines if line.startswith("first.0 Conv2d"))
    assert conv.split()[2:5] == ["3x6x22x26", "1x1x2x2", "3x6x11x13"]
    assert lines[-3].startswith("worker 0, peak ") and lines[-2].startswith("sequential, peak ")
    assert lines[-1].startswith("peak counts the tensors of ") and "it does not count the loss, " in lines[-1]


def test_nothing_is_allocated_or_changed():
    model = UNet()
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    distdl.summary(model, (1, 1, 2, 2), SHAPE)
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is before[name][0] and torch.equal(value, before[name][1]) and value.grad is None
    assert type(model) is UNet and "forward" not in model.__dict__
    assert all(not module._forward_hooks for module in model.modules())
    # nobody has 16 TiB
    told = distdl.summary(nn.Conv3d(64, 64, 3, padding=1), (1, 1, 2, 2, 2), (64, 64, 1024, 1024, 1024))
    assert told.totals.peak > 2**41 and told.sequential.peak > 2**44


def test_tables_that_a_model_keeps_or_makes_become_meta_tensors_too():
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.arange(8.0)  # neither parameter nor buffer
            self.weight = nn.Parameter(torch.ones(4, 1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x + self.table) * self.weight + torch.ones(8)

    model = Positions()
    told = distdl.summary(model, (2, 1, 2), (3, 4, 8))
    assert model.table.device.type == "cpu" and on_meta(model).table.is_meta
    assert next(row for row in told.rows if row.path == "").block == (2, 4, 4)


def test_several_inputs_and_integers():
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 6)

        def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"y": self.embedding(tokens) * scale}

    told = distdl.summary(Tokens(), (2, 2), [torch.empty(3, 5, dtype=torch.int64), (3, 5, 1)])
    row = next(row for row in told.rows if row.path == "embedding")
    assert row.shape == (3, 5, 6) and row.block == (2, 3, 6)


@pytest.mark.parametrize("kind", ["normal", "categorical"])
def test_models_that_make_distributions(kind):
    """Which check their parameters: nobody knows whether they are right, so they are taken to be."""

    class Policy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x)
            if kind == "categorical":
                choice = torch.distributions.Categorical(logits=y)
                return choice.log_prob(choice.sample()) + choice.entropy()
            drawn = torch.distributions.Normal(y, nn.functional.softplus(y) + 0.1)
            return drawn.log_prob(drawn.rsample()).sum(1)

    for worker, sent in enumerate(really(Policy(), (2, 1), 2, shape=(6, 4))):
        told = distdl.summary(Policy(), (2, 1), (6, 4), worker=worker)
        assert told.totals.backward == sent["backward"]
        if kind == "normal":  # (multinomial asks for a number of the weights, too, which nobody knows)
            assert told.totals.forward == sent["forward"]
    row = next(row for row in told.rows if not row.path)
    assert row.shape == (6,) and row.block == (3,)


def test_every_worker_of_a_model_that_draws():
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    for worker, sent in enumerate(really(model, (2, 1), 2, shape=(6, 4))):
        assert distdl.summary(model, (2, 1), (6, 4), worker=worker).totals.forward == sent["forward"] == (0, 0)


def test_without_backward():
    told = distdl.summary(UNet(), (1, 1, 2, 2), SHAPE, backward=False)
    assert told.totals.backward == (0, 0) and told.totals.activations == 0
    assert told.totals.forward == distdl.summary(UNet(), (1, 1, 2, 2), SHAPE).totals.forward
    model = UNet().eval().requires_grad_(False)
    assert distdl.summary(model, (1, 1, 2, 2), SHAPE).totals.activations == 0


def test_options_of_distribute():
    told = distdl.summary(UNet(odd=True), (1, 1, 2, 2), SHAPE, fallback="silent")
    assert told == distdl.summary(UNet(odd=True), (1, 1, 2, 2), SHAPE)
    with pytest.raises(NotImplementedError, match="alias_copy"):
        distdl.summary(UNet(odd=True), (1, 1, 2, 2), SHAPE, fallback="error")


def test_wrong_workers():
    with pytest.raises(ValueError, match="a worker from 0 to 3; got 4"):
        distdl.summary(UNet(), (1, 1, 2, 2), SHAPE, worker=4)
    with pytest.raises(RuntimeError, match="to have 2 channels, but got 4"):
        distdl.summary(UNet(), (1, 1, 2, 2), (3, 4, 22, 26))


def test_suggest_ranks_by_memory():
    found = distdl.suggest(UNet(), 4, SHAPE)
    assert len(found) == 8  # of ten ways, two need a batch of four samples, or four channels
    assert {one.grid for one in found} >= {(1, 1, 2, 2), (1, 1, 4, 1), (1, 2, 2, 1), (2, 1, 2, 1)}
    assert [one.peak for one in found] == sorted(one.peak for one in found)
    best = distdl.summary(UNet(), found[0].grid, SHAPE)
    assert found[0].peak >= best.totals.peak and found[0].peak < found[-1].peak
    lines = str(found).splitlines()
    assert lines[0].split() == ["split", "peak", "sent"] and lines[1].split()[0] == "x".join(map(str, found[0].grid))


def test_suggest_names_what_runs_on_one_worker_and_what_cannot_be():
    assert all(one.falls_back == ("alias_copy",) for one in distdl.suggest(UNet(odd=True), 2, SHAPE))

    class Whole(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.to_local().shape[1] < x.shape[1]:
                raise ValueError("needs all channels")
            return x

    found = distdl.suggest(Whole(), 2, (2, 4))
    assert [one.grid for one in found] == [(2, 1), (1, 2)]
    assert found[1].error == "ValueError: needs all channels" and found[1].error in str(found)
    with pytest.raises(ValueError, match="no grid of 7 workers for an input of 2x4"):
        distdl.suggest(Whole(), 7, (2, 4))


def test_footprint_forgets_what_is_freed():
    with Footprint() as footprint:
        for _ in range(3):
            x = torch.zeros(1000)
            del x
        y = torch.zeros(500) + 1
    assert (footprint.peak, footprint.now) == (4000, 2000)
    assert y.sum() == 500


class Applied(nn.Module):
    """A function and a weight, of which it makes nothing."""

    def __init__(self, function):
        super().__init__()
        self.weight, self.function = nn.Parameter(torch.ones(1)), function

    def forward(self, x):
        return self.function(x)


WHOLE = {
    "area": (lambda x: F.interpolate(x, scale_factor=0.5, mode="area"), (1, 1, 4, 4), (1, 4, 64, 64)),
    "recomputed": (
        lambda x: F.interpolate(x, scale_factor=0.5, mode="nearest", recompute_scale_factor=True),
        (1, 1, 4, 4),
        (1, 4, 64, 64),
    ),
    "unpooled": (lambda x: F.max_unpool2d(x, x.long(), 1), (4, 4, 1, 1), (8, 8, 16, 16)),
    "written there": (lambda x: torch.add(x.detach(), 1, out=torch.empty_like(x)), (4, 4, 1, 1), (8, 8, 16, 16)),
    "dtypes": (lambda x: x.to(torch.result_type(x, 1.0)), (4, 4, 1, 1), (8, 8, 16, 16)),
    "written by index": (lambda x: torch.index_put(x, (torch.arange(8),), x), (1, 4, 4, 1), (8, 8, 16, 16)),
    "spectra": (lambda x: torch.stft(x, 8, window=torch.ones(8), return_complex=True), (16, 1), (64, 64)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_whole_tensors_of_which_torch_is_asked_about_options_are_no_memory(name):
    """Nothing moves but some cells around blocks, so what one of 16 workers holds is about that part."""
    function, grid, shape = WHOLE[name]
    told = distdl.summary(Applied(function), grid, shape, worker=0, backward=False)
    assert told.totals.peak < 3 * told.sequential.peak / 16
