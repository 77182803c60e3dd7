"""Chains of layers that are called several times, on blocks; other workers, other splits and other tensors each time.

A chain prints as the code that makes it. Between two layers that lie in different ways stands a Repartition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from faults import Fault, damaged
from partitions import WORKERS, Blocks, assembled
from programs import assert_close
from team import Failed

import distdl
from distdl.partition import Partition


@dataclass(frozen=True)
class Grid:
    """Workers in an array of this shape."""

    workers: tuple[int, ...]
    shape: tuple[int, ...]

    def partition(self, world: Partition) -> Partition:
        return world.create_partition_inclusive(self.workers).reshape(*self.shape)


class Against(torch.nn.Module):
    """A loss of its input and a constant."""

    def __init__(self, loss: torch.nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dense = isinstance(x, torch.Tensor) and x.layout is torch.strided
        return self.loss(x, torch.full_like(x, 0.3) if dense else x)


class AgainstClass(torch.nn.Module):
    """A loss of classes: of its input, and of a class number that is the same everywhere."""

    def __init__(self, loss: torch.nn.Module, number: int) -> None:
        super().__init__()
        self.loss, self.number = loss, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.Tensor):
            return self.loss(x, x)
        target = torch.full((*x.shape[:1], *x.shape[2:]), self.number, dtype=torch.long, device=x.device)
        return self.loss(x, target)


@dataclass(frozen=True)
class LayerOf:
    """A layer and its sequential counterpart.

    Attributes:
        ours: its name in ``distdl.nn``, or the name of a torch module that works on any block.
        theirs: its name in ``torch.nn``.
        grids: P_x, and also P_y and P_w where the layer has them.
        ours_only, options: arguments of our constructor alone, and of both.
        number: of a loss of classes: the class that it gets as a target.
    """

    ours: str
    theirs: str
    grids: tuple[Grid, ...]
    options: tuple[tuple[str, Any], ...] = ()
    ours_only: tuple[tuple[str, Any], ...] = ()
    number: int | None = None

    def sequential(self, number: int) -> torch.nn.Module:
        module = getattr(torch.nn, self.theirs)(**dict(self.options)).double()
        if self.is_loss:
            return self._against(module)
        generator = torch.Generator().manual_seed(number)
        for parameter in module.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return module

    def distributed(self, world: Partition, sequential: torch.nn.Module) -> torch.nn.Module:
        if not self.is_ours:
            return getattr(torch.nn, self.ours)(**dict(self.options))
        partitions = [grid.partition(world) for grid in self.grids]
        if self.is_loss:
            return self._against(getattr(distdl.nn, self.ours)(*partitions, **dict(self.options)))
        layer = getattr(distdl.nn, self.ours)(*partitions, **dict((*self.options, *self.ours_only)))
        own = dict(layer.double().named_parameters())
        layouts = getattr(layer, "parameter_layouts", {})
        for (name, layout), parameter in zip(layouts.items(), sequential.parameters(), strict=True):
            if name in own:
                own[name].data = layout.block(parameter.data.reshape(layout.extents)).clone()
        return layer

    def _against(self, loss: torch.nn.Module) -> torch.nn.Module:
        return Against(loss) if self.number is None else AgainstClass(loss, self.number)

    @property
    def is_loss(self) -> bool:
        return self.ours.endswith("Loss")

    @property
    def is_ours(self) -> bool:
        return hasattr(distdl.nn, self.ours)

    @property
    def members(self) -> set[int]:
        return {worker for grid in self.grids for worker in grid.workers}

    @property
    def P_y(self) -> Grid:
        return self.grids[1] if len(self.grids) > 1 else self.grids[0]


@dataclass(frozen=True)
class Call:
    """One call of a chain.

    Attributes:
        blocks: how the input lies on the workers of the first layer's P_x.
        wants: whether the input requires a gradient; on the workers that are named only.
        grad: whether grad mode is on.
        fault: what one worker does otherwise.
        rows: of an embedding, so that the input is numbers of rows; 0: it is real.
    """

    blocks: Blocks
    seed: int
    wants: tuple[int, ...] = ()
    grad: bool = True
    fault: Fault | None = None
    rows: int = 0


@dataclass(frozen=True)
class Chain:
    layers: tuple[LayerOf, ...]
    calls: tuple[Call, ...]

    def distributed(self, world: Partition) -> Any:
        """For each call what this worker has: its y, the gradient of its x and of its parameters; or the failure."""
        network = Network(self, world)
        results: list[Any] = []
        for call in self.calls:
            results.append(network.called(call))
            if isinstance(results[-1], Failed) and not self.takes_everyone:
                break  # (a worker outside of the layer that failed may still wait for one behind it)
        return results

    @property
    def takes_any_blocks(self) -> bool:
        """Whether the first layer does not ask how the blocks lie: one of torch, or a loss, which is a sum."""
        return self.layers[0].is_loss or not self.layers[0].is_ours

    @property
    def takes_everyone(self) -> bool:
        """Whether every worker takes part in every layer and in what moves between them, so that all fail together."""
        return all(len(one) == WORKERS for one in (*(layer.members for layer in self.layers), *self.between))

    def is_alone(self, worker: int) -> bool:
        """Whether nobody else is a member of what a worker is a member of."""
        shared = [one.members for one in self.layers if one.is_ours] + self.between
        return all(worker not in members or members == {worker} for members in shared)

    @property
    def between(self) -> list[set[int]]:
        """The workers that take part in what moves from each layer to the next."""
        pairs = zip(self.layers, self.layers[1:], strict=False)
        return [{*before.P_y.workers, *after.grids[0].workers} for before, after in pairs]

    def modules(self) -> list[torch.nn.Module]:
        return [one.sequential(number) for number, one in enumerate(self.layers)]


class Network:
    """The layers of a chain, with a Repartition between each and the next, and calls of all of them."""

    def __init__(self, chain: Chain, world: Partition) -> None:
        made = zip(chain.layers, chain.modules(), strict=True)
        self._world = world
        self._layers = [one.distributed(world, like) for one, like in made]
        self._between = [
            distdl.nn.Repartition(before.P_y.partition(world), after.grids[0].partition(world))
            for before, after in zip(chain.layers, chain.layers[1:], strict=False)
        ]

    def called(self, call: Call) -> Any:
        """What this worker finds in a call and its backward; or the failure."""
        try:
            x, y = self.forward(call)
            self.backward(y)
        except Exception as error:
            return Failed(type(error).__name__, str(error))
        return self.found(x, y)

    def forward(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor that this worker gives to the first layer, and what it gets from the last."""
        rank = self._world.rank
        x = call.blocks.block(self._world, call_input(call)).requires_grad_(rank in call.wants)
        fault = call.fault if call.fault is not None and call.fault.worker == rank else None
        for layer in self._layers:
            layer.zero_grad()  # (to None: what the last call has found is not written)
        with torch.set_grad_enabled(call.grad != (fault is not None and fault.kind == "grad mode")):
            y = x if fault is None else damaged(x, fault)
            for number, layer in enumerate(self._layers):
                y = layer(self._between[number - 1](y) if number else y)
        return x, y

    @staticmethod
    def backward(y: torch.Tensor) -> None:
        if y.requires_grad:
            y.sin().sum().backward()

    def found(self, x: torch.Tensor, y: torch.Tensor) -> Found:
        return Found(y.detach(), x.grad, [_gradients(layer, self._world.rank) for layer in self._layers])


@dataclass(frozen=True)
class Gradient:
    """Of a parameter: the box that this worker has of it, if any, and the gradient of its block."""

    extents: tuple[int, ...] = ()
    box: tuple[tuple[int, int], ...] | None = None
    block: torch.Tensor | None = None


@dataclass(frozen=True)
class Found:
    """What a worker has after a call: y, the gradient of x, and for each layer those of its parameters."""

    y: torch.Tensor
    dx: torch.Tensor | None
    gradients: list[list[Gradient]]


def _gradients(layer: torch.nn.Module, rank: int) -> list[Gradient]:
    own = dict(layer.named_parameters())
    return [
        Gradient(layout.extents, layout[rank], own[name].grad) if name in own and rank in layout else Gradient()
        for name, layout in getattr(layer, "parameter_layouts", {}).items()
    ]


def call_input(call: Call) -> torch.Tensor:
    generator = torch.Generator().manual_seed(call.seed)
    if call.rows:
        return torch.randint(call.rows, call.blocks.extents, generator=generator)
    return torch.randn(call.blocks.extents, generator=generator, dtype=torch.float64)


def boxes(shape: Sequence[int], blocks: Sequence[torch.Tensor]) -> list[tuple[tuple[int, int], ...]] | None:
    """The boxes of the blocks of a tensor, one for each place of a grid; None if they form no grid."""
    sizes: dict[tuple[int, int], int] = {}
    dims = blocks[0].dim()
    if any(one.dim() != dims for one in blocks) or dims < len(shape):
        return None
    places = list(product(*map(range, (*shape, *[1] * (dims - len(shape))))))
    for place, block in zip(places, blocks, strict=True):
        for dim, index in enumerate(place):
            if sizes.setdefault((dim, index), block.shape[dim]) != block.shape[dim]:
                return None
    return [
        tuple(
            (sum(sizes[d, i] for i in range(at)), sum(sizes[d, i] for i in range(at + 1))) for d, at in enumerate(place)
        )
        for place in places
    ]


def given_to(call: Call) -> list[Any]:
    """What the workers of the first P_x pass, in the order of their ranks."""
    whole, sizes = call_input(call), call.blocks.sizes
    found: list[Any] = []
    for worker, at in zip(call.blocks.workers, product(*map(range, call.blocks.grid)), strict=True):
        starts = [sum(one[:i]) for one, i in zip(sizes, at, strict=True)]
        block = whole[tuple(slice(a, a + one[i]) for a, one, i in zip(starts, sizes, at, strict=True))]
        found.append(damaged(block, call.fault) if call.fault is not None and call.fault.worker == worker else block)
    return found


def sequential(call: Call, modules: Sequence[torch.nn.Module]) -> Any:
    """The whole input with its gradient, its boxes, and y; the failure; or None if there is no such call."""
    given = given_to(call)
    if not all(isinstance(one, torch.Tensor) and one.layout is torch.strided and not one.is_meta for one in given):
        return None
    where = boxes(call.blocks.grid, given)
    full = {one.dtype for one in given if one.numel()}
    if where is None or len(full) > 1 or (call.fault is not None and call.fault.kind == "grad mode"):
        return None
    tiles = [one.to(next(iter(full), one.dtype)) for one in given]
    x = assembled(list(zip(where, tiles, strict=True)), [stop for _, stop in where[-1]])
    x.requires_grad_(bool(call.wants) and x.is_floating_point())
    for module in modules:
        module.zero_grad()
    try:
        with torch.set_grad_enabled(call.grad):
            y = x
            for module in modules:
                y = module(y)
        if y.requires_grad:
            y.sin().sum().backward()
    except Exception as error:
        return Failed(type(error).__name__, str(error))
    return x, where, y.detach()


def assert_call(
    chain: Chain, call: Call, found: Sequence[Any], expected: Any, modules: Sequence[torch.nn.Module]
) -> None:
    """Compare a call with the sequential one: y, the gradient of x, and those of all parameters."""
    x, given, y = expected
    tolerance = 1e-9 if y.dtype is torch.float64 else 1e-4
    last = chain.layers[-1].P_y
    if chain.layers[-1].is_loss:  # which one worker has
        values = torch.stack([one.y.to(y.dtype) for one in found])
        assert_close(values.sum(), y, "the loss", tolerance)
        assert values.count_nonzero() <= 1, f"the loss is {values.tolist()}"
    else:
        _assert_tiled(last, found, y, tolerance)
    _assert_gradients(call, found, given, x, modules, tolerance)


def _assert_tiled(last: Grid, found: Sequence[Any], y: torch.Tensor, tolerance: float) -> None:
    tiles = [found[worker].y for worker in last.workers]
    where = boxes(last.shape, tiles)
    assert where is not None, f"the blocks of y form no grid: {[tuple(one.shape) for one in tiles]}"
    whole = assembled(list(zip(where, tiles, strict=True)), [stop for _, stop in where[-1]])
    assert_close(whole, y, "y", tolerance)
    assert all(not one.y.numel() for w, one in enumerate(found) if w not in last.workers), "y of a worker outside P_y"


def _assert_gradients(
    call: Call,
    found: Sequence[Any],
    given: Sequence[Any],
    x: torch.Tensor,
    modules: Sequence[torch.nn.Module],
    tolerance: float,
) -> None:
    for worker, box in zip(call.blocks.workers, given, strict=True):
        if call.fault is not None and call.fault.worker == worker:
            continue  # (its block was made of another, which may have no gradient)
        if worker in call.wants and x.grad is not None:
            assert found[worker].dx is not None, f"worker {worker} has no gradient of x"
            wanted = _cut(x.grad, box)
            if not wanted.numel():  # (a block without cells may be of any dtype, and so is its gradient)
                wanted = wanted.to(found[worker].dx.dtype)
            assert_close(found[worker].dx, wanted, f"the gradient of x on worker {worker}", tolerance)
    for worker, one in enumerate(found):
        for number, (module, gradients) in enumerate(zip(modules, one.gradients, strict=True)):
            if not gradients:
                continue
            for (name, theirs), ours in zip(module.named_parameters(), gradients, strict=True):
                if ours.box is not None and theirs.grad is not None:
                    what = f"the gradient of {name} of layer {number} on worker {worker}"
                    assert ours.block is not None, f"{what} is None"
                    assert_close(ours.block, _cut(theirs.grad.reshape(ours.extents), ours.box), what, tolerance)


def _cut(whole: torch.Tensor, box: tuple[tuple[int, int], ...]) -> torch.Tensor:
    return whole[tuple(slice(*one) for one in box)]
