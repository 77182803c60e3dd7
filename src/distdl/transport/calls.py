"""Calls: what a group of workers has exchanged so far, in its order, as one of them sees it."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from distdl.transport.label import MARKS, Label

_REMEMBERED = 256  # exchanges that errors can name
LARGEST = MARKS - 1
LAST_TAG = (1 << 14) - 1  # of exchanges in their order; the tags behind it are those of what is sent ahead of it
_FIFTH = pow(5, -1, MARKS)


class Calls:
    """The exchanges of a group of workers, as this worker counts them; a deep copy of a layer goes on counting with it.

    Members that have made the same exchanges in the same order have the same history. So what carries the history, or a
    tag that follows from it, finds out any difference that lies before it.

    Attributes:
        number: how many exchanges have begun.
        history: a number that follows from all of them, in their order. An exchange of a layer makes it
            ``(history ^ mark) * 5 & LARGEST``, and before that, if it is a derivative, ``history ^ source``.
        log: the last ones, each as the label of its layer; in front of one that is a derivative, its source: what the
            history was when the exchange began of which it is.
        layers: how many layers of these workers have been built.
        silent: how many nodes were recorded that exchange in their backward only.
        met: how many calls have begun in which the members meet, to send each other values.
        agreed: how many agreements of layers have begun.
        met_after: how many exchanges had begun at the last of them.
    """

    __slots__ = ("_passed", "agreed", "history", "layers", "log", "met", "met_after", "number", "silent")

    def __init__(self) -> None:
        self.number = self.met = self.met_after = self.agreed = 0
        self.history = 1  # not 0, which means no source
        self.log: deque[Label | int] = deque(maxlen=_REMEMBERED)
        self.layers = 0
        self.silent = 0
        self._passed: deque[int] = deque(maxlen=_REMEMBERED)  # the sources of the last of them

    def pass_by(self) -> int:
        """Count a node that exchanges in its backward only. Returns the source of that exchange."""
        self.silent += 1
        source = (self.history ^ self.silent * _FIFTH) & LARGEST or 1
        self._passed.append(source)
        return source

    def derive(self, source: int) -> None:
        """Note that the next exchange is a derivative."""
        self.log.append(source)
        self.history ^= source

    def underive(self) -> int:
        """Undo :meth:`derive`. Returns the source; 0 if the next exchange is no derivative."""
        source = self.source
        if source:
            self.log.pop()
            self.history ^= source
        return source

    def meet(self) -> None:
        """Note that a call begins in which the members meet."""
        self.met += 1
        self.met_after = self.number

    def built(self) -> int:
        """Count a layer that is built. Returns how many were built before."""
        self.layers += 1
        return self.layers - 1

    @property
    def position(self) -> tuple[int, int, int]:
        """How many calls have begun, of each kind: the same on all members when they are in the same call."""
        return self.number, self.met, self.agreed

    @property
    def source(self) -> int:
        """The source of the next exchange, if that has been noted to be a derivative; else 0."""
        last = self.log[-1] if self.log else 0
        return last if isinstance(last, int) else 0

    def recent(self) -> dict[int, str]:
        """What the last exchanges were, by their numbers."""
        past = self._unwound()
        return {n: self._told(label.numbered, n, past) for n, label in sorted(past.labels.items())}

    def histories(self) -> dict[int, int]:
        """What the history was after each of the last exchanges, by their numbers, the last one first."""
        return self._unwound().histories

    def coming(self, name: str) -> str:
        """What the next exchange is, one of a layer of this name."""
        return self._told(name, self.number + 1, self._unwound())

    def _unwound(self) -> _Past:
        past = _Past({}, {}, {}, {})
        history, number = self.history, self.number
        for entry in reversed(list(self.log)):  # a copy, as the log may grow while another thread reads it
            if isinstance(entry, Label):
                past.histories[number] = history
                history = history * _FIFTH & LARGEST ^ entry.mark
                past.labels[number], past.numbers[history] = entry, number
                number -= 1
            else:
                past.sources[number + 1] = entry
                history ^= entry
        return past

    def _told(self, name: str, number: int, past: _Past) -> str:
        """An exchange of a layer of this name; of which one, or of which recorded node, if it is a derivative."""
        source = past.sources.get(number)
        if source is None:
            return name
        of, passed = past.numbers.get(source), list(self._passed)
        if of is not None:
            return f"the backward of exchange {of}, {name}"
        if source in passed:
            return f"the backward of recorded node {self.silent - passed[::-1].index(source)}, {name}"
        return f"the backward of an earlier exchange, {name}"

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return self


class _Past(NamedTuple):
    """The last exchanges of a group.

    Attributes:
        labels, sources, histories: by the number of the exchange; what the history was after it.
        numbers: by what the history was when the exchange began.
    """

    labels: dict[int, Label]
    sources: dict[int, int]
    histories: dict[int, int]
    numbers: dict[int, int]


class Begun:
    """Where a worker is that has begun an exchange: which of its group's exchanges that is, for errors.

    Args:
        group: the members of the exchange.
        calls: of the group.
        label: of the layer.
    """

    __slots__ = ("_calls", "_label", "group")

    def __init__(self, group: tuple[int, ...], calls: Calls, label: Label) -> None:
        self.group = group
        self._calls = calls
        self._label = label

    @property
    def numbered(self) -> str:
        """The name of the layer with path and number, and the number of the exchange."""
        number = self._calls.number
        return f"{self._calls.recent().get(number, self._label.numbered)} (exchange {number})"

    def __str__(self) -> str:
        return str(self._label)


class Meeting:
    """Where a worker is that meets the other members of a group, to agree or to send each other values.

    Args:
        where: what it does, as the communicator says it.
    """

    __slots__ = ("group", "where")

    def __init__(self, group: tuple[int, ...], where: object) -> None:
        self.group = group
        self.where: object = where.where if isinstance(where, Meeting) else where

    @property
    def numbered(self) -> str:
        return numbered(self.where)

    def __str__(self) -> str:
        return str(self.where)


VALUE = "the value of a global tensor (item, float, bool, print), for which every worker has to ask"
_ASK = "Ask on every worker, and print on one: `value = loss.item()`, then `if P.rank == 0: print(value)`"
_CALL = (
    "Every worker has to make the same calls, in the same order: take them out of what only some workers do, as under "
    "`if P.rank == 0:`, and let all of them make as many steps"
)


def cure(text: str) -> str:
    """The last sentence of an error of workers that are in different calls: what to change in the script."""
    # where a value is asked for, that call may be the one too many, or the others may have left out one before it
    return f". {_ASK}. {_CALL}" if VALUE in text else f". {_CALL}"


def numbered(where: object) -> str:
    """What a worker does, for errors: of a layer with its number, for layers may have one name."""
    return where.numbered if isinstance(where, (Label, Begun, Meeting)) else str(where)
