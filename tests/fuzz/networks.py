"""Networks of torch's own modules, trained sequentially and by ``distdl.distribute``. They print as code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from partitions import Blocks
from programs import assert_equal, attempt, entered, local
from torch import nn
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.partition import Partition

_KINK = 1e-12  # by how much inputs differ, to see whether derivatives jump there


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x)


class Twice(Residual):
    """Weights that are used in two places."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x))


class Recomputed(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


class Gate(Residual):
    """Of the mean over all dims of space."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.inner(x.mean(tuple(range(2, x.dim())), keepdim=True)).sigmoid()


class Side(Residual):
    """Beside what it was given, along the channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.inner(x)], 1)


class First(Residual):
    """The first of what a recurrent layer returns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Attention(Residual):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


_OURS = {one.__name__: one for one in (Residual, Twice, Recomputed, Gate, Side, First, Attention)}


@dataclass(frozen=True)
class Part:
    """A module, by its name in torch.nn or here.

    Attributes:
        inner: the modules in it, one behind the other.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()
    inner: tuple[Part, ...] = ()

    def module(self) -> nn.Module:
        if self.inner:
            inside = [one.module() for one in self.inner]
            sequence = inside[0] if len(inside) == 1 and self.name != "Sequential" else nn.Sequential(*inside)
            return _OURS[self.name](sequence) if self.name in _OURS else sequence
        return getattr(nn, self.name)(*self.arguments, **dict(self.options))


@dataclass(frozen=True)
class Batch:
    """One step: its input, and what is done with it.

    Attributes:
        plain: whether the input is passed as a plain tensor, the same on all workers.
        wants: whether it requires a gradient.
        mode: ``train``, ``eval``, ``no_grad`` or ``penalty`` (the gradients of the input, if it requires one, or else
            of the weights, are differentiated, too).
    """

    blocks: Blocks
    seed: int
    plain: bool = False
    wants: bool = False
    mode: str = "train"


@dataclass(frozen=True)
class Network:
    """Modules, the batches that they are trained with, and how.

    Attributes:
        grid: the workers over which it is distributed, as the blocks of a tensor that is split so.
        classes: whether the loss is the cross-entropy of random classes, and not a mean of squares.
        clip: the largest norm of all gradients.
    """

    parts: tuple[Part, ...]
    batches: tuple[Batch, ...]
    grid: Blocks
    weights: str = "replicated"
    optimiser: str = "SGD"
    classes: bool = False
    clip: float | None = None
    single: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.single else torch.float64

    def module(self) -> nn.Module:
        """Its modules in one, with weights that follow from their shapes. (Threads share a generator.)"""
        made = Part("Sequential", inner=self.parts).module().to(self.dtype)
        generator = torch.Generator().manual_seed(len(self.parts))
        with torch.no_grad():
            for one in made.parameters():
                one.copy_(torch.randn(one.shape, generator=generator, dtype=torch.float64) * 0.4 + 0.1)
        return made

    def sequential(self, off: float = 0.0) -> Any:
        """What each step left, as plain tensors; or the failure, and its step.

        Args:
            off: what the input differs by.
        """
        return attempt(lambda place: self._train(self.module(), self._inputs(off), place))

    def distributed(self, world: Partition) -> Any:
        """The same, tensors as the box and block of this worker, weights whole."""

        def run(place: Any) -> list[Any]:
            model = distdl.distribute(self.module(), self.grid.partition(world), self.weights, fallback="silent")
            inputs = [
                whole if batch.plain else entered(whole, batch.blocks, world)
                for whole, batch in zip(self._inputs(0.0), self.batches, strict=True)
            ]
            return [local(one) for one in self._train(model, inputs, place)]

        return attempt(run)

    def jumps(self) -> bool:
        """Whether derivatives or values are others where the input is the same to rounding: maxima of equal cells."""
        first, second = self.sequential(), self.sequential(_KINK)
        try:
            assert_equal(first, [second], 1e-4 if self.single else 1e-7)
        except AssertionError:
            return True
        return False

    def _inputs(self, off: float) -> list[torch.Tensor]:
        found = []
        for batch in self.batches:
            generator = torch.Generator().manual_seed(batch.seed)
            x = torch.randn(batch.blocks.extents, generator=generator, dtype=torch.float64)
            found.append((x + off * torch.randn(x.shape, generator=generator, dtype=x.dtype)).to(self.dtype))
        return found

    def _train(self, model: nn.Module, inputs: Sequence[torch.Tensor], place: Any) -> list[Any]:
        found: list[Any] = []
        weights = list(model.parameters())
        options = {"momentum": 0.9} if self.optimiser == "SGD" else {"eps": 1e-2}
        optimiser = getattr(torch.optim, self.optimiser)(weights, lr=0.05, **options) if weights else None
        for place.step, (x, batch) in enumerate(zip(inputs, self.batches, strict=True)):
            model.train(batch.mode != "eval")
            x.requires_grad_(batch.wants)
            with torch.set_grad_enabled(batch.mode != "no_grad"):
                y = model(x)
                loss = self._loss(y, batch)
            found += [y, loss]
            if not loss.requires_grad:
                continue
            given = [x] if batch.wants else weights
            if batch.mode == "penalty" and given:
                slopes = torch.autograd.grad(loss, given, create_graph=True, allow_unused=True)
                loss = loss + sum(slope.square().sum() for slope in slopes if slope is not None)
            if optimiser is not None:
                optimiser.zero_grad()
            loss.backward()
            found += [x.grad, *(_whole(one.grad) for one in weights)]
            if self.clip is not None:
                found.append(_whole(nn.utils.clip_grad_norm_(weights, self.clip)))
            if optimiser is not None:
                optimiser.step()
        return [*found, *model.state_dict().values()]

    def _loss(self, y: torch.Tensor, batch: Batch) -> torch.Tensor:
        if not self.classes or y.dim() < 2:
            return y.square().mean() + y.sum() * 0.1
        generator = torch.Generator().manual_seed(batch.seed)
        classes = torch.randint(0, y.shape[1], (y.shape[0], *y.shape[2:]), generator=generator)
        return nn.functional.cross_entropy(y, classes)


def _whole(x: Any) -> Any:
    whole = x.full_tensor() if isinstance(x, distdl.GlobalTensor) else x
    return whole if whole is None else whole.detach().clone()  # (gradients are clipped in place)
