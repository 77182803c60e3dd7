"""What is measured: for each case, steps of forward and backward that do the same work in different ways."""

from collections.abc import Callable
from dataclasses import dataclass, field

import floors
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import distdl
from distdl.nn import (
    AllGather,
    AllSumReduce,
    Broadcast,
    DistributedAdaptiveAvgPool2d,
    DistributedBatchNorm,
    DistributedConv2d,
    DistributedConvTranspose2d,
    DistributedDropout,
    DistributedGroupNorm,
    DistributedLayerNorm,
    DistributedLinear,
    DistributedMaxPool2d,
    DistributedUpsample,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
)

SIZES = {"1 KiB": 1 << 10, "256 KiB": 1 << 18, "16 MiB": 1 << 24}


@dataclass
class Case:
    """One row of the table.

    Attributes:
        steps: from the name of a way to do it ("ours", "floor", ...) to a function that does it once.
        inner: how many steps one measurement takes, so that it is longer than the clock's noise.
        repeats: how many measurements.
    """

    name: str
    size: str
    steps: dict[str, Callable[[], object]] = field(default_factory=dict)
    inner: int = 1
    repeats: int = 15


def every(P, transport, mesh):
    """All cases."""
    yield from primitives(P, transport, mesh)
    yield repartition_of_a_matrix(P, transport, mesh)
    yield from convolutions(P)
    yield from layers(P)


def differentiated(function, x, dy):
    """A step: forward and backward of a function, with fresh gradients."""
    x = x.requires_grad_()

    def step():
        x.grad = None
        function(x).backward(dy)

    return step


def fixed(step):
    """The same step under fixed_shapes()."""

    def fixed_step():
        with distdl.fixed_shapes():
            step()

    return fixed_step


def primitives(P, transport, mesh):
    """The seven primitives between two workers, in float32."""
    line, first = P.reshape(2, 1), P[:1].reshape(1, 1)
    for size, nbytes in SIZES.items():
        count = nbytes // 4
        side = int(count**0.5)  # every size makes a square; half of its rows is the block of a gather
        rows, square = (side // 2, side), (side, side)
        zero = torch.zeros(0)
        x, dy = torch.randn(count), torch.randn(count)
        halves = torch.randn(*square)
        ours = {
            "Broadcast": (
                Broadcast(first, line, preserve_batch=False), x.clone() if P.rank == 0 else zero.clone(), dy,
                floors.broadcast, (count,),
            ),
            "SumReduce": (
                SumReduce(line, first, preserve_batch=False), x.clone(), dy if P.rank == 0 else zero,
                floors.sum_reduce, (count,),
            ),
            "AllSumReduce": (AllSumReduce(line, (0,)), x.clone(), dy, floors.all_sum, (count,)),
            "Repartition": (
                Repartition(line, P.reshape(1, 2)), halves.clone(),
                torch.randn(square[0] * 2, square[1] // 2), floors.repartition, square,
            ),
            "HaloExchange": (halo_exchange(line, P.rank), halves.clone(), halves, floors.halo, square),
            "AllGather": (AllGather(line, (0,)), halves[: rows[0]].clone(), halves, floors.all_gather, rows),
            "ReduceScatter": (
                ReduceScatter(line, (0,)), halves.clone(), halves[: rows[0]].clone(), floors.reduce_scatter, rows,
            ),
        }  # fmt: skip
        for name, (layer, x, dy, floor, shape) in ours.items():
            case = Case(name, size, inner={"1 KiB": 20, "256 KiB": 6, "16 MiB": 1}[size])
            case.steps["ours"] = differentiated(layer, x.clone(), dy)
            if size == "1 KiB":
                case.steps["fixed shapes"] = fixed(differentiated(layer, x.clone(), dy))
            if transport is not None:
                there, back = floor(transport, shape)
                case.steps["floor"] = differentiated(
                    lambda x, there=there, back=back: floors.Floor.apply(x, there, back), x.clone(), dy
                )
            if mesh is not None and name == "Repartition":
                case.steps["DTensor"] = redistribution(mesh, Shard(0), Shard(1), x.clone(), dy)
            if mesh is not None and name == "AllSumReduce":
                case.steps["DTensor"] = redistribution(mesh, Partial(), Replicate(), x.clone(), dy)
            yield case


def redistribution(mesh, source, target, x, dy):
    """The same by torch's DTensor, over gloo."""

    def function(x):
        return DTensor.from_local(x, mesh, [source], run_check=False).redistribute(mesh, [target]).to_local()

    return differentiated(function, x, dy)


def repartition_of_a_matrix(P, transport, mesh):
    case = Case("Repartition", "2048x2048", repeats=9)
    x, dy = torch.randn(1024, 2048), torch.randn(2048, 1024)
    case.steps["ours"] = differentiated(Repartition(P.reshape(2, 1), P.reshape(1, 2)), x.clone(), dy)
    if transport is not None:
        there, back = floors.repartition(transport, (1024, 2048))
        case.steps["floor"] = differentiated(lambda x: floors.Floor.apply(x, there, back), x.clone(), dy)
    if mesh is not None:
        case.steps["DTensor"] = redistribution(mesh, Shard(0), Shard(1), x.clone(), dy)
    return case


def convolutions(P):
    """Split over the rows, by a module and by torch's layer on a global tensor, beside torch's layer on half of the
    rows and on all of them (by worker 0 alone).
    """
    for shape, inner in (((4, 16, 256, 256), 1), ((1, 8, 32, 32), 10)):
        batch, channels, height, width = shape
        case = Case("Convolution", "x".join(map(str, shape)), inner=inner)
        layer = DistributedConv2d(
            P.reshape(1, 1, 2, 1), in_channels=channels, out_channels=channels, kernel_size=3, padding=1
        )
        half, x = torch.randn(batch, channels, height // 2, width), torch.randn(*shape)
        case.steps["ours"] = learning(layer, half.clone(), half)
        rows = P.reshape(1, 1, 2, 1)
        split = distdl.distribute(nn.Conv2d(channels, channels, 3, padding=1), rows, fallback="error")
        case.steps["global"] = learning(split, *(distdl.distribute_tensor(one, rows) for one in (x, x)))
        case.steps["half"] = learning(nn.Conv2d(channels, channels, 3, padding=1), half.clone(), half)
        whole = learning(nn.Conv2d(channels, channels, 3, padding=1), x.clone(), x)
        case.steps["all"] = whole if P.rank == 0 else nothing
        yield case


def layers(P):
    """One of each family, split over rows (or features, or classes), beside the sequential layer on half and on all."""
    field, features = (4, 16, 128, 128), (64, 256, 512)
    rows, line = P.reshape(1, 1, 2, 1), P.reshape(1, 1, 2)
    weights, first = P.reshape(2, 1), P[:1].reshape(1, 1)
    families = {
        "Linear": (
            DistributedLinear(first, P.reshape(1, 2), weights, 512, 512), nn.Linear(512, 256), (2048, 512), None,
        ),
        "ConvTranspose": (
            DistributedConvTranspose2d(rows, in_channels=16, out_channels=16, kernel_size=4, stride=2, padding=1),
            nn.ConvTranspose2d(16, 16, 4, 2, 1), field, 2,
        ),
        "MaxPool": (DistributedMaxPool2d(rows, 3, 2, 1), nn.MaxPool2d(3, 2, 1), field, 2),
        "AdaptiveAvgPool": (DistributedAdaptiveAvgPool2d(rows, 1), nn.AdaptiveAvgPool2d(1), field, 2),
        "BatchNorm": (DistributedBatchNorm(rows, 16), nn.BatchNorm2d(16), field, 2),
        "GroupNorm": (DistributedGroupNorm(rows, 4, 16), nn.GroupNorm(4, 16), field, 2),
        "LayerNorm": (DistributedLayerNorm(P.reshape(2, 1, 1), 512), nn.LayerNorm(512), features, 0),
        "LayerNorm split": (DistributedLayerNorm(line, 512), nn.LayerNorm(256), features, 2),
        "Upsample": (
            DistributedUpsample(rows, scale_factor=2, mode="linear"),
            nn.Upsample(scale_factor=2, mode="bilinear"), field, 2,
        ),
        "Dropout": (DistributedDropout(rows), nn.Dropout(), field, 2),
    }  # fmt: skip
    for name, (ours, sequential, shape, dim) in families.items():
        case = Case(name, "x".join(map(str, shape)), repeats=9)
        half = shape if dim is None else tuple(n // 2 if d == dim else n for d, n in enumerate(shape))
        given = torch.randn(*half) if dim is not None or P.rank == 0 else torch.zeros(shape[0], 0)
        for way, layer, x in (("ours", ours, given), ("half", sequential, torch.randn(*half))):
            case.steps[way] = learning(layer, x.clone(), layer(x).detach())
        yield case


def learning(layer, x, dy):
    """A step of a layer with weights."""
    x = x.requires_grad_()

    def step():
        x.grad = None
        layer.zero_grad()
        layer(x).backward(dy)

    return step


def nothing():
    pass


def mesh_of(P, backend):
    """DTensor's mesh over all workers, on gloo; None for threads."""
    if backend == "threads":
        return None
    if not dist.is_initialized():
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if P.rank == 0 else None
        port = P.broadcast_data(store.port if store else None)
        store = store or dist.TCPStore("localhost", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=P.rank, world_size=P.size)
    return dist.init_device_mesh("cpu", (P.size,))


def halo_exchange(line, rank):
    sizes = np.zeros((2, 2), dtype=int)
    sizes[0, 1 - rank] = 1
    return HaloExchange(line, sizes, sizes, sizes)
