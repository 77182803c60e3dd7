"""LeNet-5 on handwritten digits, trained over four workers and, beside it, sequentially: the numbers are the same.

The data are the 1,797 images that come with scikit-learn, scaled from 8x8 to 32x32. Worker 0 reads them.

     worker 0         all workers, 2x2 over space            workers 0, 1       all workers, 2x2 over weights
    +--------+         +----+----+                            +----+----+            +----+----+
    | images |  --->   |conv|conv|  ---> pool ---> ... --->   |features |  --->      | linear  |  --->  loss
    +--------+         +----+----+                            +----+----+            +----+----+
             Repartition    |conv|conv|            Repartition                       x 3

Run it alone (four threads), or: mpirun -n 4 python lenet_digits.py, or: torchrun --nproc-per-node 4 lenet_digits.py

With --compile, the distributed step is recorded, and then replayed without Python between torch's operators.
"""

import sys
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from tqdm import tqdm

import distdl
from distdl.nn import (
    DistributedConv2d,
    DistributedCrossEntropyLoss,
    DistributedLinear,
    DistributedMaxPool2d,
    Repartition,
)
from distdl.nn.placement import parameter_layouts
from distdl.utilities.torch import zero_volume_tensor

EPOCHS = 4
BATCH = 32
TEST_IMAGES = 360
LEAST_ACCURACY = 0.96


def sequential_lenet():
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.MaxPool2d(2, 2),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.MaxPool2d(2, 2),
        nn.Flatten(),
        nn.Linear(400, 120), nn.Tanh(),
        nn.Linear(120, 84), nn.Tanh(),
        nn.Linear(84, 10),
    ).double()  # fmt: skip


def distributed_lenet(P):
    """The same network. Its input lies on worker 0; its output, the scores of the classes, on workers 0 and 1."""
    root = P[:1].reshape(1, 1, 1, 1)
    space = P.reshape(1, 1, 2, 2)
    channels = P[:2].reshape(1, 2, 1, 1)
    features, weights = P[:2].reshape(1, 2), P.reshape(2, 2)
    return nn.Sequential(
        Repartition(root, space),
        DistributedConv2d(space, in_channels=1, out_channels=6, kernel_size=5), nn.Tanh(),
        DistributedMaxPool2d(space, kernel_size=2, stride=2),
        DistributedConv2d(space, in_channels=6, out_channels=16, kernel_size=5), nn.Tanh(),
        DistributedMaxPool2d(space, kernel_size=2, stride=2),
        Repartition(space, channels),
        nn.Flatten(),  # half of the channels is half of the features
        DistributedLinear(features, features, weights, 400, 120), nn.Tanh(),
        DistributedLinear(features, features, weights, 120, 84), nn.Tanh(),
        DistributedLinear(features, features, weights, 84, 10),
    ).double()  # fmt: skip


def read_digits():
    """Images in [0, 1] and classes: those for training, and those for testing."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).unsqueeze(1) / 16
    images = nn.functional.interpolate(images, size=(32, 32), mode="bilinear")
    classes = torch.from_numpy(digits.target)
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    train, test = order[TEST_IMAGES:], order[:TEST_IMAGES]
    return (images[train], classes[train]), (images[test], classes[test])


def batches(count, epoch):
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1 + epoch))
    return order.split(BATCH)


def main(compiles=False):
    P = distdl.world()
    reads = P.rank == 0  # worker 0 also trains the sequential network
    (images, classes), test = read_digits() if reads else ((None, None), (None, None))
    count = P.broadcast_data(len(classes) if reads else None)

    network = distributed_lenet(P)
    criterion = DistributedCrossEntropyLoss(P[:2].reshape(1, 2))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    step = gradients_of(network, criterion)
    if compiles:
        step = distdl.compile(step)
    if reads:
        torch.manual_seed(0)
        sequential = sequential_lenet()
        sequential_step = gradients_of(sequential, nn.CrossEntropyLoss())
        sequential_optimiser = torch.optim.SGD(sequential.parameters(), lr=0.05, momentum=0.9)
    for name, layout, whole in sequential_parameters(P, network, sequential if reads else None):
        network.get_parameter(name).data = layout.block(whole).clone()

    for epoch in range(EPOCHS):
        losses = torch.zeros(2).double()
        for batch in tqdm(batches(count, epoch), f"epoch {epoch + 1}", leave=False, disable=None if reads else True):
            x = images[batch] if reads else zero_volume_tensor(len(batch), dtype=torch.float64)
            loss = train(step, optimiser, x, classes[batch] if reads else None)
            if reads:
                theirs = train(sequential_step, sequential_optimiser, x, classes[batch])
                losses += torch.stack([loss, theirs]) * len(batch) / count
        if reads:
            ours, theirs = losses.tolist()
            print(f"epoch {epoch + 1}: loss {ours:.12f}, sequential {theirs:.12f}, difference {abs(ours - theirs):.1e}")

    accuracy = evaluate(P, network, *test)
    difference = largest_difference(P, network, sequential if reads else None)
    if reads:
        print(f"accuracy on {TEST_IMAGES} test images: {accuracy:.2%}")
        print(f"largest difference of any weight from the sequential network: {difference:.1e}")
    if accuracy < LEAST_ACCURACY or difference > 1e-8:
        raise SystemExit(f"the network is not what it should be: at least {LEAST_ACCURACY:.0%}, and at most 1e-8 apart")


def gradients_of(network, criterion):
    """A function that computes the loss, and adds its gradients to those of the weights."""

    def step(x, target):
        loss = criterion(network(x), target)
        loss.backward()
        return loss.detach()

    return step


def train(step, optimiser, x, target):
    """One step of the optimiser; returns the loss before it."""
    optimiser.zero_grad()
    loss = step(x, target)
    optimiser.step()
    return loss


def sequential_parameters(P, network, sequential):
    """For each parameter: its name, where its blocks live, and worker 0's whole tensor of the sequential network."""
    values = [parameter.detach() for parameter in sequential.parameters()] if sequential is not None else None
    for number, (name, layout) in enumerate(parameter_layouts(network).items()):
        yield name, layout, P.broadcast_data(values[number] if values is not None else None)


def largest_difference(P, network, sequential):
    """The largest difference of any weight from the sequential network's, on every worker."""
    largest = 0.0
    for name, layout, whole in sequential_parameters(P, network, sequential):
        gap = network.get_parameter(name).detach() - layout.block(whole)
        largest = max(largest, gap.abs().max().item() if gap.numel() else 0.0)
    return P.allreduce_data(largest, op="max")


def evaluate(P, network, images, classes):
    """The share of images that the network classifies rightly, on every worker."""
    gather = Repartition(P[:2].reshape(1, 2), P[:1].reshape(1, 1))
    with torch.no_grad():
        x = images if P.rank == 0 else zero_volume_tensor(TEST_IMAGES, dtype=torch.float64)
        scores = gather(network(x))
    return P.broadcast_data((scores.argmax(dim=1) == classes).double().mean().item() if P.rank == 0 else None)


if __name__ == "__main__":
    distdl.run_workers(partial(main, "--compile" in sys.argv[1:]))
