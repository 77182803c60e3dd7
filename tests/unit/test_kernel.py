"""torch's convolution in 3-d, by the implementation that is the fastest: its numbers, and which one it is."""

import itertools

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import distdl
from distdl.nn import DistributedConv3d
from distdl.ops.kernel import Kernel

ONEDNN = torch.ops.aten.mkldnn_convolution.default
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def kernel(stride=1, padding=1, dilation=1, groups=1, transposed=False, more=0, dims=3):
    return Kernel(*((n,) * dims for n in (stride, dilation)), groups, transposed, (padding,) * dims, (more,) * dims)


def tensors(channels, space, taps=(3, 3, 3), dtype=torch.float32, samples=1):
    generator = torch.Generator().manual_seed(0)
    shapes = (samples, channels[0], *space), (channels[1], channels[0], *taps), (channels[1],)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def called(function):
    """The operators that a function calls."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return {event.key for event in profile.key_averages()}


def assert_equal(found, expected, tolerance=3e-6):
    """Two computations in float32 and float64 agree to the rounding of the first."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is torch.float32 and one.layout is torch.strided
        assert (one - other).abs().max() <= tolerance * other.abs().max()


@pytest.mark.parametrize(("channels", "space", "taps"), [
    (8, (32, 64, 64), 3), (8, (40, 64, 8), 3), (16, (4, 64, 64), 3), (1, (64, 64, 64), 3), (4, (16, 16, 16), 3),
    (8, (32, 16, 16), 4), (8, (41, 64, 8), 3), (16, (32, 64, 64), 3), (6, (64, 64, 2), 3),
])  # fmt: skip
def test_torch_chooses_as_we_think(channels, space, taps):
    """If this fails, torch has changed its rule: ours then asks for oneDNN in other cases than those overlooked."""
    x, weight, bias = tensors((channels, 4), space, (taps,) * 3)
    chosen = torch._C._select_conv_backend(x, weight, bias, [1] * 3, [1] * 3, [1] * 3, False, [0] * 3, 1)
    overlooked = kernel()._is_overlooked(x, weight, (0, 0))
    assert chosen.name == ("Slow3d" if overlooked else "Mkldnn")


CASES = [
    ((8, 8), (16, 16, 16), (3, 3, 3), {}),
    ((8, 24), (8, 12, 20), (3, 3, 3), {"padding": 0}),
    ((16, 16), (16, 16, 16), (3, 3, 3), {"stride": 2}),
    ((8, 16), (9, 16, 21), (3, 3, 3), {"dilation": 2, "padding": 2}),
    ((8, 8), (16, 16, 16), (2, 5, 3), {}),
    ((8, 8), (24, 24, 24), (1, 3, 3), {"padding": 0}),
]


@pytest.mark.parametrize(("channels", "space", "taps", "options"), CASES)
@pytest.mark.parametrize("biased", [True, False])
def test_what_torch_overlooks_is_convolved_by_onednn(channels, space, taps, options, biased):
    x, weight, bias = tensors(channels, space, taps)
    given = [x, weight, bias] if biased else [x, weight, None]
    convolve = kernel(**options)
    assert "aten::mkldnn_convolution" in called(lambda: convolve(*given))
    doubles = [one if one is None else one.double().requires_grad_() for one in given]
    y = convolve(*doubles)
    assert_equal([convolve(*given)], [y])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(y, [one for one in doubles if one is not None], dy.double())
    back = called(lambda: convolve.backward(dy, x, weight, (True, True, biased)))
    assert ("aten::to_mkldnn" in back) == ("stride" not in options)  # (with few taps for each cell, torch's is as fast)
    for rise in (dy, dy.transpose(2, 4).contiguous().transpose(2, 4)):
        found = convolve.backward(rise, x, weight, (True, True, biased))
        assert_equal([one for one in found if one is not None][: len(expected)], expected)
    alone, nothing, _ = convolve.backward(dy, x, weight, (True, False, False))
    assert_equal([alone], expected[:1])
    assert nothing is None


@pytest.mark.parametrize("bias", [torch.arange(16.0)[::2], torch.ones(1).expand(8)])
def test_a_bias_may_lie_anyhow(bias):
    x, weight, _ = tensors((8, 8), (16, 16, 16))
    assert "aten::mkldnn_convolution" in called(lambda: kernel()(x, weight, bias))
    assert_equal([kernel()(x, weight, bias)], [kernel()(x.double(), weight.double(), bias.double())])


@pytest.mark.parametrize("transposed", [False, True])
def test_the_gradient_of_a_bias_keeps_its_digits(transposed):
    x, weight, _ = tensors((8, 8), (32, 32, 40))
    convolve = kernel(transposed=transposed)
    dy = torch.full((1, 8, 32, 32, 40), 1.37)
    assert "aten::to_mkldnn" in called(lambda: convolve.backward(dy, x, weight, (True, True, True)))
    assert_equal(convolve.backward(dy, x, weight, (True, True, True))[2:], [dy.double().sum((0, 2, 3, 4))], 1e-6)


@pytest.mark.parametrize("dilation", [(2, 2, 2), (1, 2, 1)])
def test_dilated_transposed_ones_are_left_to_torch(dilation):
    x, weight, _ = tensors((8, 8), (16, 16, 16))
    convolve = Kernel((1, 1, 1), dilation, 1, True, (1, 1, 1), (0, 0, 0))
    doubles = [one.double().requires_grad_() for one in (x, weight)]
    dy = torch.ones_like(convolve(*doubles))
    expected = torch.autograd.grad(convolve(*doubles), doubles, dy)
    assert_equal(convolve.backward(dy.float(), x, weight, (True, True, False))[:2], expected)


def test_a_torch_without_onednn_is_left_alone(monkeypatch):
    x, weight, bias = tensors((8, 8), (16, 16, 16))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not kernel()._is_overlooked(x, weight, (0, 0))
    assert "aten::convolution" in called(lambda: kernel()(x, weight, bias))


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # (by torch, where flags are set)
@pytest.mark.parametrize("case", ["small", "thin", "of one tap", "float64", "grouped", "samples", "off"])
def test_all_else_is_left_to_torch(case):
    taps = (1, 1, 1) if case == "of one tap" else (3, 3, 3)
    space = {"small": (4, 4, 4), "thin": (2, 64, 64)}.get(case, (16, 16, 16))
    dtype, samples = torch.float64 if case == "float64" else torch.float32, 2 if case == "samples" else 1
    x, weight, bias = tensors((8, 8), space, taps, dtype, samples)
    groups = 2 if case == "grouped" else 1
    convolve = kernel(1, int(taps[0] > 1), 1, groups)
    weight = weight[:, : 8 // groups].contiguous()
    with torch.backends.mkldnn.flags(enabled=case != "off"):
        if case != "thin":
            assert "aten::convolution" in called(lambda: convolve(x, weight, bias))
        dy = convolve(x, weight, bias)
        assert "aten::to_mkldnn" not in called(lambda: convolve.backward(dy, x, weight, (True, True, True)))
        own = called(lambda: convolve.recorded(x.requires_grad_(), weight, bias).sum().backward())
        assert "aten::conv3d" in own or (case == "thin" and "aten::to_mkldnn" not in own)


@pytest.mark.parametrize(("taps", "padding"), [((2, 2, 2), 0), ((3, 3, 3), 1)])
def test_transposed_ones_are_differentiated_by_onednn(taps, padding):
    x, weight, _ = tensors((16, 16), (16, 16, 20), taps)
    convolve = kernel(2, padding, transposed=True)
    assert "aten::slow_conv_transpose3d" in called(lambda: convolve(x, weight))
    doubles = [one.double().requires_grad_() for one in (x, weight)]
    y = convolve(*doubles)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    expected = [*torch.autograd.grad(y, doubles, dy.double()), dy.double().sum((0, 2, 3, 4))]
    assert_equal(
        convolve.backward(dy, x, weight, (True, True, True)), expected, 1e-5
    )  # (as sums of 40,000 numbers are)
    assert "aten::to_mkldnn" in called(lambda: convolve.backward(dy, x, weight, (True, True, False)))
    given = [one.clone().requires_grad_() for one in (x, weight)]
    assert "aten::to_mkldnn" in called(lambda: convolve.recorded(*given, None).backward(dy))
    assert_equal([one.grad for one in given], expected[:2], 1e-5)
    names = called(lambda: convolve.recorded(*given, None, casts=True).backward(dy))
    assert "aten::conv_transpose3d" in names and "aten::to_mkldnn" not in names


def test_modes_see_torchs_operators():
    x, weight, bias = tensors((8, 8), (16, 16, 16))
    with FlopCounterMode(display=False) as counter:
        kernel()(x, weight, bias)
    assert counter.get_total_flops() == 2 * x[0, 0].numel() * weight.numel()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("flat", list(itertools.product([False, True], repeat=3))[1:])
def test_dims_of_one_cell_that_one_tap_reads_are_left_out(flat, transposed):
    space, taps = ([one if thin else n for thin, n in zip(flat, wide, strict=True)] for one, wide in
                   ((1, (5, 6, 7)), (1, (3, 2, 3))))  # fmt: skip
    x, weight, bias = tensors((2, 2), space, taps, torch.float64, samples=2)
    padding = tuple(int(not thin) for thin in flat)
    convolve = Kernel((1, 2, 1), (1, 1, 1), 1, transposed, padding, (0, 0, 0))
    names = called(lambda: convolve(x, weight, bias))
    assert "aten::squeeze" in names and not names & {"aten::slow_conv3d", "aten::slow_conv_transpose3d"}
    given = [one.requires_grad_() for one in (x, weight, bias)]
    y = torch.convolution(*given, (1, 2, 1), padding, (1, 1, 1), transposed, (0, 0, 0), 1)
    assert torch.equal(convolve(*given).detach(), y.detach())
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.autograd.grad(y, given, dy)
    found = convolve.backward(dy, x.detach(), weight.detach(), (True, True, True))
    assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, expected, strict=True))
    assert [one.shape for one in found] == [one.shape for one in given]
    assert convolve.backward(dy, x.detach(), weight.detach(), (False, False, True))[:2] == (None, None)


@pytest.mark.parametrize("wanted", [(0, 1, 2), (0,), (1,), (2,), (0, 2)])
def test_a_recorded_one_has_torchs_derivatives_the_second_ones_too(wanted):
    given = tensors((8, 8), (12, 12, 12))

    def derivatives(function, dtype):
        inputs = [one.to(dtype).requires_grad_(number in wanted) for number, one in enumerate(given)]
        leaves = [inputs[number] for number in wanted]
        first = torch.autograd.grad(function(*inputs).pow(3).sum(), leaves, create_graph=True)
        return [*first, *torch.autograd.grad(sum(one.square().sum() for one in first), leaves)]

    found = derivatives(kernel().recorded, torch.float32)
    assert_equal(found, derivatives(lambda *given: functional.conv3d(*given, padding=1), torch.float64))


@pytest.mark.parametrize("by_modules", [False, True])
@pytest.mark.parametrize(("grid", "samples", "extents"), [
    ((1, 1, 2, 1, 1), 1, (24, 16, 16)), ((1, 1, 1, 1, 2), 1, (12, 12, 24)), ((2, 1, 1, 1, 1), 2, (12, 12, 12)),
])  # fmt: skip
def test_blocks_of_a_volume_are_convolved_by_onednn(grid, samples, extents, by_modules, monkeypatch):
    """In float32, whether they lie where they are or are copied into windows; beside float64's numbers."""
    torch.manual_seed(0)
    x, model = torch.randn(samples, 8, *extents), torch.nn.Conv3d(8, 8, 3, padding=1)
    state = {name: one.clone() for name, one in model.state_dict().items()}
    wide = x.double().requires_grad_()
    model.double()(wide).pow(3).sum().backward()
    expected = [wide.grad, model.weight.grad, model.bias.grad]
    counted = []

    def onednn(*args):
        counted.append(args)
        return ONEDNN(*args)

    monkeypatch.setattr("distdl.ops.kernel._ONEDNN", onednn)

    def main():
        P = distdl.world().reshape(*grid)
        if by_modules:
            layer = DistributedConv3d(P, in_channels=8, out_channels=8, kernel_size=3, padding=1)
        else:
            layer = distdl.distribute(torch.nn.Conv3d(8, 8, 3, padding=1), P)
        for name, parameter in layer.named_parameters():
            if parameter.numel():
                parameter.data = state[name].clone()
        given = distdl.distribute_tensor(x, P).requires_grad_()
        layer(given).pow(3).sum().backward()
        return [given.grad.full_tensor(), *(one.grad for one in layer.parameters() if one.numel())]

    found, other = distdl.run_workers(main, 2, "threads")
    assert_equal(found, expected)
    assert_equal(other, expected[: len(other)])
    assert len(counted) == 2
