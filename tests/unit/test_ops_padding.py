"""Padding as an operation: what all workers compute together is torch's function, and its matrix."""

import pytest
import torch
from ops import Case, assert_computes, balanced_over, matrices
from torch.nn import functional

from distdl.geometry.borders import Border
from distdl.geometry.boxes import runs
from distdl.ops.padding import Padding
from distdl.partition import Layout


def uneven(P):
    return [Layout.of(P[1:].reshape(1, 4), [runs([2]), runs([0, 3, 1, 3])])]


CASES = {
    mode: Case(
        5,
        Padding(Border(mode, ((0, 0), (3, 2))), 0.0, (1,)),
        lambda P: P[1:].reshape(1, 4),
        uneven,
        lambda x, mode=mode: functional.pad(x, (3, 2), "constant" if mode == "zeros" else mode),
    )
    for mode in ("zeros", "reflect", "replicate", "circular")
}
CASES["cut"] = Case(
    4,
    Padding(Border("zeros", ((-1, 2), (2, -3))), 0.0, (0, 1)),
    lambda P: P.reshape(2, 2),
    lambda P: [balanced_over(3, 7)(P.reshape(2, 2))],
    lambda x: functional.pad(x, (2, -3, -1, 2)),
)


@pytest.mark.parametrize("name", CASES)
def test_padding_is_torchs(name):
    assert_computes(CASES[name])
    ours, theirs = matrices(CASES[name])
    assert torch.equal(ours, theirs)
