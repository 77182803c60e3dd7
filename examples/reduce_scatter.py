"""ReduceScatter: the tensors of a row of four workers add up, and each keeps a block of the sum, of a size of its own.

     worker 0   [  1   1   1   1   1 ]
     worker 1   [  2   2   2   2   2 ]            worker 0   worker 1   worker 2   worker 3
     worker 2   [  3   3   3   3   3 ]   --->     [10  10]     [10]     [10  10]      [ ]
     worker 3   [  4   4   4   4   4 ]

The adjoint is an AllGather: every worker gets the gradients of all blocks, side by side.

Run it alone, or: mpirun -n 4 python reduce_scatter.py, or: torchrun --nproc-per-node 4 reduce_scatter.py
"""

import torch

import distdl
from distdl.nn import ReduceScatter


def main():
    P = distdl.world().reshape(4)
    layer = ReduceScatter(P, axes=[0], sizes={0: [2, 1, 2, 0]})

    x = torch.full((5,), P.rank + 1.0, requires_grad=True)
    y = layer(x)
    y.backward(torch.full_like(y, float(P.rank)))
    P.print_sequential(f"worker {P.rank}: y = {y.tolist()}, gradient of x = {x.grad.tolist()}")


if __name__ == "__main__":
    distdl.run_workers(main)

# It prints:
# worker 0: y = [10.0, 10.0], gradient of x = [0.0, 0.0, 1.0, 2.0, 2.0]
# worker 1: y = [10.0], gradient of x = [0.0, 0.0, 1.0, 2.0, 2.0]
# worker 2: y = [10.0, 10.0], gradient of x = [0.0, 0.0, 1.0, 2.0, 2.0]
# worker 3: y = [], gradient of x = [0.0, 0.0, 1.0, 2.0, 2.0]
