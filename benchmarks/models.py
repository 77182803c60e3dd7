"""The page of models: steps of whole networks, forward, backward and optimiser, in different ways.

The ways: ``global``, torch's network by ``distdl.distribute``; ``by images``, the same with samples split, not rows;
``modules``, the same of distdl's modules; ``share``, torch's network on this worker's part of the data, which is
the limit; ``in step``, the same where workers wait for each other after each layer with weights, by the transport's
barrier; ``by hand``, a program for this network alone, see by_hand.py; ``all``, on all of the data by worker 0 alone;
``DTensor``, torch's tensor parallelism, over gloo.
"""

import by_hand
import networks
import torch
from cases import Case, nothing
from floors import MPITransport
from networks import Plain, Split, UNet, training
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import distdl
from distdl.nn import DistributedCrossEntropyLoss, DistributedMSELoss


def every(P, barrier, mesh, transport):
    """All cases, split over the rows of the data (the multilayer perceptron over features)."""
    for sizes, channels in (((256, 256), 32), ((64, 64), 32), ((64, 64, 64), 8)):
        yield unet(P, barrier, sizes, channels, transport)
    yield resnet(P, barrier)
    yield lenet(P, barrier)
    yield mlp(P, mesh)
    yield decoder(P, barrier)


def of_rows(case, P, barrier, build, criterion, x, truth, weights="replicated"):
    """Fill in what all networks on rows have in common: global, share, in step and all."""
    n, rows = P.size, P.reshape(1, 1, P.size, *[1] * (x.dim() - 3))
    part = x.chunk(n, 2)[0].clone()
    same = truth.dim() < x.dim()  # classes of samples are not split
    own = truth if same else truth.chunk(n, 2)[0].clone()
    case.steps["global"] = training(
        networks.distributed(build(), rows, weights), criterion, distdl.distribute_tensor(x, rows),
        truth if same else distdl.distribute_tensor(truth, rows),
    )  # fmt: skip
    case.steps["share"] = training(build(), criterion, part, own)
    case.steps["in step"] = training(networks.in_step(build(), barrier), criterion, part, own)
    case.steps["all"] = training(build(), criterion, x, truth) if P.rank == 0 else nothing
    return rows, part, own


def by_images(P, network, x, classes):
    over = P.reshape(P.size, *[1] * (x.dim() - 1))
    images = distdl.distribute_tensor(x, over)
    return training(networks.distributed(network, over), nn.functional.cross_entropy, images, classes)


def unet(P, barrier, sizes, channels, transport):
    case = Case(f"UNet {len(sizes)}-d", "x".join(map(str, sizes)), repeats=7)
    x, truth = torch.randn(1, 1, *sizes), torch.randn(1, 2, *sizes)
    dims = len(sizes)
    rows, part, own = of_rows(case, P, barrier, lambda: UNet(Plain(dims), channels), nn.functional.mse_loss, x, truth)
    case.steps["modules"] = training(UNet(Split(rows), channels), DistributedMSELoss(rows), part, own)
    if dims == 2 and isinstance(transport, MPITransport):
        network = UNet(by_hand.ByHand(transport), channels)
        case.steps["by hand"] = by_hand.training(network, nn.functional.mse_loss, part, own, transport)
    return case


def resnet(P, barrier):
    case = Case("ResNet-18", "8x3x224x224", repeats=3)
    x, classes = torch.randn(8, 3, 224, 224), torch.arange(8)
    rows, part, _ = of_rows(
        case, P, barrier, lambda: networks.resnet18(Plain(2)), nn.functional.cross_entropy, x, classes
    )
    case.steps["by images"] = by_images(P, networks.resnet18(Plain(2)), x, classes)
    criterion = DistributedCrossEntropyLoss(P[:1].reshape(1, 1))
    own = classes if P.rank == 0 else None
    case.steps["modules"] = training(networks.resnet18(Split(rows)), criterion, part, own)
    return case


def lenet(P, barrier):
    """On 32 images, over rows; its share is that of the images, as no part of the rows alone passes through it."""
    case = Case("LeNet", "32x1x32x32", inner=3)
    x, classes = torch.randn(32, 1, 32, 32), torch.arange(32) % 10
    rows, criterion = P.reshape(1, 1, P.size, 1), nn.functional.cross_entropy
    case.steps["global"] = training(
        networks.distributed(networks.lenet(), rows), criterion, distdl.distribute_tensor(x, rows), classes
    )
    case.steps["by images"] = by_images(P, networks.lenet(), x, classes)
    case.steps["modules"] = training(
        networks.split_lenet(P), DistributedCrossEntropyLoss(P[:1].reshape(1, 1)), x.chunk(P.size, 2)[P.rank].clone(),
        classes if P.rank == 0 else None,
    )  # fmt: skip
    part = slice(0, 32 // P.size)
    case.steps["share"] = training(networks.lenet(), criterion, x[part], classes[part])
    case.steps["in step"] = training(networks.in_step(networks.lenet(), barrier), criterion, x[part], classes[part])
    case.steps["all"] = training(networks.lenet(), criterion, x, classes) if P.rank == 0 else nothing
    return case


def mlp(P, mesh):
    """Weights split: global tensors store shares and split the samples; modules and DTensor split hidden features."""
    samples, features, hidden = 512, 512, 2048
    case = Case("MLP", f"{samples}x{features}x{hidden}", repeats=9)
    x, truth = torch.randn(samples, features), torch.randn(samples, features)
    over, criterion = P.reshape(P.size, 1), nn.functional.mse_loss
    case.steps["global"] = training(
        networks.distributed(networks.mlp(features, hidden), over, "sharded"), criterion,
        distdl.distribute_tensor(x, over), distdl.distribute_tensor(truth, over),
    )  # fmt: skip
    given = x if P.rank == 0 else torch.zeros(samples, 0)
    wanted = truth if P.rank == 0 else torch.zeros(samples, 0)
    case.steps["modules"] = training(
        networks.split_mlp(P, features, hidden), DistributedMSELoss(P[:1].reshape(1, 1)), given, wanted
    )
    if mesh is not None:
        parallel = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        network = parallelize_module(networks.mlp(features, hidden), mesh, parallel)
        case.steps["DTensor"] = training(network, criterion, x, truth)
    case.steps["share"] = training(networks.mlp(features, hidden // P.size), criterion, x, truth)
    case.steps["all"] = training(networks.mlp(features, hidden), criterion, x, truth) if P.rank == 0 else nothing
    return case


def decoder(P, barrier):
    """Attention over all positions in the middle: a share of the rows has a share of the share of its products."""
    case = Case("Decoder", "1x8x48x48", repeats=5)
    x, truth = torch.randn(1, 8, 48, 48), torch.randn(1, 3, 192, 192)
    of_rows(case, P, barrier, networks.decoder, nn.functional.mse_loss, x, truth)
    return case
