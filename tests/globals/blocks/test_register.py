"""Functions of a user's own, applied to global tensors."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from autograd_functions import scaled_sine
from launched import assert_close, on_workers, split
from registered import unregister
from same import noise

import distdl
from distdl import GlobalTensor

x35, row = noise(3, 5), noise(5, seed=2)


@pytest.mark.parametrize("named", [0, 1, 2])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
def test_an_autograd_function_of_elements(grid, named):
    """Also of arguments by name, as many as that."""
    function = scaled_sine()
    distdl.register(function, "elementwise")

    @on_workers
    def work():
        found = []
        for x, w in ((split(x35, *grid), row.clone()), (x35.clone(), row.clone())):
            x.requires_grad_(), w.requires_grad_()
            y = function.apply(*(x, w)[: 2 - named], **dict([("x", x), ("w", w)][2 - named :]))
            found.append((y, *torch.autograd.grad((y * y).sum(), (x, w))))
        assert type(found[0][0]) is GlobalTensor
        for ours, theirs in zip(*found, strict=True):
            assert_close(ours, theirs)

    work()
    unregister(function)
    work()  # (of whole tensors)


@pytest.mark.parametrize("handler", ["elementwise", lambda apply, args, kwargs: distdl.local_map(apply)(*args)])
def test_autograd_functions_derived_from_a_registered_one(handler):
    """They compute by themselves, on plain tensors, too."""
    function = scaled_sine()

    class Doubled(function):
        @staticmethod
        def forward(ctx, x, w):
            return 2 * function.forward(ctx, x, w)

        @staticmethod
        def backward(ctx, dy):
            return function.backward(ctx, 2 * dy)

    distdl.register(function, handler)

    @on_workers
    def work():
        for one, factor in ((function, 1), (Doubled, 2)):
            for x in (split(x35), x35.clone()):
                w = row.clone().requires_grad_()
                y = one.apply(x.requires_grad_(), w)
                assert_close(y, factor * x35.sin() * row)
                dx, dw = torch.autograd.grad(y.sum(), (x, w))
                assert_close(dx, factor * x35.cos() * row)
                assert_close(dw, factor * x35.sin().sum(0))

    work()
    distdl.register(Doubled, "elementwise")
    work()
    unregister(function)
    unregister(Doubled)
    work()
    assert "apply" not in vars(function)


def test_an_autograd_function_with_an_apply_of_its_own():
    class Shifted(scaled_sine()):
        @classmethod
        def apply(cls, x):
            return super().apply(x, row)

    @on_workers
    def work():
        assert_close(Shifted.apply(split(x35)), x35.sin() * row)

    work()
    own = vars(Shifted)["apply"]
    distdl.register(Shifted, "elementwise")
    distdl.register(Shifted, lambda apply, args, kwargs: apply(*args, **kwargs))
    work()
    unregister(Shifted)
    assert vars(Shifted)["apply"] is own


def test_a_registered_function_that_is_none_of_elements():
    class Sums(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum(0)

    def sums(x):
        if type(x) is GlobalTensor:
            return torch.overrides.handle_torch_function(sums, (x,), x)
        return x.sum(0)

    distdl.register(Sums, "elementwise")
    distdl.register(sums, "elementwise")

    @on_workers
    def work():
        for function in (Sums.apply, sums):
            with pytest.raises(
                ValueError, match=r"(?i)sums is registered as elementwise, but gave [05] for a block of .x[05] on"
            ):
                function(split(x35))

    try:
        work()
    finally:
        unregister(sums)


def test_an_autograd_function_of_parameters_alone():
    """The parameters of a distributed model are no global tensors; their gradients are summed all the same."""
    function = scaled_sine()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(x35[0].clone().reshape(1, 5))
            self.b = torch.nn.Parameter(row.clone())

        def forward(self, x):
            return x * function.apply(self.a, self.b)

    @on_workers
    def work():
        ours, theirs = Model(), Model()
        distdl.distribute(ours, split(x35).layout.partition)
        for model in (ours, theirs):
            model(x35).pow(2).sum().backward()
        assert_close(ours.a.grad, theirs.a.grad)
        assert_close(ours.b.grad, theirs.b.grad)

    work()


def test_a_handler_of_ones_own():
    @distdl.register(torch.alias_copy)
    def handler(function, args, kwargs):
        x, *rest = args
        return GlobalTensor.from_local(function(x.to_local(), *rest), x.layout.partition)

    @on_workers
    def work():
        assert_close(torch.alias_copy(split(x35)), torch.alias_copy(x35))

    work()
    unregister(torch.alias_copy)


@pytest.mark.parametrize("wrong", [(3, "elementwise"), (torch.exp, "fast"), (torch.nn.Linear, "elementwise")])
def test_what_cannot_be_registered(wrong):
    with pytest.raises(TypeError, match="register needs"):
        distdl.register(*wrong)


@dataclass(slots=True)
class Slotted:
    n: float

    def __call__(self, a):
        return a * self.n


@dataclass(frozen=True)
class Multiplying:
    n: float

    def __call__(self, a):
        return a * self.n


class Both(NamedTuple):
    sine: torch.Tensor
    positive: torch.Tensor


def dict_of(ys):
    return {"sine": ys[0], "positive": ys[1]}


class Pair(tuple):
    """A tuple that is made of two arguments."""

    __slots__ = ()

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


@pytest.mark.parametrize("kind", [Pair, Both])
@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_a_function_that_falls_back_and_gives_a_tuple_of_its_own(kind):
    def function(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return {"found": [kind(x.sin(), x.shape)]}

    with pytest.raises(TypeError, match=f"has a {kind.__name__}, a class of tuples .* give a tuple .* distdl.register"):
        function(split(x35))


@pytest.mark.parametrize(
    ("kind", "registered"),
    [(kind, True) for kind in (list, Both._make, dict_of)] + [(kind, False) for kind in (list, tuple, dict_of)],
)
@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_a_function_that_gives_a_structure(kind, registered):
    """On blocks, and on one worker."""

    def function(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return [kind([x.sin(), x > 0]), 3]

    if registered:
        distdl.register(function, "elementwise")
    x = split(x35).requires_grad_()
    y, three = function(x)
    assert type(y) is type(function(x35)[0]) and three == 3
    sine, positive = y.values() if isinstance(y, dict) else y
    assert_close(sine, x35.sin())
    assert torch.equal(positive.full_tensor(), x35 > 0)
    assert_close(torch.autograd.grad(sine.sum(), x)[0], x35.cos())
    if registered:
        unregister(function)


@pytest.mark.parametrize("within", [lambda y: y, lambda y: (0, y), lambda y: {"y": [y]}])
@on_workers
def test_a_function_of_elements_that_gives_an_object(within):
    def function(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return within(SimpleNamespace(y=x * 2) if x.dtype.is_floating_point else x.device)

    distdl.register(function, "elementwise")
    with pytest.raises(TypeError, match="registered as elementwise, but gave a SimpleNamespace, and no tensors"):
        function(split(x35))
    assert function(split(x35.long())) == within(x35.device)  # (in which no block is hidden)
    unregister(function)


HELD = {
    "an object in another": lambda y: Slotted(SimpleNamespace(y=[y])),
    "values of a dict": lambda y: {"y": y}.values(),
    "an iterator": lambda y: map(torch.sin, [y]),
    "an object without tensors": lambda y: Slotted(2.0),
    "a partial": lambda y: partial(torch.add, y),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
@on_workers
def test_a_function_of_elements_that_gives_what_holds_tensors_deeper_down(held):
    def function(x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(function, (x,), x)
        return x.sin(), held(x * 2)

    distdl.register(function, "elementwise")
    with pytest.raises(TypeError, match=r"registered as elementwise, but gave a .*, and no tensors"):
        function(split(x35))
    unregister(function)


@on_workers
def test_a_function_of_elements_of_a_list():
    """Its tensors would not come to be blocks."""

    def function(xs):
        if torch.overrides.has_torch_function(xs):
            return torch.overrides.handle_torch_function(function, xs, xs)
        return sum(xs)

    distdl.register(function, "elementwise")
    with pytest.raises(TypeError, match="registered as elementwise, but got global tensors in a structure"):
        function([split(x35), split(x35)])
    unregister(function)


class Doubled:
    """What is called in the place of a function, as tools put it there that count what is computed."""

    def __call__(self, x):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(self, (x,), x)
        return 2 * x


@pytest.mark.parametrize("debug", ["", "1"])
@pytest.mark.filterwarnings("ignore:.*Doubled")
def test_an_object_that_is_called_has_the_same_name_on_all_workers(monkeypatch, debug):
    monkeypatch.setenv("DISTDL_DEBUG", debug)

    def work():
        x = distdl.distribute_tensor(noise(4, 3), distdl.world().reshape(2, 1))
        assert torch.equal(Doubled()(x).full_tensor(), 2 * noise(4, 3))
        with pytest.raises(ValueError, match="on worker 1, Multiplying gave 2x3 instead of 0x3") as error:
            distdl.local_map(Multiplying(2.0), out=x[:2].layout)(x)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 2))) == 1


def test_constants_beside_the_results_of_functions_of_elements():
    given = np.float32(2.5), True, "ab", None, {"dtype": torch.float32}, torch.Size([3])

    def sines(x):
        if type(x) is GlobalTensor:
            return torch.overrides.handle_torch_function(sines, (x,), x)
        return x.sin(), given

    distdl.register(sines, "elementwise")

    def work():
        y, constants = sines(split(x35))
        assert constants == given
        assert_close(y, x35.sin())

    distdl.run_workers(work, 3)
    unregister(sines)
