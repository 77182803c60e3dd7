"""Functions of each element by itself, over operands that lie anywhere."""

from math import inf

import pytest
import torch
from launched import assert_close, assert_told_apart, on_workers, split
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F

import distdl

x4, y4 = noise(3, 5, 7, 2), noise(3, 5, 7, 2, seed=1)
row = noise(5, 1, 1, seed=2)
UNARY = [
    torch.exp, torch.tanh, torch.relu, F.relu, F.gelu, F.silu, F.elu, F.leaky_relu, F.hardswish, F.softplus, F.hardtanh,
    torch.neg, torch.sin, lambda x: x**2, lambda x: 2 / (x + 9), lambda x: x.clamp(-0.5, 0.5),
    lambda x: x.to(torch.float32),
    lambda x: (x > 0).to(x.dtype) * x, lambda x: F.relu(x, inplace=True) + 1, lambda x: x.mul_(2).add_(1),
    torch.Tensor.clone,
    lambda x: torch.where(x > 0, x, 0.1 * x), lambda x: x.masked_fill(x > 0, 1.5), torch.zeros_like,
    lambda x: -x + 1 - x,
]  # fmt: skip


@pytest.mark.parametrize("function", UNARY)
def test_one_operand(function):
    assert_same(function, Global(x4))


SPECIAL = """bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1 modified_bessel_k0
modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1 spherical_bessel_j0 airy_ai"""
PAIRS = """gammainc gammaincc chebyshev_polynomial_t chebyshev_polynomial_u hermite_polynomial_h hermite_polynomial_he
laguerre_polynomial_l legendre_polynomial_p"""


def test_special_functions_without_derivatives():
    def function(x):
        z = x.detach().abs() + 0.1
        return (
            *(getattr(torch.special, name)(z) for name in SPECIAL.split()),
            *(getattr(torch.special, name)(z, z[:1].ceil()) for name in PAIRS.split()),
            torch.igamma(z, z),
            z.igammac(z),
        )

    assert_same(function, Global(x4), tolerance=1e-11)


BINARY = [torch.div, torch.add, torch.mul, lambda x, y: x.sub_(y), lambda x, y: x > y]
OTHERS = [
    Global(row), y4, Global(y4), Global(y4, (1, 1, 3, 1)), Global(row, (1, 1, 1)),
    Global(noise(1, 5, 1, 2), (1, 3, 1, 1)),
    Global(torch.tensor(2.5, dtype=torch.float64)), row, torch.tensor(2.0), Global(noise(5, 7, 2, seed=3)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "other"),
    [  # each function with two operands, and each operand with the quotient, which tells its two operands apart
        pytest.param(function, other, marks=[] if first == 0 or second < 2 else pytest.mark.every_case)
        for first, function in enumerate(BINARY)
        for second, other in enumerate(OTHERS)
    ],
)
def test_two_operands(function, other):
    assert_same(function, Global(x4), other)


def test_the_result_may_be_larger_than_each_operand():
    assert_same(torch.mul, Global(noise(5, 1)), Global(noise(1, 7)))
    assert_same(torch.add, Global(noise(5, 1)), noise(7))
    assert_same(torch.add, Global(noise(1, 1)), noise(3, 4, 7))


def test_dtypes_are_promoted_as_with_whole_tensors():
    half = noise(3, 5).float()
    assert_same(torch.add, Global(half), Global(torch.tensor(2.0, dtype=torch.float64)), tolerance=1e-6)
    assert_same(torch.add, Global(half), Global(noise(3, 5)))
    assert_same(torch.add, Global(torch.arange(15).reshape(3, 5)), 1.5)


def test_more_operands():
    assert_same(lambda a, b, c: torch.addcmul(a, b, c, value=0.5), Global(x4), Global(row), y4)
    assert_same(lambda a, b: torch.lerp(a, b, 0.3), Global(x4), Global(y4, (1, 1, 3, 1)))
    assert_same(lambda a, b: torch.where(a > b, a, b), Global(x4), Global(row))


def test_tensors_that_stand_for_numbers():
    """Also beside a tensor without dims, of which other workers hold nothing: as optimisers do with lr=tensor."""
    half = torch.tensor(0.5, dtype=torch.float64)
    for x in (Global(x4), Global(torch.tensor(3.0, dtype=torch.float64))):
        assert_same(lambda x: torch.add(x, x, alpha=half), x)
        assert_same(lambda x: x.sub_(x * 0.5, alpha=half), x)
        assert_same(lambda x: torch.addcdiv(x, x, x + 9, value=half), x)
        assert_same(lambda x: torch.full_like(x, half) + torch.nn.functional.elu(-x.abs(), alpha=half), x)
        assert_same(lambda x: torch._foreach_mul([x, x * 2], half), x)
        assert_same(lambda x: x.clone().addcmul_(x, x, value=(x.detach() * 0).sum() + 2), x)


def test_lists():
    """Of tensors: what is done to each by itself, and not element by element, too."""
    a, b = Global(noise(3, 5)), Global(noise(5, 4, seed=2))
    assert_same(lambda a, b: torch._foreach_mm([a, b], [b, b.mT]), a, b, falls_back=True)
    assert_same(lambda a, b: [*torch._foreach_norm([a, b], 1), *torch._foreach_max([a, b])], a, b)
    assert_same(lambda a: torch._foreach_norm([a.float()], 2, torch.float64), a, tolerance=1e-6)
    assert_same(lambda a, b: torch._foreach_powsum([a.detach(), b.detach()], 3), a, b, falls_back=True)
    given = [torch.zeros(2)]

    def written(a):
        both = [a.clone(), a * 2]
        found = torch._foreach_add_(both, 1)
        return found if (found is both) == (torch._foreach_add_(given, 1) is given) else []

    assert_same(written, a)
    assert_same(lambda a, b: torch._foreach_add(self=[a, b], other=[a * 2, b], alpha=3), a, b)
    assert_same(lambda a: torch._foreach_pow(2.0, exponent=[a, a]), a)
    scalars = torch.tensor([1.0, 5.0])  # (torch's have no derivative)
    for function in (torch._foreach_addcmul, torch._foreach_addcdiv):
        for named in (lambda one: ((one,), {}), lambda one: ((), {"scalars": one})):

            def product(a, function=function, named=named):
                a = a.detach()
                rest, options = named(scalars)
                return function([a, a], [a * 2, a], [a + 8, a + 9], *rest, **options)

            assert_same(product, a, grids=[(1, 2)])
    assert_raises_the_same(lambda a: torch._foreach_add([a], [a, a]), noise(4, 4))
    assert_raises_the_same(lambda a: torch._foreach_norm([a], True), noise(4, 4), text=True)
    apart = torch.ones(4)[::2]
    assert_raises_the_same(lambda a: torch._foreach_addcmul([a, a], [a, a], [a, a], apart), noise(4, 4), text=True)
    if hasattr(torch, "foreach"):  # (since 2.15)
        assert_same(lambda a, b: torch.foreach.add([a, b], [a * 2, b], alpha=3), a, b)
        assert_same(lambda a, b: torch.foreach.mul_([a * 1, b * 1], 2.0), a, b)
        assert_same(lambda a, b: torch.foreach.norm([a, b]), a, b)


def test_empty_blocks():
    assert_same(torch.mul, Global(noise(2, 3)), Global(noise(1, 3)), grids=[(4, 1), (1, 4), (2, 2)])


def test_second_derivatives():
    assert_same(lambda a, b: (a * b).sigmoid(), Global(noise(3, 5)), noise(5), twice=True)


def test_dtypes_of_other_tensors_by_name():
    assert_same(lambda x, w: x * w.float().type_as(other=x) + w.float().to(x), Global(noise(3, 4)), noise(4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.quantile(input=x, q=0.3, dim=0), lambda x: torch.nanmedian(input=x, dim=1)[0],
        lambda x: torch.median(input=x, dim=1)[0], lambda x: torch.linalg.norm(input=x), lambda x: torch.numel(input=x),
        lambda x: torch.rand_like(input=x) * 0 + x, lambda x: torch.linalg.vector_norm(input=x, dim=0),
        lambda x: torch.where(condition=x > 0, input=x, other=-x), lambda x: torch.polygamma(n=1, input=x.exp()),
    ],
)  # fmt: skip
def test_the_first_argument_by_name(function):
    assert_same(function, Global(noise(3, 4)))


def test_real_and_imaginary_parts_are_set():
    def function(x, y):
        x = x.clone()
        x.imag *= -1
        x.real[:, 1:] += y[:, 1:]
        other = x * 2
        other.imag = y
        other.real = 3.0
        return x, other

    real, imaginary = noise(5, 7), noise(5, 7, seed=1)
    assert_same(function, Global(torch.complex(real, imaginary)), Global(noise(5, 7, seed=2)))
    assert_same(function, Global(torch.complex(real, imaginary)), noise(5, 7, seed=2))


def test_the_bytes_of_a_tensor_are_those_of_all_cells():
    assert_same(lambda x: (x.nbytes, x.float().nbytes, x[:0].nbytes), Global(noise(5, 7)))


def test_attributes_of_the_whole():
    """They are known without a message."""

    def known(x):
        y = x * 1
        same = torch.is_same_size(x, y) and x.is_same_size(y) and not x.is_same_size(y[0])
        base = y._base is None and y[1:]._base is y and y[1:][0]._base is y
        return (
            x.storage_offset(), x.dim_order(), x.dense_dim(), x.sparse_dim(), x.name, same, base,
            torch.get_device(x), torch.is_distributed(x), x.grad_dtype if x.is_leaf else x.dtype,
        )  # fmt: skip

    assert_same(known, Global(noise(5, 7)))
    assert_same(known, Global(noise(5)))


def test_copies_by_constructors():
    assert_same(lambda x: torch.asarray(x.detach(), copy=True), Global(noise(5, 7)))
    assert_same(lambda x: torch.asarray(x.detach(), dtype=torch.float32), Global(noise(5, 7)))
    assert_same(lambda x: torch.DoubleTensor(x.detach()), Global(noise(5, 7)))


def test_assert_close():
    """It compares whole tensors, on every worker."""

    def work():
        close, P = torch.testing.assert_close, distdl.world()[:2].reshape(1, 2)
        x = noise(5, 7)
        ours, other = distdl.distribute_tensor(x, P), distdl.distribute_tensor(x, P.reshape(2, 1))
        for left, right in ((ours, x), (x, ours), (ours, other), ([ours, {"a": x}], [x, {"a": ours}])):
            close(left, right)
        wrong = x.clone()
        wrong[4, 6] += 1
        for left, right, text in (
            (ours, wrong, "not close"), (wrong, ours, "not close"), (ours, x.float(), "dtype"), (ours, x[0], "shape"),
        ):  # fmt: skip
            with pytest.raises(AssertionError, match=text):
                close(left, right)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, inf, -inf])
def test_norms_of_a_list_that_is_not_differentiated(order):
    """Also of blocks without cells, of numbers, and of several kinds."""
    a, row, number = Global(noise(3, 5)), Global(noise(1, 2, seed=1)), Global(noise())

    def listed(a, row, number):
        return [one.detach() for one in (a, row, number, a[:0] if order not in (inf, -inf) else a, a.mT)]

    assert_same(lambda *given: torch._foreach_norm(listed(*given), order), a, row, number)
    assert_same(lambda *given: torch._foreach_norm(listed(*given)[:3], order), a, row, number)
    if order:  # (of one complex number, torch warns)
        assert_same(lambda a: torch._foreach_norm([a.detach() * 1j, (a * 1j).mT.detach()], order), a)
    assert_same(lambda a: torch._foreach_norm([a.detach(), a.float().detach()], order), a, tolerance=1e-6)
    wide = {"tolerance": 1e-3 if order in (inf, -inf) else 2e-2}
    assert_same(lambda a: torch._foreach_norm([a.detach().bfloat16(), a.mT.detach().bfloat16()], order), a, **wide)
    assert_same(lambda a: torch._foreach_norm([torch.full_like(a, torch.nan).detach(), a.detach()], order), a)
    assert_raises_the_same(lambda a: torch._foreach_norm([a.int(), a.int()], order), noise(4, 4), text=True)


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping_takes_two_messages(foreach):
    """One for all norms, and one for the factor of all gradients; of lists, which torch takes where it can."""
    whole = [noise(3), noise(), noise(7), noise(1)]

    def clipped(given):
        leaves = [one.requires_grad_() for one in given]
        sum(one.square().sum() for one in leaves).backward()
        with distdl.ledger() as book:
            norm = torch.nn.utils.clip_grad_norm_(leaves, 0.5, foreach=foreach)
        return sum(one.calls for one in book.entries), [norm, *(one.grad for one in leaves)]

    def work():
        _, expected = clipped([one.clone() for one in whole])
        given = [distdl.distribute_tensor(one.reshape(-1), distdl.world()) for one in whole]
        calls, found = clipped([one.sum() if not two.dim() else one for one, two in zip(given, whole, strict=True)])
        assert calls > 2 if foreach is False else calls == 2
        for one, other in zip(found, expected, strict=True):
            assert_close(one, other)

    distdl.run_workers(work, 3)


def test_clipping_of_global_and_plain_parameters_together():
    def function(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        (x.square() * w).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([x, w], 0.5, foreach=True)
        return norm, x.grad, w.grad

    assert_same(function, Global(noise(5, 7)), noise(7))
    assert_same(function, Global(noise(5, 7)), Global(noise(7)))


_DIVIDING = {
    "of two": lambda x, y: x // y,
    "remainder": lambda x, y: x % y,
    "rounded": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "in place": lambda x, y: x.remainder_(y),
    "by a number": lambda x, y: x // 0,
    "of a row": lambda x, y: x // y[:1],
}


@pytest.mark.parametrize("divide", _DIVIDING.values(), ids=_DIVIDING)
def test_an_integer_that_is_divided_by_zero(divide):
    """Torch sees it in the block that has the zero, and nowhere else."""

    def work():
        P = distdl.world().create_partition_inclusive([0, 1]).reshape(2, 1)
        x, y = (distdl.distribute_tensor(torch.ones(4, 2, dtype=torch.int64), P) for _ in range(2))
        y[0, 0] = 0
        divide(x, y)
        y.sum().item()

    assert_told_apart(work, 3, "that has failed (RuntimeError: ZeroDivisionError)")


def test_integers_that_are_divided_by_zero_on_every_worker():
    def work():
        x = distdl.distribute_tensor(torch.ones(4, 2, dtype=torch.int64), distdl.world().reshape(2, 1))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            x // 0
        assert x.sum().item() == 8

    distdl.run_workers(work, 2)


x35 = noise(3, 5)


NUMBERS_WRITTEN = {
    "fill_": lambda x, plain: x.fill_(plain), "fill_ itself": lambda x, plain: x.fill_(x),
    "masked_fill_": lambda x, plain: x.masked_fill_(torch.tensor(True), plain),
    "detach_": lambda x, plain: x.detach_(), "detach_ of a sum": lambda x, plain: (x * 1).sum().detach_(),
}  # fmt: skip


@pytest.mark.parametrize("write", NUMBERS_WRITTEN.values(), ids=NUMBERS_WRITTEN)
@on_workers
def test_tensors_without_dims_are_written_on_every_worker(write):
    """One worker has such a tensor; on the others its block has a dim."""
    for x in (split(x35).sum(), distdl.distribute_tensor(torch.tensor(2.0), distdl.world()[1:2], axes=())):
        plain = x.full_tensor()
        ours, theirs = (write(one, torch.tensor(3)) for one in (x, plain))
        assert_close(ours, theirs)


@on_workers
def test_numbers_are_compared_with_what_requires_a_gradient():
    found = []
    for place in (split, torch.clone):
        numbers = place(x35.long())
        numbers.lt_(place(x35).requires_grad_())
        found.append(numbers)
    assert_close(*found)
