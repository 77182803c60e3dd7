"""Layers leave nothing behind: no communicators, no descriptors, no memory."""

import copy
import gc
import os
import weakref

import torch

import distdl
from distdl.nn import AllSumReduce, Broadcast, DistributedConv2d, Repartition, SumReduce

PAGE = os.sysconf("SC_PAGE_SIZE")


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * PAGE


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_layers_that_are_dropped_leave_nothing():
    def main():
        P = distdl.world()
        x = torch.ones(2, 2)
        alive = weakref.WeakSet()
        for _ in range(500):
            layer = AllSumReduce(P.reshape(2), [0])
            layer(x)
            alive.add(layer)
        return alive, len(P.comm._calls)

    for alive, groups in distdl.run_workers(main, 2):
        gc.collect()  # here: while one thread collects, another's call returns at once
        assert len(alive) == 0 and groups == 1


def test_many_layers_use_as_many_counts_as_there_are_groups():
    def main():
        P = distdl.world()
        row, column = P.reshape(1, 4), P.reshape(4, 1)
        layers = [layer for _ in range(50) for layer in (Repartition(column, row), Repartition(row, column))]
        layers += [Broadcast(P[:1].reshape(1, 1), column), Repartition(column, row)]
        x = torch.ones(1, 4)
        for layer in layers[:-2]:
            x = layer(x)
        return len(P.comm._calls)

    assert distdl.run_workers(main, 4) == [1] * 4


def test_a_deep_copy_counts_its_calls_together_with_the_original():
    """Where a worker has no output, a forward without gradients moves as the double backward did; else anew."""

    def main():
        P = distdl.world()
        original = SumReduce(P, P[:1])

        def check(layer):
            x = torch.tensor([1.0 + P.rank], requires_grad=True)
            (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
            (ddx,) = torch.autograd.grad(dx.square().sum(), x)
            assert (dx.item(), ddx.item()) == (6.0, 48.0)  # y is the sum 3: 2y on both, and of (2y)^2 + (2y)^2, 16y
            with torch.no_grad():
                assert layer(x).tolist() == ([3.0] if P.rank == 0 else [[]])

        (dx,) = torch.autograd.grad(
            original(x := torch.ones(1, requires_grad=True)).square().sum(), x, create_graph=True
        )
        torch.autograd.grad(dx.square().sum(), x)
        copied = copy.deepcopy(original)
        with torch.no_grad():
            copied(x)
        for layer in (copied, original, copied):
            check(layer)
        assert len(P.comm._calls) == 1

    distdl.run_workers(main, 2)


def test_training_steps_leak_nothing():
    """Resident memory and descriptors stay where they are after the first steps."""

    def main():
        P = distdl.world()
        grid = P.reshape(1, 1, 2, 1)
        net = torch.nn.Sequential(
            DistributedConv2d(grid, in_channels=1, out_channels=4, kernel_size=3, padding=1),
            torch.nn.Tanh(),
            DistributedConv2d(grid, in_channels=4, out_channels=1, kernel_size=3, padding=1),
        )
        optimiser = torch.optim.SGD(net.parameters(), lr=1e-3)
        x = torch.ones(1, 1, 64, 128)

        def steps(count):
            for _ in range(count):
                optimiser.zero_grad()
                net(x).square().sum().backward()
                optimiser.step()

        found = []
        for count in (200, 800):
            steps(count)
            P.allreduce_data(0)
            found.append((resident(), descriptors()) if P.rank == 0 else (0, 0))  # looking opens a descriptor, too
            P.allreduce_data(0)
        return found

    (before, opened), (after, still_opened) = distdl.run_workers(main, 2)[0]
    assert after - before < 4 << 20 and still_opened == opened, (before, after, opened, still_opened)
