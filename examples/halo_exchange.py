"""HaloExchange: each block of a 4x4 tensor over a 2x2 grid is completed by the cells around it, corners included.

     the tensor, 2x2 to a worker        what worker 0 has before and after (. is room for the halo)

     |  1   2 |  3   4 |                  1   2   .           1   2   3
     |  5   6 |  7   8 |                  5   6   .   --->    5   6   7
     +--------+--------+                  .   .   .           9  10  11
     |  9  10 | 11  12 |
     | 13  14 | 15  16 |

The adjoint adds the gradients of all copies of a cell on the worker that owns it: cell 6 is on all four workers.

Run it alone, or: mpirun -n 4 python halo_exchange.py, or: torchrun --nproc-per-node 4 halo_exchange.py
"""

import numpy as np
import torch

import distdl
from distdl.nn import HaloExchange
from distdl.utilities.torch import distdl_padding_to_torch_padding


def main():
    P = distdl.world().reshape(2, 2)
    row, column = P.index
    # one cell of halo on the sides where there is a neighbour; each receives as much as it sends
    halo = np.array([[row, 1 - row], [column, 1 - column]])
    layer = HaloExchange(P, halo_shape=halo, recv_buffer_shape=halo, send_buffer_shape=halo)

    tensor = torch.arange(1.0, 17.0).reshape(4, 4)
    bulk = tensor[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
    x = torch.nn.functional.pad(bulk, distdl_padding_to_torch_padding(halo), value=-1.0).requires_grad_()

    y = layer(x)
    y.sum().backward()
    P.print_sequential(f"worker {P.rank}: y = {y.int().tolist()}, gradient of x = {x.grad.int().tolist()}")


if __name__ == "__main__":
    distdl.run_workers(main)

# It prints:
# worker 0: y = [[1, 2, 3], [5, 6, 7], [9, 10, 11]], gradient of x = [[1, 2, 0], [2, 4, 0], [0, 0, 0]]
# worker 1: y = [[2, 3, 4], [6, 7, 8], [10, 11, 12]], gradient of x = [[0, 2, 1], [0, 4, 2], [0, 0, 0]]
# worker 2: y = [[5, 6, 7], [9, 10, 11], [13, 14, 15]], gradient of x = [[0, 0, 0], [2, 4, 0], [1, 2, 0]]
# worker 3: y = [[6, 7, 8], [10, 11, 12], [14, 15, 16]], gradient of x = [[0, 0, 0], [0, 4, 2], [0, 2, 1]]
