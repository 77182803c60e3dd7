"""Random networks of torch's own modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from hypothesis import strategies as st
from networks import Batch, Network, Part
from partitions import Blocks, blocks
from picking import Pick
from team import quietly

_MOST = 4000  # elements of a tensor
ACTIVATIONS = [
    "ReLU", "ReLU", "GELU", "SiLU", "ELU", "LeakyReLU", "Tanh", "Sigmoid", "Softplus", "Hardswish", "Mish", "Hardtanh",
    "PReLU", "ReLU6", "CELU", "SELU", "Softsign", "LogSigmoid", "Hardsigmoid", "Tanhshrink", "Softshrink", "Hardshrink",
]  # fmt: skip
OPTIMISERS = ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax"]

Make = Callable[[Pick, tuple[int, ...]], Part | None]
Options = tuple[tuple[str, Any], ...]


def _of(pick: Pick, **choices: tuple[Any, ...]) -> Options:
    """For each option one of the values, the first more often; at the first it is left out."""
    found = {name: pick.of(values[0], *values) for name, values in choices.items()}
    return tuple((name, value) for name, value in found.items() if value is not choices[name][0])


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _each(pick: Pick, low: int, high: int, space: int) -> Any:
    """A number, or one for each dim of space."""
    return pick.number(low, high) if pick.flag() else tuple(pick.number(low, high) for _ in range(space))


def convolution(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    space = len(shape) - 2
    if not 1 <= space <= 3:
        return None
    groups = pick.of(1, 1, *_divisors(shape[1]))
    mode = pick.of("zeros", "zeros", "zeros", "reflect", "replicate", "circular")
    kernel = _each(pick, 1, 3, space)
    padding = pick.of("same", "valid", *[_each(pick, 0, 2, space)] * 4)
    stride = 1 if padding == "same" else _each(pick, 1, 3, space)
    options = _of(pick, bias=(True, False), dilation=(1, 2))
    return Part(
        f"Conv{space}d", (shape[1], groups * pick.number(1, 2), kernel),
        (("stride", stride), ("padding", padding), ("groups", groups), ("padding_mode", mode), *options),
    )  # fmt: skip


def transposed(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    space = len(shape) - 2
    if not 1 <= space <= 3:
        return None
    groups = pick.of(1, *_divisors(shape[1]))
    stride = pick.number(1, 3)
    return Part(
        f"ConvTranspose{space}d", (shape[1], groups * pick.number(1, 2), _each(pick, 1, 3, space)),
        (
            ("stride", stride), ("padding", pick.number(0, 1)), ("output_padding", pick.number(0, stride - 1)),
            ("groups", groups), *_of(pick, bias=(True, False), dilation=(1, 2)),
        ),
    )  # fmt: skip


def normalisation(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    kind = pick.of("BatchNorm", "BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm", "LocalResponseNorm")
    if kind in ("LayerNorm", "RMSNorm"):
        return Part(kind, (shape[pick.number(1, len(shape) - 1) :],), _of(pick, elementwise_affine=(True, False)))
    if kind == "GroupNorm":
        return Part(kind, (pick.of(*_divisors(shape[1])), shape[1]), _of(pick, affine=(True, False)))
    if kind == "LocalResponseNorm":
        return Part(kind, (pick.number(1, 3),), _of(pick, alpha=(1e-4, 0.5), k=(1.0, 2.0))) if len(shape) > 2 else None
    space = max(len(shape) - 2, 1)
    options = _of(
        pick, affine=(kind == "BatchNorm", kind != "BatchNorm"), momentum=(0.1, 0.5, *[None] * (kind[0] == "B"))
    )
    tracked = _of(pick, track_running_stats=(kind == "BatchNorm", kind != "BatchNorm"))
    return Part(f"{kind}{space}d", (shape[1],), (*options, *tracked)) if space < 4 else None


def pooling(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    space = len(shape) - 2
    if not 1 <= space <= 3:
        return None
    kind = pick.of("MaxPool", "MaxPool", "AvgPool", "AvgPool", "LPPool", "AdaptiveAvgPool", "AdaptiveMaxPool")
    if kind.startswith("Adaptive"):
        size = pick.of(1, pick.number(1, 4), tuple(pick.of(None, pick.number(1, 4)) for _ in range(space)))
        return Part(f"{kind}{space}d", (size,))
    kernel = _each(pick, 1, 3, space)
    options = _of(pick, stride=(None, 1, 2, 3), ceil_mode=(False, True))
    if kind == "LPPool":
        return Part(f"LPPool{space}d", (pick.of(1.0, 2.0, 3.0), kernel), options)
    least = kernel if isinstance(kernel, int) else min(kernel)
    options += _of(pick, padding=(0, least // 2))
    if kind == "MaxPool":
        # (of a window that lies in the padding alone, torch's backward writes behind the end of the gradient)
        steps = (1,) if any(name == "padding" and size for name, size in options) else (1, 2)
        return Part(f"MaxPool{space}d", (kernel,), (*options, *_of(pick, dilation=steps)))
    options += _of(pick, count_include_pad=(True, False))
    return Part(
        f"AvgPool{space}d", (kernel,), (*options, *(_of(pick, divisor_override=(None, 3)) if space > 1 else ()))
    )


def linear(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    return Part("Linear", (shape[-1], pick.number(1, 5)), _of(pick, bias=(True, False)))


def resizing(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    space = len(shape) - 2
    if not 1 <= space <= 3:
        return None
    smooth = {1: ("linear",), 2: ("bilinear", "bicubic"), 3: ("trilinear",)}[space]
    mode = pick.of("nearest", "nearest-exact", "area", *smooth)
    corners = (("align_corners", pick.flag()),) if mode in smooth else ()
    if pick.flag():
        factors = (2, 2.0, 1.5) if mode == "area" else (2, 2.0, 1.5, 0.7)  # (of one cell, torch makes none by area)
        return Part("Upsample", (), (("scale_factor", pick.of(*factors)), ("mode", mode), *corners))
    return Part("Upsample", (), (("size", _each(pick, 1, 7, space)), ("mode", mode), *corners))


def padding(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    space = len(shape) - 2
    if not 1 <= space <= 3:
        return None
    kind = pick.of("ConstantPad", "ZeroPad", "ReflectionPad", "ReplicationPad", "CircularPad")
    crops = (
        kind != "CircularPad" and pick.rarely()
    )  # (of cropped dims, torch's circular one repeats memory that nobody wrote)
    sizes = tuple(pick.number(-1 if crops else 0, 2) for _ in range(2 * space))
    return Part(f"{kind}{space}d", (sizes, 0.5) if kind == "ConstantPad" else (sizes,))


def activation(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    kind = pick.of(*ACTIVATIONS, "Softmax", "LogSoftmax", "Softmax2d", "GLU", "Threshold", "Dropout", "Identity")
    if kind in ("Softmax", "LogSoftmax", "GLU"):
        return Part(kind, (pick.number(-len(shape), len(shape) - 1),))
    if kind == "PReLU":
        return Part(kind, (pick.of(1, shape[1]),))
    if kind == "Threshold":
        return Part(kind, (0.1, -0.5))
    if kind == "Dropout":
        return Part(kind, (0.0,))
    return Part(kind, (), _of(pick, inplace=(False, True)) if kind in ("ReLU", "SiLU", "ELU", "Hardtanh") else ())


def reordering(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    kind = pick.of("Flatten", "Unflatten", "PixelShuffle", "PixelUnshuffle", "ChannelShuffle", "Unfold")
    if kind == "Flatten":
        start = pick.number(1, len(shape) - 1)
        return Part(kind, (start, pick.of(-1, pick.number(start, len(shape) - 1)))) if len(shape) > 2 else None
    if kind == "Unflatten":
        dim = pick.number(1, len(shape) - 1)
        first = pick.of(*_divisors(shape[dim]))
        return Part(kind, (dim, (first, shape[dim] // first))) if len(shape) < 5 else None
    if kind == "ChannelShuffle":
        return Part(kind, (pick.of(*_divisors(shape[1])),)) if len(shape) > 2 else None
    if kind == "Unfold":
        return Part(kind, (pick.number(1, 3),), _of(pick, stride=(1, 2), padding=(0, 1))) if len(shape) == 4 else None
    return Part(kind, (2,)) if len(shape) > 3 else None


def sequences(pick: Pick, shape: tuple[int, ...]) -> Part | None:
    """Recurrent layers and attention: of batches of sequences of vectors."""
    if len(shape) != 3:
        return None
    width = shape[2]
    kind = pick.of("LSTM", "GRU", "RNN", "MultiheadAttention", "TransformerEncoderLayer")
    first = (("batch_first", pick.flag()),)
    heads = pick.of(*_divisors(width))
    if kind == "MultiheadAttention":
        return Part("Attention", inner=(Part(kind, (width, heads), first),))
    if kind == "TransformerEncoderLayer":
        return Part(kind, (width, heads, 4, 0.0), (*first, *_of(pick, norm_first=(False, True))))
    options = (*first, *_of(pick, num_layers=(1, 2), bidirectional=(False, True), bias=(True, False)))
    return Part("First", inner=(Part(kind, (width, pick.number(1, 3)), options),))


FAMILIES: tuple[Make, ...] = (
    convolution, convolution, convolution, transposed, normalisation, normalisation, pooling, pooling, linear,
    resizing, padding, activation, activation, reordering, sequences,
)  # fmt: skip


def _wrapped(pick: Pick, parts: tuple[Part, ...], before: tuple[int, ...], after: tuple[int, ...]) -> Part | None:
    """Some modules in one that does something else with them, where their shapes allow it."""
    kinds = ["Sequential"] if _overwrites(parts[0]) else ["Sequential", "Recomputed"]
    if before == after:
        kinds += ["Residual", "Twice"]
    if len(before) == len(after) and (before[0], *before[2:]) == (after[0], *after[2:]):
        kinds += ["Side"]
    if before == after and len(before) > 2 and all(one.name.startswith(("Conv", "Re", "Si")) for one in parts):
        kinds += ["Gate"]
    return Part(pick.of(*kinds), inner=parts)


def _overwrites(part: Part) -> bool:
    """Whether a module writes into what it is given. (Torch refuses to differentiate such a checkpoint twice.)"""
    return _overwrites(part.inner[0]) if part.inner else ("inplace", True) in part.options


def _taken(parts: tuple[Part, ...], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of what modules return; None if they fail."""
    try:
        with torch.no_grad():  # (some warnings come once in a process: as errors, they would fail but then)
            y = quietly(lambda: Part("Sequential", inner=parts).module()(torch.ones(shape)))
    except Exception:
        return None
    return tuple(y.shape) if y.numel() <= _MOST and 2 <= y.dim() <= 5 else None


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """A network and two or three batches; rarely one that torch refuses."""
    pick = Pick(draw, [], 0)
    space = pick.of(1, 2, 2, 3, 0)
    shape = (pick.number(1, 4), pick.of(1, 2, 3, 4, 6), *(pick.number(1, 9 - 2 * space) for _ in range(space)))
    parts: list[tuple[Part, tuple[int, ...]]] = []  # and the shapes that they are given
    now = shape
    for _ in range(pick.number(1, 6)):
        part = pick.of(*FAMILIES)(pick, now)
        if part is None:
            continue
        after = _taken((part,), now)
        if after is None and not pick.rarely():
            continue
        parts.append((part, now))
        if after is None:
            break
        now = after
        back = pick.number(1, 3)
        if pick.of(0, 1, 2) == 0 and back <= len(parts):
            inner, before = tuple(one for one, _ in parts[-back:]), parts[-back][1]
            outer = _wrapped(pick, inner, before, now)
            after = _taken((outer,), before)
            if after is not None:
                parts[-back:] = [(outer, before)]
                now = after
    found = tuple(one for one, _ in parts) or (Part("Identity"),)
    return Network(
        found, tuple(_batch(draw, pick, shape) for _ in range(pick.number(1, 3))), _grid(draw, pick, shape),
        pick.of("replicated", "sharded"), pick.of(*OPTIMISERS), pick.flag(), pick.of(None, 0.5), pick.rarely(),
    )  # fmt: skip


def _grid(draw: st.DrawFn, pick: Pick, shape: tuple[int, ...]) -> Blocks:
    """The workers of a distributed model: mostly an axis for each dim of its inputs."""
    return draw(blocks(shape if pick.number(0, 3) else shape[: pick.number(1, len(shape))]))


def _batch(draw: st.DrawFn, pick: Pick, shape: tuple[int, ...]) -> Batch:
    """An input; some have more samples, or fewer, than the first."""
    samples = shape[0] if pick.flag() else pick.number(1, 4)
    mode = pick.of("train", "train", "train", "eval", "penalty", "no_grad")
    found = Batch(draw(blocks((samples, *shape[1:]))), pick.number(0, 99), pick.rarely(), pick.flag(), mode)
    return found if prod(found.blocks.extents) else replace(found, mode="eval")
