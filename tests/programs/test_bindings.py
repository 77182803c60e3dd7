"""The functions of torch by which a line calls operators: each calls its operator, with the same arguments."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.programs.bindings import BINDINGS, binding_of
from distdl.programs.matching import same_bits
from distdl.programs.worker import below_autograd

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
MATRIX, ROW, CUBE = (2, 3), (3,), (1, 2, 3)
# of each operator, what it is called with: a tuple stands for a tensor of that shape
GIVEN = {
    "add.Tensor": [(MATRIX, ROW), (MATRIX, 2), (ROW, MATRIX, {"alpha": 2})],
    "add_.Tensor": [(MATRIX, ROW), (ROW, 1), (ROW, ROW, {"alpha": 3}), ((), 1)],
    "addcmul.default": [(ROW, ROW, ROW), (ROW, ROW, ROW, {"value": 2})],
    "as_strided.default": [(MATRIX, [3, 2], [1, 3], 0), (MATRIX, [2], [1], 4), (MATRIX, [2, 2], [0, 1])],
    "cat.default": [([MATRIX, MATRIX],), ([MATRIX, MATRIX], 1), ([ROW, (0,)],)],
    "clone.default": [(MATRIX,), (CUBE, {"memory_format": torch.contiguous_format})],
    "convolution.default": [
        ((1, 2, 5), (3, 2, 2), (3,), [1], [0], [1], False, [0], 1),
        ((1, 2, 4, 4), (2, 3, 2, 2), None, [2, 2], [0, 1], [1, 1], True, [0, 0], 1),
    ],
    "copy_.default": [(MATRIX, ROW), (MATRIX, MATRIX, True)],
    "div.Tensor": [(MATRIX, ROW), (ROW, 3), (ROW, 0.3)],
    "div_.Tensor": [(MATRIX, ROW), (ROW, -2048)],
    "empty_strided.default": [([2, 3], [1, 2], {"dtype": torch.int64, "device": torch.device("cpu")})],
    "mm.default": [(MATRIX, (3, 2))],
    "mul.Tensor": [(MATRIX, ROW), (ROW, 2.5)],
    "mul_.Tensor": [(MATRIX, ROW), (ROW, 2), (ROW, 0.9)],
    "new_empty.default": [(ROW, [0]), (ROW, [2, 0], {"dtype": torch.float64, "pin_memory": False})],
    "permute.default": [(CUBE, [2, 0, 1])],
    "relu.default": [(MATRIX,)],
    "relu_.default": [(MATRIX,)],
    "rsqrt_.default": [(MATRIX,)],
    "scatter_add_.default": [(MATRIX, 1, torch.tensor([[0, 2], [1, 1]]), MATRIX)],
    "select.int": [(CUBE, 1, 0), (CUBE, -1, -2)],
    "squeeze_.dim": [(CUBE, 0), (MATRIX, 0)],
    "stack.default": [([ROW, ROW],), ([ROW, ROW], 1)],
    "sub.Tensor": [(MATRIX, ROW), (ROW, 2), (ROW, ROW, {"alpha": 2})],
    "sub_.Tensor": [(MATRIX, ROW), (ROW, 1)],
    "sum.dim_IntList": [(MATRIX, [0]), (CUBE, [0, 2], True), (MATRIX, [1], {"dtype": torch.complex128})],
    "t.default": [(MATRIX,), (ROW,)],
    "transpose.int": [(CUBE, 0, 2)],
    "unbind.int": [(MATRIX,), (CUBE, 1), (CUBE, -1)],
    "unsqueeze.default": [(ROW, 0), (ROW, -1)],
    "view.default": [(MATRIX, [3, 2]), (MATRIX, [-1]), ((0, 3), [3, 0])],
    "zero_.default": [(MATRIX,)],
}


class Seen(TorchDispatchMode):
    """Which operators are called."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def arguments(given, dtype, wrap):
    """The arguments of a row of the table: the same at each call."""
    torch.manual_seed(0)

    def made(one):
        if isinstance(one, list) and one and isinstance(one[0], tuple):
            return [made(each) for each in one]
        if not isinstance(one, tuple):
            return one
        found = torch.randint(0, 2, one).bool() if dtype is torch.bool else (torch.randn(one) * 3).to(dtype)
        return wrap(found)

    named = given[-1] if isinstance(given[-1], dict) else {}
    return [made(one) for one in given if not isinstance(one, dict)], named


def called(function, args, kwargs):
    """The operators that are called; and of each tensor of the result which arguments share its memory, and itself."""
    with below_autograd(), Seen() as seen:
        try:
            result = function(*args, **kwargs)
        except (RuntimeError, IndexError) as error:  # of a dtype that the operator does not know
            return seen.operators, [str(error).splitlines()[0]]
    tensors = [one for one in args if isinstance(one, torch.Tensor)]
    results = result if isinstance(result, (list, tuple)) else [result]
    return seen.operators, [([storage(one) == storage(own) for own in tensors], one) for one in results]


def storage(one):
    return one.untyped_storage()._cdata


@pytest.mark.parametrize("wrap", [lambda one: one, lambda one: nn.Parameter(one, False)], ids=["tensor", "parameter"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GIVEN)
def test_a_binding_calls_its_operator_with_the_same_arguments(name, dtype, wrap):
    packet, _, overload = name.partition(".")
    operator = getattr(getattr(torch.ops.aten, packet), overload)
    for given in GIVEN[name]:
        operators, found = called(binding_of(operator), *arguments(given, dtype, wrap))
        expected = called(operator._op, *arguments(given, dtype, wrap))
        assert operators == expected[0] == [operator]
        for mine, theirs in zip(found, expected[1], strict=True):
            if isinstance(theirs, str):
                assert mine == theirs
                continue
            assert mine[0] == theirs[0] and mine[1].storage_offset() == theirs[1].storage_offset()
            one, other = (torch.zeros_like(each[1]) if "empty" in packet else each[1] for each in (mine, theirs))
            assert same_bits(one, other)


def test_the_table_of_this_test_is_that_of_the_line():
    assert {str(operator).removeprefix("aten.") for operator in BINDINGS} == set(GIVEN)
