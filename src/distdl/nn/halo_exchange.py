"""HaloExchange: the margins of a tensor's blocks, filled from the neighbouring blocks."""

from typing import Any

import numpy as np
import torch

from distdl.agreement.header import Headers
from distdl.nn.layer import Layer
from distdl.nn.module import Option, check_buffer_manager
from distdl.nn.primitive import Movement
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import IntArray
from distdl.plan import Plan
from distdl.plan.planning import padded_halo


class HaloExchange(Layer):
    r"""Fill the halo of each worker's block with the cells of the global tensor that lie there.

    Forward: :math:`y[\text{bulk}] = x[\text{bulk}]`, and y[halo] comes from the bulks of the workers that own those
    cells: in corners too, and from beyond the neighbour if the halo is wider than the neighbour's block. Cells outside
    the tensor are 0.
    Adjoint: the gradients of all copies of a cell add up in the bulk of its owner; the gradient of x's halo is 0.

    The tensor already has space for the halo. What lies there is ignored, and x is not written.

    Args:
        P_x: the partition; its axis i splits tensor dim i.
        halo_shape: cells of halo before and after the bulk in each dim: ``(dim, 2)`` integers; None where inactive.
        recv_buffer_shape: how much of the halo is received, ``(dim, 2)``: all of it, except that at the border of the
            tensor it may be less.
        send_buffer_shape: how much the neighbours receive from here, ``(dim, 2)``: on each side, what the neighbour
            there gives as its ``recv_buffer_shape``.
        buffer_manager: checked for its type; not used.
    Shapes: x local, bulk and halo, as many dims as P_x has axes, in elements; y has that shape. Workers outside P_x
        return a clone of their input.
    Raises: in forward, the same ValueError on every member, if sizes disagree: a halo that is negative or larger than
        the tensor, a received size that is not that of the halo, or not what the neighbour sends, or bulks that form no
        grid.
    Source: Hewett & Grady, arXiv:2006.03108.
    """

    P_x = Option[Partition]()

    @checks_arguments
    def __init__(
        self,
        P_x: Partition,
        halo_shape: Any,
        recv_buffer_shape: Any,
        send_buffer_shape: Any,
        buffer_manager: Any = None,
    ) -> None:
        check_buffer_manager(buffer_manager)
        dim = P_x.workers.ndim

        def plan(headers: Headers, me: int) -> Plan:
            shapes = headers.shapes(P_x, "HaloExchange", dim)
            halo, receive, send = np.moveaxis(headers.extras(P_x).reshape(*P_x.workers.shape, 3, dim, 2), -3, 0)
            _check(P_x, halo, receive, send)
            return padded_halo(P_x, shapes, halo, me)

        movement = Movement(P_x, P_x, plan)
        super().__init__(movement.name("HaloExchange"), movement.everyone, movement, (), (P_x,))
        self.P_x = P_x
        given = (halo_shape, recv_buffer_shape, send_buffer_shape)
        sizes = [np.zeros((0, 2), dtype=int) if size is None else np.asarray(size) for size in given]
        fits = all(size.shape == (dim, 2) and np.issubdtype(size.dtype, np.integer) for size in sizes)
        # a wrong shape on one worker must be an error on all, so it is reported with the header, as -1
        self._sizes = tuple(int(n) for size in sizes for n in size.flat) if fits else (-1,) * (6 * dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        setup = self.agree(x, extra=self._sizes)
        y: torch.Tensor = setup.local(*setup.move_in(x))
        return y


def _check(P_x: Partition, halo: IntArray, receive: IntArray, send: IntArray) -> None:
    workers = P_x.workers
    negative = np.argwhere((halo < 0).any(axis=(-1, -2)))
    if len(negative):
        raise ValueError(
            f"HaloExchange needs halo, receive and send sizes of shape {workers.ndim} x 2, none of them negative; "
            f"those of worker {workers[tuple(negative[0])]} are not"
        )
    for axis in range(workers.ndim):
        names = np.moveaxis(workers, axis, 0)
        for side, here, there in ((0, slice(1, None), slice(0, -1)), (1, slice(0, -1), slice(1, None))):
            width = np.moveaxis(halo[..., axis, side], axis, 0)[here]
            wanted = np.moveaxis(receive[..., axis, side], axis, 0)[here]
            offered = np.moveaxis(send[..., axis, 1 - side], axis, 0)[there]
            for at in map(tuple, np.argwhere((wanted != offered) | (wanted != width))):
                raise ValueError(
                    f"HaloExchange needs sizes that agree; in dim {axis} worker {names[here][at]} has a halo of "
                    f"{width[at]} cells and receives {wanted[at]} from worker {names[there][at]}, which sends "
                    f"{offered[at]}"
                )
