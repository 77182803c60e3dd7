"""Values that Python asks for: numbers, arrays and assertions of global tensors."""

import numpy as np
import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise
from torch import nn
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)


@on_workers
def test_values_tables_and_constants():
    """``.item()`` in a forward, ``.data`` of a tensor, ``torch.as_tensor``, NumPy of a tensor."""
    x = split(x35).requires_grad_()
    assert_close(x / x.abs().sum().item(), x35 / x35.abs().sum())
    assert_close(x.data * 2, x35 * 2)
    assert not x.data.requires_grad
    assert type(torch.as_tensor(x)) is GlobalTensor
    assert x.detach().numpy().tolist() == x35.tolist()


@on_workers
def test_as_tensor_of_another_dtype_has_a_gradient():
    """Torch asks nobody there, but for a copy below autograd."""
    given = []
    for x in (split(x35), x35.clone()):
        x.requires_grad_()
        y = torch.as_tensor(x, dtype=torch.complex128) * 1j + torch.as_tensor((x * 2).exp(), dtype=torch.float32)
        y.abs().square().sum().backward()
        given += [y, x.grad]
    assert_close(given[0], given[2])
    assert_close(given[1], given[3])


@pytest.mark.filterwarnings("error:.*has no op")
@on_workers
def test_an_assertion_of_a_value_is_that_of_every_worker():
    x = split(x35)
    torch._assert_async((x < 100).all(), "too large")
    with pytest.raises(RuntimeError, match="too small"):
        torch._assert_async((x > 100).all(), "too small")


def me():
    return distdl.world().comm.rank


@on_workers
def test_values_come_to_every_worker():
    x, total = split(x35), split(x35).sum()
    value = float(x35.sum())
    for found in (total.item(), float(total), total.tolist(), total.numpy().item(), float(f"{total:.12f}")):
        assert found == pytest.approx(value, abs=1e-11)
    assert bool(total > 0) == (value > 0) and int(total * 100) == int(value * 100)
    assert x.tolist() == x35.tolist()
    assert "GlobalTensor(" in repr(total) and f"{value:.4f}" in repr(total)
    held = {0: "worker 0 holds [0:2, 0:5]", 1: "worker 1 holds [2:3, 0:5]", 2: "worker 2 holds nothing"}
    assert "shape=(3, 5), dtype=torch.float64, over 2x1" in repr(x) and held[me()] in repr(x)
    for wrong in (x.item, lambda: bool(x), lambda: float(x)):
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            wrong()


@pytest.mark.fault("threads")
def test_a_value_for_which_one_worker_asks_is_an_error_that_says_so():
    def work():
        total = split(x35).sum()
        if me() == 0:
            print(total)
        split(x35).sum(1).sum()
        distdl.world().allgather_data(0)

    with pytest.raises(distdl.CommunicationError, match="for which every worker has to ask"):
        distdl.run_workers(work, 3)


@on_workers
def test_a_global_tensor_is_no_value_to_send():
    """Asking it for its memory would be messages, which the workers that send no value do not make."""
    P, x = distdl.world(), split(x35)
    for value in (x, x.sum(), {"a": [x[:0]]}):
        for send in (P.broadcast_data, P.allgather_data, P.allreduce_data):
            with pytest.raises(ValueError, match=r"^worker 0: .*(a GlobalTensor, which wraps|reached a global tensor)"):
                send(value if me() == 0 else 0)
    assert P.allgather_data(me()) == [0, 1, 2]


doubles = torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, 4)


@pytest.mark.parametrize("function", [lambda x: x.numpy(), np.asarray])
def test_no_array_of_what_requires_a_gradient(function):
    def work():
        x = distdl.distribute_tensor(doubles, distdl.world()[:2].reshape(1, 2))
        assert (function(x) == function(doubles)).all()
        plain = doubles.clone().requires_grad_()
        for ours, theirs in ((x.requires_grad_(), plain), (x * 2, plain * 2)):
            with pytest.raises(RuntimeError) as expected:
                function(theirs)
            with pytest.raises(RuntimeError) as found:
                function(ours)
            assert str(found.value) == str(expected.value)
            assert (ours.numpy(force=True) == theirs.numpy(force=True)).all()
            assert (function(ours.detach()) == function(theirs.detach())).all()

    distdl.run_workers(work, 3)


x43 = noise(4, 3, 5).float()


GRIDS = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]


class Observing(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.layer = nn.Conv1d(3, 3, 3, padding=1)
        self.first, self.last = (kind(quant_min=0, quant_max=255, **options) for _ in range(2))
        with torch.no_grad():
            self.layer.weight.copy_(noise(3, 3, 3))
            self.layer.bias.copy_(noise(3))

    def forward(self, x):
        return self.last(self.layer(self.first(x)))


def _set(model, step):
    if step == 2:
        model.last.disable_observer()
    elif step == 3:
        model.first.disable_fake_quant()


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_what_is_observed_is_the_same_on_every_worker():
    for grid, weights in zip(GRIDS, ("replicated", "sharded", "replicated"), strict=True):
        alone = Observing(FakeQuantize)
        P = split(x43, *grid).layout.partition
        model = distdl.distribute(Observing(FakeQuantize), P, weights=weights)
        for step in range(4):
            for one in (alone, model):
                _set(one, step)
            x = x43 * (step + 1)
            ours, theirs = model(x), alone(x)
            torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-5, atol=1e-5)
            ours.square().sum().backward()
            theirs.square().sum().backward()
        for (path, one), other in zip(model.named_buffers(), alone.buffers(), strict=True):
            assert one.shape == other.shape and torch.allclose(one, other, rtol=1e-6), path
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            found = one.grad.full_tensor() if weights == "sharded" else one.grad
            torch.testing.assert_close(found, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_what_observes_in_one_function_is_an_error():
    model = Observing(FusedMovingAvgObsFakeQuantize, observer=MovingAverageMinMaxObserver)
    x = split(x43)
    with pytest.raises(NotImplementedError, match=r"torch\.ao\.quantization\.FakeQuantize"):
        distdl.distribute(model, x.layout.partition)(x)
