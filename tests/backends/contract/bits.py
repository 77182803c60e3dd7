"""What a training leaves on each worker, as a digest of its bits: by primitives, by modules, by global tensors.

A worker may come late to each exchange, so that messages arrive in another order in each run.
"""

from __future__ import annotations

import functools
import random
import threading
import time
import zlib
from collections import Counter
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn

import distdl
from distdl.transport.communicator import Pending
from distdl.transport.recording import Recording

COUNTS = (100, 30_000)  # of floats: of the small sum each worker adds up all, of the large one a part
# what worker 0 gets of sums over so many workers: found once, and the same wherever additions are those of IEEE 754
SUMS = {2: 3643689245, 3: 3130550138, 4: 2134181674}


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_noise(module):
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = noise(*parameter.shape, seed=seed) / 4
    return module


@contextmanager
def late(seed, arrived=None):
    """Let this worker come late to each exchange, by up to half a millisecond, drawn from a seed.

    Args:
        arrived: a dict that the threads of a world share: then sums follow the order of arrival.
    """
    comm = distdl.world().comm
    chance = random.Random(1000 * seed + comm.rank)

    def begun(call):
        time.sleep(chance.random() / 2000)

    comm.recorder = Recording(comm, begun=begun) if arrived is None else ByArrival(comm, begun, arrived)
    try:
        yield
    finally:
        comm.recorder = None


class ByArrival(Recording):
    """A transport of threads that adds up what has come first, first: its sums depend on who comes when."""

    lock = threading.Lock()

    def __init__(self, inner, begun, arrived):
        super().__init__(inner, begun=begun)
        self.arrived, self.counts = arrived, Counter()

    def sum(self, group, x, y, tag=0):
        return self.all_sum(group, x, y)

    def all_sum(self, group, x, y, tag=0):
        self._begin("all_sum", group, 0)
        self.counts[group] += 1
        key = (group, self.counts[group])
        with self.lock:
            self.arrived.setdefault(key, []).extend([] if x is None else [x.clone()])
        self.inner.all_max(group, np.zeros(1, np.int64))  # all have come
        if y is not None:
            y.copy_(functools.reduce(torch.add, self.arrived[key]))
        return Pending()


def digest(tensors):
    blocks = [one.to_local() if isinstance(one, distdl.GlobalTensor) else one for one in tensors]
    return zlib.crc32(b"".join(one.detach().contiguous().numpy().tobytes() for one in blocks))


def sums(P):
    """Of primitives over a partition: small and large, to all and to one."""
    found = []
    for count in COUNTS:
        terms = (torch.arange(count) * 7919 + P.rank * 104729) % 10007
        terms = terms.float() / 7 if P.active else torch.zeros(0)
        found += [distdl.nn.AllSumReduce(P, (0,))(terms), distdl.nn.SumReduce(P, P[:1])(terms)]
    return found


def by_global_tensors(P, weights):
    """Losses, norms of gradients, weights and buffers of two steps. The gradients fill more than one small message."""
    grid = P.reshape(1, 1, P.workers.size, 1)
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(189, 60)]
    model = with_noise(nn.Sequential(*layers, nn.LayerNorm(60), nn.Linear(60, 7)))
    model = distdl.distribute(model, grid, weights=weights)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    x = distdl.distribute_tensor(noise(3, 2, 9, 7, seed=1), grid)
    found = []
    for _ in range(2):
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x), torch.tensor([2, 0, 6]))
        loss.backward()
        found += [loss, nn.utils.clip_grad_norm_(model.parameters(), 0.5)]
        optimiser.step()
    return [*found, *model.state_dict().values()]


def by_modules(P):
    """The same of layers of distdl.nn, whose weights lie on one worker, on all of them, and in blocks."""
    n = P.workers.size
    grid = P.reshape(1, 1, n, 1)
    conv = distdl.nn.DistributedConv2d(grid, in_channels=2, out_channels=3, kernel_size=3, padding=1)
    norm = distdl.nn.DistributedBatchNorm(grid, 3)
    linear = distdl.nn.DistributedLinear(P[:1].reshape(1, 1), P.reshape(1, n), P.reshape(n, 1), 14, 10)
    network = with_noise(nn.ModuleList([conv, norm, linear]))
    loss = distdl.nn.DistributedMSELoss(grid)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
    x = noise(3, 2, 5, 7, seed=P.rank) if P.active else torch.zeros(3, 0)
    row = noise(6, 14, seed=2) if P[:1].active else torch.zeros(6, 0)
    found = []
    for _ in range(2):
        optimiser.zero_grad()
        y = norm(conv(x))
        first, second = loss(y, torch.zeros_like(y)), linear(row).square().sum()
        (first + second).backward()
        found += [first, second, distdl.nn.utils.clip_grad_norm_(network, 0.5)]
        optimiser.step()
    return [*found, *network.state_dict().values()]


def bits(workers):
    """A digest for each way, of a training by the first workers of the world, by sums in their order."""
    P = distdl.world()[:workers]
    with distdl.reproducible():
        return [
            digest(sums(P)),
            digest(by_modules(P)),
            digest(by_global_tensors(P, "replicated")),
            digest(by_global_tensors(P, "sharded")),
        ]
