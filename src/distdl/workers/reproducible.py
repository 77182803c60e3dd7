"""Sums that have the same bits from run to run and on every back-end."""

from __future__ import annotations

from distdl.partition.arguments import checks_arguments
from distdl.transport.communicator import Communicator
from distdl.workers.worlds import world


class reproducible:
    """From here on, sums over workers are made in the order of the workers, whatever arrives first.

    On a given partition the results then have the same bits from run to run and on threads, gloo and MPI, as long as
    torch computes with as many threads in each worker (``torch.set_num_threads``). Another partition, or another number
    of workers, adds up other terms, and its results differ by rounding. Without it, sums over workers are those of the
    MPI library, which chooses its own order; on threads the same as with it, and on gloo the same from run to run. All
    workers get the same bits of a sum over all of them in either case. Every worker calls it. It costs a little where
    many workers add up::

        distdl.reproducible()           # from here to the end

        with distdl.reproducible():     # or in here only
            train()

    Args:
        comm: the communicator; by default that of :func:`distdl.world`.
    """

    @checks_arguments
    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm or world().comm
        self._before = self._comm.ordered
        self._comm.ordered = True

    def __enter__(self) -> reproducible:
        return self

    def __exit__(self, *error: object) -> None:
        self._comm.ordered = self._before
