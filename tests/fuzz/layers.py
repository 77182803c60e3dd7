"""Random chains of layers, and random calls of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from math import prod
from typing import Any

import torch
from chains import Call, Chain, Grid, LayerOf
from faults import KINDS, Fault
from hypothesis import strategies as st
from partitions import WORKERS, Blocks, splits, workers_of
from picking import Pick
from team import quietly

Make = Callable[["Site"], LayerOf]


class Site:
    """Where a layer is drawn: the shape of its input, as far as it is known."""

    def __init__(self, draw: st.DrawFn, shape: tuple[int, ...]) -> None:
        self.draw, self.shape = draw, shape
        self.space = len(shape) - 2
        pick = Pick(draw, [], 0)
        self.of, self.number, self.flag = pick.of, pick.number, pick.flag

    def grid(self, *most: int) -> Grid:
        """Workers in an array: of at most so many along each axis."""
        shapes = [one for one in product(*(range(1, n + 1) for n in most)) if prod(one) <= WORKERS]
        shape = shapes[self.number(0, len(shapes) - 1)]
        return Grid(self.draw(workers_of(prod(shape))), shape)

    def any(self) -> Grid:
        return self.grid(*[WORKERS] * len(self.shape))


def _geometry(site: Site) -> tuple[tuple[str, Any], ...]:
    kernel = site.number(1, 3)
    return (("kernel_size", kernel), ("stride", site.number(1, 3)), ("padding", site.number(0, kernel // 2)))


def feature_convolution(site: Site) -> LayerOf:
    mode = site.of("zeros", "zeros", "replicate", "circular")
    options = (
        ("in_channels", site.shape[1]), ("out_channels", site.number(1, 3)), *_geometry(site),
        ("dilation", site.number(1, 2)),
        ("bias", site.flag()), ("padding_mode", mode),
    )  # fmt: skip
    return LayerOf(
        f"DistributedConv{site.space}d", f"Conv{site.space}d", (site.grid(4, 1, *[4] * site.space),), options
    )


def general_convolution(site: Site, kind: str = "Conv") -> LayerOf:
    batch, inner, out = site.of((1, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 2, 1), (2, 1, 2), (2, 1, 1))
    space = [site.number(1, max(WORKERS // (batch * inner * out), 1)), 1][: site.space]
    shapes = [(batch, inner, *space), (batch, out, *space), (batch, out, inner, *space)]
    grids = tuple(Grid(site.draw(workers_of(prod(shape))), shape) for shape in shapes)
    options = (
        ("in_channels", site.shape[1]), ("out_channels", site.number(1, 4)), *_geometry(site), ("bias", site.flag()),
    )  # fmt: skip
    return LayerOf(f"Distributed{kind}{site.space}d", f"{kind}{site.space}d", grids, options)


def transposed_convolution(site: Site) -> LayerOf:
    if site.flag():
        return general_convolution(site, "ConvTranspose")
    options = (
        ("in_channels", site.shape[1]),
        ("out_channels", site.number(1, 3)),
        *_geometry(site),
        ("bias", site.flag()),
    )
    name = f"ConvTranspose{site.space}d"
    return LayerOf(f"Distributed{name}", name, (site.grid(4, 1, *[4] * site.space),), options)


def pooling(site: Site) -> LayerOf:
    kind = site.of("MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "LPPool")
    name = f"{kind}{site.space}d"
    if kind.startswith("Adaptive"):
        return LayerOf(f"Distributed{name}", name, (site.any(),), (("output_size", site.number(1, 4)),))
    options = dict(_geometry(site))
    if kind == "LPPool":
        del options["padding"]
        options["norm_type"] = 2.0
    return LayerOf(f"Distributed{name}", name, (site.any(),), (*options.items(), ("ceil_mode", site.flag())))


def normalisation(site: Site) -> LayerOf:
    kind = site.of("BatchNorm", "GroupNorm", "InstanceNorm", "LayerNorm", "RMSNorm")
    if kind in ("LayerNorm", "RMSNorm"):
        options: tuple[tuple[str, Any], ...] = (
            ("normalized_shape", site.shape[-1:]),
            ("elementwise_affine", site.flag()),
        )
        return LayerOf(f"Distributed{kind}", kind, (site.any(),), options)
    if kind == "GroupNorm":
        groups = site.of(*(n for n in range(1, site.shape[1] + 1) if site.shape[1] % n == 0))
        return LayerOf(
            "DistributedGroupNorm", kind, (site.any(),), (("num_groups", groups), ("num_channels", site.shape[1]))
        )
    options = (("num_features", site.shape[1]), ("affine", site.flag()))
    return LayerOf(f"Distributed{kind}", f"{kind}{site.space}d", (site.any(),), options)


def padding(site: Site) -> LayerOf:
    sizes = tuple(site.number(-1, 2) for _ in range(2 * site.space))
    theirs = f"{site.of('Constant', 'Constant', 'Replication', 'Circular', 'Reflection')}Pad{site.space}d"
    mode = {"C": "constant", "R": "reflect"}[theirs[0]]
    mode = "replicate" if theirs.startswith("Repl") else "circular" if theirs.startswith("Circ") else mode
    value = (("value", 0.0),) if mode == "constant" else ()
    if mode == "circular":  # (of cropped dims, torch's repeats memory that nobody wrote)
        sizes = tuple(max(size, 0) for size in sizes)
    return LayerOf("DistributedPad", theirs, (site.any(),), (("padding", sizes), *value), (("mode", mode),))


def upsampling(site: Site) -> LayerOf:
    mode = site.of("nearest", "linear" if site.space == 1 else "bilinear")
    corners = (("align_corners", site.flag()),) if mode != "nearest" else ()
    factor = site.of(1.0, 2.0, 1.5, 0.75)
    return LayerOf(
        "DistributedUpsample", "Upsample", (site.any(),), (("scale_factor", factor), ("mode", mode), *corners)
    )


def local(site: Site) -> LayerOf:
    return LayerOf(*[site.of("Tanh", "ReLU", "Softplus")] * 2, (site.any(),))


def embedding(site: Site, dims: int) -> LayerOf:
    """A table of rows and columns; of indices in so many dims."""
    rows, columns = site.of((1, 1), (2, 1), (1, 2), (3, 1), (2, 2))
    shape = [1] * dims
    shape[site.number(0, dims - 1)] = site.number(1, max(WORKERS // (rows * columns), 1))
    shapes = [tuple(shape), (*shape, columns), (*shape, rows, columns)]
    grids = tuple(Grid(site.draw(workers_of(prod(shape))), shape) for shape in shapes)
    options = (("num_embeddings", site.number(1, 5)), ("embedding_dim", site.number(1, 4)))
    return LayerOf("DistributedEmbedding", "Embedding", grids, options)


def loss(site: Site) -> LayerOf:
    if site.number(0, 2) == 0:
        kind, number = site.of("CrossEntropyLoss", "NLLLoss"), site.number(0, site.shape[1] - 1)
        options = (("reduction", site.of("mean", "sum")),)
        return LayerOf(f"Distributed{kind}", kind, (site.any(),), options, number=number)
    kind = site.of("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "BCEWithLogitsLoss")
    return LayerOf(f"Distributed{kind}", kind, (site.any(),), (("reduction", site.of("mean", "sum")),))


MAKERS: tuple[Make, ...] = (
    feature_convolution, feature_convolution, general_convolution, general_convolution, transposed_convolution,
    pooling, pooling,
    normalisation, normalisation, padding, upsampling, local,
)  # fmt: skip


@st.composite
def chains(draw: st.DrawFn, faulty: bool = False) -> Chain:
    """One to three layers, called one to three times; with ``faulty``, some worker does something else in some call."""
    channels, space = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    looked_up = draw(st.integers(0, 9)) == 9
    shape = (draw(st.integers(1, 4)), channels, *(draw(st.integers(3, 8)) for _ in range(space - looked_up)))
    layers: list[LayerOf] = []
    calls: list[Call] = []
    y = torch.zeros(shape, dtype=torch.long if looked_up else torch.float64)
    last = draw(st.integers(1, 3))
    for number in range(last):
        site = Site(draw, tuple(y.shape))
        ends = number == last - 1 and (number or not looked_up) and site.flag()
        if looked_up and not number:
            layers.append(embedding(site, len(shape)))
        else:
            layers.append(loss(site) if ends else site.of(*MAKERS)(site))
        made = layers[-1]
        try:
            y = quietly(partial(made.sequential(number), y))
        except Exception:
            break
    first = layers[0].grids[0]
    fixed = [d for d, one in enumerate(layers) if one.theirs in ("LayerNorm", "RMSNorm")]
    rows = dict(layers[0].options)["num_embeddings"] if looked_up else 0
    count = draw(st.integers(1, 3))
    at = draw(st.integers(0, count - 1)) if faulty and layers[0].is_ours else -1  # (torch's fail where they are)
    for number in range(count):
        calls.append(draw(_calls(shape, first, number == at, bool(number) and not fixed, rows)))
        if number and draw(st.booleans()):
            calls[-1] = calls[0] if calls[0].fault is None else calls[-1]
    return Chain(tuple(layers), tuple(calls))


@st.composite
def _calls(draw: st.DrawFn, shape: tuple[int, ...], grid: Grid, faulty: bool, changes: bool, rows: int) -> Call:
    if changes:
        shape = (draw(st.integers(1, 4)), shape[1], *(draw(st.integers(3, 8)) for _ in shape[2:]))
    sizes = tuple(draw(splits(n, p)) for n, p in zip(shape, grid.shape, strict=True))
    wants = () if rows else tuple(draw(st.lists(st.sampled_from(sorted(grid.workers)), unique=True)))
    fault = None
    if faulty:
        fault = Fault(
            draw(st.sampled_from(sorted(grid.workers))), draw(st.sampled_from(KINDS)), draw(st.integers(0, 9))
        )
    return Call(Blocks(grid.workers, sizes), draw(st.integers(0, 99)), wants, draw(st.integers(0, 5)) > 0, fault, rows)
