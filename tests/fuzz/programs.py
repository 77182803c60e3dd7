"""Programs of torch functions, run on plain tensors and on global ones. A program prints as the code that makes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from partitions import Blocks, assembled
from team import Failed

import distdl
from distdl.partition import Partition


@dataclass(frozen=True)
class Ref:
    """A tensor of the program, by its number: the inputs first, then what the steps return."""

    at: int


@dataclass(frozen=True)
class Input:
    """A tensor that a program begins with.

    Attributes:
        kind: of its numbers: normal, positive, integers, booleans, single, complex.
        wants: whether it requires a gradient.
        leaf: whether the program gets the leaf itself, and not a product with it.
        blocks: how it lies on the workers; a plain tensor, the same on all of them, has none.
    """

    shape: tuple[int, ...]
    seed: int
    kind: str = "normal"
    wants: bool = False
    leaf: bool = False
    blocks: Blocks | None = None

    def tensor(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        if self.kind == "integers":
            return torch.randint(0, 3, self.shape, generator=generator)
        noise = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.kind == "complex":
            return torch.complex(noise, noise.flip(tuple(range(noise.dim()))) + 0.5)
        return {"normal": noise, "positive": noise.abs() + 0.1, "booleans": noise > 0, "single": noise.float()}[
            self.kind
        ]


@dataclass(frozen=True)
class Step:
    """A call of a function of torch, by its path: ``torch.sum``, ``Tensor.add_``, ``functional.conv2d``.

    Or of one of ours: ``ours.redistributed``.
    """

    function: str
    arguments: tuple[Any, ...]
    options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Program:
    """Inputs, steps, and what is differentiated.

    Attributes:
        outputs: the tensors, by their numbers, that are compared and differentiated.
        twice: the inputs of which gradients are differentiated in turn, by their numbers among those that want one.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    twice: tuple[int, ...] = ()

    @property
    def is_single(self) -> bool:
        """Whether any tensor is in single precision."""
        return any(one.kind == "single" for one in self.inputs) or any(
            one.function == "Tensor.float" for one in self.steps
        )

    def name(self, step: int) -> str:
        """The function of a step."""
        return self.steps[step].function if step < len(self.steps) else "backward"

    def sequential(self) -> Any:
        """The tensors of the outputs, then the gradients of the inputs that want one; or the failure."""
        return attempt(lambda place: self._run([one.tensor() for one in self.inputs], place))

    def distributed(self, world: Partition) -> Any:
        """The same, each tensor as the box and block of this worker; or the failure."""

        def run(place: _Place) -> list[Any]:
            given = []
            for one in self.inputs:
                whole = one.tensor()
                given.append(whole if one.blocks is None else entered(whole, one.blocks, world))
            return [local(value) for value in self._run(given, place)]

        return attempt(run)

    def _run(self, given: Sequence[torch.Tensor], place: _Place) -> list[Any]:
        values: list[Any] = []
        leaves: list[torch.Tensor] = []
        for one, tensor in zip(self.inputs, given, strict=True):
            if one.wants:
                leaves.append(tensor.requires_grad_())
            values.append(tensor * 1 if one.wants and not one.leaf else tensor)
        for place.step, step in enumerate(self.steps):
            values += taken(step, values)
        place.step = len(self.steps)
        outputs = [values[at] for at in self.outputs]
        return [*outputs, *gradients(outputs, leaves, self.twice)]


def taken(step: Step, values: Sequence[torch.Tensor]) -> list[Any]:
    """The tensors that a step returns, given those so far."""
    space, _, name = step.function.partition(".")
    spaces = {"torch": torch, "Tensor": torch.Tensor, "functional": torch.nn.functional, "linalg": torch.linalg}
    function = redistributed if space == "ours" else getattr(spaces[space], name)
    result = function(
        *_resolved(step.arguments, values), **{key: _resolved(value, values) for key, value in step.options}
    )
    if isinstance(result, torch.Tensor):
        return [result]
    return [one for one in result or () if isinstance(one, torch.Tensor)]


def redistributed(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The same tensor, split otherwise."""
    if not isinstance(x, distdl.GlobalTensor):
        return x * 1
    y: torch.Tensor = x.redistribute(blocks.partition(distdl.world()))
    return y * 1


def _resolved(value: Any, values: Sequence[torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return values[value.at]
    return type(value)(_resolved(one, values) for one in value) if type(value) in (tuple, list) else value


def gradients(
    outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor], twice: Sequence[int]
) -> list[torch.Tensor | None]:
    """Of a loss that tells all elements of the outputs apart; then those of the squares of some of these gradients."""
    wanted = [y for y in outputs if y.requires_grad]
    if not wanted or not leaves:
        return []
    loss = sum(_real((y * _weights(y)).sum()) for y in wanted)
    found = torch.autograd.grad(loss, leaves, create_graph=bool(twice), allow_unused=True)
    if not twice:
        return list(found)
    loss = sum(_real((found[at] * found[at]).sum()) for at in twice)
    return [*found, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def twice_differentiable(program: Program) -> tuple[int, ...]:
    """Which gradients of a program have in turn gradients that are not 0, by the numbers of the inputs."""
    leaves = [one for one in program.inputs if one.wants]
    found = []
    for at in range(len(leaves)):
        result = replace(program, twice=(at,)).sequential()
        if isinstance(result, list) and any(
            one is not None and one.isfinite().all() and one.count_nonzero() for one in result[-len(leaves) :]
        ):
            found.append(at)
    return tuple(found)


def _weights(y: torch.Tensor) -> torch.Tensor:
    weights = (torch.arange(y.numel(), dtype=y.real.dtype) * 0.37).cos().reshape(tuple(y.shape))
    return weights * (1 - 0.3j) if y.is_complex() else weights


def _real(y: torch.Tensor) -> torch.Tensor:
    return y.real if y.is_complex() else y


def entered(whole: torch.Tensor, blocks: Blocks, world: Partition) -> distdl.GlobalTensor:
    """A global tensor that lies so."""
    P = blocks.partition(world)
    if blocks.balanced and blocks.workers[0] == 0:
        return distdl.distribute_tensor(whole if world.rank == 0 else None, P)
    return distdl.GlobalTensor.from_local(blocks.block(world, whole), P)


@dataclass
class _Place:
    step: int = 0


def attempt(run: Any) -> Any:
    """What it returns; if it fails, the number of the step, or of steps for the backward, and the error."""
    place = _Place()
    try:
        return run(place)
    except Exception as error:
        return place.step, Failed(type(error).__name__, str(error))


@dataclass(frozen=True)
class Local:
    """What a worker has of a global tensor: its box, unless it is outside, and its block.

    Attributes:
        rank: how many dims the tensor has.
    """

    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...] | None
    block: torch.Tensor


def local(value: Any) -> Any:
    if not isinstance(value, distdl.GlobalTensor):
        return value.detach() if isinstance(value, torch.Tensor) else value
    layout = value.layout
    return Local(tuple(value.shape), layout.box if layout.active else None, value.to_local().detach().clone())


def assert_equal(expected: Sequence[Any], found: Sequence[Sequence[Any]], tolerance: float) -> None:
    """Compare the sequential tensors with what the workers have of them."""
    for number, theirs in enumerate(expected):
        ours = [one[number] for one in found]
        if all(one is None for one in ours) or theirs is None:  # (a gradient that is 0 may be none at all)
            zeros = [one for one in (theirs, *(getattr(one, "block", one) for one in ours)) if one is not None]
            assert not any(one.count_nonzero() for one in zeros), f"tensor {number} is {ours}, not {theirs}"
            continue
        if all(isinstance(one, Local) for one in ours):
            shapes = {one.shape for one in ours}
            assert shapes == {tuple(theirs.shape)}, f"tensor {number} has the shapes {shapes}, not {theirs.shape}"
            whole = [assembled([(one.box, one.block) for one in ours if one.box is not None], theirs.shape)]
        else:
            whole = ours
        for one in whole:
            assert_close(one, theirs.detach(), f"tensor {number}", tolerance)


def assert_close(ours: Any, theirs: torch.Tensor, what: str, tolerance: float) -> None:
    """Compare two plain tensors; the tolerance is relative to the largest element."""
    assert type(ours) is torch.Tensor, f"{what} is a {type(ours).__name__}"
    assert ours.shape == theirs.shape, f"{what} has the shape {list(ours.shape)}, not {list(theirs.shape)}"
    assert ours.dtype == theirs.dtype, f"{what} has the dtype {ours.dtype}, not {theirs.dtype}"
    if theirs.is_complex():
        ours, theirs = torch.view_as_real(ours.resolve_conj()), torch.view_as_real(theirs.resolve_conj())
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs), f"{what} is {ours.tolist()}, not {theirs.tolist()}"
        return
    assert torch.equal(ours.isfinite(), theirs.isfinite()), f"{what} is {ours.tolist()}, not {theirs.tolist()}"
    ours, theirs = ours.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
    if theirs.numel():
        scale = max(1.0, float(theirs.abs().max()))
        differs = float((ours - theirs).abs().max())
        assert differs <= tolerance * scale, f"{what} differs by {differs:.3g}: {ours.tolist()}, not {theirs.tolist()}"
