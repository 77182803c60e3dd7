"""What the pooling layers do for each property: ``CELLS[layer][property](P)``, on a world of four workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from distdl import nn
from distdl.geometry.boxes import runs
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.testing import assert_matches_sequential

Cell = Callable[[Partition], str]
LINE, PLANE = (1, 1, 4), (1, 1, 2, 2)


def noise(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).abs() + 0.5


def exact(
    name: str,
    options: tuple[Any, ...],
    extents: tuple[int, ...],
    grid: tuple[int, ...],
    P: Partition,
    sizes: list[list[int]] | None = None,
) -> str:
    """The layer equals torch's, which takes the same options in the same order."""
    space = len(extents) - 2
    reference = getattr(torch.nn, f"{name}{space}d")(*options)
    layer = getattr(nn, f"Distributed{name}{space}d")(P.reshape(*grid), *options)
    blocks = None if sizes is None else [runs(along) for along in sizes]
    assert_matches_sequential(layer, reference, noise(*extents), blocks)
    return "exact"


def refused(make: Callable[[Partition], Any], P: Partition) -> str:
    """The layer raises the same ValueError on every worker."""
    text = None
    try:
        make(P)
    except ValueError as error:
        text = str(error)
    texts = set(P.allgather_data(text))
    assert len(texts) == 1 and text is not None, texts
    return "refused"


def none(P: Partition) -> str:
    """The layer has nothing of the kind."""
    return "none"


def double_backward(name: str, options: tuple[Any, ...], P: Partition) -> str:
    """The gradient of a function of the gradient equals the sequential one."""
    reference = getattr(torch.nn, f"{name}1d")(*options)
    owned = Layout.of(P.reshape(*LINE), [runs([2]), runs([1]), runs([3, 0, 5, 1])])
    layer = getattr(nn, f"Distributed{name}1d")(owned.partition, *options)
    whole = noise(2, 1, 9).requires_grad_()
    part = owned.block(whole.detach()).clone().requires_grad_()
    for network, x in ((reference, whole), (layer, part)):
        (dx,) = torch.autograd.grad((network(x) ** 3).sum(), x, create_graph=True)
        (dx**3).sum().backward()
    assert whole.grad is not None and part.grad is not None
    assert torch.allclose(part.grad, owned.block(whole.grad), rtol=1e-10, atol=1e-12)
    return "exact"


def cells(name: str, some: tuple[Any, ...], wide: tuple[Any, ...]) -> dict[str, Cell]:
    """What all layers are asked alike, with some options and with those whose windows reach over several blocks."""
    return {
        "deep halo": partial(exact, name, wide, (1, 1, 11), LINE),
        "uneven": partial(exact, name, some, (2, 1, 11), LINE, sizes=[[2], [1], [1, 6, 1, 3]]),
        "empty": partial(exact, name, some, (2, 1, 11), LINE, sizes=[[2], [1], [0, 8, 0, 3]]),
        "batch split": partial(exact, name, some, (3, 1, 9), (2, 1, 2)),
        "channel split": partial(exact, name, some, (1, 3, 9), (1, 2, 2)),
        "double backward": partial(double_backward, name, some),
        "padding modes": none,
    }


def sliding(name: str) -> dict[str, Cell]:
    return {
        "stride": partial(exact, name, ((3, 2), (2, 3), (1, 0)), (1, 2, 9, 8), PLANE),
        "even kernel": partial(exact, name, (4, 1, 2), (1, 1, 10), LINE),
        **cells(name, (3, 2, 1), (9, 2, 4)),
    }


def adaptive(name: str) -> dict[str, Cell]:
    return {"stride": none, "dilation": none, "even kernel": none, **cells(name, (3,), (1,))}


def power() -> dict[str, Cell]:
    return {
        "stride": partial(exact, "LPPool", (3, (3, 2), (2, 3), True), (1, 2, 9, 8), PLANE),
        "dilation": none,
        "even kernel": partial(exact, "LPPool", (2.5, 4, 1), (1, 1, 10), LINE),
        **cells("LPPool", (3, 3, 2), (3, 9, 1)),
    }


CELLS: dict[str, dict[str, Cell]] = {
    "DistributedMaxPool": {
        **sliding("MaxPool"),
        "dilation": partial(exact, "MaxPool", (3, 2, 1, 2), (1, 1, 11), LINE),
    },
    "DistributedAvgPool": {
        **sliding("AvgPool"),
        "dilation": partial(refused, lambda P: nn.DistributedAvgPool1d(P.reshape(*LINE), 3, dilation=2)),
    },
    "DistributedLPPool": power(),
    "DistributedAdaptiveAvgPool": adaptive("AdaptiveAvgPool"),
    "DistributedAdaptiveMaxPool": adaptive("AdaptiveMaxPool"),
}
