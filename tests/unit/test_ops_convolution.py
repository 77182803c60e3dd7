"""Linear maps, convolutions and embeddings as operations: what all workers compute together is torch's function."""

import itertools
import re
from dataclasses import replace
from math import prod

import pytest
import torch
from ops import Case, assert_computes, matrices, signature, site, together
from torch.nn import functional

from distdl.geometry.boxes import balanced, runs
from distdl.geometry.transposed import Transposed
from distdl.geometry.windows import Sliding
from distdl.ops.convolution import Convolution
from distdl.ops.embedding import Embedding
from distdl.ops.linear import Linear
from distdl.ops.transposed import TransposedConvolution
from distdl.partition import Layout


def channels_split(out, inner, grid, sizes=None, batch=(2,)):
    """Partitions of work, y and x on different workers, and the layouts of x, w and b.

    Args:
        grid: the partition of space.
        sizes: how the last dim of x is split.
    """
    axes, ones, cells = tuple(grid), (1,) * len(grid), prod(grid)
    world = out * inner * len(batch) * cells + 2

    def work(P):
        return P[2:].reshape(len(batch), out, inner, *axes)

    def target(P):
        return P[: len(batch) * out * cells].reshape(len(batch), out, *axes)

    def source(P):
        return P[1 : 1 + len(batch) * inner * cells].reshape(len(batch), inner, *axes)

    def places(P, extents, shape_w):
        x = Layout.balanced(source(P), extents)
        intervals = [runs(list(batch)), *x.intervals[1:]]
        if sizes is not None:
            intervals[-1] = runs(sizes)
        stored = work(P)[:1, :, :, *[slice(0, 1)] * len(axes)].reshape(out, inner)
        weight = Layout.balanced(stored.reshape(out, inner, *ones), shape_w)
        bias = Layout.balanced(stored[:, :1].reshape(out), shape_w[:1])
        return [Layout.of(source(P), intervals), weight, bias]

    return world, work, target, places


def convolution(out, inner, grid, sizes=None, batch=(2,), k=3, s=1, p=1, d=1, mode="zeros", bias=True, extent=9):
    world, work, target, places = channels_split(out, inner, grid, sizes, batch)
    rank = len(grid)
    sliding = Sliding.of("Convolution", rank, k, s, p, d)
    convolve = getattr(functional, f"conv{rank}d")

    def sequential(x, w, b=None):
        if mode != "zeros":
            x, padding = functional.pad(x, [p, p] * rank, mode), 0
        else:
            padding = p
        return convolve(x, w, b, s, padding, d)

    return Case(
        world,
        lambda P: Convolution(target(P), 5, 4, sliding, mode),
        work,
        lambda P: places(P, (sum(batch), 5, *[extent] * rank), (4, 5, *[k] * rank))[: 3 if bias else 2],
        sequential,
        batch=sum(batch),
        others=lambda P: [target(P)],
    )


def grouped(workers, groups):
    sliding = Sliding.of("Convolution", 1, 3, 1, 1, 1)

    def row(P):
        return P.reshape(1, workers, 1)

    def places(P):
        return [
            Layout.of(row(P), [runs([2]), runs([0] * (workers - 1) + [6]), runs([5])]),
            Layout.balanced(P.reshape(workers, 1, 1), (12, 6 // groups, 3)),
            Layout.balanced(P.reshape(workers), (12,)),
        ]

    return Case(
        workers,
        lambda P: Convolution(row(P), 6, 12, sliding, groups=groups),
        lambda P: P.reshape(1, workers, 1, 1),
        places,
        lambda x, w, b: functional.conv1d(x, w, b, padding=1, groups=groups),
    )


def transposed(out, inner, space, sizes=None, k=3, s=2, p=1, d=1, more=1, extent=6):
    geometry = Transposed.of("TransposedConvolution", 1, k, s, p, d, more)
    world, work, target, places = channels_split(out, inner, (space,), sizes)

    def own(P):
        x, _, bias = places(P, (2, 5, extent), (4, 5, k))
        stored = work(P)[:1, :, :, :1].reshape(out, inner)
        return [x, Layout.balanced(stored.T.reshape(inner, out, 1), (5, 4, k)), bias]

    return Case(
        world,
        lambda P: TransposedConvolution(target(P), 5, 4, geometry),
        work,
        own,
        lambda x, w, b: functional.conv_transpose1d(x, w, b, s, p, more, 1, d),
        batch=2,
        others=lambda P: [target(P)],
    )


def linear(out, inner, batch=(3,), more=(), bias=True):
    world, work, target, places = channels_split(out, inner, (), batch=batch)

    def own(P):
        x, weight, bias_ = places(P, (sum(batch), 7), (5, 7))
        P_x = x.partition.reshape(len(batch), *[1] * len(more), inner)
        whole = [[(0, extent)] for extent in more]
        return [Layout.of(P_x, [runs(list(batch)), *whole, balanced(7, inner)]), weight, bias_][: 3 if bias else 2]

    return Case(
        world,
        lambda P: Linear(target(P), 7, 5),
        work,
        own,
        functional.linear,
        batch=sum(batch),
        others=lambda P: [target(P)],
    )


def embedding(rows, columns, split):
    size = rows * columns * len(split)
    indices = torch.tensor([[5, 0, 3, 3], [1, 1, 2, 5], [4, 3, 1, 0]])

    def work(P):
        return P.reshape(len(split), 1, rows, columns)

    def places(P):
        P_x = P[: len(split)].reshape(len(split), 1)
        table = Layout.balanced(work(P)[:1].reshape(rows, columns), (6, 5))
        return [Layout.of(P_x, [runs(list(split)), runs([4])]), table]

    return Case(
        size,
        lambda P: Embedding(P[: len(split) * columns].reshape(len(split), 1, columns), padding_idx=3),
        work,
        places,
        lambda x, w: functional.embedding(x, w, 3),
        (indices, torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))),
    )


CASES = {
    "space": convolution(1, 1, (3,)),
    "space, uneven": convolution(1, 1, (4,), [1, 0, 7, 1], k=4, s=2, p=2, d=2),
    "two dims": convolution(1, 1, (2, 2), k=2, s=2, p=0, extent=5),
    "in": convolution(1, 3, (1,)),
    "out": convolution(3, 1, (1,)),
    "in, out, space": convolution(2, 2, (2,), [9, 0]),
    "batch": convolution(2, 1, (1,), batch=(1, 2)),
    "an empty batch": convolution(1, 2, (1,), batch=(3, 0)),
    "without bias": convolution(2, 2, (1,), bias=False),
    **{mode: convolution(1, 1, (3,), [1, 5, 0], p=2, k=5, extent=6, mode=mode) for mode in (
        "reflect", "replicate", "circular"
    )},
    **{f"{groups} groups on {workers}": grouped(workers, groups) for groups, workers in (
        (2, 1), (3, 2), (2, 3), (6, 4), (2, 5)
    )},
    **{f"transposed {out} {inner} {space}": transposed(out, inner, space) for out, inner, space in (
        (1, 1, 3), (2, 1, 1), (1, 2, 1), (2, 3, 2)
    )},
    "transposed, wide": transposed(1, 1, 4, [0, 5, 1, 0], k=2, s=4, p=0, more=3),
    "transposed, dilated": transposed(1, 1, 4, [1, 1, 0, 4], k=3, s=2, p=2, d=3, more=2),
    **{f"linear {out} {inner}": linear(out, inner) for out, inner in ((1, 1), (1, 3), (4, 1), (2, 3))},
    "linear, batch": linear(2, 2, batch=(1, 0, 3), more=(2, 3)),
    "linear, without bias": linear(2, 2, more=(2,), bias=False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_operation_computes_what_torch_computes(name):
    """On workers of which one is not in each partition: results, and the gradients of x, w and b."""
    assert_computes(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_the_matrix_of_an_operation_is_torchs(name):
    """Of x, so that each cell is known to come from where it should."""
    ours, theirs = matrices(CASES[name])
    assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "columns", "split"), [*itertools.product((1, 3), (1, 2), [(3,)]), (2, 2, (1, 2)), (1, 1, (3, 0))]
)
def test_an_embedding_is_torchs(rows, columns, split):
    assert_computes(embedding(rows, columns, split))


@pytest.mark.parametrize(("change", "words"), [
    ({"in_channels": 6}, "needs an input with 6 channels in dim 1; the global shape of the input is 2x5x9"),
    ({"sliding": Sliding.of("Op", 1, 14, 1, 1, 1)}, "the kernel spans 14 cells and the input, with its padding, 11"),
    ({"padding_mode": "reflect", "sliding": Sliding.of("Op", 1, 3, 1, 9, 1)}, "in dim 2 the padding is 9 and 9 and"),
])  # fmt: skip
def test_a_setup_is_refused_alike_on_every_worker(change, words):
    case = CASES["in, out, space"]
    refused = replace(case, op=lambda P: replace(case.op(P), **change))

    def main(P):
        wholes = [torch.zeros(layout.extents, dtype=torch.float64) for layout in case.places(P)]
        with pytest.raises(ValueError, match=re.escape(words)) as error:
            refused.set_up(P, wholes, True)
        return str(error.value)

    assert len(set(together(case.size, main))) == 1


def test_dtypes_that_differ_are_refused_unless_torch_casts():
    case = CASES["space"]

    def main(P):
        op, work, layouts = case.op(P), case.work(P), case.places(P)
        dtypes = torch.float64, torch.float32, torch.float32
        given = [signature(layout, dtype) for layout, dtype in zip(layouts, dtypes, strict=True)]
        here = site(work, layouts[0].partition, *case.others(P))
        if P.comm.rank not in here.members:
            return ""
        with pytest.raises(ValueError, match="needs input, weight and bias of one dtype; got"):
            op.setup(here, *given)
        replace(op, autocast=torch.bfloat16).setup(here, *given)
        return "done"

    assert "done" in together(case.size, main)
