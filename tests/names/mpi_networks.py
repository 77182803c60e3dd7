"""Networks as existing users write them, trained beside the sequential network, under MPI."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import lenet
import torch
import vgg
from mpi4py import MPI

from distdl.backends.mpi.partition import MPIPartition
from distdl.nn.placement import parameter_layouts
from distdl.utilities.torch import zero_volume_tensor

STEPS = 3
PAGE = Path(__file__).parents[2] / "docs" / "coming-from" / "distdl.md"


def agree(ours, theirs):
    """Whether two float64 tensors are equal to 1e-10, relative to the largest element."""
    return not theirs.numel() or (ours - theirs).abs().max() <= 1e-10 * theirs.abs().max()


def placed(network, reference):
    """For each parameter that this worker stores: ours, and the block of the sequential one that it should be."""
    ours = dict(network.named_parameters())
    for (name, layout), whole in zip(parameter_layouts(network).items(), reference.parameters(), strict=True):
        if layout.partition.active:
            yield ours[name], layout.block(whole.detach().reshape(layout.extents))


def trains_like_sequential(model):
    """Three steps of both networks, with the same weights, images and classes: equal losses and weights, and scores.

    Returns: the names of the distributed network's modules.
    """
    P_world = MPIPartition(MPI.COMM_WORLD)
    torch.manual_seed(0)
    reference = model.sequential().double()
    network, criterion, P_out = model.distributed(P_world)
    network = network.double()
    for ours, theirs in placed(network, reference):
        ours.data = theirs.clone()
    optimisers = [torch.optim.SGD(n.parameters(), lr=0.05, momentum=0.9) for n in (reference, network)]
    losses = []
    for _ in range(STEPS):
        images = torch.randn(model.SHAPE, dtype=torch.float64)
        classes = torch.randint(model.CLASSES, model.SHAPE[:1])
        for optimiser in optimisers:
            optimiser.zero_grad()
        expected = torch.nn.functional.cross_entropy(reference(images), classes)
        expected.backward()
        x = images if P_world.rank == 0 else zero_volume_tensor(model.SHAPE[0])
        loss = criterion(network(x), classes)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        losses.append(expected.item())
        assert P_world.rank != 0 or agree(loss, expected), (loss, expected)
        for ours, theirs in placed(network, reference):
            assert agree(ours.detach(), theirs)
    assert len(set(losses)) == STEPS
    with torch.no_grad():
        scores, expected = network.eval()(x), reference.eval()(images)
    if P_out.active:
        width = scores.shape[1]
        assert agree(scores, expected[:, P_out.index[1] * width :][:, :width])
    for partition in (P_world, P_out):
        partition.deactivate()
    return {type(layer).__name__ for layer in network.modules()}


def check_lenet_trains_like_the_sequential_network():
    trains_like_sequential(lenet)


def check_a_vgg_trains_like_the_sequential_network():
    kinds = trains_like_sequential(vgg)
    assert {f"Distributed{kind}Conv2d" for kind in ("Feature", "Channel", "General")} <= kinds


def check_the_example_of_the_docs():
    code, printed = re.findall(r"```(?:python|text)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with redirect_stdout(StringIO()) as text:
        exec(compile(code, str(PAGE), "exec"), {"__name__": "__main__"})
    assert text.getvalue() == (printed if MPI.COMM_WORLD.rank == 0 else "")
