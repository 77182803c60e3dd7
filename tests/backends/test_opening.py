"""Opening a world has a limit, and says who is missing and what was tried; so has all that is asked of a store."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launchers import FOLDER, ended, imported, mpirun, python_path

import distdl
from distdl import CommunicationError
from distdl.backends.torch_distributed import TorchCommunicator, communicator, threads
from distdl.backends.torch_distributed.threads import in_their_turn, receiving_threads
from distdl.nn import Broadcast, Repartition, SumReduce
from distdl.transport import watch
from distdl.transport.stores import LOOPBACK, connect, local_store

SCRIPT = FOLDER / "run_openings.py"


def each(count, function):
    """What ``function(0)``, ``function(1)``, ... return or raise, called in a thread each, and after how long."""
    found = [None] * count

    def call(worker):
        begun = time.monotonic()
        try:
            result = function(worker)
        except Exception as error:
            result = error
        found[worker] = (result, time.monotonic() - begun)

    threads = [threading.Thread(target=call, args=(worker,), daemon=True) for worker in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert None not in found, "a worker waits without limit"
    return found


@pytest.fixture
def store():
    return local_store(30)


def link(store, rank, size, host=LOOPBACK):
    """A worker's communicator in this process, with a connection of its own to the store."""
    return TorchCommunicator(connect(LOOPBACK, store.port, 10), rank, size, host=host)


# -- opening: gloo


@pytest.mark.fault("gloo")
def test_gloo_with_half_of_the_workers_says_who_is_missing(store, monkeypatch):
    monkeypatch.setenv("DISTDL_TIMEOUT", "1")
    for error, seconds in each(2, lambda worker: link(store, worker, 4)):
        assert isinstance(error, CommunicationError) and 0.9 < seconds < 15
        assert "waited longer than 1 s (DISTDL_TIMEOUT)" in str(error)
        came = f"worker 0 (process {os.getpid()} on"
        assert f"for workers 2, 3, which did not come to the store at 127.0.0.1:{store.port}; {came}" in str(error)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")
def test_a_list_of_threads_that_cannot_be_read_or_is_of_another_namespace_is_empty(monkeypatch):
    class Full(type(Path())):
        def glob(self, pattern):
            raise OSError("Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(threads, "Path", Full)
        assert receiving_threads() == set()
    monkeypatch.setattr(threading, "get_native_id", lambda: -1)
    monkeypatch.setattr(threads, "_NAME", threads.Path("/proc/self/comm").read_bytes().strip())
    assert receiving_threads() == set()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such policy")
def test_threads_of_gloo_take_no_core_from_a_worker_that_sends(store, monkeypatch):
    def policies(of):
        return {os.sched_getscheduler(thread) for thread in of}

    own = policies([0])
    before = receiving_threads()
    links = [result for result, _ in each(2, lambda worker: link(store, worker, 2))]
    ours = receiving_threads()
    assert len(ours - before) == 2 and policies(ours - before) == {os.SCHED_BATCH} and policies([0]) == own

    def refused(*arguments):
        raise PermissionError

    at = dist.HashStore()
    monkeypatch.setattr(os, "sched_setscheduler", refused)
    with in_their_turn():  # (where the system refuses, all goes on as it is)
        groups = [result for result, _ in each(2, lambda place: dist.ProcessGroupGloo(at, place, 2, timedelta(0, 9)))]
    theirs = receiving_threads() - ours
    assert len(theirs) == 2 and policies(theirs) == own
    del links, groups


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say the names of threads")
def test_names_of_threads_that_are_no_text_are_passed_over():
    name = Path("/proc/thread-self/comm")
    before = name.read_bytes()
    name.write_bytes(b"model \xc3")  # (the system cuts long names, in a letter, too)
    try:
        assert threading.get_native_id() not in receiving_threads()
    finally:
        name.write_bytes(before)


@contextmanager
def listener(answer):
    """Something that listens, and is no store."""
    with socket.create_server((LOOPBACK, 0)) as listening:
        kept = []

        def serve():
            while True:
                try:
                    kept.append(listening.accept()[0])
                    if answer:
                        kept[-1].sendall(answer)
                        kept[-1].close()
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield listening.getsockname()[1]
        finally:
            for one in kept:
                one.close()


@contextmanager
def nobody():
    with socket.create_server((LOOPBACK, 0)) as listening:
        port = listening.getsockname()[1]
    yield port


@pytest.mark.fault("gloo")
@pytest.mark.parametrize(("what", "words"), [
    (lambda: listener(b""), "got no answer from 127.0.0.1:{} within 1 s"),
    (lambda: listener(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9), "127.0.0.1:{} within 1 s"),
    (nobody, "127.0.0.1:{} within 1 s"),
], ids=["silent", "http", "nobody"])  # fmt: skip
def test_an_address_without_a_store_is_an_error_at_the_limit(monkeypatch, what, words):
    with what() as port:
        variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port)}
        for name, value in {**variables, "DISTDL_TIMEOUT": "1", "DISTDL_BACKEND": "gloo"}.items():
            monkeypatch.setenv(name, value)
        begun = time.monotonic()
        with pytest.raises(CommunicationError, match=r"worker 1 of 2 .*MASTER_ADDR and MASTER_PORT") as error:
            distdl.world()
        assert words.format(port) in str(error.value) and time.monotonic() - begun < 15


class Elsewhere(dist.Store):
    """A store in which a worker finds the other one's address altered, as that of a host whose name means 127.0.1.1.

    Args:
        store: the one that both share.
        key: the end of that under which the other one tells its address.
        address: four numbers; the port is 1, at which nobody listens.
    """

    def __init__(self, store, key, address):
        super().__init__()
        self.store, self.key, self.address = store, key, address

    def get(self, key):
        told = self.store.get(key)
        if not key.endswith(self.key):
            return told
        # gloo writes the length of an address, and then a `struct sockaddr_in`: family, port, four numbers
        found = re.search(rb"\x88\x00{7}\x02\x00", told)
        assert found, f"gloo told no address in the form that this test knows: {told}"
        return told[: found.end()] + bytes([0, 1, *self.address]) + told[found.end() + 6 :]

    def set(self, *arguments):
        return self.store.set(*arguments)

    def wait(self, *arguments):
        return self.store.wait(*arguments)

    def check(self, keys):
        return self.store.check(keys)

    def compare_set(self, key, expected, desired):
        return self.store.compare_set(key, expected.decode(), desired.decode())


@pytest.mark.fault("gloo")
@pytest.mark.parametrize("refused", [0, 1])
def test_a_connection_that_is_refused_is_told_at_once_with_the_cure(store, monkeypatch, refused):
    """One worker connects to where nobody listens. The other, which gloo lets wait for a connection, hears of that."""
    monkeypatch.setenv("DISTDL_TIMEOUT", "20")
    addresses = {refused: (0, 0, 0, 0), 1 - refused: (255, 255, 255, 255)}  # gloo lets the higher one connect
    stores = [Elsewhere(connect(LOOPBACK, store.port, 10), f"/{1 - worker}", addresses[worker]) for worker in range(2)]
    ends = each(2, lambda worker: TorchCommunicator(stores[worker], worker, 2))
    assert all(isinstance(error, CommunicationError) and seconds < 10 for error, seconds in ends), ends
    first, second = str(ends[refused][0]), str(ends[1 - refused][0])
    assert f"worker {refused} of 2 could not connect to worker {1 - refused} by gloo" in first
    assert "Connection refused" in first and "GLOO_SOCKET_IFNAME" in first and "waited longer" not in first
    assert second == f"worker {1 - refused} of 2 gave up, after another worker had: {first}"


@pytest.fixture
def nccl(monkeypatch):
    """What NCCL is imitated by, as there is no GPU: a class whose attribute ``said`` lists what was done."""
    said = []

    class Nccl:
        class Options:
            pass

        def __init__(self, *given):
            self.abort = lambda: said.append("aborted")

    Nccl.said = said
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Nccl


def test_groups_of_nccl_that_cuda_graphs_have_messages_of(store, nccl, monkeypatch):
    """NCCL waits for ever for graphs that are still there. (They are imitated, too.)"""
    said = nccl.said

    class Graph:
        def reset(self):
            said.append("reset")
            raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    one, graph = link(store, 0, 1), Graph()
    one._group((0,), True)
    one.release()
    assert said == ["aborted"]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group = one._group((0,), True)
    one.release()
    assert one._group((0,), True) is group and said == ["aborted"]
    one.leave()
    assert said == ["aborted", "reset", "aborted"]
    del graph


def test_all_groups_are_closed_where_a_device_has_failed_that_nobody_has_told(store, nccl, monkeypatch):
    """As where the program has caught the error, or calls sys.exit."""

    def refuse():
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    ones = [link(store, 0, 1), link(store, 0, 1)]
    monkeypatch.setattr(communicator, "_open_ones", set(ones))
    for one in ones:
        one._group((0,), True)
    with pytest.raises(RuntimeError, match="device-side assert"):
        communicator._leave()
    assert nccl.said == ["aborted", "aborted"] and not any(one._groups for one in ones)


def test_two_workers_on_one_gpu_are_told_so_by_nccl(store, nccl, monkeypatch):
    text = (
        "NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
        "details), NCCL version 2.29.7\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
        "Last error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000"
    )

    def refuse(*given):
        raise RuntimeError(text)

    nccl.broadcast = refuse
    monkeypatch.setattr(TorchCommunicator, "_direct", lambda self, tensor: tensor.dtype is torch.float64)
    comms = [comm for comm, _ in each(2, lambda worker: link(store, worker, 2))]
    ends = each(2, lambda worker: comms[worker].broadcast((0, 1), torch.ones(1, dtype=torch.float64)).wait())
    for error, _ in ends:
        assert isinstance(error, CommunicationError)
        assert str(error).endswith(": Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000"), error


# -- after that: gloo


@pytest.mark.fault("gloo")
def test_who_waits_is_not_blamed_where_another_worker_gave_up_a_moment_before(store, monkeypatch):
    """Worker 2 is busy, and worker 0 waits for it. Worker 1 waits for worker 0, which gives up first."""
    monkeypatch.setenv("DISTDL_TIMEOUT", "3")
    comms = [comm for comm, _ in each(3, lambda worker: link(store, worker, 3))]

    def work(worker):
        if worker < 2:
            time.sleep(0.5 * worker)
            comms[worker].where = f"call {worker}"
            comms[worker].exchange([], [(2 if worker == 0 else 0, torch.zeros(1))]).wait()

    (first, seconds), (second, later), _ = each(3, work)
    line = r" at \S*test_opening\.py:\d+"
    told = rf"worker 0 waited longer than 3 s \(DISTDL_TIMEOUT\) in call 0{line} for worker 2"
    assert re.fullmatch(told, str(first)) and 3 <= seconds < 25
    assert re.fullmatch(rf"worker 1 gave up in call 1{line}, after another worker had: {told}", str(second))
    assert later < 25


@pytest.mark.fault("gloo")
def test_a_limit_that_is_set_later_holds_for_messages_too(store):
    comms = [comm for comm, _ in each(2, lambda worker: link(store, worker, 2))]

    def work(worker):
        if worker == 0:
            comms[0].timeout = 0.5
            comms[0].exchange([], [(1, torch.zeros(1))]).wait()

    (error, seconds), _ = each(2, work)
    assert "waited longer than 0.5 s (DISTDL_TIMEOUT)" in str(error) and 0.5 <= seconds < 20


def moves(P):
    layer = Repartition(P.reshape(3, 1), P.reshape(1, 3))
    return [layer(torch.ones(1, 3, requires_grad=True)) for _ in range(2)]


def sums(P):
    layer = SumReduce(P.reshape(3), P[:1].reshape(1))
    return [layer(torch.ones(size, requires_grad=True)) for size in (2, 3)]


def copies(P):
    layer = Broadcast(P[:1].reshape(1), P.reshape(3))
    mine = P.rank == 0
    return [layer(torch.ones(size if mine else 0, requires_grad=True)) for size in (200_000, 300_000)]


@pytest.mark.fault("gloo")
@pytest.mark.parametrize("results_of", [moves, sums, copies])
def test_backwards_in_another_order_end_long_before_the_limit(results_of, store, monkeypatch):
    """Worker 1 takes another order. All are told by one of them what differs, and since when."""
    monkeypatch.setenv("DISTDL_TIMEOUT", "300")
    monkeypatch.setattr(watch, "_PATIENCE", 0.3)
    comms = [comm for comm, _ in each(3, lambda worker: link(store, worker, 3))]

    def work(worker):
        P = distdl.Partition(comms[worker], range(3))
        results = results_of(P)
        for place in (1, 0) if worker == 1 else (0, 1):
            results[place].sum().backward()
        P.allgather_data(0)

    ended = each(3, work)
    assert all(seconds < 20 for _, seconds in ended), ended
    texts = [str(error) for error, _ in ended]
    told = {text.partition("after another worker had: ")[2] or text for text in texts}
    assert len(told) == 1, texts
    [text] = told
    assert "the backward of exchange 1, " in text and "the backward of exchange 2, " in text
    assert "the calls of workers 0, 1, 2 differ since exchange 3, which was the backward of exchange " in text


def stopped(folder):
    """Stop the process that keeps the store once both workers have noted that they are there; then let them go on."""
    await_files(folder, ["pid-store", "pid0", "pid1"], 80)
    os.kill(int((folder / "pid-store").read_text()), signal.SIGSTOP)
    (folder / "go").touch()


def await_files(folder, names, seconds):
    until = time.monotonic() + seconds
    while not all((folder / name).exists() for name in names):
        assert time.monotonic() < until, f"{names} are not all there: {sorted(map(str, folder.iterdir()))}"
        time.sleep(0.05)


@pytest.mark.fault("gloo")
@pytest.mark.timeout(120)
def test_gloo_ends_its_wait_where_the_process_that_keeps_the_store_is_stopped(tmp_path):
    command = [*imported(), str(SCRIPT), "stopped_store", str(tmp_path)]
    process = subprocess.Popen(command, env=python_path(DISTDL_TIMEOUT="2"), stderr=subprocess.DEVNULL)
    try:
        stopped(tmp_path)
        await_files(tmp_path, ["error"], 20)
    finally:
        for file in tmp_path.glob("pid*[!t]"):
            os.kill(int(file.read_text()), signal.SIGKILL)
        process.kill()
        process.wait()
    seconds, _, text = (tmp_path / "error").read_text().partition(" ")
    assert 2 <= float(seconds) < 20
    assert "worker 0 waited longer than 2 s (DISTDL_TIMEOUT) in allgather_data" in text and "for worker 1" in text
    assert "the store at 127.0.0.1:" in text and "does not answer: the process that keeps it is stopped" in text


# -- opening: MPI


def launch(scenario, folder, **variables):
    command = mpirun(3, SCRIPT, scenario, str(folder), python=imported())
    return ended(command, **variables)


@pytest.mark.fault("mpi")
@pytest.mark.timeout(120)
def test_a_worker_that_is_late_for_mpis_dup_is_named_and_the_others_may_try_again(tmp_path):
    done = launch("late_for_dup", tmp_path, DISTDL_TIMEOUT="2")
    assert done.returncode == 0, done.stdout + done.stderr
    opening = r"the opening of a world of 3 workers at \S+\.py:\d+"
    for worker, other in ((0, 2), (2, 0)):
        errors = [file.read_text().partition(" ") for file in tmp_path.glob(f"error{worker}.*")]
        assert errors and all(2 <= float(seconds) < 20 for seconds, _, _ in errors)
        waited = rf"worker {worker} waited longer than 2 s \(DISTDL_TIMEOUT\) in {opening} for worker 1; "
        assert any(re.fullmatch(f"{waited}worker {other} waits in {opening}", text) for _, _, text in errors), errors
    assert {file.name for file in tmp_path.glob("opened*")} == {"opened0", "opened1", "opened2"}


@pytest.mark.fault("mpi")
@pytest.mark.timeout(120)
def test_a_worker_that_never_starts_mpi_ends_the_job_at_the_limit(tmp_path):
    done = launch("late_for_init", tmp_path, DISTDL_TIMEOUT="2")
    assert done.returncode != 0, done.stdout + done.stderr
    assert re.search(r"worker [02] waited longer than 2 s \(DISTDL_TIMEOUT\) in MPI_Init", done.stderr), done.stderr


# -- sockets


def listening_addresses():
    """The addresses at which this process listens for TCP connections, as the kernel writes them."""
    own = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    inodes = {os.readlink(path) for path in own if os.path.islink(path)}
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and f"socket:[{columns[9]}]" in inodes:
                found.add(columns[1].partition(":")[0])
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs the kernel's table of sockets")
def test_what_run_workers_opens_listens_on_the_loopback_address_only(store):
    before = listening_addresses()
    comms = each(2, lambda worker: link(store, worker, 2))
    assert all(isinstance(comm, TorchCommunicator) for comm, _ in comms)
    assert "0100007F" in listening_addresses() and listening_addresses() - before <= {"0100007F"}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port))
