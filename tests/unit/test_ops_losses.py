"""Losses and dropout as operations: what all workers compute together is torch's function, and so are its derivatives.

No world is there and nothing is agreed: the signatures are given.
"""

from functools import partial

import pytest
import torch
from ops import signature, site, together
from torch.nn import functional

from distdl.geometry.boxes import runs, slices
from distdl.ops.class_loss import CrossEntropy, NegativeLogLikelihood
from distdl.ops.dropout import Dropout
from distdl.ops.loss import ABSENT, ElementLoss
from distdl.partition import Layout, Partition, Signature
from distdl.tensors.derivatives import Derivatives
from distdl.tensors.repeats import CallCount
from distdl.testing import Silent

every = partial(pytest.param, marks=pytest.mark.every_case)
GRIDS = {  # the shape of P_x, and the extents of its blocks; one more worker is outside
    "alone": ((1, 1, 1), ([3], [4], [2])),
    "batch": ((3, 1, 1), ([2, 0, 1], [4], [2])),
    "classes": ((1, 3, 1), ([3], [1, 0, 3], [2])),
    "all": ((2, 2, 2), ([1, 2], [3, 1], [2, 0])),
}
SHAPE = (3, 4, 2)


def noise(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


X, T, W, POSITIVE = noise(*SHAPE), torch.sigmoid(noise(*SHAPE, seed=1)), noise(*SHAPE, seed=2).abs(), noise(4, 1).abs()
NUMBERS = torch.tensor([[0, 3], [1, -100], [3, 2]])
WEIGHT = noise(4, seed=3).abs()

ELEMENTS = {  # function, options, input, target, weight of elements, weight of positive targets
    "l1": ("l1_loss", {}, X, T, None, None),
    "mse": ("mse_loss", {}, X, T, None, None),
    "smooth": ("smooth_l1_loss", {"beta": 0.3}, X, T, None, None),
    "huber": ("huber_loss", {"delta": 0.4}, X, T, None, None),
    "poisson": ("poisson_nll_loss", {"log_input": True}, X, T, None, None),
    "bce": ("binary_cross_entropy", {}, torch.sigmoid(X), T, W, None),
    "logits": ("binary_cross_entropy_with_logits", {}, X, T, W, POSITIVE),
    "divergence": ("kl_div", {"log_target": False}, functional.log_softmax(X, 1), T, None, None),
}


FIRST = 1  # the first worker of P_x


def members(P, grid):
    """P_x: all workers but the first."""
    return P[FIRST:].reshape(*grid)


NOTHING = (0, 0, 0)  # what a worker has outside P_x


def part_of(layout, tensor):
    """This worker's block."""
    return layout.block(tensor) if layout.partition.active else tensor.new_zeros(NOTHING)


def derivatives_of(loss, tensors):
    """The gradients, and those of their squares."""
    first = torch.autograd.grad(3 * loss.sum(), tensors, create_graph=True, materialize_grads=True)
    squares = sum((one**2).sum() for one in first)
    return [first, torch.autograd.grad(squares, tensors, materialize_grads=True)]


def assert_together(found, expected, whole, blocks):
    """The losses of all workers add up to the sequential one; the derivatives are the blocks of the sequential ones.

    Args:
        found: of each worker, None or its loss and its derivatives.
        blocks: of each worker, where the blocks of the tensors are.
    """
    losses = [one[0].detach() for one in found if one is not None]
    assert torch.allclose(sum(losses), expected.detach(), rtol=1e-12)
    assert not any(one[0].any() for rank, one in enumerate(found) if one is not None and rank != FIRST)
    for order, sequential in enumerate(derivatives_of(expected, whole)):
        for one, at in zip(found, blocks, strict=True):
            for ours, theirs, where in zip(one[1][order], sequential, at, strict=True) if one else ():
                part = theirs[where] if where is not None else ours.new_zeros(ours.shape)
                assert ours.shape == part.shape and torch.allclose(ours, part, rtol=1e-10, atol=1e-12), order


@pytest.mark.parametrize(
    ("reduction", "idle"),
    [
        ("sum", False),
        ("mean", False),
        ("batchmean", False),
        ("mean", True),
        every("sum", True),
        every("batchmean", True),
    ],
)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_a_loss_of_elements(name, grid, reduction, idle):
    """An idle worker may take part, too, with tensors of zero volume."""
    function, options, x, target, weight, positive = ELEMENTS[name]
    shape, extents = GRIDS[grid]
    blocks, op = [runs(along) for along in extents], ElementLoss(function, reduction, tuple(options.items()))
    size = torch.tensor(shape).prod().item() + 1

    def main(P):
        P_x = members(P, shape)
        if not (P_x.active or idle):
            return None
        owned = Layout.of(P_x, blocks)
        tensors = [part_of(owned, one).clone().requires_grad_() for one in (x, target)]
        given = [signature(owned, blank=NOTHING), signature(owned, blank=NOTHING)]
        given.append(None if weight is None else signature(owned, gradient=False, blank=NOTHING))
        everywhere = Signature(owned, torch.float64, Derivatives(), (4, 1))
        given.append(None if positive is None else everywhere)
        setup = op.setup(site(P_x, *[P] * idle), *given)
        weights = (ABSENT if weight is None else part_of(owned, weight), ABSENT if positive is None else positive)
        loss = setup.move_out(setup.local(*setup.move_in(*tensors, *weights)))
        return loss, derivatives_of(loss, tensors)

    whole = [one.clone().requires_grad_() for one in (x, target)]
    more = {key: one for key, one in (("weight", weight), ("pos_weight", positive)) if one is not None}
    expected = getattr(functional, function)(*whole, reduction="sum", **options, **more)
    expected = expected / {"sum": 1, "mean": x.numel(), "batchmean": len(x)}[reduction]
    P = Partition(Silent(0, size))
    boxes = [[None, None], *[[slices(box)] * 2 for box in Layout.of(members(P, shape), blocks).values()]]
    assert_together(together(size, main), expected, whole, boxes)


CLASSES = {  # the operation, torch's function, whether there is a weight, the target
    "likelihood": (partial(NegativeLogLikelihood, -100), functional.nll_loss, True, NUMBERS),
    "entropy": (partial(CrossEntropy, -100), functional.cross_entropy, False, NUMBERS),
    "weighted": (partial(CrossEntropy, -100), functional.cross_entropy, True, NUMBERS),
    "smooth": (partial(CrossEntropy, -100, label_smoothing=0.3), functional.cross_entropy, True, NUMBERS),
    "probabilities": (partial(CrossEntropy, -100, probabilities=True), functional.cross_entropy, True, T.softmax(1)),
}


@pytest.mark.parametrize(("reduction", "idle"), [("sum", False), ("mean", False), ("mean", True), every("sum", True)])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", CLASSES)
def test_a_loss_of_classes(name, grid, reduction, idle):
    """An idle worker may take part, too, with tensors of zero volume."""
    make, sequential, weighted, target = CLASSES[name]
    shape, extents = GRIDS[grid]
    blocks, probabilities = [runs(along) for along in extents], target.dim() == 3
    size = torch.tensor(shape).prod().item() + 1

    def main(P):
        P_x = members(P, shape)
        if not (P_x.active or idle):
            return None
        owned, places = Layout.of(P_x, blocks), P_x[:, :1]
        targets = Layout.of(places, [blocks[0], [(0, 4 if probabilities else 1)], blocks[2]])
        x, t = part_of(owned, X).clone().requires_grad_(), torch.zeros(0, dtype=target.dtype)
        if not P_x.active:
            t = target.new_zeros((0,) * target.dim())
        if places.active:
            at = slices(targets[P.rank])
            t = target[at] if probabilities else target[at[0], at[2]]
        t = t.clone().requires_grad_(probabilities)
        given = [
            signature(owned, blank=NOTHING),
            Signature(targets, t.dtype, Derivatives(probabilities), tuple(t.shape)),
        ]
        given.append(Signature(owned, torch.float64, Derivatives(), (4,)) if weighted else None)
        setup = make(reduction=reduction).setup(site(P_x, *[P] * idle), *given)
        loss = setup.move_out(setup.local(*setup.move_in(x, t, WEIGHT if weighted else ABSENT)))
        assert setup.classes == 4
        return loss, derivatives_of(loss, [x, t] if probabilities else [x])

    whole = [X.clone().requires_grad_()] + ([target.clone().requires_grad_()] if probabilities else [])
    weight = WEIGHT if weighted else None
    options = make(reduction=reduction)
    smoothing = {"label_smoothing": options.label_smoothing} if sequential is functional.cross_entropy else {}
    asked = whole[1] if probabilities else target
    expected = sequential(whole[0], asked, weight, reduction=reduction, **smoothing)
    found, where = Layout.of(members(Partition(Silent(0, size)), shape), blocks), [[None] * len(whole)]
    for worker in found:
        box = slices(found[worker])
        reads = found.partition.index_of(worker)[1] == 0
        where.append([box, (box[0], slice(None), box[2]) if reads else None][: len(whole)])
    assert_together(together(size, main), expected, whole, where)


@pytest.mark.parametrize("leading", [None, 2])
def test_dropout_is_one_diagonal_on_any_partition(leading):
    """The matrix that all workers have together: of zeros and 1 / (1 - p), the same however the tensor is split."""
    op = Dropout(0.4, leading, key=(5, 1, 2))
    found = []
    for shape, extents in GRIDS.values():
        blocks = [runs(along) for along in extents]

        def main(P, shape=shape, blocks=blocks):
            P_x = members(P, shape)
            if not P_x.active:
                return None
            owned = Layout.of(P_x, blocks)
            x, calls = torch.ones(owned.block(X).shape, dtype=torch.float64, requires_grad=True), CallCount()
            setup = op.setup(site(P_x), signature(owned))
            y = setup.move_out(setup.local(*setup.move_in(x), calls))
            y.sum().backward()
            assert torch.equal(x.grad, y) and setup.results == (owned,) and calls.number == 1
            return slices(owned[P.rank]), y.detach()

        diagonal = torch.full(SHAPE, torch.nan, dtype=torch.float64)
        for at, block in filter(None, together(torch.tensor(shape).prod().item() + 1, main)):
            diagonal[at] = block
        found.append(diagonal)
    assert set(found[0].unique().tolist()) == {0.0, 1 / 0.6}
    assert all(torch.equal(one, found[0]) for one in found)


REFUSED = [
    (ElementLoss("l1_loss", "mean"), torch.int64, "needs floating-point numbers for the reduction mean"),
    (ElementLoss("mse_loss", "sum"), torch.complex64, "has no loss of an input of torch.complex64"),
    (Dropout(0.5), torch.int64, "needs a tensor of floating-point or complex numbers; got torch.int64"),
    (NegativeLogLikelihood(-100, "sum"), torch.int64, "needs an input of real floating-point numbers"),
    (CrossEntropy(3, "sum", probabilities=True), torch.float32, "ignores no places by class"),
]


@pytest.mark.parametrize(("op", "dtype", "words"), REFUSED)
def test_what_torch_does_not_take_is_refused_when_it_is_set_up(op, dtype, words):
    P_x = Partition(Silent(0, 2)).reshape(2, 1)
    owned, places = Layout.balanced(P_x, (2, 3)), Layout.of(P_x, [runs([1, 1]), [(0, 1)]])
    x, numbers = signature(owned, dtype), Signature(places, torch.int64, Derivatives(), (1,))
    given = {Dropout: (x,), ElementLoss: (x, x)}.get(type(op), (x, numbers))
    with pytest.raises(ValueError, match=words):
        op.setup(site(P_x, name="Loss"), *given)


@pytest.mark.parametrize("op", [one for one, _, _ in REFUSED])
def test_operations_are_values(op):
    assert op == eval(repr(op)) and hash(op) == hash(eval(repr(op)))
