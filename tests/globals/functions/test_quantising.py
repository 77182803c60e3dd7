"""Training for numbers of few bits: elements are rounded on one worker, by steps that every worker knows."""

import pytest
import torch
from launched import on_workers, split
from same import noise
from torch import nn
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver

import distdl

pytestmark = pytest.mark.filterwarnings("ignore:.*has no op")

x43 = noise(4, 3, 5).float()
GRIDS = [(2, 1, 1), (1, 2, 1), (1, 1, 2)]
STEPS, POINTS = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([3, 0, 7], dtype=torch.int32)
ROUNDED = {
    "by a number": lambda x: torch.fake_quantize_per_tensor_affine(x, 0.3, 2, 0, 15),
    "by a tensor": lambda x: torch.fake_quantize_per_tensor_affine(x, STEPS[:1], POINTS[:1], quant_min=0, quant_max=15),
    "by a number of x": lambda x: torch.fake_quantize_per_tensor_affine(
        x, x.detach().abs().amax() / 9, POINTS[0], 0, 15
    ),
    "by channel": lambda x: torch.fake_quantize_per_channel_affine(x, STEPS, POINTS, 1, 0, 15),
    "an empty tensor": lambda x: torch.fake_quantize_per_tensor_affine(x[:0], 0.3, 2, 0, 15),
}


@on_workers
@pytest.mark.parametrize("name", ROUNDED)
def test_elements_are_rounded_as_torch_does(name):
    theirs = x43.clone().requires_grad_()
    expected = ROUNDED[name](theirs)
    (expected * expected).sum().backward()
    for grid in GRIDS:
        x = split(x43, *grid).requires_grad_()
        distdl.distribute(nn.Identity(), x.layout.partition)
        y = ROUNDED[name](x)
        (y * y).sum().backward()
        assert torch.equal(y.full_tensor(), expected) and torch.equal(x.grad.full_tensor(), theirs.grad)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_a_point_out_of_range_is_an_error_on_every_worker():
    with pytest.raises(RuntimeError, match=r"zero_point.* must be between"):
        torch.fake_quantize_per_channel_affine(split(x43, 1, 3, 1), STEPS, POINTS, 1, 0, 5)


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


@on_workers
def test_what_observes_in_one_function_is_an_error():
    model = Observing(FusedMovingAvgObsFakeQuantize, observer=MovingAverageMinMaxObserver)
    x = split(x43)
    with pytest.raises(NotImplementedError, match=r"torch\.ao\.quantization\.FakeQuantize"):
        distdl.distribute(model, x.layout.partition)(x)
