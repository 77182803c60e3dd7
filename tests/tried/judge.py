"""Run a program of others alone and distributed, and compare what it computes.

A program is written once. On one worker it gets its modules and tensors as they are. On several, its modules went
through ``distdl.distribute`` and its tensors through ``distdl.distribute_tensor``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import distdl
from distdl.globals.tensor.structures import map_tensors

Grid = tuple[int, ...]
PROGRAMS: list[Program] = []


@dataclass(frozen=True)
class Global:
    """An argument that is split over the workers. A tensor without this mark stays whole on every worker.

    Attributes:
        tensor: the whole tensor. If it requires a gradient, the gradient is compared.
        axes: for each of its dims, the axis of the program's grid that splits it; None for one that is not split. Not
            given: dim i is split along axis i.
    """

    tensor: Tensor
    axes: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class Program:
    """A program that is compared.

    Attributes:
        libraries: the names on PyPI of what it imports; the table shows the version of the first.
        name: what it does, for the table.
        grids: over which it is run: how many workers split each dim of its input.
        build: gives the function and its arguments. It runs on one worker, with a seed.
        tolerance: largest difference that is accepted, relative to the largest value of a result.
        weights: how ``distdl.distribute`` keeps the weights.
    """

    libraries: tuple[str, ...]
    name: str
    grids: tuple[Grid, ...]
    build: Callable[[], tuple[Any, ...]]
    tolerance: float
    weights: str


def program(
    *libraries: str,
    name: str,
    grids: Sequence[Grid],
    tolerance: float = 1e-9,
    weights: str = "replicated",
) -> Callable[[Callable[[], tuple[Any, ...]]], Callable[[], tuple[Any, ...]]]:
    """Enter a program; see :class:`Program`. What it decorates gives ``(function, *arguments)``."""

    def enter(build: Callable[[], tuple[Any, ...]]) -> Callable[[], tuple[Any, ...]]:
        PROGRAMS.append(Program(libraries, name, tuple(grids), build, tolerance, weights))
        return build

    return enter


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in float64, the same for the same shape and seed."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + 7919 * len(shape)))


def square(model: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """Return what a model gives, after a backward of its mean square."""
    y = model(*inputs)
    y.square().mean().backward()
    return y


def fitted(criterion: Callable[..., Tensor], model: Callable[..., Tensor], x: Tensor, target: Tensor) -> Any:
    """Return the loss of a model and what it gives, after a backward of the loss."""
    y = model(x)
    loss = criterion(y, target)
    loss.backward()
    return loss, y


@dataclass(frozen=True)
class Verdict:
    """What a comparison found.

    Attributes:
        difference: the largest one, relative to the largest value of its result.
        where: the grid and the result that has it.
        fallbacks: the functions that ran on one worker.
    """

    difference: float
    where: str
    fallbacks: tuple[str, ...]


def judge(one: Program) -> Verdict:
    """Run a program alone and over each of its grids; compare results, gradients and states of modules."""
    function, *arguments = _built(one)
    expected = _outcome(function, [a.tensor if isinstance(a, Global) else a for a in copy.deepcopy(arguments)])
    worst, where, fallbacks = 0.0, "", set[str]()
    for grid in one.grids:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = _distributed(one, grid, function, arguments)
        fallbacks |= {str(w.message).split(" has no op for global tensors")[0] for w in caught if _is_fallback(w)}
        for name, difference in _differences(expected, found):
            if not difference <= worst:
                worst, where = difference, f"{'x'.join(map(str, grid))}: {name}"
    return Verdict(worst, where, tuple(sorted(fallbacks)))


def _is_fallback(warning: warnings.WarningMessage) -> bool:
    return "has no op for global tensors" in str(warning.message)


def _built(one: Program) -> tuple[Any, ...]:
    torch.manual_seed(0)
    function, *arguments = one.build()
    # A model often begins with weights of zero, and then the gradients of those before them are zero, too.
    generator = torch.Generator().manual_seed(1)
    for module in arguments:
        if isinstance(module, nn.Module):
            with torch.no_grad():
                for p in module.parameters():
                    p.add_(torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype), alpha=0.02)
    return (function, *arguments)


def _distributed(one: Program, grid: Grid, function: Any, arguments: list[Any]) -> dict[str, Any]:
    workers = torch.Size(grid).numel()
    copies = [copy.deepcopy(arguments) for _ in range(workers)]

    def work() -> dict[str, Any]:
        P = distdl.world().reshape(*grid)
        return _outcome(function, [_placed(argument, P, one.weights) for argument in copies[distdl.world().rank]])

    return distdl.run_workers(work, workers)[0]


def _placed(argument: Any, P: Any, weights: str) -> Any:
    if isinstance(argument, nn.Module):
        return distdl.distribute(argument, P, weights=weights)
    if not isinstance(argument, Global):
        return argument
    with torch.no_grad():
        x = distdl.distribute_tensor(argument.tensor, P, axes=argument.axes)
    return x.requires_grad_(argument.tensor.requires_grad)


def _outcome(function: Any, arguments: list[Any]) -> dict[str, Any]:
    """Return all that the program computes by name, as whole tensors."""
    results = function(*arguments)
    named: dict[str, Any] = dict(_flat("result", results))
    for place, argument in enumerate(arguments):
        if isinstance(argument, Tensor) and argument.requires_grad:
            named[f"gradient of argument {place}"] = argument.grad
        if isinstance(argument, nn.Module):
            named |= {f"gradient of {name}": p.grad for name, p in argument.named_parameters()}
            named |= dict(argument.state_dict())
    return {name: map_tensors(value, _whole) for name, value in named.items()}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, (tuple, list)):
        for place, inner in enumerate(value):
            yield from _flat(f"{name}[{place}]", inner)
    else:
        yield name, value


def _whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, distdl.GlobalTensor) else tensor
    return whole.detach().clone()


def _differences(expected: dict[str, Any], found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name in expected.keys() ^ found.keys():
        yield f"{name} is missing on one side", float("inf")
    for name in expected.keys() & found.keys():
        yield name, _difference(expected[name], found[name])


def _difference(a: Any, b: Any) -> float:
    """Return the largest difference relative to the largest value; infinity if the two are no tensors that compare."""
    if type(a) is type(b) is float:
        a, b = torch.tensor([a, b], dtype=torch.float64).unbind()
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return 0.0 if type(a) is type(b) and a == b else float("inf")
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return float("inf")
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else float("inf")
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.nan_to_num(), b.nan_to_num()
    return float((a - b).abs().max() / max(float(a.abs().max()), 1e-3)) if a.numel() else 0.0
