"""Regions of memory: whether two of them meet, against the places themselves."""

import random

import pytest
import torch

from distdl.geometry.regions import Region, meet, overlaps_itself

BASE = (4, 3, 6)


def _region(x, itemsize=8):
    return Region.of(tuple(x.shape), x.stride(), x.storage_offset(), itemsize)


def _places(x):
    return set(x.flatten().tolist())


DISJOINT = {
    "rows": lambda x: (x[:2], x[2:]),
    "columns": lambda x: (x[..., :3], x[..., 3:]),
    "chunks of a middle dim": lambda x: (x[:, :1], x[:, 1:]),
    "chunks in another order": lambda x: (x.transpose(0, 2)[:2], x[..., 2:]),
    "one number": lambda x: (x[1, 2, 3], x[1, 2, 4:]),
    "part of the flat one": lambda x: (x.view(-1)[:18], x[1:]),
    "every other": lambda x: (x[..., ::2], x[..., 1::2]),
    "nothing": lambda x: (x[:0], x),
    "expanded": lambda x: (x[:1].expand(4, 3, 6), x[1:]),
    "windows": lambda x: (x[:, :2].unfold(1, 2, 1), x[:, 2:]),
}
MEETING = {
    "itself": lambda x: (x, x),
    "flat": lambda x: (x.view(-1)[17:19], x[1:, 0, 0]),
    "row and column": lambda x: (x[1], x[:, 1]),
    "transposed": lambda x: (x.permute(2, 0, 1)[5], x[..., 4:]),
    "expanded": lambda x: (x[:1].expand(4, 3, 6), x[:, 0]),
}


@pytest.mark.parametrize("pair", DISJOINT.values(), ids=DISJOINT)
def test_parts_without_a_common_place_do_not_meet(pair):
    one, other = pair(torch.arange(72).view(BASE))
    assert not _places(one) & _places(other)
    assert not meet(_region(one), _region(other))
    assert not meet(_region(other), _region(one))


@pytest.mark.parametrize("pair", MEETING.values(), ids=MEETING)
def test_parts_with_a_common_place_meet(pair):
    one, other = pair(torch.arange(72).view(BASE))
    assert _places(one) & _places(other)
    assert meet(_region(one), _region(other))


def test_real_and_imaginary_parts_do_not_meet():
    z = torch.zeros(3, 4, dtype=torch.complex128)
    real, imag, whole = (Region.of((3, 4), x.stride(), x.storage_offset(), x.itemsize) for x in (z.real, z.imag, z))
    assert not meet(real, imag)
    assert meet(real, whole)
    assert meet(imag, whole)


def test_no_common_place_is_ever_missed():
    draw = random.Random(0)

    def viewed(x):
        for _ in range(draw.randint(0, 4)):
            if not x.dim() or 0 in x.shape:
                break
            dim = draw.randrange(x.dim())
            n = x.shape[dim]
            start = draw.randrange(n)
            x = draw.choice([
                lambda x=x, d=dim, i=start, n=n: x.narrow(d, i, draw.randint(0, n - i)),
                lambda x=x, d=dim: x.transpose(d, 0), lambda x=x, d=dim, i=start: x.select(d, i),
                lambda x=x, d=dim, n=n: x.unfold(d, min(2, n), 1), lambda x=x, d=dim: x.transpose(d, -1)[..., ::2],
                lambda x=x, d=dim: x.unsqueeze(d).expand(*x.shape[:d], 3, *x.shape[d:]),
            ])()  # fmt: skip
        return x

    for _ in range(3000):
        base = torch.arange(72).view(draw.choice([BASE, (72,), (12, 6), (2, 2, 3, 6)]))
        one, other = viewed(base), viewed(base)
        if _places(one) & _places(other):
            assert meet(_region(one), _region(other))
        if len(_places(one)) < one.numel():
            assert overlaps_itself(tuple(one.shape), one.stride())
