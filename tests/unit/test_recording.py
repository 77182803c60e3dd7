"""Recording: a communicator that passes everything on to another one and tells of each call."""

import numpy as np
import pytest
import torch

from distdl.transport import Communicator, Pending, Recording, View

GROUP = (0, 1, 2)


class Answering(Communicator):
    """Worker 0 of three; whatever it receives is ones, and it counts its waits."""

    def __init__(self):
        super().__init__()
        self.rank, self.size, self.absent, self.waits = 0, 3, -7, 0

    def exchange(self, sends, receives, tag=0):
        def finish():
            self.waits += 1
            for _, tensor in receives:
                tensor.fill_(1)

        return Pending(finish)


@pytest.fixture
def told():
    """A recorded communicator, what it has told as calls ended, and as they began."""
    inner, ended, begun = Answering(), [], []
    return Recording(inner, ended.append, lambda call: begun.append(call.operation)), ended, begun


def test_an_exchange_is_told_once_it_has_been_waited_for(told):
    comm, ended, begun = told
    comm.where = "a layer"
    y = torch.zeros(4, dtype=torch.float64)
    pending = comm.exchange([(1, torch.ones(3)), (2, torch.ones(1))], [(2, y)], tag=5)
    assert begun == ["exchange"] and ended == []
    pending.wait()
    pending.wait()
    (call,) = ended
    assert (call.operation, call.workers, call.where) == ("exchange", (1, 2, 2), "a layer")
    assert (call.sends, call.receives, call.nbytes) == ([(1, 12), (2, 4)], [(2, 32)], 0)
    assert call.waited > 0 and y.tolist() == [1] * 4 and comm.inner.waits == 1


def test_a_prepared_exchange_is_told_as_an_exchange_each_time(told):
    comm, ended, _ = told
    laid = torch.zeros(2, 3)
    prepared = comm.prepare([(1, View.of(0, laid))], [(2, View.of(1, laid, (slice(0, 2), slice(0, 1))))])
    for _ in range(2):
        x, y = torch.ones(2, 3), torch.zeros(2, 3)
        comm.start(prepared, [x, y], 3).wait()
        assert y.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert [(call.operation, call.sends, call.receives) for call in ended] == [("exchange", [(1, 24)], [(2, 8)])] * 2


COLLECTIVES = {
    "broadcast": lambda comm: comm.broadcast(GROUP, torch.ones(5)).wait(),
    "sum": lambda comm: comm.sum(GROUP, None, torch.zeros(5)).wait(),
    "all_sum": lambda comm: comm.all_sum(GROUP, torch.ones(5), torch.zeros(5)).wait(),
    "all_gather": lambda comm: comm.all_gather(GROUP, torch.ones(5)),
    "all_max": lambda comm: comm.all_max(GROUP, np.ones(5, dtype=np.int64)),
}
RECEIVED = {"broadcast": 0, "sum": 2, "all_sum": 2, "all_gather": 2, "all_max": 2}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_made_of_messages_is_one_call_with_its_messages(told, name):
    comm, ended, begun = told
    comm.inner.recorder = comm  # the messages of which it is made go through the recorder, too
    COLLECTIVES[name](comm)
    (call,) = ended
    width = 8 if name == "all_max" else 4
    assert begun == [name] and (call.operation, call.workers, call.nbytes) == (name, GROUP, 5 * width)
    assert call.sends == ([] if name == "sum" else [(1, 5 * width), (2, 5 * width)])
    assert len(call.receives) == RECEIVED[name] and call.waited > 0


def test_a_call_inside_a_collective_counts_with_it_and_the_next_by_itself(told):
    comm, ended, _ = told
    comm.inner.recorder = comm
    comm.all_max(GROUP, np.ones(1, dtype=np.int64))
    comm.exchange([(1, torch.ones(1))], []).wait()
    assert [call.operation for call in ended] == ["all_max", "exchange"]


def test_it_stands_for_the_communicator_it_records(told):
    comm, _, _ = told
    assert (comm.rank, comm.size, comm.absent) == (0, 3, -7)
    comm.where = "here"
    assert comm.inner.where == comm.where == "here"


def test_recorders_can_be_nested():
    outer, inner = [], []
    comm = Recording(Recording(Answering(), inner.append), outer.append)
    comm.exchange([(1, torch.ones(1))], []).wait()
    assert [call.sends for call in outer] == [call.sends for call in inner] == [[(1, 4)]]
