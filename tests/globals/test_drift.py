"""Weights that every worker has whole, and that are written otherwise on some: an error, and the same on all."""

import copy
import gc
import weakref

import pytest
import torch
from nets import batch, network, partition, run
from torch import nn

import distdl
from distdl.globals.models.drift import _bits_of


def _net():
    return nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 2, 1))


def _trained(model, steps):
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01)
    for step in range(steps):
        optimiser.zero_grad()
        x, target = batch(step)
        (model(x) - target).square().mean().backward()
        optimiser.step()
    return model


def _passed(model, steps):
    for _ in range(steps):
        model(torch.ones(6, 3, dtype=torch.float64)).to_local().sum().backward()


def _drawn_again(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.rand(one.shape, generator=generator))


def _drawn_in_data(model, seed):
    for one in model.parameters():
        one.data = torch.rand(one.shape, generator=torch.Generator().manual_seed(seed), dtype=one.dtype)


def _scaled_on_one(model, seed):
    if seed == 1:
        with torch.no_grad():
            model[0].weight[0, 0, 0] *= 1.01


def _frozen(model, seed):
    model[3].weight.requires_grad_(False)
    with torch.no_grad():
        model[3].weight.add_(seed)


@pytest.mark.parametrize("write", [_drawn_again, _drawn_in_data, _scaled_on_one, _frozen])
def test_weights_that_are_written_otherwise_on_some_workers(write):
    texts = {}

    def work():
        model = _trained(distdl.distribute(network(_net), partition((3, 1))), 3)
        write(model, distdl.world().rank)
        with pytest.raises(ValueError, match=r"the same weights on every worker; .* of worker [123] differs") as raised:
            _trained(model, 6)
        texts[distdl.world().rank] = str(raised.value)

    run(work)
    assert len(texts) == 4 and len(set(texts.values())) == 1


def test_another_layer_that_is_frozen_on_one_worker():
    """(Of processes, in backends/test_failures.)"""

    def work():
        model = distdl.distribute(network(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), partition((3, 1)))
        model[int(distdl.world().rank == 1)].requires_grad_(False)
        _passed(model, 1)

    named = r"\(parameters 2-3 of the model; .*\(parameters 0-1 of the model"
    with pytest.raises(distdl.CommunicationError, match=named):
        distdl.run_workers(work, 4)


def test_what_is_written_alike_and_what_is_rounded_otherwise_is_no_error():
    def work():
        rank = distdl.world().rank
        model = _trained(distdl.distribute(network(_net), partition((3, 1))), 3)
        _drawn_again(model, 0)
        _trained(model, 7)
        with torch.no_grad():
            for one in model.parameters():
                one.mul_(1 + rank * 1e-12)
        _trained(model, 20)
        _trained(copy.deepcopy(model), 20)
        with torch.no_grad():
            model[0].weight.fill_(torch.nan)
            model[0].weight[0].fill_(rank * torch.inf if rank else torch.inf)
        _trained(model, 1)

    run(work)


def test_one_weight_that_is_rounded_otherwise_hides_no_other():
    def work():
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))
        _passed(model, 2)
        with torch.no_grad():
            model.weight.mul_(1 + distdl.world().rank * 1e-12)
            model.bias.add_(distdl.world().rank)
        with pytest.raises(ValueError, match="bias of worker 3 differs"):
            _passed(model, 16)

    run(work)


def test_a_graph_does_not_keep_the_model():
    models = []

    def work():
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))
        _passed(model, 3)
        models.append(weakref.ref(model))

    run(work)
    gc.collect()
    assert [one() for one in models] == [None] * 4


def test_weights_whose_conjugate_is_there():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.arange(3).to(torch.complex128).mul(1j).conj())
            self.part = nn.Parameter(self.weight.detach().imag)

        def forward(self, x):
            return (x * self.weight * self.part).abs()

    run(lambda: _passed(distdl.distribute(Net(), partition((3, 1))), 4))


def test_it_sends_no_message():
    def work():
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))
        for _ in range(3):
            with distdl.ledger() as book:
                model(torch.ones(6, 3, dtype=torch.float64)).to_local().sum().backward()
            assert sum(one.calls for one in book.entries) == 1  # (that of the gradients)

    run(work)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128, torch.int64, torch.bool]
)
def test_bits_follow_from_all_of_a_tensor(dtype):
    one = torch.arange(-3, 3).reshape(2, 3).to(dtype)
    other = one.clone()
    other[1, 0] = 7 if dtype is not torch.bool else ~other[1, 0]
    assert torch.equal(_bits_of(one), _bits_of(one.clone())) and _bits_of(one).numel() == 16
    assert not torch.equal(_bits_of(one), _bits_of(other))
    assert torch.equal(_bits_of(one.T), _bits_of(one))
