"""A process that has imported torch and distdl once, and forks itself for each process of a job.

Starting a process is what tests of jobs cost: the imports take more than a second of a processor, and a job has up to
five of them. ``python imported.py server PATH`` imports, and then waits at the socket PATH as long as its standard
input is open. ``python imported.py PATH SCRIPT ARGUMENT ...`` is, to whoever has started it, what ``python SCRIPT
ARGUMENT ...`` would be (or ``python -m MODULE ARGUMENT ...``): it has the script run by a fork of the server, with its
environment, its folder, its process group and its three streams, ends as that ends, and takes it along when it is
killed. mpirun and torchrun can start it.

The processes that ``run_workers`` starts from such a script are forks as well. Tests of how processes are started, and
end with the one that has started them, take none of this.
"""

import contextlib
import gc
import json
import os
import signal
import socket
import sys

STREAMS = 3


def ask(path, arguments):
    """Have the script run, and end this process as it ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        job = json.dumps([arguments, os.getcwd(), dict(os.environ), os.getpgrp()]).encode()
        socket.send_fds(server, [len(job).to_bytes(4, "little")], list(range(STREAMS)))
        server.sendall(job)
        answer = server.recv(4)
    if len(answer) < 4:
        raise RuntimeError("the process that has imported torch ended before the script did")
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        with contextlib.suppress(OSError):  # (of SIGKILL there is nothing to set)
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def serve(path):
    """Fork for each that asks. Returns, in the forks alone, what ``ask`` has sent."""
    import select

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen(64)
        print("listening", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            asking, _ = listening.accept()
            if not os.fork():
                listening.close()
                return look_after(asking)
            asking.close()
            reap()
    reap()
    sys.exit()


def reap():
    """Take note of the forks that have ended, so that their time counts as time of the tests."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def look_after(asking):
    """Fork once more, tell how the fork has ended, and kill it if nobody is there any more to hear that."""
    import select

    size, streams, _, _ = socket.recv_fds(asking, 4, STREAMS)
    with asking.makefile("rb") as reading:
        job = json.loads(reading.read(int.from_bytes(size, "little")))
    child = os.fork()
    if not child:
        asking.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return job
    for stream in (*range(STREAMS), *streams):
        os.close(stream)
    ended = os.pidfd_open(child)
    if ended not in select.select([asking, ended], [], [])[0]:
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(OSError):
        asking.sendall(code.to_bytes(4, "little", signed=True))
    os._exit(0)


def run(arguments, folder, environment, group):
    """Be the process that runs a script."""
    import multiprocessing
    import runpy

    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(PermissionError):  # a group of another session, as torchrun makes them
        os.setpgid(0, group)
    fork = multiprocessing.get_context("fork")
    multiprocessing.get_context = lambda method=None: fork
    begin_together()
    is_module = arguments[0] == "-m"
    sys.argv = arguments[is_module:]
    place = folder if is_module else os.path.dirname(arguments[0])
    sys.path[:1] = [place, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")


def begin_together():
    """Let the workers of ``run_workers`` begin when all of them have been forked.

    A worker that connects to the store keeps a thread of this process busy, in C++. Where that holds a lock of libc at
    a fork, the fork waits for it for ever. (Processes that are spawned begin without locks.)
    """
    from distdl.workers import processes

    gate, store, work, collect = [], processes.local_store, processes._work, processes._collect

    def open_store(*arguments):
        gate[:] = os.pipe()
        return store(*arguments)

    def work_then(*arguments):
        reading, writing = gate
        os.close(writing)
        os.read(reading, 1)  # (until nobody can write)
        os.close(reading)
        work(*arguments)

    def collect_now(*arguments):
        for end in gate:
            os.close(end)
        collect(*arguments)

    processes.local_store, processes._work, processes._collect = open_store, work_then, collect_now


if __name__ == "__main__":
    if sys.argv[1] != "server":
        ask(sys.argv[1], sys.argv[2:])
    import torch._dynamo  # noqa: F401  (which optimisers import at their first use)

    import distdl  # noqa: F401  (which the forks need not do any more)

    gc.freeze()  # (what no job changes is not copied for it)
    run(*serve(sys.argv[2]))
