"""What one worker plans and sends in a 3-d U-Net, from 8 to 131,072 workers: python benchmarks/scaling.py

No worker runs: plans are pure, so the real plans of one worker can be made on any machine. The block per worker stays
the same (weak scaling). The assumptions about network and work stand at the top.
"""

import time
from math import ceil, log2, prod

import numpy as np

from distdl.agreement.rows import Marginal
from distdl.geometry.boxes import balanced, volume
from distdl.geometry.windows import sliding
from distdl.partition import Partition
from distdl.partition.layout import Layout, Lookup
from distdl.plan.planners import broadcast, copy
from distdl.testing import Silent

LATENCY = 2e-6  # seconds for a message
BANDWIDTH = 12.5e9  # bytes per second that a worker sends
BLOCK = 64  # cells along each dim of a worker's block, at the finest level
CHANNELS = (16, 32, 64, 128)  # from the finest level to the coarsest
ELEMENT = 4  # bytes
GRIDS = [(2, 2, 2), (4, 4, 4), (8, 8, 8), (16, 16, 8), (32, 32, 16), (64, 64, 32)]


def halo_plan(P, me, extents, channels):
    """The plan of a 3x3x3 convolution with padding 1, batch 1."""
    grid = P.workers.shape[2:]
    space = [balanced(extent, n) for extent, n in zip(extents, grid, strict=True)]
    owned = Layout.of(P, [[(0, 1)], [(0, channels)], *space])
    windows = [[sliding(run, 3, padding=1) for run in runs] for runs in space]
    return copy(owned, Layout.of(P, [[(0, 1)], [(0, channels)], *windows]), me)


def sent(plan, me):
    sends = [move for move in plan.moves if move.source == me and move.target != me]
    return len(sends), ELEMENT * sum(volume(move.src) for move in sends)


def unet(P, me, grid):
    """Messages and bytes of one worker for the halos of a step, and bytes of all weights.

    Per level: two convolutions on the way down and two on the way up. Pooling by 2 and upsampling by 2 of even blocks
    need no message.
    """
    messages = nbytes = weights = 0
    for level, channels in enumerate(CHANNELS):
        extents = [n * BLOCK // 2**level for n in grid]
        before = CHANNELS[max(level - 1, 0)] if level else 1
        for inputs in (before, channels, 2 * channels, channels):
            plan = halo_plan(P, me, extents, inputs)
            for one in (plan, plan.T):
                count, size = sent(one, me)
                messages, nbytes = messages + count, nbytes + size
            weights += ELEMENT * (27 * inputs * channels + channels)
    return messages, nbytes, weights


def fastest(make, times=7):
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        make()
        found.append(time.perf_counter() - begin)
    return min(found)


def main():
    layers = 4 * len(CHANNELS)
    print(f"latency {LATENCY * 1e6:g} us, {BANDWIDTH / 1e9:g} GB/s, {BLOCK}^3 cells per worker, channels {CHANNELS}\n")
    print("| workers | halo messages | halo MiB | weights MiB | agreements, us | halos, ms | weights, ms | plan, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for grid in GRIDS:
        size = prod(grid)
        me = int(np.ravel_multi_index([n // 2 for n in grid], grid))
        P = Partition(Silent(me, size)).reshape(1, 1, *grid)
        messages, nbytes, weights = unet(P, me, grid)
        rounds = ceil(log2(size))
        agreement = layers * 2 * rounds * LATENCY
        halos = messages * LATENCY + nbytes / BANDWIDTH
        # a broadcast forward, a sum backward, each in parts as large collectives are: twice the bytes
        shared = layers * 2 * rounds * LATENCY + 2 * 2 * weights / BANDWIDTH
        extents = [n * BLOCK for n in grid]
        plan = fastest(lambda P=P, me=me, extents=extents: schedules(halo_plan(P, me, extents, 16), me))
        print(
            f"| {size:,} | {messages} | {nbytes / 2**20:.1f} | {weights / 2**20:.1f} | {agreement * 1e6:.0f} "
            f"| {halos * 1e3:.2f} | {shared * 1e3:.2f} | {plan * 1e3:.2f} |"
        )
    root_of_all(GRIDS[-1])
    from_the_cache(GRIDS)


def schedules(plan, me):
    return plan.schedule(me), plan.T.schedule(me)


def root_of_all(grid):
    P = Partition(Silent(0, prod(grid))).reshape(*grid)
    shapes = Lookup((), lambda worker: (4, 4))
    seconds = fastest(lambda: schedules(broadcast(P[:1, :1, :1], P, shapes, 0), 0))
    print(f"\nthe plan of a root that feeds all {P.size:,} workers: {seconds * 1e3:.2f} ms")


def from_the_cache(grids):
    """What it takes to find a plan again whose headers have been there before."""
    for grid in grids:
        P = Partition(Silent(0, prod(grid))).reshape(*grid)
        lines = [np.array([[0, 3, 64, 64, 64]] * n) for n in grid]
        headers = Marginal(P, lines, np.zeros(5, dtype=np.int64))
        plans = {headers.key: "a plan"}
        seconds = fastest(lambda headers=headers, plans=plans: plans[headers.key], 100)
        print(f"a plan from the cache, of {P.size:,} workers: {seconds * 1e6:.1f} us")


if __name__ == "__main__":
    main()
