"""Whereabouts: what a worker that waits long lets the others know, so that they see whether any of them waits in vain.

Members of a group make the same exchanges in the same order. If the histories of two of them differ after the same
number of exchanges, their messages have other tags, and never meet. To be behind is no difference. But where one has
begun more exchanges, and the other more calls in which they meet, each has gone past the place where the other waits.

The calls of different groups have no order of their own. There, workers wait in vain if they wait in a circle, each for
the next one, which has yet to begin the call in which it is awaited.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from distdl.transport.calls import VALUE, Meeting, cure
from distdl.transport.communicator import Communicator, Group, name_workers

_ASKED = 16  # members of a group that are asked, at most: those that come next in it
HINT = "DISTDL_DEBUG=1 says where they began to differ, of functions of global tensors"
NAMED = 16  # workers of which an error of two that differ says where they wait, too, at most
_RECENT = 3  # exchanges of which others are told what they were
_FAR = 64  # workers among which a circle is looked for, at most


class Whereabouts(NamedTuple):
    """Where a worker waits, and after what. It stays true when the worker goes on.

    Attributes:
        worker: who waits.
        generation: how many times its communicator had been released.
        where: as an error says it.
        histories: of each group after its last exchanges, by their numbers, the last one first.
        counts: of the exchanges of each group, of the calls in which its members meet, and of the exchanges before the
            last of these.
        wait: a number that no other wait of this worker has.
        group: whose call it waits in; empty if that is not known.
        awaited: the workers without which the wait cannot end.
        positions: how many calls of each kind have begun, of groups of which that is known.
        recent: what the last exchanges of each group were, by their numbers.
    """

    worker: int
    generation: int
    where: str
    histories: dict[Group, dict[int, int]]
    counts: dict[Group, tuple[int, int, int]]
    wait: float
    group: Group
    awaited: tuple[int, ...]
    positions: dict[Group, tuple[int, int, int]]
    recent: dict[Group, dict[int, str]]

    @classmethod
    def of(
        cls, comm: Communicator, groups: Iterable[Group], wait: float = 0, awaited: Sequence[int] = ()
    ) -> Whereabouts:
        """Those of this worker, which waits, in these groups.

        Args:
            wait: a number that no other wait of this worker has.
            awaited: whose messages it waits for. Where members meet, each needs all others, whosever message it is; of
                many, some are listed.
        """
        listed = {group: comm.calls(group) for group in groups}
        where = comm.where  # read once, as the worker may change it while another thread asks
        group = tuple(getattr(where, "group", ()))
        if isinstance(where, Meeting):
            place = group.index(comm.rank)
            awaited = [*group[place + 1 :], *group[:place]][:_ASKED]
        shown = listed if group in listed or not group else {**listed, group: comm.calls(group)}
        return cls(
            comm.rank,
            comm.generation,
            comm.place,
            {group: calls.histories() for group, calls in listed.items()},
            {group: (calls.number, calls.met, calls.met_after) for group, calls in listed.items()},
            wait,
            group,
            tuple(awaited),
            {group: calls.position for group, calls in shown.items()},
            {group: dict(list(calls.recent().items())[-_RECENT:]) for group, calls in listed.items()},
        )

    def encode(self) -> str:
        groups = list(self.positions)
        own = groups.index(self.group) if self.group else -1
        histories = [
            (max(found, default=0), list(found.values()), self.counts[group], list(self.recent[group].items()))
            for group, found in self.histories.items()
        ]
        positions = list(self.positions.values())
        listed = self.worker, self.generation, self.where, self.wait, own, self.awaited, groups, positions, histories
        return json.dumps(listed, separators=(",", ":"), default=int)  # short, as MPI sends short messages at once

    @classmethod
    def decode(cls, message: str | bytes) -> Whereabouts:
        worker, generation, where, wait, own, awaited, groups, positions, histories = json.loads(message)
        groups = [tuple(group) for group in groups]
        found, counts, recent = {}, {}, {}
        # the group in which the worker waits may come last, without a history
        for group, (last, values, listed, named) in zip(groups, histories, strict=False):
            found[group], counts[group] = {last - n: one for n, one in enumerate(values)}, tuple(listed)
            recent[group] = dict(named)
        placed = {group: tuple(one) for group, one in zip(groups, positions, strict=True)}
        group = () if own < 0 else groups[own]
        return cls(worker, generation, where, found, counts, wait, group, tuple(awaited), placed, recent)


def disorder(comm: Communicator, other: Whereabouts) -> str:
    """What is wrong if this worker, which waits, and another one have made different calls; empty if they have not.

    Only a worker that waits may ask it, or what it has called would change meanwhile.
    """
    if other.generation != comm.generation:
        return ""
    for group, theirs in other.histories.items():
        if comm.rank not in group:
            continue
        calls = comm.calls(group)
        ours = calls.histories()
        differ = [number for number in ours if theirs.get(number, ours[number]) != ours[number]]
        if differ:
            first = min(differ)
            own = calls.recent().get(first, "an earlier call")
            another = other.recent[group].get(first, own)
            return (
                f"worker {comm.rank} waits in {comm.place}, and worker {other.worker} in {other.where}: the calls of "
                f"{name_workers(group)} differ since exchange {first}, which was {own} on worker "
                f"{comm.rank}, and {another if another != own else 'another one'} on worker {other.worker} ({HINT})"
            )
        number, met, met_after = other.counts[group]
        past_each_other = (calls.number - number) * (calls.met - met) < 0
        if past_each_other or (calls.met == met and calls.met_after != met_after):
            return (
                f"worker {comm.rank} waits in {comm.place}, and worker {other.worker} in {other.where}, which only one "
                f"of them has called: each waits for the other"
            )
    return ""


def told(text: str, waiting: Mapping[int, str], apart: bool = True) -> str:
    """The text of an error, with the workers that wait, too, and where, and with its cure.

    Args:
        apart: whether the workers are sure to be in different calls.
    """
    places: dict[str, list[int]] = {}
    for worker, where in sorted(waiting.items()):
        if f"worker {worker} waits" not in text and f"and worker {worker} in" not in text:
            places.setdefault(where, []).append(worker)
    text += "".join(f"; {wait_of(workers)} in {where}" for where, workers in places.items())
    return text + cure(text) if apart or VALUE in text else text


def wait_of(workers: Sequence[int]) -> str:
    """``worker 3 waits`` or ``workers 0, 2 wait``."""
    return f"{name_workers(workers)} {'wait' if len(workers) > 1 else 'waits'}"


class Circles:
    """Looks whether a worker waits in a circle. What is asked of workers one after the other need not be true at once,
    so it is a circle when it is found twice, with the same waits.
    """

    def __init__(self) -> None:
        self._found: list[tuple[int, float]] = []

    def look(
        self, comm: Communicator, me: Whereabouts, known: Callable[[int, Group], Whereabouts | None]
    ) -> tuple[bool, str]:
        """Look once more.

        Args:
            comm, me: of this worker.
            known: where another worker waits, as it has told since this was called last; with its position in a group.
        Returns: whether there may be a circle; and what is wrong, if it has been found twice.
        """
        circle = _circle(comm, me, known)
        found = [(one.worker, one.wait) for one in circle]
        if not found:
            return False, ""
        again, self._found = found == self._found, found
        return True, _text(circle) if again else ""


def _circle(
    comm: Communicator, me: Whereabouts, known: Callable[[int, Group], Whereabouts | None]
) -> list[Whereabouts]:
    """Workers of which each waits for the next, which has yet to begin that call, and the last one for this worker."""
    seen = {me.worker}

    def search(one: Whereabouts) -> list[Whereabouts]:
        if me.worker in one.awaited:
            mine = me._replace(positions={one.group: comm.calls(one.group).position})
            if _is_behind(mine, one):
                return [one]
        for worker in one.awaited:
            if worker in seen or len(seen) > _FAR:
                continue
            other = known(worker, one.group)
            if other is not None and _is_behind(other, one):
                seen.add(worker)
                rest = search(other)
                if rest:
                    return [one, *rest]
        return []

    return search(me)


def _is_behind(other: Whereabouts, one: Whereabouts) -> bool:
    """Whether a worker has yet to begin the call in which another one waits for it."""
    if not one.group or other.worker not in one.group or other.generation != one.generation:
        return False
    theirs, ours = other.positions.get(one.group), one.positions[one.group]
    return theirs is not None and theirs != ours and all(n <= m for n, m in zip(theirs, ours, strict=True))


def _text(circle: Sequence[Whereabouts]) -> str:
    waits = "; ".join(
        f"worker {one.worker} waits in {one.where} for worker {other.worker}"
        for one, other in zip(circle, [*circle[1:], circle[0]], strict=True)
    )
    return f"workers wait for each other, each for one that has yet to come to that call: {waits}"
