"""Workers that end as they should not, or whose launcher ends, for ``test_exits``: ``exits.py NAME BACKEND|alone``."""

import atexit
import gc
import os
import signal
import sys
import time
from pathlib import Path

import torch

import distdl
from distdl.backends import threaded
from distdl.nn import AllSumReduce
from distdl.workers import processes


def layer_called_once(workers):
    layer = AllSumReduce(distdl.world().reshape(workers), [0])
    layer(torch.ones(2))
    return layer


def fails_in_a_hook():
    """A hook that raises in the backward of worker 1, while the others wait for its gradients."""

    def hook(*gradients):
        if P.rank == 1:
            raise KeyError("the reason")

    P = distdl.world()
    model = distdl.distribute(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), P.reshape(3, 1))
    model[1].register_full_backward_hook(hook)
    model(distdl.distribute_tensor(torch.ones(3, 2), P.reshape(3, 1))).sum().backward()


def leaves():
    """Worker 1 calls ``sys.exit(0)`` while the others wait for it."""
    P = distdl.world()
    layer = layer_called_once(P.size)
    if P.rank == 1:
        sys.exit(0)
    layer(torch.ones(2))


def leaves_pieces_out():
    """Worker 0 waits for pieces of workers 1 and 2; worker 2 comes to its end."""
    from distdl.backends.mpi import messages

    P, messages.PIECE_BYTES = distdl.world(), 64
    if P.rank == 0:
        P.comm.exchange([], [(1, torch.empty(100)), (2, torch.empty(100))]).wait()
    if P.rank == 1:
        P.comm.exchange([(0, torch.ones(100))], []).wait()


def ends_beside_its_watch():
    """Worker 1 ends after a long wait, while the thread that has written of it into the store still asks the store."""

    class Asking:
        def __init__(self, store):
            self.store = store

        def __getattr__(self, name):
            return getattr(self.store, name)

        def set(self, key, value):
            until = time.monotonic() + (0.7 if value == "" else 0.0)
            while time.monotonic() < until:
                self.store.check(["nothing"])
            self.store.set(key, value)

    P = distdl.world()
    P.comm._watch._store = Asking(P.comm._watch._store)
    time.sleep(2 if P.rank == 0 else 0)
    P.allgather_data(0)
    time.sleep(2.5 if P.rank == 0 else 0)  # (it keeps the store)


def returns():
    """Worker 1 returns while the others wait for it."""
    P = distdl.world()
    layer = layer_called_once(P.size)
    if P.rank != 1:
        layer(torch.ones(2))


def raises():
    """Worker 1 raises while the others wait for it; worker 0 says what it heard of that."""
    P = distdl.world()
    layer = layer_called_once(P.size)
    if P.rank == 1:
        raise KeyError("the reason")
    layer(torch.ones(2))


def raises_beside_torch_distributed():
    """Worker 1 raises while the other waits for it. torch.distributed has put a hook over ours that keeps stderr."""
    rank, layer = distdl.world().rank, layer_called_once(2)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    if rank == 1:
        raise KeyError("the reason")
    layer(torch.ones(2))


def fails_beside_a_deaf_one():
    """Worker 0 raises, and worker 1 does not hear SIGTERM."""
    if distdl.world().rank == 0:
        raise KeyError("the reason")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)


def computes_on():
    """Worker 1 raises, and worker 0 computes for ever; it gets less time to end than elsewhere."""
    threaded._GRACE = 1.0
    if distdl.world().rank == 1:
        raise KeyError("the reason")
    x = torch.ones(300, 300)
    while True:
        torch.mm(x, x)


def trains_on():
    """Every worker writes its process id and goes on; worker 1 is stopped, worker 0 does not hear SIGTERM."""
    P = distdl.world()
    if P.rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (FOLDER / "new").mkdir(exist_ok=True)
    (FOLDER / "new" / str(P.rank)).write_text(str(os.getpid()))
    P.allgather_data("all have written")
    (FOLDER / "new" / str(P.rank)).rename(FOLDER / str(P.rank))
    if P.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


def saves_when_asked():
    """Worker 0 is sent SIGTERM; both save at the same step."""
    saves_after(lambda: os.kill(os.getpid(), signal.SIGTERM))


def saves_when_its_parent_is_asked():
    """mpirun, which has started both workers, is sent SIGUSR1, and passes it on; they save at the same step."""
    saves_after(lambda: os.kill(os.getppid(), signal.SIGUSR1), [signal.SIGTERM, signal.SIGUSR1])


def saves_after(asking, signals=(signal.SIGTERM,)):
    P = distdl.world()
    steps = []
    check = distdl.on_terminate(lambda: (FOLDER / str(P.rank)).write_text(str(P.allgather_data(steps[-1]))), signals)
    for step in range(100):
        steps.append(step)
        if step == 3 and P.rank == 0:
            asking()
        time.sleep(0.05)
        check()


def recovers():
    """Worker 1 raises in the first start; in the second all end without a last collective."""
    P = distdl.world()
    layer = layer_called_once(P.size)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and P.rank == 1:
        raise KeyError("the reason")
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        layer(torch.ones(2))
    if P.rank == 0:
        atexit._run_exitfuncs()
        print("groups open at exit:", len(P.comm._groups), flush=True)


class Slow:
    """Garbage that gives the interpreter to another thread when it is collected."""

    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(1e-6)


def asks_for_states():
    """Both workers ask for the state of torch's generator, as checkpoints do, while garbage is collected in there."""
    gc.set_threshold(4)
    for n in range(3000):
        Slow()
        _counted = [[] for _ in range(n % 5)]  # so that the collection comes at another place in each round
        torch.set_rng_state(torch.get_rng_state())
    print("asked", flush=True)


def forks_beside_one_that_asks():
    """Worker 0 starts processes that use torch's generator, as those of a DataLoader do, while worker 1 uses it."""
    P, ended = distdl.world(), 0
    for _ in range(40):
        if P.rank == 1:
            for _ in range(20000):
                torch.initial_seed()
        else:
            child = os.fork()
            if not child:
                torch.manual_seed(1)
                os._exit(0)
            deadline = time.monotonic() + 3
            while not (done := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < deadline:
                time.sleep(0.001)
            if not done[0]:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            ended += bool(done[0])
    print(f"{ended} ended", flush=True)


FOLDER = Path(os.environ.get("EXITS_FOLDER", "."))

if __name__ == "__main__":
    scenario, how = sys.argv[1:]
    if how == "alone":
        globals()[scenario]()
    else:
        processes._GRACE = float(os.environ.get("EXITS_GRACE", processes._GRACE))
        distdl.run_workers(globals()[scenario], int(os.environ.get("EXITS_WORKERS", "2")), how)
