"""Operators: plans that can be called. Most of these move data on one worker, so that no world is needed."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.exchange import Chain, Operator, Together
from distdl.plan import Move, Plan
from distdl.plan.planners import broadcast
from distdl.tensors.derivatives import NONE, Derivatives
from distdl.testing import Counting, Silent
from distdl.transport import Label

GRADIENT = Derivatives(gradient=True)
LABEL = Label("Shuffle (P_x: 1 on worker 0)")
LABEL.path = "encoder.1"


def alone():
    return Silent(rank=0, size=1)


def shuffle():
    """Six cells to five: two blocks change places, two cells add up, and one stays 0."""
    moves = [((0, 2), (3, 5)), ((2, 4), (0, 2)), ((5, 6), (0, 1))]
    return Plan({0: (6,)}, {0: (5,)}, tuple(Move(0, (src,), 0, (dst,)) for src, dst in moves))


def operator(inputs=((6,),), outputs=((5,),), derivatives=GRADIENT, dtype=torch.float64):
    return Operator(shuffle(), alone(), (0,), LABEL, dtype, derivatives, inputs, outputs)


def identity(*shapes, derivatives=GRADIENT, dtype=torch.float64):
    return Operator.identity(alone(), (0,), LABEL, dtype, derivatives, shapes)


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


# how six cells are taken and five are given: one tensor, the same in another shape, several with an empty one
STRUCTURES = {
    "one tensor": ([(6,)], [(5,)]),
    "a matrix": ([(2, 3)], [(5, 1)]),
    "several": ([(2, 2), (0, 3), (1, 2)], [(3,), (1, 2), (2, 0)]),
    "several become one": ([(1,), (5,)], [(5,)]),
    "one becomes several": ([(6,)], [(2, 2), (1,)]),
    "numbers": ([()] * 6, [()] * 5),
    "numbers and more": ([(), (5,)], [(4,), ()]),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_operator_applies_the_matrix_of_its_plan_and_its_adjoint_the_transpose(structure):
    inputs, outputs = STRUCTURES[structure]
    op, matrix = operator(inputs, outputs), torch.from_numpy(shuffle().matrix()).double()
    xs = [numbers(*shape, seed=1).requires_grad_() for shape in inputs]
    dys = [numbers(*shape, seed=2) for shape in outputs]
    ys = op(*xs)
    ys = ys if isinstance(ys, tuple) else (ys,)
    assert [tuple(y.shape) for y in ys] == outputs
    assert torch.equal(flat(ys), matrix @ flat(xs))
    back = op.T(*dys)
    back = back if isinstance(back, tuple) else (back,)
    assert [tuple(x.shape) for x in back] == inputs
    assert torch.equal(flat(back), matrix.T @ flat(dys))
    torch.autograd.backward(ys, dys)
    assert all(torch.equal(x.grad, expected) for x, expected in zip(xs, back, strict=True))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_derivatives_of_any_order_and_forward(structure):
    inputs, outputs = STRUCTURES[structure]
    xs = [numbers(*shape).requires_grad_() for shape in inputs]
    assert gradcheck(operator(inputs, outputs), xs) and gradgradcheck(operator(inputs, outputs), xs)
    op = operator(inputs, outputs, Derivatives(tangent=True))
    tangents = [numbers(*shape, seed=3) for shape in inputs]
    with dual_level():
        ys = op(*(make_dual(x.detach(), dx) for x, dx in zip(xs, tangents, strict=True)))
        found = [unpack_dual(y).tangent for y in (ys if isinstance(ys, tuple) else (ys,))]
    assert torch.equal(flat(found), torch.from_numpy(shuffle().matrix()).double() @ flat(tangents))


def test_an_input_is_neither_written_nor_returned():
    x = numbers(6)
    before = x.clone()
    y = operator(derivatives=NONE)(x)
    y.fill_(9)
    assert torch.equal(x, before)


@pytest.mark.parametrize("x", [
    numbers(6).float(), numbers(6).long(), numbers(5), numbers(7), numbers(6, 1), numbers(0), numbers(0).float(),
])  # fmt: skip
def test_what_is_not_what_the_plan_reads(x):
    """Back-ends read the memory of x as if it were."""
    op = operator()
    op(numbers(6))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"of the shape \[6\], torch\.float64, from worker 0, which has one of"):
            op(x)
    assert op.calls.number == 1


def test_what_the_plan_does_not_read():
    """Of a worker that has no part, or whose part is empty, a tensor of any dtype and shape is taken."""
    nowhere = Operator(Plan({}, {0: (2,)}), alone(), (0,), LABEL, torch.float64, GRADIENT, [(3,)], [(2,)])
    empty = Operator(Plan({0: (0,)}, {0: (2,)}), alone(), (0,), LABEL, torch.float64, GRADIENT, [(0,)], [(2,)])
    for op, xs in ((nowhere, (numbers(3).float(), numbers(3, 0).long())), (empty, (numbers(3, 0).long(),))):
        for x in xs:
            assert torch.equal(op(x), torch.zeros(2, dtype=torch.float64))


def test_the_adjoint_of_the_adjoint_is_the_operator():
    for op in (operator(), operator(*STRUCTURES["several"]), identity((2, 3))):
        assert op.T.T is op and op.T is op.T
        assert (op.T.inputs, op.T.outputs) == (op.outputs, op.inputs)
        assert (op.T.plan.matrix() == op.plan.matrix().T).all()
        assert (op.T.still, op.T.dtype, op.T.derivatives, op.T.label) == (op.still, op.dtype, op.derivatives, op.label)


def test_deriving_is_the_same_operator_for_other_derivatives():
    op = operator()
    assert op.deriving(GRADIENT) is op
    other = op.deriving(NONE)
    assert other is op.deriving(NONE) and other.deriving(GRADIENT) is op
    assert (op.recorded, other.recorded) == (True, False)
    x = numbers(6).requires_grad_()
    assert op(x).requires_grad and not other(x).requires_grad
    assert torch.equal(op(x), other(x)) and other.plan is op.plan


def test_what_carries_no_gradient_is_not_recorded():
    op = operator(dtype=torch.int64)
    assert not op.recorded and not op(torch.arange(6)).requires_grad


def test_all_members_record_what_one_of_them_differentiates():
    """Also a member whose own tensor requires no gradient."""
    y = operator()(numbers(6))
    assert y.requires_grad
    y.sum().backward()


def test_its_text_is_the_label_and_the_plan():
    assert repr(operator()) == (
        "encoder.1: Shuffle (P_x: 1 on worker 0): moves of {0: [6]} to {0: [5]}\n"
        "  0[0:2] -> 0[3:5]\n  0[2:4] -> 0[0:2]\n  0[5:6] -> 0[0:1]"
    )


# -- the identity, which moves nothing


def saved_by(op, *xs):
    """What an operator returns and what it saves for backward, as inside a checkpoint."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor.shape), lambda _: None):
        return op(*xs), saved


def test_an_identity_returns_its_tensors():
    x, w = numbers(2, 3).T, numbers(4)
    assert identity((3, 2))(x) is x
    found = identity((3, 2), (4,))(x, w)
    assert found[0] is x and found[1] is w
    assert (identity((3, 2)).plan.matrix() == torch.eye(6).numpy()).all()


@pytest.mark.parametrize("requires_grad", [True, False])
def test_an_identity_inside_a_checkpoint_saves_a_tensor_without_volume(requires_grad):
    x = numbers(2, 3).T.requires_grad_(requires_grad)
    y, saved = saved_by(identity((3, 2)), x)
    assert saved == [(0,)] and y.requires_grad
    assert torch.equal(y, x) and y.stride() == x.stride() and y is not x
    (first, second), saved = saved_by(identity((3, 2), (2,)), x, numbers(2))
    assert saved == [(0,)] and first.requires_grad and not second.requires_grad


@pytest.mark.parametrize("op", [identity((2,), derivatives=NONE), identity((2,), dtype=torch.int64)])
def test_an_identity_of_what_is_not_differentiated_saves_nothing(op):
    x = torch.ones(2, dtype=op.dtype)
    y, saved = saved_by(op, x)
    assert y is x and saved == []


def test_a_checkpoint_recomputes_through_an_identity():
    """Nothing else saves a tensor behind it, so the checkpoint would stop before it."""
    calls = []

    def block(x):
        calls.append("block")
        y = identity((3,))(2 * x)
        calls.append("behind")
        return 3 * y

    x = numbers(3).requires_grad_()
    checkpoint(block, x, use_reentrant=False).sum().backward()
    assert calls[:3] == ["block", "behind", "block"] and torch.equal(x.grad, torch.full((3,), 6.0).double())


# -- several operators


def test_together_gives_each_operator_its_tensors_and_passes_the_rest():
    several = operator(*STRUCTURES["several"])
    x, w, rest = numbers(3), [numbers(*shape, seed=4) for shape in several.inputs], numbers(1)
    found = Together(identity((3,)), several, operator())(x, *w, numbers(6), rest)
    assert found[0] is x and found[-1] is rest
    assert torch.equal(flat(found[1:4]), flat(several(*w))) and torch.equal(found[4], operator()(numbers(6)))
    assert Together()(x, rest) == (x, rest)
    back = Together(operator().T)
    (found,) = Chain(Together(operator()), back)(numbers(6))
    assert torch.equal(found, operator().T(operator()(numbers(6))))
    assert Chain(Together(identity((3,))), back).operators[1] is back.operators[0]


def test_operators_that_move_together_are_one_node_and_only_the_recorded_carry_gradients():
    x, w = numbers(6).requires_grad_(), numbers(6, seed=5).requires_grad_()
    y, z, n = Together(operator(), operator(derivatives=NONE), operator())(x, numbers(6), w)
    assert y.grad_fn is n.grad_fn and not z.requires_grad
    (y.sum() + 2 * n.sum()).backward()
    ones = operator().T(torch.ones(5).double())
    assert torch.equal(x.grad, ones) and torch.equal(w.grad, 2 * ones)


def test_two_tensors_of_a_broadcast_are_one_message_each_way():
    """From worker 2 to 0 and 1; a fourth worker is a member without any part."""

    def main():
        P = distdl.world()
        counted = distdl.Partition(Counting(P.comm))
        source, target = counted[2:3].reshape(1), counted[:2].reshape(2)
        plan = broadcast(source, target, {2: (5,)}, P.rank)
        shapes, blanks = [(1, 2), (3,)], [(0,), (0,)]
        inputs, outputs = shapes if P.rank == 2 else blanks, shapes if P.rank < 2 else blanks
        op = Operator(plan, counted.comm, (0, 1, 2, 3), Label("Pair"), torch.float64, GRADIENT, inputs, outputs)
        xs = [numbers(*shape, seed=6).requires_grad_() for shape in inputs]
        ys = op(*xs)
        assert [tuple(y.shape) for y in ys] == outputs and all(y.requires_grad for y in ys)
        if P.rank < 2:
            assert torch.equal(ys[0], numbers(1, 2, seed=6)) and torch.equal(ys[1], numbers(3, seed=6))
        torch.autograd.backward(ys, [torch.full_like(y, P.rank + 1.0) for y in ys])
        for x in xs:
            assert torch.equal(x.grad, torch.full_like(x, 3.0))
        return [name for name, _ in counted.comm.log]

    calls = distdl.run_workers(main)
    assert calls == [["broadcast", "sum"]] * 3 + [[]]
