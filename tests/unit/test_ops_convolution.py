"""Linear maps, convolutions and embeddings as operations: what all workers compute together is torch's function."""

import itertools
import re
from dataclasses import replace
from math import prod

import pytest
import torch
from ops import Case, assert_computes, matrices, signature, site, together
from torch.nn import functional

from distdl.exchange import transfer
from distdl.geometry.boxes import balanced, runs
from distdl.geometry.channels import Channels
from distdl.geometry.transposed import Transposed
from distdl.geometry.windows import Sliding
from distdl.ops.convolution import Convolution
from distdl.ops.edges import InPlace
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
        lambda P: Convolution(target(P), Channels(5, 4), sliding, mode),
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
        lambda P: Convolution(row(P), Channels(6, 12, groups), sliding),
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
        lambda P: TransposedConvolution(target(P), Channels(5, 4), geometry),
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


@pytest.mark.parametrize("name", ["space", "space, uneven", "two dims", "in, out, space", "circular", "linear 2 3"])
def test_gradients_of_windows_are_made_in_their_memory(name, monkeypatch):
    """As those of large windows are: here of all."""
    monkeypatch.setattr(transfer, "_SHORT_COPY", 0)
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


def everywhere(op, sequential, grid, extents, weights, split=None, axes=None):
    """An operation on x that is split over a grid of workers, of which each has the whole of the weights; one is idle.

    Args:
        op: from the target to the operation.
        weights: shapes of the weights.
        split: how the channels of x are split, where that is not even; the dim, and the extents of the blocks.
        axes: from the grid to the shape of the work; one behind the channels if not given.
    """
    count = prod(grid)

    def target(P):
        return P[1 : 1 + count].reshape(grid)

    def places(P):
        intervals = [*Layout.balanced(target(P), extents).intervals]
        if split is not None:
            intervals[split[0]] = runs(split[1])
        return [Layout.of(target(P), intervals), *[Layout.everywhere(P, one) for one in weights]]

    work = (*grid[:2], 1, *grid[2:]) if axes is None else axes
    return Case(
        count + 1, lambda P: op(target(P)), lambda P: target(P).reshape(work), places, sequential, dims=len(extents)
    )


def convolved(grid, split=None, groups=1, mode="zeros", channels=(6, 4), bias=True, extents=(3, 7)):
    sliding, space = Sliding.of("Convolution", len(grid) - 2, 3, 2, 1, 1), len(grid) - 2
    batch, extent = extents

    def sequential(x, w, b=None):
        x = functional.pad(x, [1] * 2 * space, "constant" if mode == "zeros" else mode)
        return getattr(functional, f"conv{space}d")(x, w, b, 2, 0, 1, groups)

    return everywhere(
        lambda P_y: Convolution(P_y, Channels(*channels, groups), sliding, mode), sequential, grid,
        (batch, channels[0], *[extent] * space),
        [(channels[1], channels[0] // groups, *[3] * space), channels[1:]][: 1 + bias], split,
    )  # fmt: skip


def transposed_everywhere(grid, split=None, groups=1, channels=(6, 4), bias=True, extent=5):
    geometry, space = Transposed.of("TransposedConvolution", len(grid) - 2, 3, 2, 1, 1, 1), len(grid) - 2
    convolve = getattr(functional, f"conv_transpose{space}d")
    return everywhere(
        lambda P_y: TransposedConvolution(P_y, Channels(*channels, groups), geometry),
        lambda x, w, b=None: convolve(x, w, b, 2, 1, 1, groups), grid, (2, channels[0], *[extent] * space),
        [(channels[0], channels[1] // groups, *[3] * space), channels[1:]][: 1 + bias], split,
    )  # fmt: skip


def linear_everywhere(grid, split=None, bias=True, features=(7, 5)):
    extents = (*[3] * (len(grid) - 1), features[0])
    return everywhere(
        lambda P_y: Linear(P_y, *features), functional.linear, grid, extents,
        [features[::-1], features[1:]][: 1 + bias], split, axes=(*grid, 1),
    )  # fmt: skip


def embedding_everywhere(grid, split):
    indices = torch.tensor([[5, 0, 3], [1, 1, 2], [4, 3, 1], [5, 5, 3], [0, 2, 2], [0, 1, 4]])
    indices = indices[:, 0] if len(grid) == 1 else indices
    case = everywhere(
        lambda P_x: Embedding(P_x.reshape(*grid, 1), padding_idx=3), lambda x, w: functional.embedding(x, w, 3), grid,
        indices.shape, [(6, 5)], (0, split), axes=(*grid, 1, 1),
    )  # fmt: skip
    table = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    return replace(case, inputs=(indices, table))


EVERYWHERE = {
    "alone": convolved((1, 1, 1)),
    "space": convolved((1, 1, 3)),
    "space, two dims": convolved((1, 1, 2, 2), bias=False),
    "batch": convolved((3, 1, 1), (0, [2, 0, 1])),
    "space, uneven": convolved((1, 1, 3), (2, [1, 0, 6])),
    "space, circular": convolved((1, 1, 3), (2, [1, 0, 6]), mode="circular"),
    "channels": convolved((1, 4, 1)),
    "channels, uneven": convolved((1, 3, 2), (1, [0, 5, 1])),
    "channels, more than there are": convolved((1, 6, 1), channels=(4, 3)),
    "channels, groups": convolved((1, 3, 1), groups=2),
    "channels, groups, uneven": convolved((2, 3, 1), (1, [1, 0, 5]), groups=2, channels=(6, 8)),
    "channels, depthwise": convolved((1, 2, 2), (1, [1, 5]), groups=6, channels=(6, 6)),
    "everything": convolved((2, 2, 2), (1, [4, 2])),
    "few outputs": convolved((1, 1, 4), extents=(2, 5)),
    "transposed, space": transposed_everywhere((1, 1, 3), (2, [4, 0, 1])),
    "transposed, channels": transposed_everywhere((2, 3, 1), (1, [0, 5, 1])),
    "transposed, more channels than there are": transposed_everywhere((1, 6, 1), channels=(4, 3)),
    "transposed, whole groups": transposed_everywhere((1, 2, 2), groups=2),
    "transposed, whole groups and an empty block": transposed_everywhere(
        (3, 2, 1), (0, [1, 0, 1]), groups=4, channels=(4, 8)),
    "transposed, parts of groups": transposed_everywhere((1, 4, 1), (1, [0, 1, 2, 3]), groups=2),
    "transposed, groups cut through": transposed_everywhere((1, 4, 2), groups=2, channels=(4, 6)),
    "transposed, many groups cut through": transposed_everywhere((1, 2, 1), groups=4, channels=(4, 12), bias=False),
    "transposed, groups cut through by an empty block": transposed_everywhere(
        (3, 2, 1), (0, [1, 0, 1]), groups=3, channels=(3, 6)),
    "embedding, one dim": embedding_everywhere((3,), [0, 5, 1]),
    "embedding, two dims": embedding_everywhere((2, 2), [2, 4]),
    "linear, features": linear_everywhere((1, 3)),
    "linear, features, uneven": linear_everywhere((2, 3), (1, [6, 0, 1])),
    "linear, batch": linear_everywhere((2, 2, 1), (1, [3, 0])),
    "linear, more places than features": linear_everywhere((1, 2, 4), features=(6, 3), bias=False),
}  # fmt: skip


@pytest.mark.parametrize("name", EVERYWHERE)
def test_with_weights_everywhere_an_operation_is_torchs(name):
    assert_computes(EVERYWHERE[name])


def in_place(grid, k, s, p, d, extents, split=None, groups=1, channels=(2, 2)):
    """A convolution of few weights, so that blocks are not copied into windows."""
    space = len(grid) - 2
    sliding, convolve = Sliding.of("Convolution", space, k, s, p, d), getattr(functional, f"conv{space}d")
    return everywhere(
        lambda P_y: Convolution(P_y, Channels(*channels, groups), sliding),
        lambda x, w, b: convolve(x, w, b, s, p, d, groups), grid, (2, channels[0], *extents),
        [(channels[1], channels[0] // groups, *[k] * space), channels[1:]], split,
    )  # fmt: skip


IN_PLACE = {
    "one dim": in_place((1, 1, 3), 3, 1, 1, 1, (40,)),
    "uneven": in_place((2, 1, 3), 3, 1, 1, 1, (80,)),
    "batch with an empty block": in_place((2, 1, 2), 3, 1, 1, 1, (60,), (0, [0, 2])),
    "two dims": in_place((1, 1, 2, 2), 3, 1, 1, 1, (15, 16)),
    "three dims, of which one is whole": in_place((1, 1, 2, 1, 2), 3, 1, 1, 1, (10, 5, 14)),
    "nine workers": in_place((1, 1, 3, 3), 3, 1, 1, 1, (21, 22)),
    "wide kernel": in_place((1, 1, 3, 1), 5, 1, 2, 1, (30, 12)),
    "stride": in_place((1, 1, 2, 1), 3, 2, 1, 1, (20, 9)),
    "dilation and groups": in_place((1, 1, 1, 3), 3, 1, 2, 2, (4, 30), groups=2, channels=(4, 4)),
}


def transposed_in_place(grid, k, s, p, d, more, extents, split=None, groups=1, channels=(2, 2)):
    """The same, transposed."""
    space = len(grid) - 2
    geometry, convolve = Transposed.of("", space, k, s, p, d, more), getattr(functional, f"conv_transpose{space}d")
    return everywhere(
        lambda P_y: TransposedConvolution(P_y, Channels(*channels, groups), geometry),
        lambda x, w, b: convolve(x, w, b, s, p, more, groups, d), grid, (2, channels[0], *extents),
        [(channels[0], channels[1] // groups, *[k] * space), channels[1:]], split,
    )  # fmt: skip


IN_PLACE |= {
    "transposed, one dim": transposed_in_place((1, 1, 3), 4, 2, 1, 1, 0, (48,)),
    "transposed, uneven": transposed_in_place((2, 1, 3), 3, 2, 1, 1, 1, (80,)),
    "transposed, batch with an empty block": transposed_in_place((2, 1, 2), 4, 2, 1, 1, 0, (80,), (0, [0, 2])),
    "transposed, two dims": transposed_in_place((1, 1, 2, 2), 4, 2, 1, 1, 0, (16, 18)),
    "transposed, three dims, of which one is whole": transposed_in_place((1, 1, 2, 1, 2), 3, 1, 1, 1, 0, (10, 5, 14)),
    "transposed, nine workers": transposed_in_place((1, 1, 3, 3), 3, 2, 1, 1, 1, (21, 24)),
    "transposed, wide kernel": transposed_in_place((1, 1, 3, 1), 5, 1, 2, 1, 0, (30, 12)),
    "transposed, dilation and groups": transposed_in_place(
        (1, 1, 1, 3), 3, 1, 2, 2, 0, (4, 30), groups=2, channels=(4, 4)
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_convolution_of_blocks_where_they_lie_is_torchs(name):
    case = IN_PLACE[name]
    assert_computes(case)
    ways = together(case.size, lambda P: type(case.set_up(P, [torch.zeros(1).double()] * 3, True)[0].local))
    assert set(ways) == {InPlace}


def test_the_matrix_of_a_convolution_in_place_is_torchs():
    ours, theirs = matrices(IN_PLACE["one dim"])
    assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize(
    "case",
    [in_place((1, 1, 4), 3, 1, 1, 1, (12,)), in_place((1, 1, 2), 3, 1, 0, 1, (40,)),
     in_place((1, 1, 2), 3, 1, 1, 1, (40,), channels=(8, 8)), in_place((1, 1, 2), 2, 2, 0, 1, (40,))],
    ids=["thin blocks", "no padding", "many weights", "nothing around"],
)  # fmt: skip
def test_other_convolutions_take_windows(case):
    ways = together(case.size, lambda P: type(case.set_up(P, [torch.zeros(1).double()] * 3, True)[0].local))
    assert InPlace not in ways
    assert_computes(case)


@pytest.mark.parametrize("name", ["space", "channels, groups", "transposed, channels", "linear, features, uneven"])
def test_nothing_is_sent_for_weights_that_are_everywhere(name):
    """What moves in is a window of x: no other operator is called, and the gradients stay where they are computed."""
    case = EVERYWHERE[name]

    def main(P):
        wholes = [torch.zeros(layout.extents, dtype=torch.float64) for layout in case.places(P)]
        setup, layouts = case.set_up(P, wholes, True)
        (fetch,) = setup.move_in.operators
        assert fetch.inputs == (layouts[0].shapes[P.rank] if P.rank in layouts[0] else case.blank,)
        assert setup.move_out("y") == "y"

    together(case.size, main)


@pytest.mark.parametrize(("change", "words"), [
    ({"channels": Channels(6, 4)}, "needs an input with 6 channels in dim 1; the global shape of the input is 2x5x9"),
    ({"sliding": Sliding.of("Op", 1, 14, 1, 1, 1)}, "kernel spans 14 cells and the input has 9, with its padding 11"),
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
