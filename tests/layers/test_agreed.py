"""What all layers have to survive: other input on one worker, checkpoints, inference mode."""

import re
from dataclasses import dataclass

import pytest
import torch
from helpers_layers import assert_options, every_worker_raises, noise, on_workers
from torch.utils.checkpoint import checkpoint

from distdl.geometry.boxes import runs
from distdl.nn import (
    AllSumReduce,
    DistributedAdaptiveAvgPool1d,
    DistributedAdaptiveAvgPool2d,
    DistributedAdaptiveMaxPool1d,
    DistributedAdaptiveMaxPool2d,
    DistributedAvgPool1d,
    DistributedAvgPool2d,
    DistributedBatchNorm,
    DistributedBCELoss,
    DistributedBCEWithLogitsLoss,
    DistributedCrossEntropyLoss,
    DistributedDropout,
    DistributedEmbedding,
    DistributedFeatureConv1d,
    DistributedFeatureConv2d,
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedL1Loss,
    DistributedLayerNorm,
    DistributedLinear,
    DistributedLPPool1d,
    DistributedLPPool2d,
    DistributedMaxPool1d,
    DistributedMaxPool2d,
    DistributedPad,
    DistributedUpsample,
    Interpolate,
)
from distdl.nn.layer import Application, Layer
from distdl.nn.module import Module, Option
from distdl.nn.primitive import Movement
from distdl.partition.layout import Layout
from distdl.plan import Plan


def line(P):
    return P.reshape(1, 1, 4)


STILL = {
    "max": lambda P: DistributedMaxPool1d(line(P), 2, 2),
    "average": lambda P: DistributedAvgPool1d(line(P), 2, 2),
    "power": lambda P: DistributedLPPool1d(line(P), 2, 2, 2),
    "adaptive average": lambda P: DistributedAdaptiveAvgPool1d(line(P), 8),
    "adaptive maximum": lambda P: DistributedAdaptiveMaxPool1d(line(P), 8),
    "nearest": lambda P: DistributedUpsample(line(P), scale_factor=(2.0,), mode="nearest"),
    "layer norm": lambda P: DistributedLayerNorm(P.reshape(4, 1, 1), (1, 4), elementwise_affine=False),
    "instance norm": lambda P: DistributedInstanceNorm(P.reshape(4, 1, 1), 1),
    "group norm": lambda P: DistributedGroupNorm(P.reshape(4, 1, 1), 1, 1, affine=False),
    "batch norm": lambda P: DistributedBatchNorm(P.reshape(4, 1, 1), 1, affine=False).eval(),
    "frozen convolution": lambda P: DistributedFeatureConv1d(P.reshape(4, 1, 1), 1, 1, 1).requires_grad_(False),
    "logits": lambda P: lambda x: DistributedBCEWithLogitsLoss(line(P), "none", pos_weight=torch.ones(1))(x, x * 0),
}


@pytest.mark.parametrize("layer", STILL)
def test_a_checkpoint_around_a_layer_that_moves_nothing(layer):
    """A gradient is wanted on one worker only, so on the others nothing is there to save."""

    def main(P):
        module = STILL[layer](P)
        x = noise(1, 1, 4, seed=P.rank).float()
        x.requires_grad_(P.rank == 0)
        expected = None
        if P.rank == 0:
            (expected,) = torch.autograd.grad(module(x).square().sum(), x)
        else:
            y = module(x)
            if y.requires_grad:
                y.square().sum().backward()
        y = checkpoint(module, x, use_reentrant=False)
        if y.requires_grad:
            y.square().sum().backward()
        assert P.rank or torch.equal(x.grad, expected)

    on_workers(4, main)


@pytest.mark.parametrize("make", [
    lambda P: DistributedMaxPool1d(P, 1),
    lambda P: DistributedAvgPool1d(P, 1),
    lambda P: DistributedLPPool1d(P, 2, 1),
    lambda P: DistributedAdaptiveAvgPool1d(P, 3),
    lambda P: DistributedAdaptiveMaxPool1d(P, 3),
    lambda P: DistributedUpsample(P, scale_factor=1.0),
])  # fmt: skip
def test_a_checkpoint_where_nothing_moves_and_an_empty_block_is_of_integers(make):
    """What is made of the block takes the dtype of the others, and part in their backward."""

    def main(P):
        x = torch.ones(1, 1, 1, requires_grad=True) if P.rank < 3 else torch.zeros(1, 1, 0, dtype=torch.int64)
        y = checkpoint(make(line(P)), x, use_reentrant=False)
        y.sum().backward()
        assert y.dtype == torch.float32 and y.shape == x.shape

    on_workers(4, main)


def pair(P):
    """A line of the first two workers: the others have no part in a layer over it."""
    return P[:2].reshape(1, 1, 2)


WITHOUT_THE_LAST = {
    "primitive": lambda P: AllSumReduce(pair(P), [2]),
    "convolution": lambda P: DistributedFeatureConv1d(pair(P), 1, 1, 3, padding=1),
    "frozen convolution": lambda P: DistributedFeatureConv1d(pair(P), 1, 1, 3, padding=1).requires_grad_(False),
    "batch norm": lambda P: DistributedBatchNorm(pair(P), 1),
    "layer norm": lambda P: DistributedLayerNorm(pair(P), 8, elementwise_affine=False),
    "pooling": lambda P: DistributedLPPool1d(pair(P), 2, 2),
    "max-pooling with indices": lambda P: lambda x: DistributedMaxPool1d(pair(P), 2, return_indices=True)(x)[0],
    "adaptive pooling": lambda P: DistributedAdaptiveAvgPool1d(pair(P), 3),
    "adaptive max-pooling": lambda P: DistributedAdaptiveMaxPool1d(pair(P), 3),
    "padding": lambda P: DistributedPad(pair(P), (1, 1)),
    "upsampling": lambda P: DistributedUpsample(pair(P), scale_factor=2.0),
    "dropout": lambda P: DistributedDropout(pair(P), 1.0),
    "dropout in evaluation": lambda P: DistributedDropout(pair(P), 0.5).eval(),
    "loss": lambda P: lambda x: DistributedL1Loss(pair(P))(x, torch.zeros_like(x)),
    "loss of classes": lambda P: lambda x: DistributedCrossEntropyLoss(pair(P))(x, torch.zeros(1, 4).long()),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("layer", WITHOUT_THE_LAST)
def test_nested_checkpoints_in_front_of_a_layer_in_which_a_worker_has_no_part(layer, depth):
    """What a worker saves last decides how far it computes again: behind an inner checkpoint, or not even into it."""

    def main(P):
        everyone, last = AllSumReduce(P, [0]), WITHOUT_THE_LAST[layer](P)

        def gradient(around):
            def outer(x):
                return last(around(everyone)(x))

            def outermost(x):
                return everyone(around(outer)(x).sum().reshape(1))

            x = noise(1, 1, 4, seed=P.rank).float().requires_grad_()
            around(outer if depth == 1 else outermost)(x).square().sum().backward()
            return x.grad

        plain = gradient(lambda function: function)
        assert torch.equal(gradient(lambda function: lambda x: checkpoint(function, x, use_reentrant=False)), plain)

    on_workers(3, main)


def test_a_checkpoint_where_one_worker_has_an_empty_block():
    def main(P):
        P_x = P.reshape(4, 1, 1, 1)
        network = torch.nn.Sequential(DistributedFeatureConv2d(P_x, 2, 2, 1), DistributedAdaptiveAvgPool2d(P_x, 1))
        x = torch.ones(1 if P.rank < 3 else 0, 2, 4, 4)  # the last batch has 3 samples
        checkpoint(network, x, use_reentrant=False).sum().backward()
        assert network[0].weight.grad is not None

    on_workers(4, main)


@pytest.mark.parametrize("make", [
    lambda P: DistributedUpsample(line(P), scale_factor=2.0),
    lambda P: DistributedPad(line(P), (1, 1), "reflect"),
    lambda P: DistributedAvgPool1d(line(P), 3, 1, 1, count_include_pad=False),
    lambda P: DistributedAdaptiveAvgPool1d(line(P), 5),
    lambda P: DistributedLPPool1d(line(P), 2, 3, 2, ceil_mode=True),
    lambda P: DistributedFeatureConv1d(line(P), 1, 1, 3, padding=1, padding_mode="reflect"),
])  # fmt: skip
def test_training_after_inference_mode_on_the_same_shape(make):
    def main(P):
        layer, x = make(P), torch.ones(1, 1, 3)
        with torch.inference_mode():
            layer(x)
        layer(x.requires_grad_()).sum().backward()
        assert x.grad.shape == x.shape

    on_workers(4, main)


def swapped(P, layer, name="weight", shape=(2, 3, 3)):
    if P.rank == 0:
        layer.get_parameter(name).data = torch.zeros(shape)
    return layer


def linear(P):
    return DistributedLinear(P[:2].reshape(1, 2), P[2:].reshape(1, 2), P.reshape(2, 2), 4, 6)


def embedding(P):
    return DistributedEmbedding(P.reshape(4), P.reshape(4, 1), P.reshape(4, 1, 1), 5, 3)


HALF = torch.full((1, 1, 2), 0.5)
REFUSED = {
    "class weights on some workers": (
        lambda P: DistributedCrossEntropyLoss(P.reshape(4, 1), torch.ones(2) if P.rank else None)(
            torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)
        ), "different calls",
    ),
    "a probability above 1": (
        lambda P: DistributedBCELoss(line(P))(HALF + P.rank // 3, HALF), "from 0 to 1; on worker 3",
    ),
    "no scores": (
        lambda P: DistributedCrossEntropyLoss(P.reshape(1, 4))(
            None if P.rank == 3 else torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)
        ), "worker 3: DistributedCrossEntropyLoss",
    ),
    "a tensor without data": (
        lambda P: DistributedMaxPool1d(line(P), 2)(torch.zeros(1, 1, 3, device="meta" if P.rank == 1 else "cpu")),
        "one that is meta",
    ),
    "a swapped weight": (
        lambda P: swapped(P, DistributedFeatureConv1d(line(P), 2, 3, 3))(torch.ones(1, 2, 4)),
        "weight of worker 0 has to be of the shape [3, 2, 3]; it is [2, 3, 3]",
    ),
    "another number of biases": (
        lambda P: swapped(P, linear(P), "sublinear.bias", (4,))(torch.ones(2, 2) if P.rank < 2 else torch.zeros(2, 0)),
        "bias of worker 0",
    ),
    "rows of an embedding": (
        lambda P: swapped(P, embedding(P), shape=(6, 3))(torch.zeros(2, dtype=torch.int64)), "weight of worker 0",
    ),
    "scales of a norm": (
        lambda P: swapped(P, DistributedLayerNorm(line(P), 8), shape=(3,))(torch.ones(1, 1, 2)), "weight of worker 0",
    ),
    "another value around": (
        lambda P: DistributedPad(line(P), (1, 1), value=float(P.rank))(torch.ones(1, 1, 2)), "different calls",
    ),
    "a mean of integers": (
        lambda P: DistributedL1Loss(line(P))(torch.ones(1, 1, 2).long(), torch.ones(1, 1, 2).long()),
        "floating-point numbers for the reduction mean; got torch.int64",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), [
    (lambda P: DistributedPad(line(P), (1, 1), value=float(P.rank // 2))(torch.ones(1, 1, 2)),
     "0.0 on 0, 1; 1.0 on 2, 3"),
    (lambda P: DistributedFeatureConv1d(line(P), 2, 2, 1, groups=1 + P.rank % 2)(torch.ones(1, 2, 2)),
     "options that differ: 1 on 0, 2; 2 on 1, 3"),
    (lambda P: (DistributedLPPool1d(line(P), 2, 2) if P.rank else DistributedAvgPool1d(line(P), 2))(HALF),
     "on 0; DistributedLPPool1d"),
])  # fmt: skip
def test_different_calls_say_what_differs(call, words):
    message = every_worker_raises(4, call, RuntimeError)
    assert words in message, message


@pytest.mark.parametrize("what", REFUSED)
def test_what_one_worker_has_wrong_is_the_same_error_on_every_worker(what):
    call, words = REFUSED[what]
    with_errors = {"different calls": RuntimeError}.get(words, ValueError)
    assert words in every_worker_raises(4, call, with_errors)


class Brings(Layer):
    """A layer of an author's, to which workers may bring what they like; its results are what all have reported."""

    def __init__(self, P):
        super().__init__("Brings", P, Movement(P, P, self.plan))
        self.P_x, self.reported = P, None

    def plan(self, headers, me):
        self.reported = headers.extras(self.P_x).tolist()
        own = dict.fromkeys(range(self.P_x.size), (2,))
        return Plan(own, own)

    def forward(self, *tensors, extra=()):
        return self.agree(*tensors, extra=extra)(*tensors)


X = torch.ones(2)


@pytest.mark.parametrize(("tensors", "extra", "words"), [
    ((X, X), (), "Brings needs as many tensors on every worker, and as many numbers beside them; it got 1 tensor on 0, "
     "2, 3; 2 tensors on 1"),
    ((X,), (7, 8), "it got 1 tensor on 0, 2, 3; 1 tensor and 2 numbers on 1"),
    ((), (), "1 tensor on 0, 2, 3; 0 tensors on 1"),
    ((X, X, X, X, X), (), "worker 1: Brings needs at most 4 tensors to agree on; got 5"),
    ((X,), (1.5,), "worker 1: Brings needs integers of 64 bits beside its tensors; got 1.5"),
    ((X,), (2**64,), "worker 1: Brings needs integers of 64 bits beside its tensors; got 18446744073709551616"),
])  # fmt: skip
def test_what_one_worker_brings_and_the_others_do_not(tensors, extra, words):
    def call(P):
        layer = Brings(P)
        try:
            layer(*(tensors if P.rank == 1 else (X,)), extra=extra if P.rank == 1 else ())
        finally:
            assert layer(X, extra=(P.rank,)).shape == (2,)  # they can go on

    assert words in every_worker_raises(4, call)


@dataclass(frozen=True)
class Forgetful:
    """An op whose setup returns nothing."""

    def setup(self, site, x):
        pass


@pytest.mark.parametrize(("derive", "words"), [
    (lambda P: Application(Forgetful(), (P,), P), "Lacking needs a distdl.ops.Setup of its op; got None"),
    (lambda P: Movement(P, P, lambda headers, me: None), "needs a distdl.plan.Plan of its function plan; got N"),
])  # fmt: skip
def test_an_author_who_returns_nothing(derive, words):
    assert words in every_worker_raises(2, lambda P: Layer("Lacking", P, derive(P.reshape(2)))(X), TypeError)


def test_numbers_beside_tensors_in_a_list_that_is_written():
    def main(P):
        layer, sizes = Brings(P), [P.rank]
        layer(X, extra=sizes)
        sizes[0] = 7
        layer(X, extra=sizes)
        assert layer.reported == [[7]] * 4

    on_workers(4, main)


def test_power_pooling_takes_whole_powers_as_numbers():
    def main(P):
        x = torch.arange(16).reshape(1, 1, 16)[..., 4 * P.rank : 4 * P.rank + 4].float()
        y = DistributedLPPool1d(line(P), 2, 2, 2)(x)
        assert torch.equal(y, torch.nn.LPPool1d(2, 2, 2)(x))

    on_workers(4, main)


F = torch.nn.functional
PLANES = {
    "maximum": (lambda P: DistributedMaxPool2d(P, 2, 1, 1), lambda x: F.max_pool2d(x, 2, 1, 1)),
    "last window in part": (
        lambda P: DistributedMaxPool2d(P, (1, 2), (1, 2), ceil_mode=True),
        lambda x: F.max_pool2d(x, (1, 2), (1, 2), ceil_mode=True),
    ),
    "average": (
        lambda P: DistributedAvgPool2d(P, 2, 1, 1, count_include_pad=False),
        lambda x: F.avg_pool2d(x, 2, 1, 1, count_include_pad=False),
    ),
    "power": (lambda P: DistributedLPPool2d(P, 2, 2), lambda x: F.lp_pool2d(x, 2, 2, 1)),
    "adaptive maximum": (lambda P: DistributedAdaptiveMaxPool2d(P, 4), lambda x: F.adaptive_max_pool2d(x, 4)),
    "adaptive average": (lambda P: DistributedAdaptiveAvgPool2d(P, 4), lambda x: F.adaptive_avg_pool2d(x, 4)),
    "adaptive of the same size": (lambda P: DistributedAdaptiveMaxPool2d(P, (None, 9)), torch.clone),
    "one cell": (lambda P: DistributedMaxPool2d(P, 1), torch.clone),
    "reflected": (lambda P: DistributedPad(P, (1, 2), "reflect"), lambda x: F.pad(x, (1, 2, 0, 0), "reflect")),
    "constant": (lambda P: DistributedPad(P, (3, -2), value=2.0), lambda x: F.pad(x, (3, -2), value=2.0)),
    "zeros": (lambda P: DistributedPad(P, (0, 0, 1, 1)), lambda x: F.pad(x, (0, 0, 1, 1))),
    "linear": (
        lambda P: DistributedUpsample(P, scale_factor=2), lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")
    ),
    "nearest of the same size": (lambda P: DistributedUpsample(P, scale_factor=1, mode="nearest"), torch.clone),
}  # fmt: skip
LINES = {
    "maximum": (lambda P: DistributedMaxPool1d(P, 2, 2, ceil_mode=True), lambda x: F.max_pool1d(x, 2, ceil_mode=True)),
    "average": (lambda P: DistributedAvgPool1d(P, 3, 2, 1), lambda x: F.avg_pool1d(x, 3, 2, 1)),
    "power": (lambda P: DistributedLPPool1d(P, 2, 2), lambda x: F.lp_pool1d(x, 2, 2, 1)),
    "adaptive maximum": (lambda P: DistributedAdaptiveMaxPool1d(P, 4), lambda x: F.adaptive_max_pool1d(x, 4)),
    "adaptive average": (lambda P: DistributedAdaptiveAvgPool1d(P, 9), torch.clone),
    "nearest": (lambda P: DistributedUpsample(P, scale_factor=3, mode="nearest"), lambda x: x.repeat_interleave(3, 2)),
    "circular": (lambda P: DistributedPad(P, (4, 4), "circular"), lambda x: F.pad(x, (4, 4), "circular")),
}


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("dims", "name"), [(4, name) for name in PLANES] + [(3, name) for name in LINES])
def test_in_place_functions_behind_a_layer(dims, name, channels_last):
    """No layer returns a view: one that is written into is cut off from its graph where a block is empty."""
    make, sequential = (PLANES if dims == 4 else LINES)[name]
    shape = (2, 3, *(3,) * (dims - 3), 9)

    def penalty(network, x):
        y = network(x)
        (dx,) = torch.autograd.grad((torch.relu_(y) ** 3).sum(), x, create_graph=True)
        return (dx**3).sum(), y

    def main(P):
        P_x = P[1:].reshape(*(1,) * (dims - 1), 4)
        whole = noise(*shape).requires_grad_()
        penalty(sequential, whole)[0].backward()
        owned = Layout.of(P_x, [*(runs([n]) for n in shape[:-1]), runs([3, 0, 5, 1])])
        x = owned.block(whole.detach()).clone() if P.rank else torch.zeros((2, 0), dtype=torch.float64)
        if channels_last and P.rank:
            x = x.movedim(1, -1).contiguous().movedim(-1, 1)
        value, y = penalty(make(P_x), x.requires_grad_())
        value.backward()
        assert x.grad.shape == x.shape and not y._is_view()
        assert not P.rank or torch.allclose(x.grad, owned.block(whole.grad), rtol=1e-10)

    on_workers(5, main)


def test_an_option_is_set_once():
    class Scale(Module):
        factor = Option[int]()

        def __init__(self, factor=None):
            super().__init__()
            if factor is not None:
                self.factor = factor

    assert_options(Scale(2), factor=2)
    assert repr(Scale(2)) == "Scale(factor=2)" and repr(Scale()) == "Scale()"
    assert isinstance(Scale.factor, Option) and not hasattr(Scale(), "factor")
    with pytest.raises(AttributeError, match="'Scale' object has no attribute 'factor'"):
        _ = Scale().factor


def maximum(P):
    return DistributedMaxPool2d(P.reshape(1, 1, 2, 2), 3, (2, 1), 1, 1, ceil_mode=True, return_indices=True)


def average(P):
    return DistributedAvgPool1d(line(P), 2, None, count_include_pad=False, divisor_override=3)


def reflected(P):
    return DistributedPad(P.reshape(2, 2), [1, -1], "reflect")


def interpolated(P):
    return Interpolate((0, 0, 0), (1, 1, 2), (1, 1, 4), (0, 0, 0), (1, 1, 3), (1, 1, 8), 2, "linear", False)


OPTIONS = {
    "maximum": (
        maximum, "DistributedMaxPool2d(P_x: 1x1x2x2@; kernel_size=(3, 3), stride=(2, 1), "
        "padding=(1, 1), dilation=(1, 1), ceil_mode=True, return_indices=True)",
    ),
    "average": (
        average, "DistributedAvgPool1d(P_x: 1x1x4@; kernel_size=(2,), stride=(2,), padding=(0,), dilation=(1,), "
        "ceil_mode=False, count_include_pad=False, divisor_override=3)",
    ),
    "power": (
        lambda P: DistributedLPPool1d(line(P), 2, 2), "DistributedLPPool1d(P_x: 1x1x4@; kernel_size=(2,), stride=(1,), "
        "padding=(0,), dilation=(1,), ceil_mode=False, norm_type=2.0)",
    ),
    "adaptive average": (
        lambda P: DistributedAdaptiveAvgPool2d(P.reshape(1, 1, 2, 2), (8, None)),
        "DistributedAdaptiveAvgPool2d(P_x: 1x1x2x2@; output_size=(8, None))",
    ),
    "adaptive maximum": (
        lambda P: DistributedAdaptiveMaxPool1d(line(P), 8),
        "DistributedAdaptiveMaxPool1d(P_x: 1x1x4@; output_size=(8,), return_indices=False)",
    ),
    "padding": (
        reflected, "DistributedPad(P_x: 2x2@; padding=(1, -1), mode='reflect', value=0.0)",
    ),
    "upsampling": (
        lambda P: DistributedUpsample(line(P), scale_factor=2),
        "DistributedUpsample(P_x: 1x1x4@; size=None, scale_factor=(2.0,), mode='linear', align_corners=False)",
    ),
    "interpolation": (
        interpolated, "Interpolate(x_start=(0, 0, 0), x_stop=(1, 1, 2), x_global_shape=(1, 1, 4), y_start=(0, 0, 0), "
        "y_stop=(1, 1, 3), y_global_shape=(1, 1, 8), scale_factor=(2.0,), mode='linear', align_corners=False)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("layer", OPTIONS)
def test_options_of_a_layer_are_shown_and_cannot_be_changed(layer):
    """Set-ups are kept, so a change would be ignored in silence, or end in different layers on different workers."""
    make, shown = OPTIONS[layer]

    def main(P):
        module = make(P)
        assert repr(module) == shown.replace("@", " on workers 0..3")
        assert_options(module, **{name: getattr(module, name) for name in re.findall(r"(\w+)[:=]", shown)})

    on_workers(4, main)
