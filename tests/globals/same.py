"""What every function of global tensors has to satisfy: the values and gradients of torch's on one worker."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import distdl
from distdl.globals.tensor.structures import map_tensors

WORKERS = 5
# for each number of dims, grids over at most 4 of 5 workers: one worker is always idle
GRIDS: dict[int, list[tuple[int, ...]]] = {
    0: [()],
    1: [(3,), (4,)],
    2: [(2, 2), (1, 3), (4, 1)],
    3: [(2, 1, 2), (1, 3, 1), (1, 2, 2)],
    4: [(2, 1, 2, 1), (1, 2, 1, 2), (1, 1, 2, 2), (1, 3, 1, 1)],
    5: [(1, 1, 2, 1, 2), (2, 1, 1, 2, 1), (1, 2, 2, 1, 1)],
    6: [(1, 2, 1, 2, 1, 1), (2, 1, 1, 1, 2, 1)],
}


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers that are the same on every worker."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + 7919 * len(shape)))


class Global:
    """An argument that is to be a global tensor; a tensor without this mark stays plain, the same everywhere."""

    def __init__(self, tensor: torch.Tensor, grid: Sequence[int] | None = None) -> None:
        self.tensor, self.grid = tensor, grid


def assert_same(
    function: Callable[..., Any],
    *arguments: Any,
    grids: Sequence[Sequence[int]] | None = None,
    workers: int = WORKERS,
    falls_back: bool = False,
    tolerance: float = 1e-12,
    twice: bool = False,
    curved: bool = True,
) -> None:
    """Run a function on plain tensors, and on global ones over several grids, and compare results and gradients.

    Args:
        function: takes the arguments; gives a tensor, or a tuple of tensors and other values.
        arguments: :class:`Global` tensors, plain tensors and others.
        grids: of the first global argument; those of its rank if not given.
        falls_back: whether the function is expected to run on one worker. If not, that is an error.
        twice: whether second derivatives are compared, too.
        curved: whether all tensors of floating point get gradients, not only those that require them.
    """
    first = next(one for one in arguments if isinstance(one, Global))
    chosen = GRIDS[first.tensor.dim()] if grids is None else grids

    expected = outcome(function, [one.tensor if isinstance(one, Global) else one for one in arguments], twice, curved)

    def work() -> None:
        root = distdl.world()
        for grid in chosen:
            made = [_made(one, grid if one is first else None, root) for one in arguments]
            found = outcome(function, made, twice, curved)
            _compare(expected, found, f"{getattr(function, '__name__', function)} over {tuple(grid)}", tolerance)

    with warnings.catch_warnings():  # (the filters are those of all threads)
        warnings.simplefilter("ignore" if falls_back else "error")
        warnings.filterwarnings("ignore", ".* workers without a cell of a tensor")  # on purpose
        distdl.run_workers(work, workers)


def assert_raises_the_same(
    function: Callable[[Any], Any],
    whole: torch.Tensor,
    text: bool = False,
    kinds: Any = (RuntimeError, IndexError, ValueError),
) -> None:
    """Run a function on a tensor whose dim 1 is split over two of three workers: it raises an error of torch's kind.

    Args:
        kinds: what kind that may be.
        text: whether it has torch's text, too.
    """

    def work() -> None:
        root, grid = distdl.world(), (1, 2, *[1] * (whole.dim() - 2))
        x = distdl.distribute_tensor(whole, root[:2].reshape(grid))
        with pytest.raises(kinds) as ours:
            function(x)
        with pytest.raises(type(ours.value)) as theirs:
            function(whole)
        assert not text or str(ours.value) == str(theirs.value)

    distdl.run_workers(work, 3)


def _made(argument: Any, grid: Sequence[int] | None, root: Any) -> Any:
    if not isinstance(argument, Global):
        return argument
    own = argument.grid or grid or GRIDS[argument.tensor.dim()][0]
    count = int(torch.Size(own).numel())
    P = root.create_partition_inclusive(range(count))
    P = P.create_cartesian_topology_partition(own) if own else P
    return distdl.distribute_tensor(argument.tensor, P) if own else _scalar(argument.tensor, P)


def _scalar(tensor: torch.Tensor, P: Any) -> Any:
    return distdl.distribute_tensor(tensor.reshape(1), P).sum().to(tensor.dtype)


def outcome(
    function: Callable[..., Any], arguments: Sequence[Any], twice: bool = False, curved: bool = True
) -> dict[str, Any]:
    """The results of a function, and the gradients by its arguments; see :func:`assert_same`."""
    leaves: list[torch.Tensor] = []

    def leaf(one: torch.Tensor) -> torch.Tensor:
        has_gradient = (curved and (one.is_floating_point() or one.is_complex())) or one.requires_grad
        one = one.detach().clone()
        if has_gradient:
            leaves.append(one.requires_grad_())
        return one

    given = map_tensors(list(arguments), leaf)
    # (what works in place must not write leaves)
    results = function(*map_tensors(given, lambda one: one * 1 if one.requires_grad else one.clone()))
    outputs: list[Any] = list(results) if isinstance(results, (tuple, list)) else [results]
    scalars = [y for y in outputs if isinstance(y, torch.Tensor) and y.requires_grad]
    gradients: tuple[Any, ...] = ()
    if scalars:
        sums = [(y * _weights(y)).sum() for y in scalars]
        # (linear in real results: where their own derivatives alone depend on x, each worker has to be connected)
        loss = sum(one.abs() if one.is_complex() else one for one in sums)
        gradients = torch.autograd.grad(loss, leaves, create_graph=twice, allow_unused=True)
        if twice:
            found = [dx for dx in gradients if dx is not None and dx.requires_grad]
            again = sum((dx * dx).sum().real for dx in found)
            gradients += torch.autograd.grad(again, leaves, allow_unused=True) if found else (None,) * len(leaves)
    return {"results": outputs, "gradients": gradients}


def _weights(y: torch.Tensor) -> torch.Tensor:
    """Numbers that tell the elements of y apart."""
    count = y.numel()
    plain = torch.linspace(0.5, 1.5, count, dtype=torch.float64) if count else torch.zeros(0, dtype=torch.float64)
    return plain.reshape(tuple(y.shape)).to(y.dtype)


def _compare(expected: dict[str, Any], found: dict[str, Any], what: str, tolerance: float) -> None:
    for kind, theirs in expected.items():
        ours = found[kind]
        assert len(ours) == len(theirs), f"{what}: {kind}"
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            where = f"{what}: {kind}[{place}]"
            if kind == "gradients" and b is not None and a is None:
                a = torch.zeros_like(b)
            elif kind == "gradients" and b is None and a is not None:  # (a second derivative of what is linear in x)
                b = torch.zeros_like(a).full_tensor() if isinstance(a, distdl.GlobalTensor) else torch.zeros_like(a)
            if not isinstance(b, torch.Tensor):
                assert a == b, f"{where} is {a!r}, not {b!r}"
                continue
            assert a.shape == b.shape, f"{where} has shape {tuple(a.shape)}, not {tuple(b.shape)}"
            assert a.dtype == b.dtype, f"{where} has dtype {a.dtype}, not {b.dtype}"
            whole = a.full_tensor() if isinstance(a, distdl.GlobalTensor) else a
            assert type(whole) is torch.Tensor
            whole, b = whole.detach(), b.detach()
            assert torch.equal(whole.isnan(), b.isnan()), where
            whole, b = whole.nan_to_num(), b.nan_to_num()
            if not (b.is_floating_point() or b.is_complex()):
                assert torch.equal(whole, b), where
            elif b.numel():
                scale = max(1.0, float(b.abs().max()))
                assert float((whole - b).abs().max()) <= tolerance * scale, where
