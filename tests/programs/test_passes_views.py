"""Views in a line: each is made of the first tensor in its memory, if the step itself has made that tensor."""

import pytest
import torch
from compiled_nets import noise

import distdl
from distdl.programs.checking import assert_same_accesses, assert_well_formed
from distdl.programs.passes.views import with_direct_views

ROWS = noise((9, 4), 0)


def chain(x):
    return (x * 2).view(2, 2, 2).transpose(0, 1)[1].unsqueeze(0).expand(3, 2, 2) + 1


def several_readers(x):
    y = x * 2
    flat = y.view(8)
    return flat[1:5].view(2, 2) + y[1, 2:] + flat.sum()


def of_an_argument(x):
    return x[1:].view(2, 2).t() + 1


def one_of_many(x):
    return (x * 2).unbind(1)[2] + 1


def both(x):
    first, last = (x * 2).unbind()
    return first + last


def written(x):
    y = x * 2
    y.view(8)[2:4].add_(1)
    return y.view(2, 2, 2)[0].t().contiguous(), y


def squeezed(x):
    y = (x * 2).unsqueeze(0)
    z = y * 3
    narrow = z.squeeze_(0)
    return narrow.sum() + narrow.unsqueeze(0).expand(2, 2, 4)


def squeezed_for_good(x):
    return (x.unsqueeze(0) * 2).squeeze_(0) + 1


def a_view_is_the_result(x):
    return (x * 2).view(4, 2)[1:].t()


def complex_numbers(x):
    return torch.view_as_complex(x.view(2, 2, 2) * 2).conj()[1:].imag + 1


def other_dtype(x):
    return (x * 2).view(torch.int32)[1:].view(2, 2) + 1


# the operators of the line, without those that make no views
STEPS = {
    chain: "as_strided",
    several_readers: "as_strided as_strided as_strided",
    of_an_argument: "slice view t",
    one_of_many: "as_strided",
    both: "unbind",
    written: "as_strided as_strided",
    squeezed: "as_strided as_strided as_strided",
    squeezed_for_good: "unsqueeze squeeze_",
    a_view_is_the_result: "as_strided",
    complex_numbers: "view view_as_complex _conj slice _conj view_as_real _neg_view select",
    other_dtype: "view slice view",
}
_COMPUTES = ("add", "add_", "mul", "sum", "clone")


def tensors(result):
    return result if isinstance(result, tuple) else [result]


@pytest.mark.parametrize("function", STEPS)
def test_a_line_makes_each_view_of_the_tensor_that_holds_its_memory(function):
    step = distdl.compile(function)
    with torch.no_grad():
        for number in range(5):  # the arguments begin at other places of one tensor
            x = ROWS[number : number + 2]
            for mine, theirs in zip(tensors(step(x)), tensors(function(x)), strict=True):
                assert torch.equal(mine, theirs)
                assert (mine.stride(), mine.storage_offset()) == (theirs.stride(), theirs.storage_offset())
    (program,) = step.programs
    assert program.line is not None and program.replays == 2
    changed = with_direct_views(program.step)
    assert_well_formed(changed)
    assert_same_accesses(program.step, changed)
    names = [call.name.split(".")[1] for call in changed.calls if call.kind == "operator"]
    assert [name for name in names if name not in _COMPUTES] == STEPS[function].split()


class Wrapped(torch.Tensor):
    """A tensor around another one, as quantised weights are, that does not know every operator."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.as_strided.default
        found = func(*[one.inner if isinstance(one, Wrapped) else one for one in args], **(kwargs or {}))
        return Wrapped(found)


def test_views_of_other_classes_stay_as_they_are():
    held = Wrapped(noise((4, 4), 0))
    step = distdl.compile(lambda: (held * 2).view(2, 8)[1].t() + 1)
    with torch.no_grad():
        found = [step().inner for _ in range(5)]
    assert step.programs[0].replays == 2
    assert all(torch.equal(one, held.inner.view(2, 8)[1] * 2 + 1) for one in found)
