"""Stores: where the processes of a job find each other. A store keeps bytes under keys, in one of the processes.

A question to it has no limit of its own: it waits for ever if that process is stopped or out of reach, or is no store.
So each is asked in a thread of its own, for which its asker waits no longer than it says.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist

T = TypeVar("T")

LOOPBACK = "127.0.0.1"


class SilentError(RuntimeError):
    """No answer within a limit."""


def within(seconds: float, *questions: Callable[[], T]) -> T:
    """What the first of the questions to end returns or raises.

    Each is asked in a thread, which is left behind if another ends before it, or if it takes too long.

    Raises: SilentError after so many seconds.
    """
    ends: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

    def ask(question: Callable[[], T]) -> None:
        try:
            ends.put((question(), None))
        except BaseException as error:
            ends.put((None, error))

    for question in questions:
        threading.Thread(target=ask, args=(question,), name="distdl-question", daemon=True).start()
    try:
        answer, error = ends.get(timeout=seconds)
    except queue.Empty:
        raise SilentError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return cast(T, answer)


def local_store(seconds: float) -> dist.TCPStore:
    """A store that this process keeps, and that only processes of this machine can reach."""
    listening = socket.create_server((LOOPBACK, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def connect(host: str, port: int, seconds: float, keep: bool = False) -> dist.TCPStore:
    """The store at an address; kept by this process, on all of its addresses, if ``keep``.

    Raises: RuntimeError after so many seconds, which says what was tried.
    """

    def ask() -> dist.TCPStore:
        limit = timedelta(seconds=seconds)
        # stores of one process share a server, so that init_process_group can come later
        return dist.TCPStore(host, port, is_master=keep, timeout=limit, wait_for_workers=False, multi_tenant=True)

    try:
        return within(seconds + 1, ask)
    except SilentError:
        raise RuntimeError(
            f"got no answer from {host}:{port} within {seconds:g} s: its name is unknown, or what listens there is no "
            f"store, or is stopped"
        ) from None
    except RuntimeError as error:
        done, reason = "keep" if keep else "reach", str(error).partition("\n")[0]  # torch appends its stack
        raise RuntimeError(f"could not {done} a store at {host}:{port} within {seconds:g} s: {reason}") from error


def absent(store: dist.Store, me: int, workers: Iterable[int], seconds: float) -> dict[int, str | None]:
    """Come to the store, and wait for the others: who they are, and None for those that have not come in time.

    Raises: SilentError, or RuntimeError, if the store does not answer.
    """
    keys = {worker: f"here/{worker}" for worker in workers}

    def ask() -> dict[int, str | None]:
        store.set(keys[me], f"process {os.getpid()} on {socket.gethostname()}")
        try:
            store.wait(list(keys.values()), timedelta(seconds=seconds))
        except RuntimeError:
            return {w: store.get(key).decode() if store.check([key]) else None for w, key in keys.items()}
        return {}

    found = within(seconds + 1, ask)
    return found if None in found.values() else {}


def described(store: Any) -> str:
    """``the store at HOST:PORT``, as far as that is known."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"the store at {store.host}:{store.port}" if hasattr(store, "port") else "the store"
