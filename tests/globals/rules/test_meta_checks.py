"""How often torch is asked about sizes, and that its errors come also behind sizes that fit."""

import pytest
import torch
from launched import on_workers, split
from same import noise
from torch.nn import functional as F

from distdl.globals.functions import pooling
from distdl.globals.rules.meta_checks import judged
from distdl.globals.rules.work import checked


def _asked(ask, sizes):
    """For each shape, whether torch is asked."""
    seen = []

    def count(x, *rest):
        seen.append(x.shape)
        return x

    told = []
    for shape in sizes:
        before = len(seen)
        ask(count, split(noise(*shape)))
        told.append(len(seen) > before)
    return told


@on_workers
def test_sizes_that_torch_does_not_look_at_are_asked_about_once():
    def ask(count, x):
        judged(count, (x, 0.1), {}, x, (1,))

    assert _asked(ask, [(2, 4, 5), (3, 4, 7), (2, 4, 5), (2, 3, 5), (2, 4, 1), (7, 4, 1), (2, 4, 0), (2, 4, 2)]) == [
        True, False, False, True, True, False, True, False,
    ]  # fmt: skip


@on_workers
def test_sizes_that_are_compared_are_asked_about_once():
    def ask(count, x):
        checked(count, [x, x.detach()[:2]], compares=True)

    # (the second operand has two rows, which are as many as those of x, or others, or as its columns)
    assert _asked(ask, [(4, 5), (6, 7), (4, 5), (2, 5), (2, 9), (4, 2), (8, 2), (1, 5), (0, 5), (3, 3), (9, 9)]) == [
        True, False, False, True, False, True, False, True, True, True, False,
    ]  # fmt: skip


@on_workers
def test_torch_is_asked_once_about_pictures_of_all_sizes(monkeypatch):
    asked = []
    judge = pooling.judge
    monkeypatch.setattr(pooling, "judge", lambda *call: asked.append(call) or judge(*call))
    for n in range(4, 9):
        for mode in ("bilinear", "bicubic"):
            for given in ({"scale_factor": 2}, {"scale_factor": 1.5, "recompute_scale_factor": True}):
                F.interpolate(split(noise(2, 3, n, 2 * n)), mode=mode, **given)
    # (all workers are counted together)
    assert len(asked) <= 3 * 4


def _matched(function, fitting, wrong):
    """A call that torch refuses, behind one of the same kind that it takes."""
    function(*[split(one) for one in fitting[:1]], *fitting[1:])
    with pytest.raises((RuntimeError, ValueError)):
        function(*wrong)
    with pytest.raises((RuntimeError, ValueError)):
        function(split(wrong[0]), *wrong[1:])


@pytest.mark.parametrize(
    "function, fitting, wrong",
    [
        (lambda x: F.batch_norm(x, None, None, training=True), [noise(4, 3, 5, 5)], [noise(1, 3, 1, 1)]),
        (lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)), [noise(4, 3, 5).float()], [noise(4, 2, 5).float()]),
        (F.instance_norm, [noise(4, 3, 5)], [noise(4, 3, 1)]),
        (lambda x: F.group_norm(x, 3), [noise(4, 6, 5)], [noise(1, 3, 1)]),
        (lambda x: F.group_norm(x, 3), [noise(4, 6, 5)], [noise(4, 5, 5)]),
        (lambda x: F.interpolate(x, scale_factor=0.4), [noise(2, 3, 5)], [noise(2, 3, 2)]),
        (lambda x: F.interpolate(x, scale_factor=0.4, mode="bilinear"), [noise(2, 3, 5, 5)], [noise(2, 3, 5, 2)]),
        (lambda x: F.interpolate(x, (4, 4), mode="bilinear"), [noise(2, 3, 5, 5)], [noise(2, 3, 0, 5)]),
        (lambda x: F.interpolate(x, (4, 4), mode="bilinear"), [noise(2, 3, 5, 5)], [noise(2, 3, 5)]),
        (torch.matmul, [noise(4, 5), noise(5, 6)], [noise(4, 5), noise(4, 6)]),
        (torch.matmul, [noise(3, 4, 5), noise(3, 5, 6)], [noise(3, 4, 5), noise(2, 5, 6)]),
        (F.linear, [noise(4, 5), noise(6, 5)], [noise(4, 5), noise(6, 4)]),
        (lambda x, y: torch.einsum("ij,jk", x, y), [noise(4, 5), noise(5, 6)], [noise(4, 5), noise(6, 5)]),
        (torch.cdist, [noise(4, 5), noise(6, 5)], [noise(4, 5), noise(6, 4)]),
    ],
)  # fmt: skip
@on_workers
def test_errors_of_sizes_come_behind_sizes_that_fit(function, fitting, wrong):
    _matched(function, fitting, wrong)


@on_workers
def test_heads_that_share_keys_are_counted_behind_heads_that_fit():
    def attend(q, k):
        return F.scaled_dot_product_attention(q, k, k, enable_gqa=True)

    _matched(attend, [noise(2, 4, 5, 3), noise(2, 2, 5, 3)], [noise(2, 5, 4, 3), noise(2, 3, 4, 3)])
