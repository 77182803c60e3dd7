"""The job of processes that this one was started in: by ``run_workers``, by torchrun, or by the user's own means."""

from __future__ import annotations

import itertools
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Job(NamedTuple):
    """A worker's place in its job, and a store that all workers of it share.

    Attributes:
        rank, size: this worker's number, and how many there are.
        local_rank: its number among those of the same machine.
        store: maps strings to bytes. ``store.get(key)`` waits until some worker has made ``store.set(key, value)``.
    """

    rank: int
    size: int
    local_rank: int
    store: dist.Store


_joined: Job | None = None
_opened: dict[str, Iterator[int]] = defaultdict(itertools.count)


def join(job: Job) -> None:
    """Make this process a worker of a job."""
    global _joined
    _joined = job


def job(backend: str) -> Job:
    """The job that this process was started in. Collective: each call gives a store with no entries in it.

    Args:
        backend: the name of the back-end that asks: the entries of different back-ends do not meet.
    Raises: RuntimeError, saying how to launch one, if this process was started in none.
    """
    if not dist.is_available():
        raise RuntimeError(f"the {backend} back-end needs a build of torch that has torch.distributed")
    if _joined is None and dist.is_initialized():
        joined = of_group(dist.group.WORLD)
    elif _joined is None and all(variable in os.environ for variable in TORCHRUN):
        store, rank, size = next(iter(dist.rendezvous("env://")))
        joined = Job(rank, size, _local_rank(), store)
        join(joined)
    elif _joined is None:
        raise RuntimeError(
            f"the {backend} back-end needs a job that torchrun has launched (its variables {', '.join(TORCHRUN)} are "
            f"not all set), or torch.distributed.init_process_group before it: torchrun --nproc-per-node 4 SCRIPT; or "
            f"distdl.run_workers(function, workers=4, backend={backend!r})"
        )
    else:
        joined = _joined
    prefix = f"distdl/{backend}/{next(_opened[backend])}"
    return joined._replace(store=dist.PrefixStore(prefix, joined.store))


def of_group(group: Any) -> Job:
    """The job of a process group that the user made, with a new store. Collective over its workers."""
    gloo = "gloo" in str(dist.get_backend_config(group))
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    address = torch.zeros(256, dtype=torch.uint8, device="cpu" if gloo else "cuda")
    if rank == 0:
        host = os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        text = f"{host} {store.port}".encode()
        address[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    dist.broadcast(address, group_src=0, group=group)
    if rank != 0:
        host, port = bytes(address.tolist()).rstrip(b"\0").decode().split()
        store = dist.TCPStore(host, int(port), is_master=False)
    return Job(rank, size, _local_rank(), store)


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
