"""Broadcast: a row of two blocks is copied down the columns of a 2x2 grid.

          P_x: 1x2                    P_y: 2x2
      worker 2  worker 3         worker 0  worker 1
     +--------+--------+        +--------+--------+
     | 10  11 | 20  21 |  --->  | 10  11 | 20  21 |
     +--------+--------+        +--------+--------+
                                | 10  11 | 20  21 |
                                +--------+--------+
                                 worker 2  worker 3

The adjoint adds up: what comes back to worker 2 is the sum of the gradients of workers 0 and 2.

Run it alone, or: mpirun -n 4 python broadcast.py, or: torchrun --nproc-per-node 4 broadcast.py
"""

import torch

import distdl
from distdl.nn import Broadcast
from distdl.utilities.torch import zero_volume_tensor


def main():
    P = distdl.world()
    P_x = P.create_partition_inclusive([2, 3]).reshape(1, 2)
    P_y = P.reshape(2, 2)
    layer = Broadcast(P_x, P_y)

    x = zero_volume_tensor()
    if P_x.active:
        start = {2: 10.0, 3: 20.0}[P.rank]
        x = torch.tensor([[start, start + 1]])
    x.requires_grad_()

    y = layer(x)
    y.backward(torch.full_like(y, float(P.rank + 1)))
    P.print_sequential(f"worker {P.rank}: y = {y.tolist()}, gradient of x = {x.grad.tolist()}")


if __name__ == "__main__":
    distdl.run_workers(main)

# It prints:
# worker 0: y = [[10.0, 11.0]], gradient of x = []
# worker 1: y = [[20.0, 21.0]], gradient of x = []
# worker 2: y = [[10.0, 11.0]], gradient of x = [[4.0, 4.0]]
# worker 3: y = [[20.0, 21.0]], gradient of x = [[6.0, 6.0]]
