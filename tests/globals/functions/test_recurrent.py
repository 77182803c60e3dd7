"""Recurrent layers and cells: samples are split, steps and features are whole meanwhile."""

import copy
import functools

import pytest
import torch
from launched import assert_close, split
from same import noise
from torch import nn
from torch.utils.checkpoint import checkpoint

import distdl

GRIDS = [(1, 2, 1), (3, 1, 1)]


class Layer(nn.Module):
    """A recurrent layer, with what follows from all of its results."""

    def __init__(self, kind, started, batch_first, **options):
        super().__init__()
        self.layer = kind(6, 4, num_layers=2, batch_first=batch_first, bidirectional=True, **options)
        self.started, self.samples = started, 0 if batch_first else 1

    def forward(self, x):
        hx = None
        if self.started:  # from a state that is computed
            state = x.mean(1 - self.samples)[..., :4].expand(4, -1, -1)
            hx = (state, state * 2) if isinstance(self.layer, nn.LSTM) else state
        y, states = self.layer(x, hx)
        states = states if isinstance(states, tuple) else (states,)
        return torch.cat([y.square().flatten(), *(one.exp().flatten() for one in states)])


class Cells(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell = kind(6, 4, **options)

    def forward(self, x):
        state = None
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return torch.stack(state) if isinstance(state, tuple) else state


def _make(build):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return build().double()


MODELS = {
    "LSTM": lambda: Layer(nn.LSTM, False, True),
    "LSTM from a state, steps first": lambda: Layer(nn.LSTM, True, False),
    "LSTM with a projection": lambda: Layer(nn.LSTM, False, True, proj_size=3),
    "GRU from a state": lambda: Layer(nn.GRU, True, True),
    "RNN of ReLU, no biases": lambda: Layer(nn.RNN, False, False, nonlinearity="relu", bias=False),
    "LSTM that drops all": lambda: Layer(nn.LSTM, True, True, dropout=1.0),
    "GRU that drops all": lambda: Layer(nn.GRU, False, False, dropout=1.0, bias=False),
    "LSTM cells": lambda: Cells(nn.LSTMCell),
    "GRU cells": lambda: Cells(nn.GRUCell),
    "LSTM cells without biases": lambda: Cells(nn.LSTMCell, bias=False),
    "GRU cells without biases": lambda: Cells(nn.GRUCell, bias=False),
    "RNN cells of ReLU, no biases": lambda: Cells(nn.RNNCell, nonlinearity="relu", bias=False),
}


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, "replicated") for name in MODELS), ("LSTM", "sharded"), ("GRU cells", "sharded")]
)
def test_values_and_gradients_are_those_of_torch_alone(name, weights):
    """Two samples on up to three workers, so that one has none. The weights are listed once, when the layer is made."""
    x, alone = noise(2, 5, 6).requires_grad_(), _make(MODELS[name])
    expected = alone(x)
    (expected * expected).sum().backward()
    models = {(worker, grid): _make(MODELS[name]) for worker in range(3) for grid in GRIDS}

    def work():
        for grid in GRIDS:
            given = split(x.detach(), *grid).requires_grad_()
            model = models[distdl.world().comm.rank, grid]
            model = distdl.distribute(model, given.layout.partition, weights=weights, fallback="error")
            y = model(given)
            assert_close(y, expected)
            (y * y).sum().backward()
            assert_close(given.grad, x.grad)
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                assert_close(ours.grad, theirs.grad)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_states_of_another_number_of_samples_are_refused(samples):
    """Every worker raises what torch raises, before anything moves."""
    x, h = noise(3, 5), noise(samples, 2)
    cell, layer = [noise(6, 5), noise(6, 2)], [noise(8, 5), noise(8, 2)]

    def step(x, h):
        torch.gru_cell(x, h, *cell)

    def steps(x, h):
        torch.lstm(x[:, None].expand(-1, 4, -1), (h[None], h[None]), layer, False, 1, 0.0, False, False, True)

    with pytest.raises(RuntimeError) as theirs:
        step(x, h)

    def work():
        for call in (step, steps):
            for given in (h, split(h)):
                ours = split(x)
                with distdl.ledger() as book, pytest.raises(RuntimeError) as found:
                    call(ours, given)
                assert not book.entries
                assert call is steps or str(found.value) == str(theirs.value)

    distdl.run_workers(work, 3)
    with pytest.raises(RuntimeError):
        steps(x, h)


@pytest.mark.parametrize("workers", [(2, 1, 1), (1, 2, 1)])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM])
def test_a_plain_state_has_a_gradient_where_a_worker_is_outside(kind, workers):
    layer, given, first = _make(lambda: kind(6, 4, batch_first=True)), noise(3, 5, 6), noise(1, 3, 4)

    def gradient(layer, x):
        state = first.clone().requires_grad_()
        layer(x, (state, state * 2) if kind is nn.LSTM else state)[0].square().sum().backward()
        return state.grad

    alone = gradient(copy.deepcopy(layer), given)

    def work():
        P = distdl.world()[:2].reshape(workers)
        for own in (distdl.distribute(copy.deepcopy(layer), P), copy.deepcopy(layer)):
            found = gradient(own, distdl.distribute_tensor(given, P))
            assert torch.allclose(found, alone, rtol=0, atol=1e-12)

    distdl.run_workers(work, 3)


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_sequences_of_different_lengths_fall_back(weights):
    alone, x = _make(lambda: nn.LSTM(6, 4)), noise(5, 2, 6)
    data = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    expected = alone(data)[0].data
    models = [_make(lambda: nn.LSTM(6, 4)) for _ in range(3)]

    def work():
        model = distdl.distribute(models[distdl.world().comm.rank], split(x).layout.partition, weights=weights)
        y, _ = model(data._replace(data=split(data.data)))
        assert_close(y.data, expected)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_no_partition_changes_what_is_dropped_between_layers(kind):
    """Nor does a forward that is recomputed in backward."""
    found = []
    torch.manual_seed(1)
    layer = _make(lambda: kind(6, 4, num_layers=3, dropout=0.4, batch_first=True, bidirectional=True))

    def work(grid, kept):
        x, model = split(noise(5, 3, 6), *grid).requires_grad_(), copy.deepcopy(layer)
        call = model.forward if kept else functools.partial(checkpoint, model.forward, use_reentrant=False)
        model = distdl.distribute(_Calling(model, call), x.layout.partition, fallback="error")
        y, z = (model(x) for _ in range(2))
        assert not torch.equal(y.full_tensor(), z.full_tensor())
        (y * z).sum().backward()
        found.append([y.full_tensor().detach(), z.full_tensor().detach(), x.grad.full_tensor()])

    for grid, kept in (((1, 1, 1), True), ((2, 1, 1), True), ((1, 3, 1), False), ((2, 1, 2), False)):
        distdl.run_workers(lambda grid=grid, kept=kept: work(grid, kept), torch.Size(grid).numel())
    for others in found[1:]:
        for ours, theirs in zip(others, found[0], strict=True):
            assert_close(ours, theirs)


class _Calling(nn.Module):
    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(x)[0]
