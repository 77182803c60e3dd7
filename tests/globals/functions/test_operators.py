"""Every operator that torch's own tests know, on their samples: global tensors give what plain ones give.

The samples are those of torch's database of operators, which comes with torch. It is not an interface that torch keeps
stable: another version may have other operators and samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from random import Random
from typing import Any

import pytest
import torch
from same import Global, assert_same, outcome
from torch.utils.checkpoint import checkpoint

from distdl.globals.tensor.structures import map_tensors

pytestmark = pytest.mark.filterwarnings("ignore")  # (operators that torch deprecates say so)
PARTS = 36
# operators whose results are not determined by their arguments, or have no values: in their names
_DRAWN = (
    "dropout", "rand", "log_normal", "normal_in_place", "normal_number_mean", "empty", "bernoulli", "multinomial",
    "cauchy", "exponential", "geometric", "uniform", "rrelu", "multi_head_attention", "scaled_dot_product",
)  # fmt: skip
# torch.masked asks for .layout, which a global tensor has of its own; others give what no global tensor can be
_REFUSED = ("masked_", "sparse", "to_sparse", "resize_")
_NOT_MASKED = ("masked_fill", "masked_scatter", "masked_select")
# complex32 has no sums; what torch gives of several derivatives of empty tensors is none, not zero
_OTHERS = ("chalf", "ormqr", "linalg_householder_product", "histogramdd", "linalg_eig", "pad_constant", "quantile")
# drawn, too; and casts to less than the precision that is compared
_THEMSELVES = ("normal", "half", "float", "bfloat16", "cfloat")


def _operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    found = []
    for one in op_db:
        name = one.formatted_name
        refused = name.startswith(_REFUSED) and not name.startswith(_NOT_MASKED)
        if not refused and name not in _THEMSELVES and not any(part in name for part in (*_DRAWN, *_OTHERS)):
            found.append(one)
    return found


def _checkpointed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call in a checkpoint, behind sums that have no gradient: all workers have to recompute as far."""

    def measured(*own: torch.Tensor) -> Any:
        for one in own:
            one.detach().sum()
        return call(*own)

    return lambda *own: checkpoint(measured, *own, use_reentrant=False)


_REALS = (torch.float64, torch.int64, torch.bool)
KINDS: dict[str, tuple[tuple[torch.dtype, ...], Callable[..., Any]]] = {  # dtypes, the first that an operator has
    "real": (_REALS, lambda call: call),
    "complex": ((torch.complex128,), lambda call: call),
    "checkpointed": (_REALS, _checkpointed),
}


def _grid(shape: Sequence[int], random: Random) -> tuple[int, ...]:
    """Two or three workers along one dim."""
    grid = [1] * len(shape)
    if grid:
        grid[random.randrange(len(grid))] = random.choice((2, 3))
    return tuple(grid)


def _check(kind: str, operator: Callable[..., Any], sample: Any, all_split: bool, random: Random) -> bool:
    """Check one sample. Says whether there was something to check."""
    tensors: list[torch.Tensor] = []
    given = ([sample.input, *sample.args], sample.kwargs)
    map_tensors(given, lambda one: tensors.append(one) or one)
    if not tensors or any(one.layout is not torch.strided for one in tensors):
        return False

    def call(*own: torch.Tensor) -> Any:
        rest = iter(own)
        args, kwargs = map_tensors(given, lambda _: next(rest))
        return operator(*args, **kwargs)

    call = KINDS[kind][1](call)
    try:
        outcome(call, tensors, curved=False)
    except Exception:
        return False  # (no such function of these arguments, or no derivative)
    call.__name__ = getattr(operator, "__name__", str(operator))
    arguments: list[Any] = [
        Global(one, _grid(one.shape, random)) if all_split or not place else one for place, one in enumerate(tensors)
    ]
    assert_same(call, *arguments, grids=[arguments[0].grid], workers=3, falls_back=True, tolerance=1e-9, curved=False)
    return True


def _check_all(kind: str, operators: Sequence[Any], most: int) -> int:
    checked, random = 0, Random(0)
    for operator in operators:
        dtype = next((one for one in KINDS[kind][0] if one in operator.dtypes), None)
        if dtype is None or (kind == "checkpointed" and "batch_norm" in operator.name):
            continue  # (torch does not count what it writes into running statistics; we do, and a checkpoint raises)
        torch.manual_seed(0)
        curved = operator.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        samples = list(islice(operator.sample_inputs("cpu", dtype, requires_grad=curved), 400))
        samples = samples if len(samples) <= most else random.sample(samples, most)
        for sample in samples:
            for function in (operator.op, operator.method_variant):
                if function is not None:
                    for all_split in (False, True):
                        checked += _check(kind, function, sample, all_split, random)
    return checked


@pytest.mark.parametrize(("kind", "least"), [("real", 30), ("complex", 15), ("checkpointed", 30)])
def test_operators_give_what_they_give_of_plain_tensors(kind: str, least: int) -> None:
    assert _check_all(kind, _operators()[::PARTS], 2 if kind == "real" else 1) > least


@pytest.mark.every_case
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", range(PARTS))
def test_all_operators(part: int, kind: str) -> None:
    most, least = (16, 100) if kind == "real" else (6, 40)
    assert _check_all(kind, _operators()[part::PARTS], most) > least
