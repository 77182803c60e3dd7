"""The torch.distributed back-end: gloo for CPU tensors, NCCL for CUDA tensors.

It makes process groups of its own, over a store of its own, so its messages never mix with those of the user's groups.
(``torch.distributed.new_group`` is not used: either it wants all workers of the world at every call, or it names a
group by how many groups this process has made, so that members that have made different numbers of groups never meet.)

A process that ends closes its sockets, and whoever waits for it gets an error at once. Other waits end at a deadline.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from distdl.backends import register
from distdl.backends.torch_distributed.communicator import TorchCommunicator
from distdl.transport.job import job, of_group

_over: MutableMapping[Any, TorchCommunicator] = WeakKeyDictionary()


def over(group: Any) -> TorchCommunicator:
    """The communicator over the workers of a process group that the user made. Collective over them, once."""
    if group not in _over:
        nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
        found = of_group(group)
        _over[group] = TorchCommunicator(found.store, found.rank, found.size, nccl)
    return _over[group]


def _open_gloo() -> TorchCommunicator:
    return _open("gloo")


def _open_nccl() -> TorchCommunicator:
    _check_nccl()
    return _open("nccl")


def _open(backend: str) -> TorchCommunicator:
    if dist.is_available() and dist.is_initialized():
        return over(dist.group.WORLD)
    found = job(backend)
    if backend == "nccl":
        _take_gpu(found.local_rank)
    return TorchCommunicator(found.store, found.rank, found.size, backend == "nccl", found.host)


def _take_gpu(number: int) -> None:
    """Make the GPU of this number the current one. The only one that a process sees is its own, as Slurm may have it.

    Raises: RuntimeError if the process sees several, but not as many.
    """
    count = torch.cuda.device_count()
    if 1 < count <= number:
        raise RuntimeError(
            f"the nccl back-end needs a GPU for each worker of a machine; this worker has number {number} there "
            f"(LOCAL_RANK, or else SLURM_LOCALID), and sees {count} GPUs (CUDA_VISIBLE_DEVICES may hide others). Start "
            "fewer workers, or choose the gloo back-end (DISTDL_BACKEND=gloo)"
        )
    torch.cuda.set_device(number if count > 1 else 0)


def _check_nccl() -> None:
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        raise RuntimeError("the nccl back-end needs a CUDA build of torch with NCCL, and a GPU for each local worker")


register("gloo", _open_gloo)
register("nccl", _open_nccl, check=_check_nccl)
