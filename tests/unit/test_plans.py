"""Laws of plans, over the table of plans and over random layouts. No worker runs."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import NAMES, halos, plans

from distdl.geometry.boxes import balanced, runs, shape, slices, volume, whole
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.plan.plan import Move, Pattern, Plan
from distdl.plan.planning import all_sum, broadcast, copy, padded_halo
from distdl.testing import Silent


@pytest.fixture
def table(world):
    return plans(world)


@pytest.mark.parametrize("name", NAMES)
def test_the_transposed_plan_has_the_transposed_matrix(table, name):
    plan = table[name](None)
    assert (plan.T.matrix() == plan.matrix().T).all()
    assert plan.T.T is plan and plan.matrix().shape == (sum_of(plan.outputs), sum_of(plan.inputs))


@pytest.mark.parametrize("name", NAMES)
def test_a_workers_plan_has_just_the_moves_that_touch_it(table, name):
    whole_plan = table[name](None)
    for me in range(12):
        mine = table[name](me)
        touching = [move for move in whole_plan.all_moves() if me in (move.source, move.target)]
        assert sorted(map(repr, {repr(m): m for m in own_moves(mine, me)}.values())) == sorted(map(repr, touching))
        assert dict(mine.inputs) == {w: s for w, s in whole_plan.inputs.items() if w == me}
        assert dict(mine.outputs) == {w: s for w, s in whole_plan.outputs.items() if w == me}


@pytest.mark.parametrize("name", NAMES)
def test_both_ends_of_a_message_have_its_parts_in_one_order(table, name):
    """Several moves between two workers are one message."""
    mine = [table[name](me) for me in range(12)]
    for source, target in itertools.permutations(range(12), 2):
        sent, received = (
            [m for m in mine[end].moves if (m.source, m.target) == (source, target)] for end in (source, target)
        )
        assert sent == received
        assert len(sent) < 2 or (mine[source].schedule(source).packs and mine[target].schedule(target).packs)


@pytest.mark.parametrize("name", NAMES)
def test_executing_the_schedules_is_applying_the_matrix(table, name):
    for plan in (table[name](None), table[name](None).T):
        rng = np.random.default_rng(0)
        xs = {worker: rng.integers(-9, 9, extents) for worker, extents in plan.inputs.items()}
        ys = simulate(plan, xs)
        x = np.concatenate([xs[worker].ravel() for worker in sorted(xs)] or [np.zeros(0)])
        y = np.concatenate([ys[worker].ravel() for worker in sorted(ys)] or [np.zeros(0)])
        assert (plan.matrix() @ x == y).all()


def test_workers_turn_to_the_teams_that_they_share_in_one_order(world):
    """Also where two teams have the same workers, as in a swap."""
    P = world(4)
    shapes = dict.fromkeys(range(4), (1,))
    for order in itertools.permutations(range(4)):
        other = P.create_partition_inclusive(order)
        for grid in ((4,), (2, 2)):
            for few in (P.reshape(*grid), P.reshape(*grid)[:1], P.reshape(*grid)[-1:]):
                plans = [broadcast(few, other.reshape(*grid), shapes, me) for me in range(4)]
                roots = [[role.team.root for role in plan.schedule(me).roles] for me, plan in enumerate(plans)]
                for one, two in itertools.combinations(roots, 2):
                    assert [root for root in one if root in two] == [root for root in two if root in one]


def simulate(plan, xs):
    """Execute every worker's schedule with NumPy, one after the other."""
    ys = {worker: np.zeros(extents, dtype=int) for worker, extents in plan.outputs.items()}
    mail = {}
    for worker in xs:
        for target, index in plan.schedule(worker).sends:
            mail.setdefault((worker, target), []).append(xs[worker][index])
    for worker, y in ys.items():
        schedule = plan.schedule(worker)
        y[...] = 99999  # every cell has to be written
        for index in schedule.blank:
            y[index] = 0
        arrived = [mail[source, worker].pop(0) for source, _, _ in schedule.receives]
        for (_, index, extents), block in zip(schedule.receives, arrived, strict=True):
            assert block.shape == extents
            if index is not None:
                y[index] = block
        for to, own in schedule.kept:
            y[to] = xs[worker][own]
        for to, terms in schedule.sums:
            total = sum(arrived[term] if isinstance(term, int) else xs[worker][term] for term in terms)
            y[to] = y[to] + total if schedule.adds else total
        for role in schedule.roles:
            team = role.team
            if plan.pattern is Pattern.BROADCAST and role.member:
                y[...] = xs[team.root]
            elif (plan.pattern is Pattern.SUM and role.root) or plan.pattern is Pattern.ALL_SUM:
                y[...] = sum(xs[member] for member in team.members.ravel().tolist())
    assert not any(mail.values())
    return ys


def own_moves(plan, me):
    return [move for move in plan.all_moves() if me in (move.source, move.target)]


def sum_of(shapes):
    return sum(volume(whole(extents)) for extents in shapes.values())


def test_a_move_swaps_both_ends():
    move = Move(1, ((0, 2),), 4, ((3, 5),))
    assert Move(4, ((3, 5),), 1, ((0, 2),)) == move.T and move == move.T.T
    assert repr(move) == "1[0:2] -> 4[3:5]"


def test_patterns_transpose():
    assert [pattern.T for pattern in Pattern] == [Pattern.MOVES, Pattern.SUM, Pattern.BROADCAST, Pattern.ALL_SUM]


def test_the_repr_is_a_table_of_moves(world):
    P = world(2).reshape(2)
    plan = copy(Layout.of(P, [runs([1, 2])]), Layout.balanced(P, (3,)))
    assert repr(plan).splitlines() == [
        "moves of {0: [1], 1: [2]} to {0: [2], 1: [1]}",
        "  0[0:1] -> 0[0:1]", "  1[0:1] -> 0[1:2]", "  1[1:2] -> 1[0:1]",
    ]  # fmt: skip


def test_moves_to_one_box_are_summed_and_the_order_is_that_of_the_plan():
    box = ((0, 2),)
    plan = Plan({0: (2,), 1: (2,), 2: (2,)}, {1: (2,)}, tuple(Move(source, box, 1, box) for source in (2, 1, 0)))
    schedule = plan.schedule(1)
    assert [source for source, _, _ in schedule.receives] == [2, 0]
    assert schedule.sums == (((), (0, (), 1)),) and not schedule.blank and not schedule.adds


extents = st.integers(0, 9)


@st.composite
def layouts(draw, P, dims, sizes=None):
    """Two layouts of one tensor over random grids of random workers, split at random places."""
    made = []
    total = [draw(extents) for _ in range(dims)] if sizes is None else sizes
    for _ in range(2):
        grid = [draw(st.integers(1, 3)) for _ in range(dims)]
        workers = draw(st.permutations(range(P.size)))[: int(np.prod(grid))]
        cuts = [sorted(draw(st.integers(0, n)) for _ in range(p - 1)) for n, p in zip(total, grid, strict=True)]
        intervals = [list(zip([0, *c], [*c, n], strict=True)) for c, n in zip(cuts, total, strict=True)]
        made.append(Layout.of(P.create_partition_inclusive(workers).reshape(*grid), intervals))
    return tuple(total), made


@given(st.data())
def test_copy_moves_a_tensor_from_any_layout_to_any_other(data):
    P = Partition(Silent(0, 9))
    total, (owned, needed) = data.draw(layouts(P, data.draw(st.integers(1, 2))))
    tensor = np.arange(int(np.prod(total))).reshape(total)
    plan = copy(owned, needed)
    ys = simulate(plan, {worker: tensor[slices(owned[worker])] for worker in owned})
    for worker in needed:
        assert np.array_equal(ys[worker], tensor[slices(needed[worker])])
    assert (plan.T.matrix() == plan.matrix().T).all()


@given(st.data())
def test_copy_gives_windows_with_zeros_beyond_the_tensor_and_its_transpose_adds_up(data):
    P = Partition(Silent(0, 9))
    (total,), (owned, _) = data.draw(layouts(P, 1))
    parts = data.draw(st.integers(1, 4))
    starts = [data.draw(st.integers(-4, 10)) for _ in range(parts)]
    windows = Layout.of(P[:parts].reshape(parts), [[(s, s + data.draw(st.integers(0, 8))) for s in starts]])
    tensor = np.arange(1, total + 1)
    plan = copy(owned, windows)
    ys = simulate(plan, {worker: tensor[slices(owned[worker])] for worker in owned})
    for worker in windows:
        ((start, stop),) = windows[worker]
        expected = [tensor[c] if 0 <= c < total else 0 for c in range(start, stop)]
        assert ys[worker].tolist() == expected
    backward = simulate(plan.T, {worker: np.ones(extents_, dtype=int) for worker, extents_ in plan.outputs.items()})
    readers = [sum(start <= cell < stop for (start, stop) in windows.intervals[0]) for cell in range(total)]
    for worker in owned:
        assert backward[worker].tolist() == readers[slices(owned[worker])[0]]


def test_a_halo_exchange_fills_halos_from_their_owners(world):
    P = world(9).reshape(3, 3)
    for bulk, width in (((4, 3), 1), ((2, 2), 3), ((1, 1), 2)):
        shapes, sizes = halos(P, bulk, width)
        field = np.arange(1, 9 * bulk[0] * bulk[1] + 1).reshape(3 * bulk[0], 3 * bulk[1])
        padded = np.pad(field, width)
        xs, expected = {}, {}
        for index in np.ndindex(3, 3):
            worker, halo = int(P.workers[index]), sizes[index]
            corner = [width + i * n - before for i, n, (before, _) in zip(index, bulk, halo, strict=True)]
            expected[worker] = padded[tuple(slice(c, c + n) for c, n in zip(corner, shapes[index], strict=True))]
            xs[worker] = np.full(shapes[index], -7)
            inner = tuple(slice(b, b + n) for (b, _), n in zip(halo, bulk, strict=True))
            xs[worker][inner] = expected[worker][inner]
        ys = simulate(padded_halo(P, shapes, sizes), xs)
        assert all(np.array_equal(ys[worker], expected[worker]) for worker in ys)


def test_halos_that_do_not_fit_are_refused(world):
    P = world(4).reshape(2, 2)
    shapes, sizes = halos(P, (2, 2), 1)
    with pytest.raises(ValueError, match="must fit into the tensor; on worker 3"):
        padded_halo(P, shapes - 5 * (P.workers == 3)[..., None], sizes)
    wrong = sizes.copy()
    wrong[1, 0, 0, 0] = 0
    with pytest.raises(ValueError, match="halos in dim 0 must be equal"):
        padded_halo(P, shapes + np.array([[[0, 0], [0, 0]], [[-1, 0], [0, 0]]]), wrong)


def test_planning_refuses_shapes_that_do_not_match(world):
    P = world(6)
    with pytest.raises(ValueError, match="axis 1 is 3 in P_x and 2 in P_y"):
        broadcast(P[:3].reshape(1, 3), P.reshape(3, 2), {})
    with pytest.raises(ValueError, match="0 to 1"):
        all_sum(P.reshape(2, 3), (2,), {})


def test_planning_one_worker_of_a_large_partition_touches_its_overlaps_only(world, monkeypatch):
    P = world(131072, rank=70000).reshape(64, 64, 32)
    looked_at = []
    original = Layout.at
    monkeypatch.setattr(Layout, "at", lambda self, index: looked_at.append(1) or original(self, index))
    tensor = (640, 640, 320)
    owned = Layout.balanced(P, tensor)
    window = [[(i - 1, j + 1) for i, j in balanced(n, p)] for n, p in zip(tensor, P.workers.shape, strict=True)]
    plan = copy(owned, Layout.of(P, window), 70000)
    assert len(plan.moves) == 53 and len(looked_at) < 70
    root = P[:1, :1, :1]
    fed = broadcast(root, P, {0: (3,)}, 0)
    assert fed.teams[0].members.base is not None and not fed.moves


def test_shapes_of_layouts_are_looked_up_when_asked_for(world):
    layout = Layout.balanced(world(4).reshape(2, 2), (5, 3))
    assert dict(layout.shapes) == {worker: shape(layout[worker]) for worker in range(4)} and len(layout.shapes) == 4
