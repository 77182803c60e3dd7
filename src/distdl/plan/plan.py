"""Plan: a data movement as a value. It is a list of moves ``y[dst] += x[src]`` between workers, and the local shapes.

A plan is linear, and swapping both ends of every move is its exact adjoint with respect to

    <x, y> = sum over workers of the local dot products.

Moves that copy a whole tensor to many workers, or add many into one, are written as a *pattern* over teams of workers,
so that a back-end can use its own collective for them; a pattern is only a short way to write the moves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import numpy as np

from distdl.environment.arguments import check_fields, known
from distdl.environment.types import Count
from distdl.geometry.boxes import Box, Shape, around, hull, meet, shape, slices, volume, whole
from distdl.partition.groups import IntArray, root_first
from distdl.transport.communicator import Group

_LARGE_SUM = 1 << 16  # elements of which two workers add up one half each, instead of all of them twice

_put = object.__setattr__  # sets fields of a frozen class

Shapes = Mapping[int, Shape]
Index = tuple[slice, ...]


@dataclass(frozen=True)
class Move:
    """One term of a plan: ``y[dst]`` on worker ``target`` gains ``x[src]`` of worker ``source``.

    Boxes are in cells of the local tensors and have equal shapes.

    Raises: ValueError for boxes of different shapes, or with cells before the first.
    """

    source: Count
    src: Box
    target: Count
    dst: Box

    def __post_init__(self) -> None:
        check_fields(self)
        if shape(self.src) != shape(self.dst) or any(start < 0 for start, _ in self.src + self.dst):
            raise ValueError(f"a Move needs two boxes of one shape, whose cells count from 0; got {self!r}")

    @staticmethod
    def known(source: int, src: Box, target: int, dst: Box) -> Move:
        """The same, of what is known to be right: the planners make thousands."""
        move = object.__new__(Move)
        _put(move, "source", source)
        _put(move, "src", src)
        _put(move, "target", target)
        _put(move, "dst", dst)
        return move

    @property
    def T(self) -> Move:
        return Move.known(self.target, self.dst, self.source, self.src)

    def __repr__(self) -> str:
        return f"{self.source}{_show(self.src)} -> {self.target}{_show(self.dst)}"


class Pattern(Enum):
    """How the moves of a plan are written."""

    MOVES = "moves"
    BROADCAST = "broadcast"
    SUM = "sum"
    ALL_SUM = "all-sum"

    @property
    def T(self) -> Pattern:
        return {Pattern.BROADCAST: Pattern.SUM, Pattern.SUM: Pattern.BROADCAST}.get(self, self)


@dataclass(frozen=True, eq=False)
class Team:
    """A root and the workers that it feeds (BROADCAST), that add up on it (SUM), or, root included, on all (ALL_SUM).

    The root is itself fed, or adds its own tensor, only if it is among the members. ``shape`` is that of the tensor
    that moves, in elements; it is the same on the whole team.
    """

    root: int
    members: IntArray
    shape: Shape

    @cached_property
    def group(self) -> Group:
        """All workers of the team, root first."""
        return root_first(self.root, self.members)

    def moves(self, pattern: Pattern) -> Iterator[Move]:
        """The same data movement, written as moves."""
        box = whole(self.shape)
        for member in self.members.ravel().tolist():
            if pattern is Pattern.BROADCAST:
                yield Move.known(self.root, box, member, box)
            elif pattern is Pattern.SUM:
                yield Move.known(member, box, self.root, box)
            else:
                yield from (Move.known(other, box, member, box) for other in self.members.ravel().tolist())


@dataclass(frozen=True)
class Role:
    """The part that a worker plays in a team of which it is the root, a member, or both."""

    team: Team
    root: bool
    member: bool

    @cached_property
    def group(self) -> Group:
        """All workers of the team, root first."""
        return self.team.group

    def writes(self, pattern: Pattern) -> bool:
        """Whether this worker's y comes from the team."""
        return self.root if pattern is Pattern.SUM else self.member


@dataclass(frozen=True)
class Schedule:
    """The part of a plan that one worker executes.

    Attributes:
        sends: ``(target, index into x)``, in plan order.
        receives: ``(source, index into y or None, shape)``, in plan order; None is a buffer of its own, for a sum.
        blank: what no other entry writes, so that it has to be set to zero: indices into y.
        kept: ``(index into y, index into x)``: what this worker has already.
        sums: ``(index into y, terms)``, in plan order; a term is the number of a receive, or an index into x.
        packs: several entries go to, or come from, the same worker; they are one message, in their order.
        adds: sums share cells, so each is added to y, once ``blank`` and ``kept`` are there, instead of written.
        roles: the teams of more than two of which this worker is part and that have something to move, in one order on
            all workers: by root, which no two teams have in common. What moves in smaller teams
            stands among the sends, receives and sums, but for large all-sums, of which each of two adds up one half.
    """

    sends: tuple[tuple[int, Index], ...]
    receives: tuple[tuple[int, Index | None, Shape], ...]
    blank: tuple[Index, ...]
    kept: tuple[tuple[Index, Index], ...]
    sums: tuple[tuple[Index, tuple[int | Index, ...]], ...]
    adds: bool
    packs: bool
    roles: tuple[Role, ...]


@dataclass(frozen=True)
class Plan:
    """A linear data movement between workers, ready to be executed.

    Attributes:
        inputs, outputs: local shape of x and of y on each worker that has one, in elements.
        moves: the terms (pattern MOVES), in an order that fixes the order of sums.
        pattern, teams: the other way to write terms.
        T: the adjoint plan.
    Raises: ValueError for a move of cells that x or y does not have, where the plan has its shape.
    """

    inputs: Shapes
    outputs: Shapes
    moves: tuple[Move, ...] = ()
    pattern: Pattern = Pattern.MOVES
    teams: tuple[Team, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        for move in self.moves:
            _check_inside("x", self.inputs.get(move.source), move.source, move.src, move)
            _check_inside("y", self.outputs.get(move.target), move.target, move.dst, move)

    @cached_property
    def T(self) -> Plan:
        moves = tuple(move.T for move in self.moves)
        transposed = known(Plan, self.outputs, self.inputs, moves, self.pattern.T, self.teams)
        transposed.__dict__["T"] = self
        return transposed

    @cached_property
    def _schedules(self) -> dict[int, Schedule]:
        return {}

    def all_moves(self) -> Iterator[Move]:
        """Every term as a move, whatever the pattern."""
        yield from self.moves
        for team in self.teams:
            yield from team.moves(self.pattern)

    def matrix(self) -> IntArray:
        """The plan as a dense matrix, for tests: columns are the elements of x, rows those of y, worker by worker."""
        column, columns = _offsets(self.inputs)
        row, rows = _offsets(self.outputs)
        matrix = np.zeros((rows, columns), dtype=np.int64)
        for move in self.all_moves():
            taken = np.arange(volume(whole(self.inputs[move.source]))).reshape(self.inputs[move.source])
            given = np.arange(volume(whole(self.outputs[move.target]))).reshape(self.outputs[move.target])
            source, target = taken[slices(move.src)].ravel(), given[slices(move.dst)].ravel()
            matrix[row[move.target] + target, column[move.source] + source] += 1
        return matrix

    def schedule(self, worker: int) -> Schedule:
        """What one worker does, computed once."""
        if worker not in self._schedules:
            self._schedules[worker] = self._schedule(worker)
        return self._schedules[worker]

    def _schedule(self, worker: int) -> Schedule:
        x, y = (whole(shapes.get(worker, ())) for shapes in (self.inputs, self.outputs))
        roles, moves = list(self._roles(worker)), list(self.moves)
        for role in [role for role in roles if self._is_few(role.team)]:
            roles.remove(role)
            moves += role.team.moves(self.pattern)
        incoming = [move for move in moves if move.target == worker]
        landings = Counter(move.dst for move in incoming)
        adds = not _disjoint(list(landings))
        receives: list[tuple[int, Index | None, Shape]] = []
        kept: list[tuple[Index, Index]] = []
        sums: dict[Box, list[int | Index]] = {}
        written: set[Box] = set() if adds else set(landings)
        for move in incoming:
            own = move.source == worker
            alone = landings[move.dst] == 1 and (not adds or (own and not written))
            if not alone:
                sums.setdefault(move.dst, []).append(slices(move.src, x) if own else len(receives))
            if not own:
                receives.append((move.source, slices(move.dst, y) if alone else None, shape(move.dst)))
            elif alone:
                kept.append((slices(move.dst, y), slices(move.src, x)))
                written.add(move.dst)
        sends = [(m.target, slices(m.src, x)) for m in moves if m.source == worker and m.target != worker]
        unwritten = () if any(role.writes(self.pattern) for role in roles) else _unwritten(written, y)
        return Schedule(
            sends=tuple(sends),
            receives=tuple(receives),
            blank=tuple(slices(box, y) for box in unwritten),
            kept=tuple(kept),
            sums=tuple((slices(box, y), tuple(terms)) for box, terms in sums.items()),
            adds=adds,
            packs=any(len({worker for worker, *_ in ends}) < len(ends) for ends in (sends, receives)),
            roles=tuple(sorted(roles, key=lambda role: role.team.root)),
        )

    def _is_few(self, team: Team) -> bool:
        """Whether messages between the members are at least as fast as any collective."""
        if team.members.size > 2:
            return False
        large = self.pattern is Pattern.ALL_SUM and volume(whole(team.shape)) > _LARGE_SUM
        return len(team.group) == 1 or (len(team.group) == 2 and not large)

    def _roles(self, worker: int) -> Iterator[Role]:
        for team in self.teams:
            member = bool((team.members == worker).any())
            if (member or team.root == worker) and 0 not in team.shape:
                yield Role(team, team.root == worker, member)

    def __repr__(self) -> str:
        rows = [f"{self.pattern.value} of {_show_shapes(self.inputs)} to {_show_shapes(self.outputs)}"]
        rows += [repr(move) for move in self.moves]
        rows += [f"{team.root}: {', '.join(map(str, team.members.ravel().tolist()))}" for team in self.teams]
        return "\n  ".join(rows)


def _check_inside(name: str, extents: Shape | None, worker: int, box: Box, move: Move) -> None:
    if extents is None:
        return
    if len(box) != len(extents) or any(stop > extent for (_, stop), extent in zip(box, extents, strict=True)):
        raise ValueError(
            f"a Plan needs moves of cells that its tensors have; {name} on worker {worker} is of the shape "
            f"{list(extents)}, and a move is {move!r}"
        )


def _unwritten(written: Collection[Box], frame: Box) -> list[Box]:
    """Boxes that hold at least what disjoint ``written`` ones leave out of a frame; no more if their hull is full."""
    if not written:
        return [frame]
    filled = hull(list(written))
    return around(filled, frame) if volume(filled) == sum(map(volume, written)) else [frame]


def _disjoint(boxes: list[Box]) -> bool:
    ordered = sorted(boxes)
    for place, box in enumerate(ordered):
        for other in ordered[place + 1 :]:
            if box and other[0][0] >= box[0][1]:
                break
            if volume(meet(box, other)):
                return False
    return True


def _offsets(shapes: Shapes) -> tuple[dict[int, int], int]:
    offsets, total = {}, 0
    for worker in sorted(shapes):
        offsets[worker] = total
        total += volume(whole(shapes[worker]))
    return offsets, total


def _show(box: Box) -> str:
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _show_shapes(shapes: Shapes) -> str:
    return "{" + ", ".join(f"{worker}: {list(extents)}" for worker, extents in sorted(shapes.items())) + "}"
