"""AllSumReduce: the blocks of a 2x2 grid add up along the rows, and every worker of a row has the sum.

       before              after
     +---+---+           +---+---+
     | 1 | 2 |  worker   | 3 | 3 |
     +---+---+   0 1     +---+---+
     | 3 | 4 |   2 3     | 7 | 7 |
     +---+---+           +---+---+

It is its own adjoint: the gradients of a row add up in the same way.

Run it alone, or: mpirun -n 4 python all_sum_reduce.py, or: torchrun --nproc-per-node 4 all_sum_reduce.py
"""

import torch

import distdl
from distdl.nn import AllSumReduce


def main():
    P = distdl.world()
    layer = AllSumReduce(P.reshape(2, 2), axes_reduce=[1])

    x = torch.tensor([P.rank + 1.0], requires_grad=True)
    y = layer(x)
    y.backward(torch.tensor([10.0 * P.rank]))
    P.print_sequential(f"worker {P.rank}: y = {y.tolist()}, gradient of x = {x.grad.tolist()}")


if __name__ == "__main__":
    distdl.run_workers(main)

# It prints:
# worker 0: y = [3.0], gradient of x = [10.0]
# worker 1: y = [3.0], gradient of x = [10.0]
# worker 2: y = [7.0], gradient of x = [50.0]
# worker 3: y = [7.0], gradient of x = [50.0]
