"""Roll: a primitive of your own. The tensor moves along one dim; cells that leave at the end come back at the start.

 worker 0     worker 1    worker 2            worker 0     worker 1    worker 2
[0  1  2]     [3  4]       [5  6]    --->    [5  6  0]     [1  2]       [3  4]        by = 2
"""

import torch

import distdl
from distdl.agreement import Headers
from distdl.nn.layer import Layer
from distdl.nn.primitive import Movement
from distdl.partition import Layout, Partition
from distdl.plan import Plan
from distdl.plan.planners import copy


# [planner]
def roll(owned: Layout, dim: int, by: int, me: int | None = None) -> Plan:
    r"""Plan the cyclic shift of a tensor along one dim.

    Forward: :math:`y[c] = x[(c - by) \bmod n]`, where n is the extent of the dim.   Adjoint: the shift by -by.

    Args:
        owned: a tiling of the tensor; y is split in the same way.
        by: cells by which the tensor moves towards higher indices; any integer.
    """
    extent = owned.extents[dim]
    back = by % extent if extent else 0
    # y's cells lie at c - back in x; those with c < back lie there once one period is added
    plans = [copy(owned, _moved(owned, dim, offset - back), me) for offset in (0, extent)]
    return Plan(plans[0].inputs, plans[0].outputs, plans[0].moves + plans[1].moves)


def _moved(owned: Layout, dim: int, offset: int) -> Layout:
    intervals = list(owned.intervals)
    intervals[dim] = tuple((start + offset, stop + offset) for start, stop in intervals[dim])
    return Layout.of(owned.partition, intervals)


# [primitive]
class Roll(Layer):
    r"""Shift a tensor cyclically along one dim.

    Forward: :math:`y[c] = x[(c - by) \bmod n]`.   Adjoint: the shift by -by.

    Args:
        P_x: the partition; its axis i splits tensor dim i.
        dim: the dim along which the tensor moves.
        by: cells by which it moves towards higher indices; any integer.
    Shapes: x local, as many dims as P_x has axes, in elements, any split that is a grid; y has that shape. Workers
        outside P_x return a clone of their input.
    Raises: ValueError, on every worker, for a dim that does not exist; in forward, on every member, if a tensor's rank
        is not the number of axes of P_x, the blocks form no grid, or dtypes differ.
    """

    def __init__(self, P_x: Partition, dim: int, by: int) -> None:
        if not 0 <= dim < P_x.workers.ndim:
            raise ValueError(f"Roll needs a dim from 0 to {P_x.workers.ndim - 1}; got {dim} (P_x: {P_x})")

        def plan(headers: Headers, me: int) -> Plan:
            return roll(Layout.tiled(P_x, headers.shapes(P_x, "Roll", P_x.workers.ndim)), dim, by, me)

        movement = Movement(P_x, P_x, plan)
        super().__init__(movement.name("Roll"), movement.everyone, movement, (dim, by))
        self.P_x, self.dim, self.by = P_x, dim, by


# [use]
def main():
    P = distdl.world().reshape(3)
    x = Layout.balanced(P, (7,)).block(torch.arange(7.0)).clone().requires_grad_()
    y = Roll(P, dim=0, by=2)(x)
    y.backward(10 * y.detach())  # the adjoint brings every cell home
    P.print_sequential(f"worker {P.rank}: y = {y.int().tolist()}, gradient of x = {x.grad.int().tolist()}")
    #: worker 0: y = [5, 6, 0], gradient of x = [0, 10, 20]
    #: worker 1: y = [1, 2], gradient of x = [30, 40]
    #: worker 2: y = [3, 4], gradient of x = [50, 60]


if __name__ == "__main__":
    distdl.run_workers(main, workers=3)
