"""Models that are distributed in tests, how they are trained, and what has to be the same as of sequential ones."""

import copy
import warnings

import torch
from same import noise
from torch import nn
from torch.utils.checkpoint import checkpoint

import distdl

WORKERS = 4
GRIDS = [(3, 1), (2, 1, 2), (1, 1, 3)]  # (one worker, at least, holds no cells)


class Again(torch.autograd.Function):
    """Computes once more in its backward what a function gives, and differentiates that, as a checkpoint does."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.save_for_backward(x)
        ctx.function = function
        return function(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(ctx.function(x), x, dy)[0], None


class Net(nn.Module):
    """Convolutions with everything that a parameter can be: used, frozen, unused, tied."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6)
        self.inner = nn.Sequential(nn.Conv1d(6, 6, 3, padding=1), nn.PReLU(6))
        self.tied = nn.Conv1d(6, 6, 3, padding=1)
        self.tied.weight = self.inner[0].weight
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 6).reshape(6, 1), requires_grad=False)
        self.unused = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Conv1d(6, 2, 1)

    def forward(self, x):
        y = torch.relu(self.norm(self.first(x)))
        y = self.tied(self.inner(y)) * self.frozen + y
        return self.last(y * self.scale.exp())


def network(make=Net, seed=0):
    """The model, with the same weights on every worker. (torch's generator is one for all threads.)"""
    model = make().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return model


def partition(grid):
    count = int(torch.Size(grid).numel())
    return distdl.world().create_partition_inclusive(range(count)).create_cartesian_topology_partition(grid)


def sharded(model, grid, fallback="error"):
    """A copy of a model, distributed over a grid, of whose weights each worker stores a share."""
    return distdl.distribute(copy.deepcopy(model), partition(grid), weights="sharded", fallback=fallback)


def in_a_row(count=6):
    """Convolutions one after the other, with the same weights on every worker."""
    return network(lambda: nn.Sequential(*(nn.Conv1d(4, 4, 3, padding=1) for _ in range(count))))


def whole(x):
    return x.detach().full_tensor() if isinstance(x, distdl.GlobalTensor) else x.detach()


def assert_close(ours, theirs, what="", tolerance=1e-10):
    ours, theirs = whole(ours), whole(theirs)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), f"{what}: {(ours - theirs).abs().max()}"


def assert_same_state(ours, theirs):
    """Same names, weights, gradients and buffers."""
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert_close(p, q, name)
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert_close(p.grad, q.grad, f"gradient of {name}")
    for (name, p), q in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert_close(p, q, name)
    saved, expected = ours.state_dict(), theirs.state_dict()
    assert list(saved) == list(expected)
    for name, value in expected.items():
        assert type(saved[name]) is torch.Tensor
        assert_close(saved[name], value, name)


def assert_identical(model):
    """Weights, gradients and buffers are the same on every worker, to the last bit."""
    P = distdl.world()
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        for value in (one, one.grad):
            if value is None:
                continue
            block = value.detach().reshape(1, -1)
            every = distdl.GlobalTensor.from_local(block, P.create_cartesian_topology_partition([P.comm.size, 1]))
            assert bool((every.full_tensor() == block).all()), name


def run(work, workers=WORKERS, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "the workers built different weights")  # worker 0's are those to compare with
        warnings.filterwarnings("ignore", ".* workers without a cell of a tensor")  # on purpose
        distdl.run_workers(lambda: work(*arguments), workers)


def batch(step):
    return noise(4, 3, 11, seed=step), noise(4, 2, 11, seed=100 + step)


OPTIMISERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.02, amsgrad=True),
}


def assert_trains_alike(model, sequential, optimiser, resets):
    """Train two models with a schedule, clipped gradients and averaged weights; everything is the same at each step.

    Args:
        resets: for each step, whether gradients are set to None before it, or to 0.
    """
    models = (model, sequential)
    decay = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    averages = [torch.optim.swa_utils.AveragedModel(one, multi_avg_fn=decay) for one in models]
    optimisers = [OPTIMISERS[optimiser](one.parameters()) for one in models]
    schedules = [torch.optim.lr_scheduler.OneCycleLR(one, 0.1, total_steps=6) for one in optimisers]
    for step, set_to_none in enumerate(resets):
        x, target = batch(step)
        losses, norms = [], []
        for one, steps, schedule, average in zip(models, optimisers, schedules, averages, strict=True):
            steps.zero_grad(set_to_none=set_to_none)
            loss = nn.functional.mse_loss(one(x), target)
            loss.backward()
            norms.append(nn.utils.clip_grad_norm_(one.parameters(), 0.5))
            steps.step()
            schedule.step()
            average.update_parameters(one)
            losses.append(loss)
        assert_close(*losses)
        assert_close(*norms)
        assert_same_state(*models)
    assert model.unused.weight.grad is None and model.frozen.grad is None
    assert model.tied.weight is model.inner[0].weight
    assert_same_state(*(one.module for one in averages))
    for one in models:
        one.eval()
    with torch.no_grad():
        x, _ = batch(9)
        assert_close(model(x), sequential(x))
        assert_close(averages[0](x), averages[1](x))


def backward_thrice(model):
    """Go through one graph twice, and then differentiate its gradients."""
    x, target = batch(0)
    loss = (model(x) - target).square().mean()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    used = [p for p in model.parameters() if p.requires_grad and p.grad is not None]
    first = torch.autograd.grad(loss, used, create_graph=True)
    sum(g.square().sum() for g in first).backward()


def backward_of_parameters(model, by, x, target):
    """Differentiate a loss of a :class:`Regularised` model, in which its parameters stand by themselves.

    Args:
        by: who adds the terms of the parameters, or ``alone`` for these terms without the others: with their gradients
            taken by ``grad`` (``gradient``), or differentiated once more (``twice``).
    Returns: the loss.
    """
    found = model(x, target=target)
    loss = found["loss"]
    if by == "result":
        loss = loss + 0.1 * found["outputs"][1][0]
    elif by == "outside":
        loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
    elif by in ("alone", "gradient", "twice"):
        loss = found["outputs"][1][0]
    if by == "gradient":
        listed = list(model.parameters())
        for p, g in zip(listed, torch.autograd.grad(loss, listed, allow_unused=True), strict=True):
            p.grad = g
    elif by == "twice":
        first = torch.autograd.grad(loss, [model.conv.weight, model.gain], create_graph=True)
        sum(g.square().sum() for g in first).backward()
    else:
        loss.backward()
    return loss


class Regularised(nn.Module):
    """Its loss is made in its forward, and has terms in which there are only parameters."""

    def __init__(self, by):
        super().__init__()
        self.conv = nn.Conv1d(3, 2, 3, padding=1)
        self.gain = nn.Parameter(torch.ones(2, 1))
        self.by = by

    def forward(self, x, *, target):
        y = self.conv(x) * self.gain
        weights = self.conv.weight.square().sum() + self.gain.exp().sum()
        if self.by == "inside":
            return {"loss": (y - target).square().mean() + 0.1 * weights, "outputs": (y, [weights])}
        if self.by == "list":
            return {"loss": (y - target).square().mean() + 0.1 * sum(p.square().sum() for p in self.parameters())}
        return {"loss": (y - target).square().mean(), "outputs": (y, [weights])}


class Checkpointed(nn.Module):
    def __init__(self, by):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.GELU())
        self.weight = nn.Parameter(torch.ones(6, 1))
        self.last = nn.Conv1d(6, 2, 3, padding=1)
        self.by = by

    def _inner(self, x):
        return self.body(x) * self.weight.exp() + self.last.bias.sum()

    def forward(self, x):
        for _ in range(1):
            if self.by == "module":
                y = checkpoint(self.body, x, use_reentrant=False) * self.weight.exp() + self.last.bias.sum()
            elif self.by == "function":
                y = checkpoint(self._inner, x, use_reentrant=False)
            else:
                y = checkpoint(lambda x: checkpoint(self._inner, x, use_reentrant=False).sin(), x, use_reentrant=False)
        return self.last(y)
