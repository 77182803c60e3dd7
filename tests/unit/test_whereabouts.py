"""What workers that wait tell each other of their calls, and when that shows that they wait in vain."""

import re
import time

import pytest
import torch.distributed as dist

from distdl.testing import Silent
from distdl.transport import watch
from distdl.transport.calls import Meeting
from distdl.transport.label import Label
from distdl.transport.watch import Watch
from distdl.transport.whereabouts import Circles, Whereabouts, disorder

GROUP = (0, 2, 3)
LAYERS = [Label("Move", number) for number in range(3)]


def after(rank, *exchanges):
    """The communicator of a worker that has made exchanges: of layers, or derivatives of earlier exchanges."""
    comm = Silent(rank, 4)
    calls, begun = comm.calls(GROUP), []
    for exchange in exchanges:
        label = exchange
        if isinstance(exchange, int):  # the derivative of an exchange, by its number
            calls.derive(begun[exchange - 1][1])
            label = begun[exchange - 1][0]
        begun.append((label, calls.history))
        calls.number += 1
        calls.log.append(label)
        calls.history = (calls.history ^ label.mark) * 5 & ((1 << 27) - 1)
    return comm


def told(comm):
    """What another worker hears of a worker."""
    return Whereabouts.decode(Whereabouts.of(comm, comm.groups()).encode())


A, B, C = LAYERS


@pytest.mark.parametrize(("ours", "theirs", "since", "other"), [
    ((A, B), (A, C), "exchange 2, which was Move [layer 1] on worker 0", "Move [layer 2]"),
    ((A, B, C), (B, A), "exchange 1, which was Move [layer 0] on worker 0", "Move [layer 1]"),
    ((A, B), (A, C, A, A), "exchange 2, which was Move [layer 1] on worker 0", "Move [layer 2]"),
    ((A, B), (A, C, A, A, A), "exchange 2, which was Move [layer 1] on worker 0", "another one"),
    ((A, A, 1), (A, A, 2), "exchange 3, which was the backward of exchange 1, Move [layer 0] on worker 0",
     "the backward of exchange 2, Move [layer 0]"),
    ((A, B, 2, 1), (A, B, 1), "exchange 3, which was the backward of exchange 2, Move [layer 1] on worker 0",
     "the backward of exchange 1, Move [layer 0]"),
])  # fmt: skip
def test_another_order_is_told_with_the_first_exchange_that_differs(ours, theirs, since, other):
    text = disorder(after(0, *ours), told(after(2, *theirs)))
    assert f"the calls of workers 0, 2, 3 differ since {since}, and {other} on worker 2" in text


@pytest.mark.parametrize(("ours", "theirs"), [
    ((A, B), (A, B)), ((A, B), (A,)), ((), (A, B, 2)), ((A,) * 600, (A,) * 500), ((A,) * 600, (B,)),
])  # fmt: skip
def test_to_be_behind_is_no_difference_and_what_is_forgotten_is_none(ours, theirs):
    assert disorder(after(0, *ours), told(after(2, *theirs))) == ""


@pytest.mark.parametrize(("ours", "theirs", "vain"), [((2, 5), (1, 6), True), ((1, 6), (2, 5), True),
    ((2, 5), (1, 5), False), ((2, 5), (2, 6), False), ((2, 5), (1, 4), False), ((2, 5), (2, 5), False)])  # fmt: skip
def test_each_is_past_the_place_of_the_other(ours, theirs, vain):
    """One has begun more exchanges, the other has begun to meet more often."""
    comms = []
    for rank, (exchanges, met) in ((0, ours), (2, theirs)):
        comms.append(after(rank, *[A] * exchanges))
        comms[-1].calls(GROUP).met, comms[-1].where = met, f"the call of {rank}"
    text = disorder(comms[0], told(comms[1]))
    assert bool(text) == vain
    sides = r"worker 0 waits in the call of 0 at \S+:\d+, and worker 2 in the call of 2 at \S+:\d+, which only one"
    assert not vain or re.match(sides, text), text


def test_they_have_met_after_other_exchanges():
    """Where calls of MPI's own have met each other, and both have gone on."""
    ours, theirs = after(0, A), after(2, A)
    ours.calls(GROUP).meet()
    theirs.calls(GROUP).meet()
    assert not disorder(ours, told(theirs))
    theirs.calls(GROUP).number -= 1
    theirs.calls(GROUP).met -= 1
    theirs.calls(GROUP).meet()
    assert "which only one of them has called" in disorder(ours, told(theirs))


def test_they_are_short_enough_for_mpi_to_send_at_once():
    comm = after(0, *[A] * 600)
    assert told(comm).histories == {GROUP: comm.calls(GROUP).histories()} and len(told(comm).encode()) < 3500


def test_a_derivative_that_is_noted_and_has_not_begun_changes_nothing_before_it():
    comm = after(0, A, B)
    expected = comm.calls(GROUP).histories()
    comm.calls(GROUP).derive(5)
    assert comm.calls(GROUP).histories() == expected and comm.calls(GROUP).underive() == 5
    assert comm.calls(GROUP).histories() == expected and comm.calls(GROUP).underive() == 0


def test_calls_before_a_release_and_groups_of_others_are_not_compared():
    other = told(after(2, B))
    comm = after(0, A)
    assert disorder(comm, other) and not disorder(after(1, A), other)
    comm.generation += 1
    assert not disorder(comm, other)


PAIR, ALL = (2, 3), (0, 1, 2, 3)


def waiting(worker, group, awaited, *positions, wait=1.0, generation=0):
    """Where a worker waits, in a call of a group, after so many calls of each."""
    places = {members: (0, 0, agreed) for members, agreed in positions}
    one = Whereabouts(worker, generation, f"a call of {group}", {}, {}, wait, group, awaited, places, {})
    assert Whereabouts.decode(one.encode()) == one
    return one


def looked(*rounds):
    """What a worker finds when it looks again and again: the first of each round, in which all have told something."""
    circles, found = Circles(), []
    for me, *others in rounds:
        known, comm = {one.worker: one for one in others}, Silent(me.worker, 4)
        for group, (number, met, agreed) in me.positions.items():
            calls = comm.calls(group)
            calls.number, calls.met, calls.agreed = number, met, agreed
        told = me._replace(positions={me.group: me.positions[me.group]} if me.group else {})  # (as over MPI)
        found.append(circles.look(comm, told, lambda worker, _, known=known: known.get(worker)))
    return found


LEFT_OUT = waiting(2, PAIR, (3,), (PAIR, 1), (ALL, 4)), waiting(3, ALL, (2,), (PAIR, 0), (ALL, 5))


def test_workers_that_wait_in_a_circle_are_told_when_it_is_found_again():
    """One has left out a call of two, and waits for the other in a call of all."""
    for records in (LEFT_OUT, LEFT_OUT[::-1]):
        (first, nothing), (second, text) = looked(records, records)
        assert first and second and not nothing
        assert "worker 2 waits in a call of (2, 3) for worker 3" in text
        assert "worker 3 waits in a call of (0, 1, 2, 3) for worker 2" in text


def test_three_in_a_circle_and_one_behind_them():
    ring = [
        waiting(0, (0, 1), (1,), ((0, 1), 1), ((2, 0), 0)), waiting(1, (1, 2), (2,), ((1, 2), 1), ((0, 1), 0)),
        waiting(2, (2, 0), (0,), ((2, 0), 1), ((1, 2), 0)), waiting(3, ALL, (0, 1), (ALL, 1)),
    ]  # fmt: skip
    for place in range(3):
        mine = ring[place:] + ring[:place]
        text = looked(mine, mine)[1][1]
        assert all(f"worker {n} waits in a call of {ring[n].group} for worker {(n + 1) % 3}" in text for n in range(3))
    assert looked(ring[::-1], ring[::-1]) == [(False, "")] * 2  # (it is told by those that are in it)


@pytest.mark.parametrize("other", [
    waiting(3, ALL, (2,), (PAIR, 1), (ALL, 5)),  # what it sent in the call of two may be under way
    waiting(3, ALL, (2,), (PAIR, 0), (ALL, 4)),  # the other has been there
    waiting(3, ALL, (1,), (PAIR, 0), (ALL, 5)),  # it waits for another one
    waiting(3, (), (2,), (PAIR, 0), (ALL, 5)),  # nobody knows where
    waiting(3, ALL, (2,), (PAIR, 0), (ALL, 5), generation=1),
    waiting(1, ALL, (2,), (PAIR, 0), (ALL, 5)),  # who is awaited computes
])  # fmt: skip
def test_others_wait_in_no_circle(other):
    assert looked((LEFT_OUT[0], other), (LEFT_OUT[0], other)) == [(False, "")] * 2


def test_who_has_long_been_in_a_call_is_not_behind_it():
    """Worker 0 is through with the value of a broadcast, which worker 3 still receives."""
    pair = (0, 3)
    mine = waiting(0, pair, (3,), (pair, 1), (ALL, 1))
    other = waiting(3, ALL, (0, 1, 2), (pair, 0), (ALL, 1))
    assert looked((mine, other), (mine, other)) == [(False, "")] * 2


def test_a_circle_of_other_waits_is_another_one():
    later = [one._replace(wait=2.0) for one in LEFT_OUT]
    found = looked(LEFT_OUT, (LEFT_OUT[0], later[1]), later, later)
    assert [bool(text) for _, text in found] == [False, False, False, True]


def test_a_wait_tells_in_which_group_it_is():
    comm = after(2, A)
    comm.where = Meeting(PAIR, Meeting(PAIR, "an agreement"))
    comm.calls(PAIR).agreed = 3
    one = Whereabouts.decode(Whereabouts.of(comm, [GROUP], 0.5, [1]).encode())
    assert re.fullmatch(r"an agreement at \S+test_whereabouts.py:\d+", one.where)
    assert (one.group, one.wait, one.awaited) == (PAIR, 0.5, (3,))
    assert one.positions == {GROUP: (1, 0, 0), PAIR: (0, 0, 3)} and list(one.histories) == [GROUP]
    comm.where = "an exchange"
    one = Whereabouts.decode(Whereabouts.of(comm, [GROUP], 0.5, [1]).encode())
    assert re.fullmatch(r"an exchange at \S+test_whereabouts.py:\d+", one.where)
    assert (one.group, one.awaited) == ((), (1,)) and list(one.positions) == [GROUP]


class Failing(Silent):
    """A communicator whose groups change while they are read, so often."""

    def __init__(self, times):
        super().__init__(0, 2)
        self.times = times

    def groups(self):
        self.times -= 1
        if self.times >= 0:
            raise ValueError("changed meanwhile")
        return super().groups()


@pytest.mark.parametrize("times", [1, 1000])
def test_a_watch_that_fails_once_goes_on_and_one_that_always_fails_says_so(times, monkeypatch):
    monkeypatch.setattr(watch, "_PATIENCE", 0.02)
    store = dist.HashStore()
    looking, comm = Watch(store, 0), Failing(times)
    looking.begin(comm, (1,))
    until = time.monotonic() + 10
    while looking._ended is None if times > 1 else not store.check(["waits/0"]):
        assert time.monotonic() < until
        time.sleep(0.05)
    told = looking.first_failure((), True, lambda others: "worker 0 waits")
    assert told.startswith("worker 0 waits")
    assert ("nobody looked" in told and "ValueError('changed meanwhile')" in told) == (times > 1)
