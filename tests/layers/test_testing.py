"""What the checkers of distdl.testing say: which worker, which tensor, which cells; the same on every worker."""

import pytest
import torch
from helpers_layers import every_worker_raises, noise
from torch import nn

from distdl.nn import DistributedLinear, Repartition
from distdl.testing import assert_adjoint, assert_matches_sequential


class Off(torch.autograd.Function):
    """Adds to one cell on the way forward, and to one on the way back."""

    @staticmethod
    def forward(ctx, x, y_cell, dx_cell, factor):
        ctx.cell, ctx.factor = dx_cell, factor
        y = x.clone()
        if y_cell is not None:
            y[y_cell] += 1
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = dy.clone()
        if ctx.cell is not None:
            dx[ctx.cell] = dx[ctx.cell] * ctx.factor + 1 - abs(ctx.factor)
        return dx, None, None, None


class Wrong(nn.Module):
    """A layer that is off on some workers."""

    def __init__(self, layer, y_cell=None, dx_cell=None, factor=0):
        super().__init__()
        self.layer, self.cells = layer, (y_cell, dx_cell, factor)
        self.P_x, self.P_y = layer.P_x, layer.P_y
        self.parameter_layouts = {f"layer.{k}": v for k, v in getattr(layer, "parameter_layouts", {}).items()}

    def forward(self, x):
        return Off.apply(self.layer(x), *self.cells)


def raised(function):
    """What a checker raises on four workers: the same text on each."""
    return every_worker_raises(4, function, AssertionError)


def linear(P):
    """Five outputs of seven inputs, each over two workers, weights over four."""
    return DistributedLinear(P[:2].reshape(1, 2), P[2:].reshape(1, 2), P.reshape(2, 2), 7, 5).double()


def reference():
    sequential = nn.Linear(7, 5).double()
    for parameter in sequential.parameters():
        parameter.data = noise(*parameter.shape)
    return sequential


def test_an_output_that_is_off():
    def check(P):
        assert_matches_sequential(Wrong(linear(P), (1, 1) if P.rank == 3 else None), reference(), noise(3, 7))

    text = raised(check)
    assert (
        "it differs from the sequential layer on worker 3:\n  worker 3: 1 of 6 cells of y are off, by up to 1" in text
    )
    assert "cell [1, 4] is " in text and text.count("cell [") == 1  # worker 3 has the outputs 3 and 4
    found, expected = text.partition("cell [1, 4] is ")[2].split(", not ")
    assert float(found) - float(expected) == pytest.approx(1)


def test_gradients_that_are_off():
    def check(P):
        layer = Wrong(linear(P))
        if P.rank == 3:  # which has the outputs 3 and 4 of the inputs 4 to 6
            layer.get_parameter("layer.sublinear.weight").register_hook(
                lambda dw: dw * torch.tensor([[1.0], [2.0]]).double()
            )
        if P.rank == 1:  # which has the inputs 4 to 6
            layer.register_forward_pre_hook(lambda _, args: Off.apply(args[0], None, (2, 0), 0))
        assert_matches_sequential(layer, reference(), noise(3, 7))

    text = raised(check)
    assert "on workers 1, 3:" in text
    assert "worker 1: 1 of 9 cells of the gradient of x are off" in text and "cell [2, 4] is 1.0, not " in text
    assert "worker 3: 3 of 6 cells of the gradient of layer.sublinear.weight are off" in text
    assert text.count("cell [4, ") == 3 and "cell [4, 6] is " in text


def test_a_gradient_that_is_missing():
    def check(P):
        layer = linear(P)
        if P.rank == 2:
            layer.sublinear.weight.requires_grad_(False)
        assert_matches_sequential(layer, reference(), noise(3, 7))

    text = raised(check)
    assert "on worker 2:\n  worker 2: the gradient of sublinear.weight is None; it has to be of shape [2, 4]" in text


def test_many_cells_are_told_as_a_few():
    text = raised(lambda P: assert_matches_sequential(Wrong(linear(P), ...), reference(), noise(9, 7)))
    assert "27 of 27 cells of y are off" in text and ", and 23 more" in text


def test_a_backward_that_is_no_adjoint():
    """The pairs of cells of input and output, on whichever workers they are."""

    def check(P):
        layer = Repartition(P[:2].reshape(2), P[2:].reshape(2))
        x = noise(3) if P.rank < 2 else torch.zeros(0, dtype=torch.float64)
        assert_adjoint(layer, x)
        assert_adjoint(Wrong(layer, None, 1 if P.rank == 2 else None, -1), x)

    text = raised(check)
    assert "the backward is not the adjoint: <Fx, dy> = " in text and "by 1 of 36 pairs of cells" in text
    assert "y[1] on worker 2 contains 1 times x[1] on worker 0; the backward gives -1 times" in text


def test_nan_is_named_and_no_pair_of_equal_numbers():
    def check(P):
        layer = Repartition(P[:2].reshape(2), P[2:].reshape(2))
        x = noise(3) if P.rank < 2 else torch.zeros(0, dtype=torch.float64)
        assert_adjoint(Wrong(layer, None, 1 if P.rank == 2 else None, torch.nan), x)

    text = raised(check)
    assert "\n  worker 0: nan in 1 of 3 cells of the gradient of x" in text and "cells of y" not in text
    assert "by 6 of 36 pairs of cells" in text
    assert "y[1] on worker 2 contains 1 times x[1] on worker 0; the backward gives nan times" in text
    assert "gives 0 times" not in text and "gives 1 times" not in text


def test_a_gradient_of_another_shape():
    class Unconnected(nn.Module):
        def __init__(self, P, cut):
            super().__init__()
            self.P_x, self.cut = P, cut

        def forward(self, x):
            return x.detach().requires_grad_() if self.cut else x * 2

    text = raised(lambda P: assert_adjoint(Unconnected(P, P.rank == 1), noise(2, 3)))
    assert "on worker 1:\n  worker 1: the gradient of x is None; x is of shape [2, 3]" in text


class Times(nn.Module):
    """Multiplies by a number, and moves to others; the backward may multiply by another."""

    def __init__(self, layer, factor, back=None):
        super().__init__()
        self.layer, self.P_x, self.factor, self.back = layer, layer.P_x, factor, back

    def forward(self, x):
        y = self.layer(x) * self.factor
        if self.back is not None and y.requires_grad:
            y.register_hook(lambda dy: dy * self.back)
        return y


def test_the_adjoint_of_complex_tensors():
    """That of a factor is its conjugate. Where the backward takes another, real and imaginary parts are told."""

    def check(P):
        layer, x = Repartition(P.reshape(4, 1), P.reshape(1, 4)), torch.randn(1, 4, dtype=torch.complex128)
        assert_adjoint(Times(layer, 2 + 3j), x)
        assert_adjoint(Times(layer, 2 + 3j), x.real.contiguous())  # real cells, and complex ones that come of them
        back = (2 + 3j) / (2 - 3j) if P.rank == 1 else None
        assert_adjoint(Times(layer, 2 + 3j, back), x)

    text = raised(check)
    assert "by 8 of 1024 pairs of cells" in text
    assert "y[0, 0].real on worker 1 contains -3 times x[0, 1].imag on worker 0; the backward gives 3 times" in text


@pytest.mark.parametrize("checker", [
    assert_adjoint, lambda layer, x: assert_matches_sequential(layer, nn.Identity(), torch.cat([x] * 4)),
])  # fmt: skip
def test_a_worker_that_would_take_no_part_in_the_backward(checker):
    class Cut(nn.Module):
        def __init__(self, P):
            super().__init__()
            self.P_x, self.layer = P, Repartition(P, P)

        def forward(self, x):
            y = self.layer(x)
            return y.detach() if self.P_x.rank == 1 else y if self.P_x.rank else [y]

    text = raised(lambda P: checker(Cut(P.reshape(4)), noise(2)))
    assert "worker 0: y is a list; it has to be a tensor\n  worker 1: y does not depend on x in the autograd" in text


def test_parameters_that_are_not_those_of_the_sequential_layer():
    def check(P):
        layer = linear(P)
        assert_matches_sequential(layer, nn.Linear(7, 6).double(), noise(3, 7))

    assert "it has sublinear.weight [5, 7], sublinear.bias [5], and the sequential layer weight [6, 7], " in raised(
        check
    )
    text = raised(lambda P: assert_matches_sequential(Repartition(P, P), nn.Linear(4, 4).double(), noise(4)))
    assert "parameter_layouts has to list the parameters" in text and "it has none, and" in text


def test_frozen_parameters():
    def check(P):
        layer, sequential = linear(P), reference()
        sequential.weight.requires_grad_(False)
        layer.sublinear.weight.requires_grad_(False)
        assert_matches_sequential(layer, sequential, noise(3, 7))
        layer.sublinear.weight.requires_grad_(P.rank == 2)
        assert_matches_sequential(layer, sequential, noise(3, 7))

    assert "on worker 2:\n  worker 2: 8 of 8 cells of the gradient of sublinear.weight are off" in raised(check)


def test_outputs_of_unlike_rank():
    class Reshaped(Repartition):
        def forward(self, x):
            y = super().forward(x)
            return y.reshape(-1, 1) if self.P_x.rank == 1 else y

    text = raised(lambda P: assert_matches_sequential(Reshaped(P, P), nn.Identity(), noise(6)))
    assert "as many dims on every worker; it has the shapes [2] on 0, [2, 1] on 1, [1] on 2, [1] on 3" in text
