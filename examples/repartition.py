"""Repartition: a 3x5 tensor that two workers hold by rows goes, in one hop, to four workers in a 2x2 grid.

        P_x: 2x1, uneven                 P_y: 2x2, as even as possible
     +---------------------+             +------------+--------+
     |  0   1   2   3   4  | worker 3    |  0   1   2 |  3   4 |  workers 0, 1
     +---------------------+             |  5   6   7 |  8   9 |
     |  5   6   7   8   9  | worker 1    +------------+--------+
     | 10  11  12  13  14  |             | 10  11  12 | 13  14 |  workers 2, 3
     +---------------------+             +------------+--------+

The adjoint goes the other way: every gradient comes home to the worker that has the cell.

Run it alone, or: mpirun -n 4 python repartition.py, or: torchrun --nproc-per-node 4 repartition.py
"""

import torch

import distdl
from distdl.nn import Repartition
from distdl.utilities.torch import zero_volume_tensor


def main():
    P = distdl.world()
    P_x = P.create_partition_inclusive([3, 1]).reshape(2, 1)
    P_y = P.reshape(2, 2)
    layer = Repartition(P_x, P_y)

    tensor = torch.arange(15.0).reshape(3, 5)
    x = zero_volume_tensor()
    if P_x.active:
        x = tensor[:1] if P.rank == 3 else tensor[1:]
    x = x.clone().requires_grad_()

    y = layer(x)
    y.backward(torch.full_like(y, float(P.rank)))
    P.print_sequential(f"worker {P.rank}: y = {y.tolist()}, gradient of x = {x.grad.tolist()}")


if __name__ == "__main__":
    distdl.run_workers(main)

# It prints:
# worker 0: y = [[0.0, 1.0, 2.0], [5.0, 6.0, 7.0]], gradient of x = []
# worker 1: y = [[3.0, 4.0], [8.0, 9.0]], gradient of x = [[0.0, 0.0, 0.0, 1.0, 1.0], [2.0, 2.0, 2.0, 3.0, 3.0]]
# worker 2: y = [[10.0, 11.0, 12.0]], gradient of x = []
# worker 3: y = [[13.0, 14.0]], gradient of x = [[0.0, 0.0, 0.0, 1.0, 1.0]]
