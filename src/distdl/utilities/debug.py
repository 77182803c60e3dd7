"""Published helper for looking at values on all workers."""

from typing import Any

from distdl.partition import Partition


def print_sequential(comm: Any, val: Any) -> None:
    """Print everyone's value on rank 0, in the order of ranks. Collective.

    Args:
        comm: a partition, or an mpi4py communicator.
    """
    if isinstance(comm, Partition):
        return comm.print_sequential(val)
    if not hasattr(comm, "gather"):
        raise TypeError(f"print_sequential needs a partition or an mpi4py communicator; got a {type(comm).__name__}")
    texts = comm.gather(str(val), root=0)
    if comm.Get_rank() == 0:
        print("\n".join(texts), flush=True)
