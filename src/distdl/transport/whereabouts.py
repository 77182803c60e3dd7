"""Whereabouts: what a worker that waits long lets the others know, so that they see whether any of them waits in vain.

Members of a group make the same exchanges in the same order. If the histories of two of them differ after the same
number of exchanges, their messages have other tags, and never meet. To be behind is no difference. But where one has
begun more exchanges, and the other more calls in which they meet, each has gone past the place where the other waits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from distdl.transport.communicator import Communicator, Group, name_workers


class Whereabouts(NamedTuple):
    """Where a worker waits, and after what. It stays true when the worker goes on.

    Attributes:
        worker: who waits.
        generation: how many times its communicator had been released.
        where: as an error says it.
        histories: of each group after its last exchanges, by their numbers, the last one first.
        counts: of the exchanges of each group, of the calls in which its members meet, and of the exchanges before the
            last of these.
    """

    worker: int
    generation: int
    where: str
    histories: dict[Group, dict[int, int]]
    counts: dict[Group, tuple[int, int, int]]

    @classmethod
    def of(cls, comm: Communicator, groups: Iterable[Group]) -> Whereabouts:
        """Those of this worker, which waits, in these groups."""
        listed = {group: comm.calls(group) for group in groups}
        return cls(
            comm.rank,
            comm.generation,
            comm.place,
            {group: calls.histories() for group, calls in listed.items()},
            {group: (calls.number, calls.met, calls.met_after) for group, calls in listed.items()},
        )

    def encode(self) -> str:
        histories = [
            (group, max(found, default=0), list(found.values()), self.counts[group])
            for group, found in self.histories.items()
        ]
        return json.dumps((self.worker, self.generation, self.where, histories))

    @classmethod
    def decode(cls, message: str | bytes) -> Whereabouts:
        worker, generation, where, histories = json.loads(message)
        found = {tuple(group): {last - n: one for n, one in enumerate(values)} for group, last, values, _ in histories}
        return cls(worker, generation, where, found, {tuple(group): tuple(counts) for group, *_, counts in histories})


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
            return (
                f"worker {comm.rank} waits in {comm.place}, and worker {other.worker} in {other.where}: the calls of "
                f"{name_workers(group)} differ since exchange {first}, which was {own} on worker "
                f"{comm.rank}, and another one on worker {other.worker}"
            )
        number, met, met_after = other.counts[group]
        past_each_other = (calls.number - number) * (calls.met - met) < 0
        if past_each_other or (calls.met == met and calls.met_after != met_after):
            return (
                f"worker {comm.rank} waits in {comm.place}, and worker {other.worker} in {other.where}, which only one "
                f"of them has called: each waits for the other. All of {name_workers(group)} have to make the same "
                "calls in the same order"
            )
    return ""
