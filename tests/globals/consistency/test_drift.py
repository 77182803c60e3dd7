"""Weights that every worker has whole, and that are written otherwise on some: an error, and the same on all."""

import copy
import gc
import weakref
from unittest.mock import Mock

import pytest
import torch
from nets import batch, network, partition, run
from same import noise
from torch import nn

import distdl
from distdl.globals.consistency.comparing import Look
from distdl.globals.models import buckets


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
            _trained(model, len(model.state_dict()))
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


def _on_one(write):
    def change(model):
        if distdl.world().rank == 1:
            with torch.no_grad():
                write(model)

    return change


ON_ONE = {
    "twice": lambda model: model[3].weight.mul_(2),
    "signs": lambda model: model[3].weight.neg_(),
    "places": lambda model: model[3].weight.copy_(model[3].weight.flip(1)),
    "loaded": lambda model: model.load_state_dict({name: one * 2 for name, one in model.state_dict().items()}),
    "halves": lambda model: [one.mul_(0.5) for one in model.parameters()],
}


@pytest.mark.parametrize("what", ON_ONE)
def test_what_one_worker_writes_is_found_within_a_step_for_each_weight_and_buffer(what):
    def work():
        model = _trained(distdl.distribute(network(_net), partition((3, 1))), 3)
        _on_one(ON_ONE[what])(model)
        with pytest.raises(ValueError, match=r"the same weights on every worker; .* of worker 1 differs"):
            _trained(model, len(model.state_dict()))

    run(work)


def test_what_one_worker_writes_once_more_and_stays_equal_is_no_error():
    def work():
        model = _trained(distdl.distribute(network(_net), partition((3, 1))), 3)
        _on_one(lambda model: model[3].weight.mul_(1))(model)
        _trained(model, 8)
        if distdl.world().rank == 1:
            model[3].weight.data.mul_(2)  # (of which torch takes no note)
        with pytest.raises(ValueError, match=r"3.weight of worker 1 differs"):
            _trained(model, len(model.state_dict()))

    run(work)


def test_buffers_that_are_written_otherwise_on_some_workers():
    def work():
        model = _trained(distdl.distribute(network(_net), partition((3, 1))), 3)
        _on_one(lambda model: model[1].running_var.mul_(2))(model)
        with pytest.raises(ValueError, match=r"1.running_var of worker 1 differs"):
            _trained(model, 12)
        model = _trained(distdl.distribute(network(_net), partition((3, 1))), 3)
        _on_one(lambda model: model[1].num_batches_tracked.add_(1))(model)
        with pytest.raises(ValueError, match=r"1.num_batches_tracked of worker 1 differs"):
            _trained(model, 12)

    run(work)


def _input(model, rank):
    return model(noise(6, 3, seed=rank)).square().mean()


@pytest.mark.parametrize("differs", ["weights", "input"])
def test_a_model_whose_first_layers_have_no_gradients(differs, monkeypatch):
    """Several messages, of which the first has none to send."""
    monkeypatch.setattr(buckets, "BUCKET", 64)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head, self.unused = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(2, 3)

        def forward(self, x):
            with torch.no_grad():
                y = self.body(x)
            return self.head(y)

    def work():
        rank = distdl.world().rank
        model = distdl.distribute(network(Net), partition((3, 1)))
        _passed(model, 1)
        if differs == "weights":
            with torch.no_grad():
                model.head.bias.add_(rank)
        with pytest.raises(ValueError, match=r"the same (weights )?on every worker"):
            for _ in range(8):
                _input(model, rank if differs == "input" else 0).backward()
        assert model.body.weight.grad is None

    run(work)


def test_other_parameters_between_a_forward_and_its_backward():
    """Which weights have gradients changes from forward to forward, as in turns of two models."""

    def work():
        model = distdl.distribute(network(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), partition((3, 1)))
        for _ in range(8):
            model.requires_grad_(True)
            model(noise(6, 3))
            if distdl.world().rank == 1:
                with torch.no_grad():
                    model[1].bias.mul_(1)
            first = model(noise(6, 3)).square().mean()
            model[0].requires_grad_(False)
            second = model(noise(6, 3)).square().mean()
            (first + second).backward()

    run(work)


def test_differences_that_are_none_hide_no_other():
    """Rounding of weights, of plain tensors, and writes that leave weights equal, all at once and in each step."""

    def work():
        rank = distdl.world().rank
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))
        for step in range(120):
            model(noise(6, 3, seed=step) * (1 + rank * 1e-12)).square().mean().backward()
            with torch.no_grad():
                model.bias.mul_(1 + rank * 1e-12)
                if rank == 1:
                    model.weight.mul_(1)
        with torch.no_grad():
            model.bias.add_(rank)
        with pytest.raises(ValueError, match="bias of worker 3 differs"):
            _passed(model, 2)

    run(work)


OWN = {
    "batches": (lambda rank: noise(6, 3, seed=rank), "differs by .* on worker [123]"),
    "blocks": (lambda rank: noise(6 - rank // 2, 3), r"one of 6x3 torch.float64 on worker 0 is 5x3 .* on worker 2"),
    "dtypes": (lambda rank: noise(6, 3).to(torch.float32 if rank == 1 else None), r"6x3 torch.float32 on worker 1"),
    "without values": (
        lambda rank: noise(6, 3).to_sparse() if rank else noise(6, 3),
        "6x3 torch.float64 on worker 0 is 6x3 torch.float64 that is sparse, or has no values on worker 1",
    ),
    "parameters": (lambda rank: nn.Parameter(noise(6, 3, seed=rank)), "differs by .* on worker [123]"),
    "nothing": (lambda rank: None if rank else noise(6, 3), "worker 0 gives 1 plain tensors, and worker 1 0"),
}


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("what", OWN)
def test_plain_inputs_of_their_own_are_found_before_anything_is_computed(what, weights):
    """Also without a backward; the world stays usable."""
    own, text = OWN[what]
    texts = {}

    def work():
        rank = distdl.world().rank
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)), weights=weights).eval()
        with torch.inference_mode():
            expected = model(noise(6, 3)).full_tensor()
            with pytest.raises(ValueError, match=text) as raised:
                model(own(rank))
            texts[rank] = str(raised.value)
            assert torch.equal(model(noise(6, 3)).full_tensor(), expected)

    run(work)
    assert len(texts) == 4 and len(set(texts.values())) == 1


def test_a_buffer_that_follows_from_blocks_is_no_difference():
    """One that does not belong to the state is not looked at."""

    class Caching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.register_buffer("cache", None, persistent=False)

        def forward(self, x):
            y = self.inner(x)

            def keep(block):
                self.cache = block.detach().sum(0) if block.numel() else None
                return block * 1

            return distdl.local_map(keep)(y)

    def work():
        P = partition((2, 1))
        model = distdl.distribute(network(Caching), P)
        for _ in range(8):
            model(distdl.distribute_tensor(noise(6, 3), P)).sum().backward()

    run(work)


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
            _passed(model, 2)

    run(work)


class _Far(torch.Tensor):
    """One that says that it is on a GPU."""

    is_cpu = False


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("bucket", [64, 1 << 22])
@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), _net], ids=["without buffers", "with buffers"])
@pytest.mark.parametrize("later", [False, True], ids=["", "bits are read with the next"])  # (as those of a GPU are)
def test_a_model_that_was_trained_is_freed(later, make, bucket, weights, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", bucket)
    if later:
        settle = Look.settle
        monkeypatch.setattr(Look, "settle", lambda self, sums: settle(self, sums.as_subclass(_Far)))
        monkeypatch.setattr(torch, "Event", lambda device: Mock())
    made = []

    def work():
        model = distdl.distribute(network(make), partition((3, 1)), weights=weights)
        _trained(model, 8) if make is _net else _passed(model, 8)
        made.extend(map(weakref.ref, (model, *model.parameters())))

    run(work)
    gc.collect()
    assert made and not any(one() is not None for one in made)


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
        x = distdl.distribute_tensor(torch.ones(6, 3, dtype=torch.float64), partition((3, 1)))
        for _ in range(3):
            with distdl.ledger() as book:
                model(x).to_local().sum().backward()
            assert sum(one.calls for one in book.entries) == 1  # (that of the gradients)

    run(work)
