"""Three steps of training, alone or distributed: one function for both, and what has to be equal afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from zoo import Entry, Loss

import distdl
from distdl.workers.footprint import Footprint

STEPS = 3
TOLERANCE = 1e-9
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
    # A bias in front of a batch norm has a gradient of zero and rounding. Adam divides it by its size plus eps: with
    # the usual 1e-8 the weights of a model trained alone already change by 2e-8 when the samples are in another order.
    "Adam": partial(torch.optim.Adam, lr=1e-3, eps=1e-4),
}


@dataclass(frozen=True)
class Split:
    """How a batch is split, and the world in which it is.

    Attributes:
        name: in words.
        grid: number of workers along each dim of the input.
        idle: how many workers stand in front of them and hold nothing.
    """

    name: str
    grid: tuple[int, ...]
    idle: int = 0

    @property
    def workers(self) -> int:
        return torch.Size(self.grid).numel() + self.idle

    def __str__(self) -> str:
        return f"{self.name}-{'x'.join(map(str, self.grid))}" + f"+{self.idle}" * bool(self.idle)


def splits_of(workers: int, dims: int) -> Iterator[Split]:
    """Splits of samples and space over so many workers, for inputs of so many dims of space."""
    rest = (1,) * (dims - 1)
    yield Split("samples", (workers, 1, 1, *rest))
    yield Split("rows", (1, 1, workers, *rest))
    if workers < 4:
        yield Split("columns", (1, 1, *rest, workers))
        yield Split("idle", (1, 1, workers, *rest), idle=1)
    else:
        yield Split("plane", (1, 1, 2, *rest[1:], workers // 2))
        yield Split("samples-and-rows", (2, 1, workers // 2, *rest))
    if workers == 2:
        yield Split("channels", (1, workers, 1, *rest))


@dataclass(frozen=True)
class Trained:
    """What came out of training: whole tensors on every worker. Output, loss and gradients are those of the first
    step; ``state`` is the state_dict after the last one.
    """

    output: Tensor
    losses: list[float]
    gradients: dict[str, Tensor | None]
    state: dict[str, Tensor]

    def tensors(self) -> dict[str, Tensor | None]:
        """All of it by name."""
        losses = torch.tensor(self.losses, dtype=torch.float64)
        gradients = {f"gradient of {name}": gradient for name, gradient in self.gradients.items()}
        return {"output": self.output, "losses": losses} | gradients | self.state


def train(module: nn.Module, x: Tensor, target: Tensor, loss: Loss, optimizer: str) -> Trained:
    """Take three steps with a module and a batch: a plain one, or a distributed one and global tensors."""
    stepping = OPTIMIZERS[optimizer](module.parameters())
    x.requires_grad_()
    losses = []
    for step in range(STEPS):
        stepping.zero_grad()
        output = module(x)
        value = loss(output, target)
        value.backward()
        losses.append(value.item())
        if step == 0:
            first = _whole(output)
            gradients = {name: _whole(parameter.grad) for name, parameter in module.named_parameters()}
            gradients["the input"] = _whole(x.grad)
        stepping.step()
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return Trained(first, losses, gradients, state)


def _whole(tensor: Any) -> Any:
    """A copy of the whole tensor, whether it is global or plain."""
    if tensor is None:
        return None
    whole = tensor.full_tensor() if isinstance(tensor, distdl.GlobalTensor) else tensor
    return whole.detach().clone()


@cache
def alone(entry: Entry, optimizer: str) -> Trained:
    """The model trained without distdl."""
    return train(entry.module(), *entry.batch(), entry.loss, optimizer)


def distributed(entry: Entry, split: Split, optimizer: str, module: nn.Module | None = None) -> Trained:
    """The model trained on this world of workers. Only the first worker is given the batch.

    Workers that are threads pass a module that was made before: making one draws from torch's generator, which they
    share.
    """
    return train(model_on(split, module or entry.module()), *batch_on(entry, split), entry.loss, optimizer)


def held(entry: Entry, split: Split, module: nn.Module) -> int:
    """The most bytes of tensors that this worker holds at once in a step of the model, but for the optimiser's."""
    module, (x, target) = model_on(split, module), batch_on(entry, split)
    with Footprint() as footprint:
        footprint.count(*module.parameters(), *module.buffers(), x.to_local(), target.to_local())
        entry.loss(module(x), target).backward()
    return footprint.peak


def model_on(split: Split, module: nn.Module, **options: Any) -> nn.Module:
    """A copy of the model, distributed over this world of workers with these options."""
    return distdl.distribute(copy.deepcopy(module), _partition(split), fallback="error", **options)


def batch_on(entry: Entry, split: Split, number: int = 0) -> tuple[Any, Any]:
    """One of its batches, distributed over this world of workers."""
    P = P_target = _partition(split)
    x, target = entry.batch(number)
    if target.ndim < x.ndim:  # no channels, and labels of samples have no space
        places = (split.grid[0], *split.grid[2:])[: target.ndim]
        P_target = P[(slice(None), *[0] * (x.ndim - target.ndim))].reshape(*places)
    if distdl.world().rank != 0:
        x, target = None, None
    return distdl.distribute_tensor(x, P), distdl.distribute_tensor(target, P_target)


def _partition(split: Split) -> distdl.Partition:
    return distdl.world()[split.idle :].reshape(*split.grid)


def differences(got: Trained, wanted: Trained) -> list[str]:
    """What is not equal within the tolerance, a line each: relative to the largest value, if that is not tiny."""
    ours, theirs = got.tensors(), wanted.tensors()
    lines = [f"{name} has no counterpart" for name in ours.keys() - theirs.keys()]
    for name, b in theirs.items():
        a = ours.get(name)
        if a is None or b is None:
            if a is not b:
                lines.append(f"{name} is missing {'here' if a is None else 'alone'}")
        elif (a.shape, a.dtype) != (b.shape, b.dtype):
            lines.append(f"{name} is {a.dtype} {tuple(a.shape)}, not {b.dtype} {tuple(b.shape)}")
        elif b.numel():
            scale = max(b.abs().max().item(), 1e-3)
            error = (a - b).abs().max().item() / scale
            if not error <= TOLERANCE:
                lines.append(f"{name} differs by {error:.1e} of {scale:.1e}")
    return lines


def identical(one: Trained, other: Trained) -> bool:
    """Whether two workers hold the same bits."""
    ours, theirs = one.tensors(), other.tensors()
    return ours.keys() == theirs.keys() and all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in ((ours[name], theirs[name]) for name in ours)
    )
