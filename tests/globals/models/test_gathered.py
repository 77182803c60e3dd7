"""Weights in shares while they are whole: a forward may only read them, and backward finds what has changed."""

import pytest
import torch
from launched import on_workers, split
from same import noise
from torch import nn

import distdl

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
