"""A worker needs what it stores of the weights, and its share of the activations of the sequential run."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import distdl
from distdl.globals.tensor.gradient_sums import UnderWay
from distdl.workers.footprint import Footprint


class Block(nn.Module):
    def __init__(self, dims, inputs, outputs):
        super().__init__()
        convolution, norm = getattr(nn, f"Conv{dims}d"), getattr(nn, f"BatchNorm{dims}d")
        self.first = convolution(inputs, outputs, 3, padding=1)
        self.second = convolution(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = norm(outputs), norm(outputs)

    def forward(self, x):
        x = F.relu(self.norm1(self.first(x)), inplace=True)
        return F.relu(self.norm2(self.second(x)), inplace=True)


class UNet(nn.Module):
    def __init__(self, dims, channels=(8, 16, 32)):
        super().__init__()
        up, coarser = getattr(nn, f"ConvTranspose{dims}d"), channels[:0:-1]
        self.pool = getattr(nn, f"MaxPool{dims}d")(2)
        self.down = nn.ModuleList(Block(dims, i, o) for i, o in zip((1, *channels[:-1]), channels, strict=True))
        self.up = nn.ModuleList(up(o, i, 2, stride=2) for i, o in zip(channels[-2::-1], coarser, strict=True))
        self.merge = nn.ModuleList(Block(dims, 2 * i, i) for i in channels[-2::-1])
        self.head = getattr(nn, f"Conv{dims}d")(channels[0], 2, 1)

    def forward(self, x):
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = self.pool(x)
        x = self.down[-1](x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x, beside = up(x), kept.pop()
            missing = [n - m for n, m in zip(beside.shape[2:], x.shape[2:], strict=True)]
            if any(missing):
                x = F.pad(x, [width for n in reversed(missing) for width in (0, n)], mode="replicate")
            x = merge(torch.cat([beside, x], 1))
        return self.head(x)


def _noise(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _unet(dims):
    model = UNet(dims)
    with torch.no_grad():  # (workers that are threads have one generator of random numbers)
        for weight in model.parameters():
            weight.copy_(_noise(*weight.shape) / 10)
    return model


def _train(model, x, truth):
    """Most bytes that were held in two steps, and the last loss."""
    optimiser = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    with Footprint() as footprint:
        footprint.count(*model.parameters())
        for _ in range(2):
            optimiser.zero_grad()
            loss = F.mse_loss(model(x), truth)
            loss.backward()
            optimiser.step()
    return footprint.peak, loss.item()


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        pytest.param((251, 198), (2, 2), id="2-d", marks=pytest.mark.every_case),
        pytest.param((384, 128), (4, 1), id="2-d, over rows"),
        pytest.param((90, 98, 24), (2, 2, 1), id="3-d"),
    ],
)
def test_a_worker_needs_its_share_of_a_unet(shape, grid):
    """Over four of five workers; the fifth holds no activations."""

    def work():
        root = distdl.world()
        P = root[:4].reshape(1, 1, *grid)
        x, truth = _noise(1, 1, *shape), _noise(1, 2, *shape)
        sequential = torch.zeros(2, dtype=torch.float64)
        if root.rank == 0:
            sequential = torch.tensor(_train(_unet(len(shape)), x.clone(), truth.clone()), dtype=torch.float64)
        peak, loss = distdl.distribute_tensor(sequential, root[:1].reshape(1)).full_tensor().tolist()
        model = distdl.distribute(_unet(len(shape)), P, fallback="error")
        stored = 3 * sum(weight.nbytes for weight in model.parameters())  # with gradients and momenta
        x, truth = distdl.distribute_tensor(x, P), distdl.distribute_tensor(truth, P)
        own, found = _train(model, x, truth)
        assert abs(found - loss) < 1e-4
        most = stored + (peak - stored) / 4 if root.rank < 4 else 2 * stored
        assert own <= 1.15 * most, f"worker {root.rank} needs {own} bytes, {own / most:.3f} of {most:.0f}"

    distdl.run_workers(work, 5)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("equal", [True, False])
def test_a_model_is_distributed_without_a_second_copy_of_its_weights(weights, equal):
    def work():
        root = distdl.world()
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(12)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1 if equal else root.rank)
        whole = sum(parameter.nbytes for parameter in model.parameters())
        with Footprint() as footprint:
            footprint.count(*model.parameters())
            distdl.distribute(model, root.reshape(1, root.size), weights=weights)
        # (a share is made before the weight is freed)
        assert footprint.peak <= 1.25 * whole, f"{footprint.peak} bytes for weights of {whole}"
        assert all(float(value.sum()) == value.numel() * equal for value in model.state_dict().values())

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("pool", [
    lambda x: F.avg_pool2d(x, 3, 2, 1), lambda x: F.avg_pool2d(x, 3, 1, 1, False, False),
    lambda x: F.adaptive_avg_pool2d(x, 48),
])  # fmt: skip
def test_averages_save_no_cells(pool):
    """And their values and derivatives are torch's, in either order in memory."""
    x = _noise(1, 4, 96, 96).double()

    def work():
        root, saved = distdl.world(), []
        P = root[:2].reshape(1, 1, 2, 1)

        def derivatives(x):
            with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one.nbytes) or one, lambda one: one):
                y = pool(x)
            (dx,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
            return y, dx, torch.autograd.grad((dx * dx).sum(), x)[0]

        for order in (torch.contiguous_format, torch.channels_last):
            alone = derivatives(x.clone(memory_format=order).requires_grad_())
            block = distdl.distribute_tensor(x, P).to_local().clone(memory_format=order)
            saved.clear()
            found = derivatives(distdl.GlobalTensor.from_local(block, P).requires_grad_())
            assert sum(saved) <= 48 * 96 * 8, f"{sum(saved)} bytes"  # (divisors of the places in space; x has 147,456)
            for ours, theirs in zip(found, alone, strict=True):
                torch.testing.assert_close(ours.full_tensor(), theirs)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize(
    ("function", "cells", "most"),
    [
        (lambda x: F.group_norm(x, 4), 2, 1.05), (F.instance_norm, 2, 1.05),
        (lambda x: F.layer_norm(x, x.shape[2:]), 2, 1.05),
        # (the window of x, and what is between two steps of some channels)
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 5, 1.45),
        (lambda x: F.interpolate(x, size=(512, 512), mode="bicubic"), 5, 1.45),
    ],
)  # fmt: skip
def test_forwards_without_gradients_need_their_share(function, cells, most):
    """Of x and y, which together are so many times as large as x."""
    x = _noise(1, 32, 256, 256)

    def work():
        P = distdl.world().reshape(1, 1, 2, 1)
        given = distdl.distribute_tensor(x, P)
        block = given.to_local()
        with torch.inference_mode(), Footprint() as footprint:
            footprint.count(block)
            y = function(given)
        torch.testing.assert_close(y.full_tensor(), function(x), rtol=1e-4, atol=1e-5)
        share = cells * block.nbytes
        assert footprint.peak <= most * share, f"{footprint.peak / share:.2f} of the share"

    distdl.run_workers(work, 2)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        raise ValueError("this backward fails")


class _Keeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy, None


def _fail(backward, *given):
    try:
        backward(*given)
    except ValueError as error:
        assert str(error) == "this backward fails"
    else:
        pytest.fail("it went through")


def _collect():
    """Collect once for all workers: a collection that is under way in another thread is none here."""
    distdl.world().allgather_data(0)
    if distdl.world().rank == 0:
        gc.collect()
    distdl.world().allgather_data(0)


@pytest.mark.parametrize("differentiate", [lambda y, x: y.backward(), lambda y, x: torch.autograd.grad(y, x)])
def test_a_backward_that_fails_keeps_nothing(differentiate):
    """Torch keeps what it would have come to next until another backward; and a thread that ends with it may abort."""

    def main():
        P = distdl.world()[:2].reshape(2, 1)
        x = distdl.distribute_tensor(torch.ones(4, 3), P).requires_grad_()
        kept = nn.Identity()
        gone = weakref.ref(kept)
        y = (_Keeping.apply(2 * x, kept) + _Failing.apply(3 * x)).sum()
        del kept
        assert gone() is not None
        _fail(differentiate, y, x)
        del y
        _collect()
        assert gone() is None

    distdl.run_workers(main, 3)


def test_workers_end_where_tensors_are_made_on_another_device():
    """Torch's default device is that of a thread; what is forgotten as a worker ends does not follow it."""

    def main():
        torch.set_default_device("meta")
        return torch.ones(2).device.type

    assert set(distdl.run_workers(main, 2, backend="threads")) == {"meta"}
    assert torch.ones(2).device.type == "cpu"


def test_a_model_whose_backward_has_failed_is_not_kept():
    """Not by the sums of gradients that were under way, either: of models so large that there are several."""

    def main():
        P = distdl.world().reshape(2, 1)
        first, last = (torch.nn.Linear(1100, 1100, bias=False) for _ in range(2))
        model = torch.nn.Sequential(first, torch.nn.Tanh(), last)
        first.register_forward_hook(lambda module, inputs, y: _Failing.apply(y))
        model = distdl.distribute(model, P)
        x = distdl.distribute_tensor(torch.ones(4, 1100), P)
        _fail(torch.Tensor.backward, model(x).sum())
        assert x.layout.context.own(UnderWay)
        gone = weakref.ref(last.weight)
        del model, first, last
        _collect()
        assert gone() is None

    distdl.run_workers(main, 2)
