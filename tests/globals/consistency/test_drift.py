"""Weights that every worker has whole, and that are written otherwise on some: an error, and the same on all."""

import copy
import functools
import gc
import subprocess
import sys
import weakref
from unittest.mock import Mock

import pytest
import torch
from nets import batch, network, partition, run
from same import noise
from torch import nn

import distdl
from distdl.globals.consistency.checksums import Sample, bits_of, digest
from distdl.globals.consistency.comparing import Look, differ
from distdl.globals.consistency.equality import _parts
from distdl.globals.layouts.context import Context
from distdl.globals.models import replicated_weights


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


def _target(model, rank):
    return nn.functional.mse_loss(model(noise(6, 3)), noise(6, 2, seed=rank))


def _classes(model, rank):
    return nn.functional.cross_entropy(model(noise(6, 3)), torch.arange(6).eq(rank).long())


def _added(model, rank):
    return (model(noise(6, 3)) + noise(6, 2, seed=rank).T.contiguous().T).square().mean()


def _learned(model, rank):
    """A parameter of the user's beside the model."""
    return (model(noise(6, 3)) * nn.Parameter(noise(2, seed=rank))).square().mean()


@pytest.mark.parametrize("loss", [_input, _target, _classes, _added, _learned])
def test_plain_tensors_that_differ(loss):
    texts = {}

    def work():
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))
        for _ in range(2):
            loss(model, 0).backward()
        with pytest.raises(
            ValueError, match=r"a plain tensor .* is the same on every worker.*on worker [1-3]"
        ) as raised:
            for _ in range(8):
                loss(model, distdl.world().rank).backward()
        texts[distdl.world().rank] = str(raised.value)

    run(work)
    assert len(texts) == 4 and len(set(texts.values())) == 1


@pytest.mark.parametrize("differs", ["weights", "input"])
def test_a_model_whose_first_layers_have_no_gradients(differs, monkeypatch):
    """Several messages, of which the first has none to send."""
    monkeypatch.setattr(replicated_weights, "_BUCKET", 64)

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


@pytest.mark.parametrize(
    ("forwards", "differs"), [(1, 0), (2, 1), (3, 0), (4, 0), (4, 1), (4, 2), (4, 3), (5, 1), (6, 5), (10, 7)]
)
def test_a_plain_tensor_in_one_of_several_forwards(forwards, differs):
    """However many forwards a step has, and whichever of them it is."""

    def work():
        rank = distdl.world().rank
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))

        def step(seed):
            for place in range(forwards):
                _target(model, seed if place == differs else 0).backward()

        with pytest.raises(ValueError, match=r"a plain tensor .* is the same on every worker"):
            for _ in range(2):
                step(rank)

    run(work)


@pytest.mark.parametrize(
    ("behind", "more", "when"),
    [
        (False, 1, [1]), (True, 9, [1]), (False, 9, range(100)), (True, 1, range(100)), (False, 1, range(0, 100, 7)),
        (True, 9, range(0, 100, 7)),
    ],
    ids=str,
)  # fmt: skip
def test_what_one_worker_computes_to_print_it_is_no_difference(behind, more, when):
    """Samples of other tensors would be compared, in that step and in later ones."""

    def work():
        rank = distdl.world().rank
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))

        def step(number, seed=0):
            y = model(noise(6, 3, seed=number))
            shown = range(more) if rank == 0 and number in when else []
            found = [] if behind else [(y.detach() * (noise(6, 2) + n)).to_local() for n in shown]
            loss = sum((y - noise(6, 2, seed=n + number + seed)).square().mean() for n in range(7))
            found += [(y.detach() * (noise(6, 2) + n)).to_local() for n in shown] if behind else []
            loss.backward()

        for number in range(8 if when == [1] else 60):
            step(number)
        if when == [1]:
            with pytest.raises(ValueError, match=r"a plain tensor .* is the same on every worker"):
                for number in range(8, 16):
                    step(number, rank)

    run(work)


def test_the_last_of_many_plain_tensors():
    def work():
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))

        def step(seed):
            y = model(noise(6, 3))
            return sum((y - noise(6, 2, seed=n + 1 + (seed if n == 10 else 0))).square().mean() for n in range(11))

        for _ in range(4):
            step(0).backward()
        with pytest.raises(ValueError, match=r"a plain tensor .* is the same on every worker"):
            for _ in range(2):
                step(distdl.world().rank).backward()

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


@pytest.mark.parametrize("make", [lambda: nn.Conv1d(3, 6, 3), lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 2))])
def test_weights_of_a_model_that_nobody_has_distributed(make):
    """Workers may build them otherwise, and then each computes its block with weights of its own."""
    told = []

    def work(differs):
        P = distdl.world()[:2].reshape(2, 1, 1)
        model = make().double()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(noise(*one.shape, seed=int(differs and distdl.world().rank == 1)))
        x = distdl.distribute_tensor(noise(4, 3, 4), P)
        for _ in range(2):
            try:
                model(x).square().sum().backward()
            except ValueError as error:
                told.append(str(error))
                return None
        return model(x).square().sum().item()

    alike = distdl.run_workers(functools.partial(work, False), 3)
    assert len(set(alike)) == 1 and not told
    distdl.run_workers(functools.partial(work, True), 3)
    assert len(told) == 3 and len(set(told)) == 1
    assert "on worker 0 differs by" in told[0] and "on worker 1" in told[0]
    assert "distdl.distribute(model, P) gives all workers the weights of worker 0" in told[0]


def test_weights_of_such_a_model_may_be_set_anew_on_one_worker():
    def work():
        x = distdl.distribute_tensor(noise(4, 3), distdl.world()[:2].reshape(2, 1))
        model = nn.Linear(3, 2).double()
        state = {name: noise(*one.shape) for name, one in model.state_dict().items()}
        found = []
        for assign in (False, distdl.world().rank == 0, False):
            model.load_state_dict(state, assign=assign)
            model.requires_grad_()
            y = model(x).square().sum()
            y.backward()
            found.append(y.item())
        return found

    for found in distdl.run_workers(work, 3):
        assert len(set(found)) == 1


def _after_forwards_alone(model, x):
    for _ in range(5):
        model(x)
    model(x).square().sum().backward()


def _after_gradients_of_the_input(model, x):
    for _ in range(5):
        torch.autograd.grad(model(x).square().sum(), x)
    model(x).square().sum().backward()


def _twice(model, x):
    torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)


def _two_backwards(model, x):
    for _ in range(2):
        model(x).square().sum().backward()


@pytest.mark.parametrize("use", [_after_forwards_alone, _after_gradients_of_the_input, _twice, _two_backwards])
@pytest.mark.parametrize("share", [1.0, 1e-4])
def test_such_a_model_is_looked_at_in_its_first_backwards(use, share):
    """One row of a weight differs on a worker, and not by much."""

    def work():
        size = 1700 if use is _two_backwards else 400
        model = nn.Linear(size, 3).double()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(noise(*one.shape))
            model.weight[2] *= 1 + share * (distdl.world().rank == 1)
        x = distdl.distribute_tensor(noise(4, size), distdl.world()[:2].reshape(2, 1)).requires_grad_()
        with pytest.raises(ValueError, match=rf"same on every worker.*of 3x{size} torch.float64 on worker 0 differs"):
            use(model, x)

    distdl.run_workers(work, 3)


def test_what_is_a_parameter_on_one_worker_only():
    def work():
        x = distdl.distribute_tensor(noise(5, 4), distdl.world()[:2].reshape(2, 1))
        w = noise(4).requires_grad_()
        w = nn.Parameter(w.detach()) if distdl.world().rank else w
        (x * w).sum().backward()
        torch.testing.assert_close(w.grad, noise(5, 4).sum(0))

    distdl.run_workers(work, 3)


def test_a_parameter_of_no_distributed_model_may_be_swapped():
    def work():
        model = nn.Linear(4, 3).double()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(noise(*one.shape))
        x = distdl.distribute_tensor(noise(5, 4), distdl.world()[:2].reshape(2, 1))
        model(x).sum().backward()
        model.zero_grad()
        return model.float().weight.dtype

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert distdl.run_workers(work, 2) == [torch.float32] * 2
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_parameters_of_a_distributed_model_are_not_swapped(weights):
    """torch swaps no tensor to which something refers, as a distributed model does."""

    def work():
        model = distdl.distribute(network(lambda: nn.Linear(4, 3)), partition((2, 1)), weights=weights)
        parameters, x = list(model.parameters()), distdl.distribute_tensor(noise(5, 4), partition((2, 1)))
        y = model(x).full_tensor()
        with pytest.raises(RuntimeError, match="Couldn't swap Linear"):
            model.float()
        assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
        torch.testing.assert_close(model(x).full_tensor(), y)
        with pytest.raises(RuntimeError, match='While swapping the parameter named "weight"'):
            model.load_state_dict(model.state_dict())

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        distdl.run_workers(work, 3)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_plain_tensors_that_are_rounded_otherwise_are_no_error():
    def work():
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))
        for step in range(4):
            model(noise(6, 3, seed=step) * (1 + distdl.world().rank * 1e-15)).square().mean().backward()
        noted = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 2.0, 3.0], dtype=torch.float64)
        (model(noise(6, 3)) + noted[:, None]).square().mean().backward()

    run(work)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int32, torch.float16, torch.int64]
)
def test_samples_of_all_dtypes(dtype):
    whole = torch.arange(3 * 7 * 250).reshape(3, 7, 250)
    for x in (whole.to(dtype), whole.to(dtype).transpose(0, 2), whole.to(dtype)[:, ::2], whole[0, 0, 3].to(dtype)):
        one, other = Sample.of(x), Sample.of(~x if dtype is torch.bool else x + 256)
        assert one.values.numel() < 300 and digest(one) == digest(Sample.of(x.clone()))
        assert digest(one) != digest(other)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 1 + 2**-7), (torch.float64, 1 + 1e-6)])
def test_rounding_of_plain_tensors_is_no_difference(dtype, near):
    def work():
        model = distdl.distribute(nn.Linear(3, 2).to(dtype), partition((3, 1)))
        model(noise(6, 3).to(dtype) * (near if distdl.world().rank else 1))

    run(work)


def test_plain_tensors_that_idle_workers_do_not_read_are_no_difference():
    """Every worker takes note of the same ones, also one without cells."""

    def work():
        P = partition((2, 1))
        model = distdl.distribute(network(lambda: nn.Linear(3, 3)), P)
        index, factor = torch.tensor([[0, 2, 1]]).expand(6, 3), noise(6, 3, seed=4)
        for _ in range(6):
            y = model(distdl.distribute_tensor(noise(6, 3), P))
            z = torch.cat([y.gather(1, index), factor[:2]])
            z[z < 0.1] = 0.5
            (z.index_add(0, torch.tensor([1, 0]), factor[:2]).mean() + (y * factor).sum()).backward()

    run(work)


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


def test_lists_of_parameters_say_nothing_of_devices():
    model = nn.ParameterList([nn.Parameter(torch.ones(2))])
    assert _parts(model) == ["the model is ParameterList()"]


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
    monkeypatch.setattr(replicated_weights, "_BUCKET", bucket)
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


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.complex128, torch.int64, torch.bool]
)
def test_bits_follow_from_all_of_a_tensor(dtype):
    one = torch.arange(-3, 3).reshape(2, 3).to(dtype)
    other = one.clone()
    other[1, 0] = 7 if dtype is not torch.bool else ~other[1, 0]
    assert torch.equal(bits_of(one), bits_of(one.clone())) and bits_of(one).numel() == 16
    assert not torch.equal(bits_of(one), bits_of(other))
    assert not torch.equal(bits_of(one, number=1 << 60), bits_of(one))


@pytest.mark.parametrize("count", [512, 5000, 2**16, 2**18 + 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bits_follow_from_places_signs_and_exponents(count, dtype):
    one = torch.linspace(-1, 1, count, dtype=torch.float64).to(dtype)
    parts = [one * 2, -one, one.flip(0), one.roll(1), one.clone(), one.clone()]
    parts[-1][-1] += 1
    parts[-2][:2] = parts[-2][:2] * 4
    for other in parts:
        assert not torch.equal(bits_of(one), bits_of(other))


def test_bits_follow_from_nothing_that_differs_between_processes():
    text = (
        "import torch; from distdl.globals.consistency.checksums import Sample, bits_of, digest; "
        "print(bits_of(torch.ones(3), digest(Sample.of(torch.ones(3)))).tolist())"
    )
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(bits_of(torch.ones(3), digest(Sample.of(torch.ones(3)))).tolist())


@pytest.mark.parametrize("what", ["plain", "weight"])
@pytest.mark.parametrize("dead", ["before", "behind"])
def test_a_forward_without_a_backward_hides_nothing(what, dead):
    """As the one of a generator for its discriminator: fake = G(z).detach()."""

    def work():
        P = distdl.world().reshape(2, 1)
        model = distdl.distribute(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)), P)
        optimiser = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(20):
            optimiser.zero_grad()
            x = distdl.distribute_tensor(noise(4, 6, seed=step).float(), P)
            if dead == "before":
                model(x).detach()
            y = model(x)
            if dead == "behind":
                model(x).detach()
            (y * torch.full((4,), 1.0 + (what == "plain") * P.rank)).square().mean().backward()
            optimiser.step()
            if what == "weight" and step == 9 and P.rank == 1:
                for one in model.parameters():
                    one.data.add_(one is model[0].weight or one is model[1].weight)  # (every other one)
        return step

    with pytest.raises(ValueError, match=r"the same (weights )?on every worker"):
        distdl.run_workers(work, 2)


def test_sums_that_no_bits_of_all_workers_have_are_differences():
    def work():
        context = Context.of(distdl.world().comm)
        assert not differ(torch.tensor([0.0, 3.0, 0.0]), context)
        for wrong in (1.0, 7e-45, -3.0, 1e30, float("nan")):
            assert differ(torch.tensor([0.0, 3.0, wrong]), context)

    distdl.run_workers(work, 3, "threads")


def test_a_parameter_of_no_model_that_differs_in_one_row_is_found_in_time():
    def work():
        P = distdl.world()
        p = nn.Parameter(noise(300, 4) + P.rank * (torch.arange(300) == 7)[:, None])
        x = distdl.distribute_tensor(noise(4, 300), P.reshape(2, 1))
        with pytest.raises(ValueError, match="a plain tensor beside a global one"):
            for _ in range(16):
                (x @ p).sum().backward()

    distdl.run_workers(work, 2)
