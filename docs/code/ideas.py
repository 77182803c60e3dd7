"""The six ideas, one after the other, on small tensors. Lines that begin with '#:' show what is printed."""

import torch

import distdl
from distdl.geometry import runs
from distdl.nn import Repartition
from distdl.partition.layout import Layout
from distdl.plan import Move
from distdl.plan.planners import broadcast, copy
from distdl.testing import Counting


def main():
    P = distdl.world()
    talk = print if P.rank == 0 else lambda *values: None

    # [moves]
    move = Move(source=1, src=((0, 2),), target=4, dst=((3, 5),))
    talk(move)
    #: 1[0:2] -> 4[3:5]
    talk(move.T)
    #: 4[3:5] -> 1[0:2]

    # [plans]
    line = P[:2].reshape(2)
    owned = Layout.of(line, [runs([1, 2])])  # worker 0 has cell 0, worker 1 has cells 1 and 2
    needed = Layout.balanced(line, (3,))  # worker 0 needs cells 0 and 1, worker 1 needs cell 2
    plan = copy(owned, needed)
    talk(plan)
    #: moves of {0: [1], 1: [2]} to {0: [2], 1: [1]}
    #:   0[0:1] -> 0[0:1]
    #:   1[0:1] -> 0[1:2]
    #:   1[1:2] -> 1[0:1]
    talk(plan.T)
    #: moves of {0: [2], 1: [1]} to {0: [1], 1: [2]}
    #:   0[0:1] -> 0[0:1]
    #:   0[1:2] -> 1[0:1]
    #:   1[0:1] -> 1[1:2]
    talk((plan.T.matrix() == plan.matrix().T).all())
    #: True

    # [windows]
    windows = Layout.of(line, [[(-1, 3), (1, 4)]])  # what two outputs each read with a kernel of 3 and padding 1
    plan = copy(owned, windows)
    talk(plan)
    #: moves of {0: [1], 1: [2]} to {0: [4], 1: [3]}
    #:   0[0:1] -> 0[1:2]
    #:   1[0:2] -> 0[2:4]
    #:   1[0:2] -> 1[0:2]
    talk(plan.matrix().T.tolist())
    #: [[0, 1, 0, 0, 0, 0, 0], [0, 0, 1, 0, 1, 0, 0], [0, 0, 0, 1, 0, 1, 0]]

    # [patterns]
    plan = broadcast(P[:1].reshape(1, 1), P.reshape(2, 2), {0: (5,)})
    talk(plan)
    #: broadcast of {0: [5]} to {0: [5], 1: [5], 2: [5], 3: [5]}
    #:   0: 0, 1, 2, 3
    talk(list(plan.all_moves())[:2])
    #: [0[0:5] -> 0[0:5], 0[0:5] -> 1[0:5]]
    talk(plan.T)
    #: sum of {0: [5], 1: [5], 2: [5], 3: [5]} to {0: [5]}
    #:   0: 0, 1, 2, 3

    # [partitions]
    P_w = P.reshape(2, 2)
    talk(P_w[:, :1])
    #: 2x1 on workers 0, 2
    talk(P_w[1])
    #: 1x2 on workers 2, 3
    talk(P_w.T.workers.tolist())
    #: [[0, 2], [1, 3]]
    talk(P_w[1] | P_w[:, :1])
    #: 3 on workers 2, 3, 0
    talk(P_w[:1] == P[:2].reshape(1, 2), P_w[:1] == P[:2])
    #: True False

    # [exchange]
    after, before = (P.rank + 1) % P.size, (P.rank - 1) % P.size
    buffer = torch.empty(2)
    P.comm.exchange([(after, torch.full((2,), float(P.rank)))], [(before, buffer)]).wait()
    talk(buffer)
    #: tensor([3., 3.])

    # [call]
    counted = distdl.Partition(Counting(P.comm))
    layer = Repartition(counted.reshape(4, 1), counted.reshape(1, 4))
    x = torch.ones(1, 4, requires_grad=True)
    names = [[], [], []]
    for call in range(2):
        layer(x).sum().backward()
        names[call] = [name for name, workers in counted.comm.log]
        counted.comm.reset()
    with distdl.fixed_shapes():
        layer(x).sum().backward()
    names[2] = [name for name, workers in counted.comm.log]
    talk(names[0])
    #: ['all_max', 'all_gather', 'exchange', 'exchange']
    talk(names[1])
    #: ['all_max', 'exchange', 'exchange']
    talk(names[2])
    #: ['exchange', 'exchange']


if __name__ == "__main__":
    distdl.run_workers(main)
