"""SumReduce: the blocks of a 2x2 grid add up along the columns, into a row of two.

          P_x: 2x2                    P_y: 1x2
      worker 0  worker 1         worker 2  worker 3
     +--------+--------+        +--------+--------+
     | 1    1 | 2    2 |        | 4    4 | 6    6 |
     +--------+--------+  --->  +--------+--------+
     | 3    3 | 4    4 |
     +--------+--------+
      worker 2  worker 3

The adjoint copies: the gradient of worker 2's sum goes to workers 0 and 2.

Run it alone, or: mpirun -n 4 python sum_reduce.py, or: torchrun --nproc-per-node 4 sum_reduce.py
"""

import torch

import distdl
from distdl.nn import SumReduce


def main():
    P = distdl.world()
    P_x = P.reshape(2, 2)
    P_y = P.create_partition_inclusive([2, 3]).reshape(1, 2)
    layer = SumReduce(P_x, P_y)

    x = torch.full((1, 2), P.rank + 1.0, requires_grad=True)
    y = layer(x)
    y.backward(torch.full_like(y, 10.0 * P.rank))
    P.print_sequential(f"worker {P.rank}: y = {y.tolist()}, gradient of x = {x.grad.tolist()}")


if __name__ == "__main__":
    distdl.run_workers(main)

# It prints:
# worker 0: y = [[]], gradient of x = [[20.0, 20.0]]
# worker 1: y = [[]], gradient of x = [[30.0, 30.0]]
# worker 2: y = [[4.0, 4.0]], gradient of x = [[20.0, 20.0]]
# worker 3: y = [[6.0, 6.0]], gradient of x = [[30.0, 30.0]]
