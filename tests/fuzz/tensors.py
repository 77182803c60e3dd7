"""Random programs of global tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from faults import spoilt
from hypothesis import strategies as st
from partitions import blocks
from picking import Pick
from programs import Input, Program, Step, taken, twice_differentiable
from steps import FAMILIES

_MOST = 3000  # elements of a tensor
KINDS = ["normal", "normal", "normal", "positive", "integers", "booleans", "single", "complex"]


@st.composite
def inputs(draw: st.DrawFn) -> tuple[Input, ...]:
    """A global tensor; others of shapes that go with it; at the end plain ones."""
    first = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    if draw(st.integers(0, 14)) == 14:
        first = (0, *first[1:])
    wants = draw(st.integers(0, 3)) > 0
    found = [Input(first, draw(st.integers(0, 99)), "normal", wants, draw(st.booleans()), draw(blocks(first)))]
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(KINDS))
        shape = draw(st.sampled_from(_beside(first)))
        wants = kind not in ("integers", "booleans") and draw(st.booleans())
        lies = draw(blocks(shape)) if shape and draw(st.booleans()) else None
        found.append(Input(shape, draw(st.integers(0, 99)), kind, wants, False, lies))
    return tuple(found)


def _beside(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Shapes of tensors that stand beside one of this shape: equal, broadcast, weights, targets, indices."""
    batch, channels, *space = (*shape, 1)[: max(len(shape), 2)]
    return [
        shape, shape, shape[1:], tuple(1 if d % 2 else n for d, n in enumerate(shape)), shape[-1:], (2, shape[-1]),
        (2, channels, *[2] * len(space)), (3, channels, *[3] * len(space)), (batch, *space), (3,),
        (shape[-1], 2), (1,) * len(shape),
    ]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, wrong: bool = False) -> Program:
    """A program; with ``wrong``, one of its steps gets an argument that is likely to be wrong."""
    given = draw(inputs())
    values: list[Any] = [one.tensor() * 1 if one.kind != "booleans" else one.tensor() for one in given]
    steps: list[Step] = []
    pick = Pick(draw, values, len(given))
    count = draw(st.integers(1, 6))
    at = draw(st.integers(0, count - 1)) if wrong else -1
    for number in range(count):
        step = None
        for _ in range(3):
            step = step or _step(pick)
        if step is None:
            continue
        if number == at and not step.function.startswith("ours."):
            step = draw(spoilt(step))
        try:
            results = taken(step, values)
        except Exception:
            steps.append(step)
            break
        if any(one.numel() > _MOST or one.dim() > 6 for one in results):
            continue
        steps.append(step)
        values += results
    outputs = sorted({len(values) - 1, *draw(st.lists(st.integers(0, len(values) - 1), max_size=2))})
    program = Program(given, tuple(steps), tuple(outputs))
    if not _is_differentiable(program):
        return replace(program, inputs=tuple(replace(one, wants=False) for one in given))
    return replace(program, twice=twice_differentiable(program)) if draw(st.integers(0, 4)) == 4 else program


def _step(pick: Pick) -> Step | None:
    ref = pick.tensor()
    assert ref is not None
    return pick.of(*FAMILIES)(pick, ref, pick.value(ref))


def _is_differentiable(program: Program) -> bool:
    """Whether a backward, if there is one, does not meet tensors that were written in place since.

    Nor variances over ``()``, all dims, whose derivatives are nan in torch.
    """
    if any(step.function in ("torch.var", "torch.std") and () in step.arguments[1:] for step in program.steps):
        return False
    result = program.sequential()
    return not (isinstance(result, tuple) and result[0] == len(program.steps))
