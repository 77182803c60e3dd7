"""Parameters and buffers of a distributed model that its forward writes."""

import copy
import threading
from copy import deepcopy

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise
from torch import nn

import distdl

x35 = noise(3, 5)


class _Written(torch.nn.Module):
    """Parameters and buffers that a forward writes, in the ways in which people write them."""

    def __init__(self):
        super().__init__()
        self.started = False
        self.scale = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.table = torch.nn.Parameter(torch.ones(2, 5, dtype=torch.float64), requires_grad=False)
        self.replaced = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
        for name in ("mean", "seen", "rows", "centre"):
            self.register_buffer(name, torch.zeros(3, 5, dtype=torch.float64))
        self.register_buffer("cells", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if not self.started:
            with torch.no_grad():
                self.scale.data.copy_(1 / (x.std(0) + 1e-6))
                self.table.copy_(x[:2])
            self.started = True
        self.mean.mul_(0.9).add_(x.detach(), alpha=0.1).sub_(0.25)
        self.seen[1:].add_(x[:2].detach())
        self.seen.data.clamp_(max=x.detach().amax() / 2)
        with torch.no_grad():
            self.rows[1] = x.mean(0)
            self.rows.index_add_(0, torch.tensor([2, 0]), x[1:])
            self.cells += (x > 0).sum()
        self.centre = self.centre * 0.5 + x.detach().cumsum(1)
        self.replaced = torch.nn.Parameter(x.detach().mean(0))
        return (x - self.mean) * self.scale + self.seen * self.rows + self.table.sum(0) + self.replaced * self.cells


def _assert_written_alike(model, plain, x, x_plain):
    for _ in range(2):
        model(x).square().mean().backward()
        plain(x_plain).square().mean().backward()
        assert_close(x.grad, x_plain.grad)
        assert_close(model.scale.grad, plain.scale.grad)
        assert_close(model.replaced.grad, plain.replaced.grad)
        saved = model.state_dict()
        assert list(saved) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert type(saved[name]) is torch.Tensor, name
            assert_close(saved[name], value)


@on_workers
def test_what_a_model_writes_into_its_parameters_and_buffers_reaches_all_workers():
    x_plain = x35.clone().requires_grad_()
    for grid in [(2, 1), (1, 2)]:
        x_plain.grad, plain = None, _Written()
        x = split(x35, *grid).requires_grad_()
        model = distdl.distribute(_Written(), x.layout.partition)
        _assert_written_alike(model, plain, x, x_plain)
    copied, mean = copy.deepcopy(model), model.mean.clone()
    _assert_written_alike(copied, copy.deepcopy(plain), x, x_plain)
    assert torch.equal(model.mean, mean) and not torch.equal(copied.mean, mean)


@on_workers
def test_a_buffer_does_not_take_a_gradient():
    x = split(x35).requires_grad_()
    model = distdl.distribute(_Written(), x.layout.partition)
    with pytest.raises(RuntimeError, match=r"add_ .*buffer.*gradient"):
        model.mean.add_(x)
    with pytest.raises(RuntimeError, match=r"add_ .*buffer.*gradient"):
        model.mean += x
    assert type(model.mean) is torch.Tensor and not model.mean.any()


@on_workers
def test_what_has_written_into_a_buffer_or_a_part_of_it_gives_that_itself():
    x = split(x35)
    model = distdl.distribute(_Written(), x.layout.partition)
    whole, part = model.mean.add_(x), model.mean[:2].mul_(x[:2])
    assert whole is model.mean
    model.mean.mul_(0.5)
    assert_close(whole, torch.cat([x35[:2] ** 2, x35[2:]]) / 2)
    assert_close(part * x[:2], x35[:2] ** 3 / 2)


class _Assigned(torch.nn.Module):
    """What a forward writes by operators, in which Python assigns what was written."""

    def __init__(self):
        super().__init__()
        self.w, self.v = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
        self.inner = None

    def forward(self, x):
        if self.inner is None:
            self.inner = torch.nn.Module()
            self.inner.register_buffer("seen", torch.zeros(5, dtype=torch.float64))
        with torch.no_grad():
            self.w += x.mean(0)
            self.w *= 2
            self.w.data -= x.amax(0)
            self.v[1:] **= x[0, 1:].abs()
        self.inner.seen += x.detach().sum(0)
        return x * self.w * self.v + self.inner.seen


@on_workers
def test_operators_in_place_assign_the_parameter_itself():
    x_plain, plain = x35.clone().requires_grad_(), _Assigned()
    x = split(x35).requires_grad_()
    model = distdl.distribute(_Assigned(), x.layout.partition)
    kept = list(model.parameters())
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x_plain).square().sum().backward()
    assert all(one is other for one, other in zip(model.parameters(), kept, strict=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert type(model.state_dict()[name]) is torch.Tensor
        assert_close(model.state_dict()[name], value)
    for one, other in ((x, x_plain), (model.w, plain.w), (model.v, plain.v)):
        assert_close(one.grad, other.grad)


@pytest.mark.parametrize("plain", [False, True])
@on_workers
def test_a_parameter_whose_data_is_set_in_a_forward_has_them(plain):
    class Set(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))

        def forward(self, x):
            self.w.data = noise(5, seed=8) if plain else x.mean(0)
            return x * self.w

    x, alone = split(x35), Set()
    model = distdl.distribute(Set(), x.layout.partition)
    for one, given in ((model, x), (alone, x35)):
        one(given).square().sum().backward()
    assert_close(model.w, alone.w)
    assert_close(model.w.grad, alone.w.grad)


@on_workers
def test_a_buffer_and_the_tensor_that_it_was_set_to_are_not_written():
    """In torch, they are one."""
    x = split(x35)
    model = distdl.distribute(_Written(), x.layout.partition)
    model.mean = t = x * 1
    with pytest.raises(RuntimeError, match=r"clamp_ writes a tensor to which a buffer .* was set.*clone\(\)"):
        t[1:].clamp_(max=0)
    for write in (lambda: model.mean.mul_(3), lambda: model.mean[1:].add_(x[1:])):
        model.mean = t = x * 1
        assert type(model.mean) is torch.Tensor
        assert_close(t + model.mean, 2 * x35)
        write()
        with pytest.raises(RuntimeError, match="of a buffer that was set to this tensor has written in place"):
            t.sum()
    assert_close(model.mean, torch.cat([x35[:1], 2 * x35[1:]]))


@on_workers
def test_the_forward_of_a_model_that_another_thread_has_distributed_writes_its_buffers():
    x = split(x35)
    model = distdl.distribute(_Written(), x.layout.partition)
    thread = threading.Thread(target=lambda: model.mean.mul_(0.9).add_(x))
    thread.start()
    thread.join()
    assert type(model.mean) is torch.Tensor
    assert_close(model.mean, x35)


@on_workers
def test_plain_tensors_of_a_list_do_not_become_global():
    x = split(x35)
    for refused in (torch.zeros(3, 5, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)[5:].view(3, 5)):
        with pytest.raises(TypeError, match=r"_foreach_add_ would write a global tensor into a plain.*zeros_like"):
            torch._foreach_add_([refused], [x])
        assert type(refused) is torch.Tensor and not refused.any()
    model = distdl.distribute(_Written(), x.layout.partition)
    torch._foreach_add_([model.mean], [x])  # (of what a model has whole, each worker has all)
    assert type(model.mean) is torch.Tensor and torch.equal(model.mean, x35)


class Averaging(nn.Module):
    """A layer that writes what has a gradient into the data of a buffer, as the codebooks of Encodec do."""

    def __init__(self, use) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(5, 5), use
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x * self.use(self, self.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1))


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
@pytest.mark.parametrize("use", [lambda model, _: model.mean, lambda _, alias: alias], ids=["buffer", "alias"])
def test_what_has_a_gradient_is_written_into_the_data_of_a_buffer(use, grid, weights):
    torch.manual_seed(0)
    model = Averaging(use).double()
    wanted = _two_steps(deepcopy(model), x35)

    def work() -> None:
        P = distdl.world()[:2].reshape(*grid)
        distributed = distdl.distribute(deepcopy(model), P, weights=weights)
        for ours, theirs in zip(_two_steps(distributed, distdl.distribute_tensor(x35, P)), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)

    distdl.run_workers(work, 3)


@on_workers
def test_the_data_of_a_buffer_of_which_there_are_other_views_is_not_written_with_a_gradient():
    model = Averaging(lambda model, alias: model.mean.data[1:].add_(alias[1:].exp())).double()
    x = distdl.distribute_tensor(x35, distdl.world()[:2].reshape(2, 1))
    with pytest.raises(RuntimeError, match="into a plain tensor of which there are other views"):
        distdl.distribute(model, x.layout.partition)(x)


def _two_steps(model, x):
    optimiser = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()
    return list(model.state_dict().values())
