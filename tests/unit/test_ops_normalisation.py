"""Normalisations as operations: what all workers compute together is torch's function."""

import pytest
import torch
from covering import in_pairs
from ops import Case, assert_computes, matrices, signature, site, together
from torch.nn import functional

from distdl.geometry.boxes import balanced, runs
from distdl.ops import rows
from distdl.ops.normalisation import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from distdl.partition import Layout

GRIDS = {"batch": (3, 1, 1), "channels": (1, 3, 1), "space": (1, 1, 3), "all": (2, 2, 2), "one": (1, 1, 1)}
EXTENTS = (4, 6, 5)


def batch_norm(x, w=None, b=None):
    return functional.batch_norm(x, None, None, w, b, True)


# the operation, torch's function, and the dims along which weight and bias vary
OPS = {
    "batch": (BatchNorm(6, running=False), batch_norm, [1], 2),
    "batch without weights": (BatchNorm(6, 0.5, running=False), lambda x: functional.batch_norm(
        x, None, None, training=True, eps=0.5), [1], 0),
    "instance": (InstanceNorm(6), lambda x, w, b: functional.instance_norm(x, weight=w, bias=b), [1], 2),
    "groups of two": (GroupNorm(3, 6), lambda x, w, b: functional.group_norm(x, 3, w, b), [1], 2),
    "groups of three": (GroupNorm(2, 6), lambda x, w, b: functional.group_norm(x, 2, w, b), [1], 2),
    "layer": (LayerNorm(((1, 6), (2, 5))), lambda x, w, b: functional.layer_norm(x, (6, 5), w, b), [1, 2], 2),
    "layer without a bias": (LayerNorm(((2, 5),)), lambda x, w: functional.layer_norm(x, (5,), w), [2], 1),
    "rms": (RMSNorm(((1, 6), (2, 5))), lambda x, w: functional.rms_norm(x, (6, 5), w), [1, 2], 1),
    "rms of the last dim": (RMSNorm(((2, 5),), 0.5), lambda x, w: functional.rms_norm(x, (5,), w, 0.5), [2], 1),
}  # fmt: skip
SPLITS = {
    "even": lambda extent, places: balanced(extent, places),
    "uneven": lambda extent, places: runs([0] * (places - 2) + [1, extent - 1] if places > 1 else [extent]),
    "first": lambda extent, places: runs([extent] + [0] * (places - 1)),
}

RUNNING = list(in_pairs([BatchNorm, InstanceNorm], list(GRIDS), list(SPLITS), [0.25, None]))


def work(grid):
    """With a worker in front that takes no part."""
    count = torch.tensor(grid).prod().item()
    return lambda P: P[1 : 1 + count].reshape(grid)


def places(grid, split, dims, weights):
    """x is split in some way over the grid, weights evenly over its workers of index 0 in the other axes."""

    def layouts(P):
        P_x = work(grid)(P)
        x = Layout.of(P_x, [SPLITS[split](extent, n) for extent, n in zip(EXTENTS, grid, strict=True)])
        stored = P_x[tuple(slice(None if dim in dims else 1) for dim in range(3))].reshape([grid[dim] for dim in dims])
        return [x, *[Layout.balanced(stored, [EXTENTS[dim] for dim in dims])] * weights]

    return layouts


@pytest.mark.parametrize(("name", "grid", "split"), list(in_pairs(list(OPS), list(GRIDS), list(SPLITS))))
def test_normalisations_are_torchs(name, grid, split):
    op, sequential, dims, weights = OPS[name]
    assert_computes(Case(9, op, work(GRIDS[grid]), places(GRIDS[grid], split, dims, weights), sequential))


@pytest.mark.parametrize("name", OPS)
def test_large_blocks_are_normalised_chunk_by_chunk(name, monkeypatch):
    monkeypatch.setattr(rows, "_CHUNK", 7)
    monkeypatch.setattr(rows, "_SMALL", 0)
    monkeypatch.setattr(rows, "_LONG", 1)
    op, sequential, dims, weights = OPS[name]
    assert_computes(Case(9, op, work((2, 2, 2)), places((2, 2, 2), "even", dims, weights), sequential))


@pytest.mark.parametrize(("name", "grid", "split"), list(in_pairs(list(OPS), list(GRIDS), ["uneven", "first"])))
def test_with_weights_everywhere_normalisations_are_torchs(name, grid, split):
    """Also where workers are idle: each has the whole of weight and bias, and nothing is sent for them."""
    op, sequential, dims, weights = OPS[name]

    def everywhere(P):
        x, *_ = places(GRIDS[grid], split, dims, 0)(P)
        return [x, *[Layout.everywhere(P, [EXTENTS[dim] for dim in dims])] * weights]

    case = Case(9, op, work(GRIDS[grid]), everywhere, sequential, others=lambda P: [P], dims=3)
    assert_computes(case)

    def operators(P):
        wholes = [torch.zeros(layout.extents, dtype=torch.float64) for layout in everywhere(P)]
        return [operator.still for operator in case.set_up(P, wholes, True)[0].move_in.operators]

    assert all(all(still) for still in together(9, operators))


@pytest.mark.parametrize(("kind", "grid", "split", "momentum"), RUNNING)
def test_running_statistics_everywhere(kind, grid, split, momentum):
    """All workers have those of all channels, to the same bits: with an empty block and outside the partition, too.

    Evaluated, a normalisation takes parts of them, and nothing moves.
    """
    grid = GRIDS[grid]
    x = torch.randn(EXTENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3
    cotangent = torch.randn(EXTENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mean, variance = torch.zeros(6).double(), torch.ones(6).double()
    theirs = x.clone().requires_grad_()
    if kind is BatchNorm:
        y = functional.batch_norm(theirs, mean, variance, training=True, momentum=momentum or 0.5)
    else:
        y = functional.instance_norm(theirs, mean, variance, momentum=momentum or 0.0)
    y.backward(cotangent)
    evaluated = functional.batch_norm(x, mean, variance)

    def main(P):
        (layout,) = places(grid, split, [1], 0)(P)
        inside = P.rank in layout.partition
        here, given = site(layout.partition, P), signature(layout, blank=(0, 0, 0))
        block = layout.block(x).clone() if inside else x.new_zeros(0, 0, 0)
        block.requires_grad_()
        kept = torch.zeros(6).double(), torch.ones(6).double(), torch.tensor(2)
        setup = kind(6, momentum=momentum, running=True, everywhere=True).setup(here, given)
        found = setup.move_out(setup.local(*setup.move_in(block, *kept)))
        found.backward(layout.block(cotangent) if inside else torch.zeros_like(found))
        setup = kind(6, running=True, training=False, everywhere=True).setup(here, given)
        assert all(operator.still for operator in setup.move_in.operators)
        constant = setup.move_out(setup.local(*setup.move_in(block.detach(), *kept)))
        if inside:
            assert torch.allclose(found, layout.block(y)) and torch.allclose(block.grad, layout.block(theirs.grad))
            assert torch.allclose(constant, layout.block(evaluated))
        else:
            assert found.numel() == constant.numel() == 0 and block.grad is not None
        return torch.stack(kept[:2])

    found = together(9, main)
    assert torch.allclose(found[0], torch.stack([mean, variance]))
    assert all(torch.equal(one, found[0]) for one in found)


class Followed:
    """A movement whose tensors are followed by others."""

    def __init__(self, moves, others):
        self.moves, self.others, self.operators = moves, others, moves.operators

    def __call__(self, *tensors):
        return self.moves(*tensors, *self.others)


@pytest.mark.parametrize("split", SPLITS)
def test_with_running_statistics_a_normalisation_is_affine(split):
    """Evaluated, it is a matrix; a worker keeps the statistics of its balanced block of channels."""
    mean, variance = torch.arange(6.0).double(), 1 + torch.arange(6.0).double()

    class Evaluated:
        """With the running statistics of each worker behind the weights."""

        def setup(self, here, *signatures):
            setup = BatchNorm(6, training=False).setup(here, *signatures)
            start, stop = balanced(6, 2)[here.partition.index_of(here.me)[1]]
            kept = mean[start:stop], variance[start:stop], torch.tensor(1)
            return type(setup)(Followed(setup.move_in, kept), setup.local, setup.move_out, setup.results)

    grid = (2, 2, 1)
    case = Case(5, Evaluated(), work(grid), places(grid, split, [1], 2), lambda x, w, b: functional.batch_norm(
        x, mean, variance, w, b))  # fmt: skip
    assert_computes(case)
    ours, theirs = matrices(case)
    assert torch.allclose(ours, theirs, rtol=1e-12)


@pytest.mark.parametrize(("kind", "grid", "split", "momentum"), RUNNING)
def test_running_statistics_take_note_of_a_batch(kind, grid, split, momentum):
    grid = GRIDS[grid]
    x = torch.randn(EXTENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 3
    mean, variance = torch.zeros(6).double(), torch.ones(6).double()
    if kind is BatchNorm:
        functional.batch_norm(x, mean, variance, training=True, momentum=momentum or 0.5)
    else:
        functional.instance_norm(x, mean, variance, momentum=momentum or 0.0)

    def main(P):
        (layout,) = places(grid, split, [1], 0)(P)
        if P.comm.rank not in layout.partition:
            return
        setup = kind(6, momentum=momentum, running=True).setup(site(layout.partition), signature(layout))
        start, stop = balanced(6, grid[1])[layout.partition.index_of(P.comm.rank)[1]]
        kept = torch.zeros(stop - start).double(), torch.ones(stop - start).double(), torch.tensor(2)
        setup.local(*setup.move_in(layout.block(x).clone(), *kept))
        assert torch.allclose(kept[0], mean[start:stop]) and torch.allclose(kept[1], variance[start:stop])

    together(9, main)


@pytest.mark.parametrize(("op", "extents", "text"), [
    (BatchNorm(3), (1, 3, 1), "needs more than 1 value per channel"),
    (InstanceNorm(3), (2, 3, 1), "needs more than 1 spatial element"),
    (GroupNorm(3, 3), (1, 3, 1), "1x3x1 in 3 groups"),
    (GroupNorm(2, 4), (1, 3, 1), "whose extents are 4 in dims 1; the global shape of the input is 1x3x1"),
    (LayerNorm(((1, 3), (2, 2))), (1, 3, 1), "whose extents are 3x2 in dims 1, 2"),
])  # fmt: skip
def test_the_same_error_on_every_worker(op, extents, text):
    def main(P):
        layout = Layout.balanced(P.reshape(1, 2, 1), extents)
        with pytest.raises(ValueError) as error:
            op.setup(site(layout.partition), signature(layout))
        return str(error.value)

    one, other = together(2, main)
    assert one == other and text in one


def test_dtypes_that_do_not_fit_are_refused(world):
    layout = Layout.balanced(world(1).reshape(1, 1), (3, 2))
    weight = Layout.balanced(world(1), (2,))
    with pytest.raises(ValueError, match=r"floating-point dtype; got torch\.int64"):
        LayerNorm(((1, 2),)).setup(site(layout.partition), signature(layout, torch.int64))
    with pytest.raises(ValueError, match=r"needs weight of the input's dtype, torch.float32.*got torch.float64"):
        LayerNorm(((1, 2),)).setup(site(layout.partition), signature(layout, torch.float32), signature(weight))
