"""AllGather: the blocks of each row of a 2x2 grid come together on every worker of the row; they may be unequal.

          before                       after
     +-----------+-------+        +-----------+-----------+
     | 0   1   2 | 3   4 |        | 0 1 2 3 4 | 0 1 2 3 4 |  workers 0, 1
     +-----------+-------+  --->  +-----------+-----------+
     | 5   6   7 | 8   9 |        | 5 6 7 8 9 | 5 6 7 8 9 |  workers 2, 3
     +-----------+-------+        +-----------+-----------+

The adjoint is a ReduceScatter: each worker gets the sum of the gradients of its block.

Run it alone, or: mpirun -n 4 python all_gather.py, or: torchrun --nproc-per-node 4 all_gather.py
"""

import torch

import distdl
from distdl.nn import AllGather


def main():
    P = distdl.world().reshape(2, 2)
    row, column = P.index
    layer = AllGather(P, axes=[1])

    tensor = torch.arange(10.0).reshape(2, 5)
    x = tensor[row : row + 1, slice(0, 3) if column == 0 else slice(3, 5)].clone().requires_grad_()

    y = layer(x)
    y.backward(torch.full_like(y, 10.0 ** int(column)))
    P.print_sequential(f"worker {P.rank}: y = {y.tolist()}, gradient of x = {x.grad.tolist()}")


if __name__ == "__main__":
    distdl.run_workers(main)

# It prints:
# worker 0: y = [[0.0, 1.0, 2.0, 3.0, 4.0]], gradient of x = [[11.0, 11.0, 11.0]]
# worker 1: y = [[0.0, 1.0, 2.0, 3.0, 4.0]], gradient of x = [[11.0, 11.0]]
# worker 2: y = [[5.0, 6.0, 7.0, 8.0, 9.0]], gradient of x = [[11.0, 11.0, 11.0]]
# worker 3: y = [[5.0, 6.0, 7.0, 8.0, 9.0]], gradient of x = [[11.0, 11.0]]
