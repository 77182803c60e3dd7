"""Pictures: which blocks and arrows they consist of, what a terminal and a browser show of them, and their files."""

import re
import struct
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import distdl
from distdl.__main__ import main
from distdl.drawing.moves import amount
from distdl.drawing.scene import Arrow, Rect, with_amounts
from distdl.geometry.boxes import volume
from distdl.nn import (
    AllGather,
    AllSumReduce,
    Broadcast,
    DistributedChannelConv1d,
    DistributedConv1d,
    DistributedConv2d,
    DistributedLinear,
    DistributedMaxPool2d,
    HaloExchange,
    ReduceScatter,
    Repartition,
    SumReduce,
)
from distdl.partition.layout import Layout
from distdl.plan import Move, Plan
from distdl.plan.planning import broadcast, copy

SVG = "{http://www.w3.org/2000/svg}"


def rects(panel, kind):
    return [rect for rect in panel.rects if rect.kind == kind]


def arrows(panel):
    return {(arrow.source, arrow.target): arrow.amount for arrow in panel.arrows if not arrow.stays}


def cells(panel):
    return {ends: int(much.split()[0]) for ends, much in arrows(panel).items()}


# -- where a tensor lies


@pytest.mark.parametrize(("extents", "places"), [
    ((10,), (3,)), ((5, 7), (2, 3)), ((3, 100), (5, 2)), ((4, 6, 6), (2, 2, 2)), ((4, 3, 8, 9), (2, 1, 2, 3)),
    ((4, 2, 4, 4), (2, 2, 2, 2)), ((1000, 2000), (2, 2)), ((2, 3), (1, 1)),
])  # fmt: skip
def test_each_worker_has_its_block_to_scale(world, extents, places):
    workers = 1
    for n in places:
        workers *= n
    layout = Layout.balanced(world(workers + 2).reshape(-1)[:workers].reshape(places), extents)
    scene = distdl.draw(layout).scene
    (panel,) = scene.panels
    drawn = {rect.worker: rect for rect in rects(panel, "block")}
    assert sorted(drawn) == sorted(layout)
    assert {w: f"worker {w}: [{', '.join(f'{i}:{j}' for i, j in layout[w])}]" for w in layout} == {
        w: rect.title.partition("], ")[0] + "]" for w, rect in drawn.items()
    }
    for worker, rect in drawn.items():
        assert bool(rect.width and rect.height) or not volume(layout[worker])
        assert rect.label == (str(worker) if rect.width and rect.height else "")
        assert rect.x >= 0 and rect.x + rect.width <= panel.width + 1e-6
        assert rect.y >= 0 and rect.y + rect.height <= panel.height
    filled = [rect for rect in drawn.values() if rect.width and rect.height]
    for one in filled:  # no two lie upon each other
        for other in filled:
            apart = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
            beside = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
            assert one is other or apart < 1e-6 or beside < 1e-6
    assert f"outside the partition: worker {workers}, {workers + 1}" in scene.notes
    empty = [str(worker) for worker in layout if not volume(layout[worker])]
    assert [note for note in scene.notes if note.startswith("without")] == (
        [f"without a cell: worker {', '.join(empty)}"] if empty else []
    )


def test_a_block_is_as_large_as_its_share(world):
    (panel,) = distdl.draw(world(2).reshape(1, 2), shape=(60, 90)).scene.panels
    one, other = rects(panel, "block")
    assert one.width / one.height == pytest.approx(45 / 60) and one.width == pytest.approx(other.width)
    (panel,) = distdl.draw(Layout.of(world(2).reshape(2), [[(0, 30), (30, 90)]])).scene.panels
    one, other = rects(panel, "block")
    assert other.width / one.width == pytest.approx(2)


def test_slices_name_their_places_and_dims_that_are_not_split_are_named(world):
    scene = distdl.draw("layout 4x3x20x30 --workers 2x1x2x3").scene
    labels = [rect.label for rect in rects(scene.panels[0], "words")]
    assert labels == ["dim 0: 0:2", "dim 0: 2:4", "dim 2: 20 down, dim 3: 30 across"]
    assert scene.notes == ["not split, and not drawn: dim 1 (3)"]


def test_cells_are_drawn_only_where_they_can_be_seen(world):
    few = rects(distdl.draw("layout 6x8 --workers 2x2").scene.panels[0], "block")[0]
    assert [len(lines) for lines in few.cells] == [3, 2]
    many = rects(distdl.draw("layout 600x800 --workers 2x2").scene.panels[0], "block")[0]
    assert not any(many.cells)


def test_a_partition_is_a_cell_for_each_worker(world):
    P = world(7).reshape(7)[1:].reshape(2, 3)
    scene = distdl.draw(P).scene
    assert scene.title == "Partition 2x3 on workers 1..6" and scene.notes == ["outside the partition: worker 0"]
    assert [rect.label for rect in rects(scene.panels[0], "block")] == list("123456")
    assert len(distdl.draw(world(5)).scene.panels[0].rects) >= 5


def test_boxes_that_overlap_are_drawn_apart(world):
    (panel,) = distdl.draw(Layout.of(world(2).reshape(2), [[(0, 4), (2, 6)]])).scene.panels
    one, other = rects(panel, "block")
    assert other.x > one.x + one.width


def test_a_global_tensor_shows_its_layout_in_a_notebook():
    def work():
        x = distdl.distribute_tensor(torch.ones(5, 6), distdl.world().reshape(2, 1))
        scene, before = distdl.draw(x).scene, len(distdl.world().comm.calls((0, 1)).log)
        return scene, x._repr_svg_(), len(distdl.world().comm.calls((0, 1)).log) == before

    for scene, svg, silent in distdl.run_workers(work, 2):
        assert scene.title == "GlobalTensor 5x6, torch.float32" and silent
        assert [rect.title for rect in rects(scene.panels[0], "block")] == [
            "worker 0: [0:3, 0:6], 3x6, 72 B", "worker 1: [3:5, 0:6], 2x6, 48 B"
        ]  # fmt: skip
        assert "GlobalTensor 5x6" in svg and "worker 1: [3:5, 0:6]" in svg


# -- who sends what to whom


def described(layer, shape):
    return distdl.draw(layer, shape).scene


@pytest.mark.parametrize(("make", "shape", "forward"), [
    (lambda P: Broadcast(P[:1, :2], P.reshape(2, 3)[:, :2]), (3, 4), {(0, 3): 12, (1, 4): 12}),
    (lambda P: SumReduce(P[:, :2], P[:1, :2]), (3, 4), {(3, 0): 12, (4, 1): 12}),
    (lambda P: AllSumReduce(P, 0), (5,), {pair: 5 for a, b in ((0, 3), (1, 4), (2, 5)) for pair in ((a, b), (b, a))}),
    (lambda P: AllGather(P[:1], 1), (2, 4), {
        (0, 1): 4, (0, 2): 4, (1, 0): 2, (1, 2): 2, (2, 0): 2, (2, 1): 2
    }),
    (lambda P: ReduceScatter(P[:1], 1), (2, 4), {
        (1, 0): 4, (2, 0): 4, (0, 1): 2, (2, 1): 2, (0, 2): 2, (1, 2): 2
    }),
    (lambda P: Repartition(P[:, :1], P[:1, :2]), (4, 5), {(0, 1): 4, (3, 0): 6, (3, 1): 4}),
])  # fmt: skip
def test_primitives_send_what_their_plans_say_and_adjoints_send_it_back(world, make, shape, forward):
    layer = make(world(6).reshape(2, 3))
    ahead, back = described(layer, shape).panels
    assert cells(ahead) == forward
    assert cells(back) == {(target, source): much for (source, target), much in forward.items()}
    assert (ahead.caption, back.caption) == ("forward", "adjoint")
    for panel in (ahead, back):
        assert len(panel.rows) == len(panel.arrows)
        for arrow in panel.arrows:
            assert arrow.start[0] < arrow.end[0] <= panel.width


def test_what_arrives_has_the_colour_of_its_sender_and_a_sum_a_stripe_of_each():
    ahead, back = distdl.draw("broadcast 1x3 4x3").scene.panels
    copies = [rect for rect in rects(ahead, "piece") if rect.title]
    assert sorted(rect.label for rect in copies) == sorted("0123"[n // 4] for n in range(12))
    assert [rect.label for rect in rects(back, "outline")] == ["+"] * 3
    stripes = [rect.worker for rect in rects(back, "piece") if rect.title]
    assert stripes == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]
    assert set(arrows(ahead).values()) == {""}  # (nobody knows the shapes)


def test_lanes_of_one_broadcast_stand_together():
    ahead, _ = distdl.draw("broadcast 1x3 4x3").scene.panels
    ordered = sorted(rects(ahead, "outline"), key=lambda rect: rect.y)
    assert [rect.worker for rect in ordered] == [0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11]


def test_blocks_are_drawn_where_they_lie_in_the_tensor():
    ahead, _ = distdl.draw("repartition 4x1 1x4 --shape 8x8").scene.panels
    frames, (first, last) = rects(ahead, "tensor"), (rects(ahead, "block")[0], rects(ahead, "block")[-1])
    assert len(frames) == 8 and (first.x, first.width) == (frames[0].x, frames[0].width)
    assert last.y + last.height == pytest.approx(frames[3].y + frames[3].height)
    assert first.height == pytest.approx(frames[0].height / 4)


def test_a_plan_is_drawn_as_it_is(world):
    P = world(3).reshape(3)
    plan = copy(Layout.of(P, [[(0, 5), (5, 5), (5, 9)]]), Layout.of(P, [[(0, 3), (3, 6), (6, 9)]]))
    ahead, back = distdl.draw(plan, dtype=torch.float64).scene.panels
    assert arrows(ahead) == {(0, 1): "16 B", (2, 1): "8 B"} and arrows(back) == {(1, 0): "16 B", (1, 2): "8 B"}
    assert "0 -> 1: [3:5] to [0:2], 16 B" in ahead.rows and "0 keeps: [0:3] to [0:3], 24 B" in ahead.rows
    empty = Plan({0: (2,)}, {1: (2,)}, ())
    assert [len(panel.arrows) for panel in distdl.draw(empty).scene.panels] == [0, 0]
    ends = Plan({0: (4,)}, {1: (4,)}, (Move(0, ((0, 1),), 1, ((3, 4),)), Move(0, ((1, 2),), 1, ((0, 1),))))
    assert distdl.draw(ends).scene.panels[0].rows == ["0 -> 1: [0:1] to [3:4], [1:2] to [0:1], 2 cells"]
    teams = distdl.draw(broadcast(P[:1], P, {0: (2, 2)})).scene.panels[0]
    assert cells(teams) == {(0, 1): 4, (0, 2): 4}


def test_of_very_many_arrows_those_of_one_worker_are_drawn():
    panel, _ = distdl.draw("all-sum-reduce 12 --shape 3").scene.panels
    assert len(panel.rows) == 144 and {0} == {0 for arrow in panel.arrows if 0 in (arrow.source, arrow.target)}
    assert len(panel.arrows) == 23


# -- windows


def test_halos_come_from_all_neighbours_and_the_adjoint_goes_back():
    ahead, back = distdl.draw("halo 12x12 --workers 2x2 --dtype float32").scene.panels
    expected = {(a, b): "4 B" if {a, b} in ({0, 3}, {1, 2}) else "24 B" for a in range(4) for b in range(4) if a != b}
    assert arrows(ahead) == expected and arrows(back) == {(b, a): much for (a, b), much in expected.items()}
    assert "0 -> 1: [0:6, 5:6], 24 B" in ahead.rows and "1 -> 0: [0:6, 5:6], 24 B" in back.rows
    assert len(rects(ahead, "halo")) == 12 and len(rects(ahead, "window")) == 4
    halo = next(rect for rect in rects(ahead, "halo") if rect.title == "worker 0 reads [0:6, 6:7] of worker 1")
    assert halo.worker == 1
    own = rects(ahead, "block")[0]
    assert halo.x == pytest.approx(own.x + own.width) and halo.height == pytest.approx(own.height)


def ends_in(arrow, panel, kind, worker):
    (x, y), found = arrow.end, [rect for rect in rects(panel, kind) if rect.worker == worker]
    return any(
        rect.x - 10 <= x <= rect.x + rect.width + 10 and rect.y - 10 <= y <= rect.y + rect.height + 10 for rect in found
    )


def test_arrows_end_where_their_cells_are_needed():
    ahead, back = distdl.draw("halo 12x12 --workers 2x2").scene.panels
    assert all(ends_in(arrow, ahead, "halo", arrow.source) for arrow in ahead.arrows)
    assert all(ends_in(arrow, back, "block", arrow.target) for arrow in back.arrows)


@pytest.mark.parametrize("words", [
    "conv 33x47 --kernel 5 --stride 2 --workers 2x2", "conv 33x47 --kernel 5 --stride 2 --padding 2 --workers 3x2",
    "conv 13 --kernel 7 --padding 3 --workers 5", "pool 9x9 --kernel 3 --stride 2 --workers 2x3",
    "conv 7x8x9 --kernel 3 --padding 1 --workers 1x2x2", "conv 4x6 --kernel 3 --workers 3x2",
])  # fmt: skip
def test_windows_are_those_of_the_layer(words):
    """Uneven blocks, halos wider than a block, workers without outputs."""
    _, shape, *options = words.split()
    given = dict(zip(options[::2], options[1::2], strict=True))
    extents = [int(n) for n in shape.split("x")]
    places = [int(n) for n in given["--workers"].split("x")]
    k, s = int(given["--kernel"]), int(given.get("--stride", 1))
    p = int(given.get("--padding", 0))
    scene = distdl.draw(words).scene
    ahead, back, result = scene.panels
    outputs = [(n + 2 * p - k) // s + 1 for n in extents]
    expected: dict[tuple[int, int], int] = {}
    owner, reader = split(extents, places), split(outputs, places)
    for target, out in reader.items():
        if any(i == j for i, j in out):
            continue
        window = [(i * s - p, (j - 1) * s - p + k) for i, j in out]
        for source, own in owner.items():
            shared = 1
            for (a, b), (c, d) in zip(window, own, strict=True):
                shared *= max(min(b, d) - max(a, c), 0)
            if shared and source != target:
                expected[source, target] = shared
    assert cells(ahead) == expected and cells(back) == {(b, a): much for (a, b), much in expected.items()}
    found = {rect.worker: rect.title for rect in rects(result, "block")}
    assert found == {
        worker: f"worker {worker}: [{', '.join(f'{i}:{j}' for i, j in box)}], "
        f"{'x'.join(str(j - i) for i, j in box)}, {amount(volume(box), None)}"
        for worker, box in reader.items()
    }
    assert bool(rects(ahead, "padding")) == (p > 0)


def split(extents, places):
    """The box of each worker, split as evenly as possible."""
    boxes = {0: ()}
    for extent, parts in zip(extents, places, strict=True):
        sizes = [extent // parts + (place < extent % parts) for place in range(parts)]
        ends = [sum(sizes[:place]) for place in range(parts + 1)]
        boxes = {
            worker * parts + place: (*box, (ends[place], ends[place + 1]))
            for worker, box in boxes.items() for place in range(parts)
        }  # fmt: skip
    return boxes


def test_of_moves_between_slices_the_text_tells():
    scene = distdl.draw("halo 9x9x9 --workers 2x2x2").scene
    ahead, _ = scene.panels
    assert len(ahead.rows) == 56 and len(ahead.arrows) == 24
    assert (
        "32 moves between slices are not drawn; the text lists them"
        in distdl.draw("halo 9x9x9 --workers 2x2x2").scene.notes
    )


def on_threads(work, workers):
    return distdl.run_workers(work, workers)


def test_layers_show_what_their_last_call_has_moved():
    def work():
        P = distdl.world().reshape(1, 1, 2, 2)
        layer = DistributedConv2d(P, in_channels=3, out_channels=8, kernel_size=5, stride=2)
        with pytest.raises(ValueError, match=r"not called it; give the global shape of x: draw\(layer, shape=...\)"):
            distdl.draw(layer)
        rows, columns = (20, 13), (7, 40)  # uneven
        i, j = P.index[2:]
        layer(torch.ones(1, 3, rows[i], columns[j]))
        return distdl.draw(layer).scene

    first, *others = on_threads(work, 4)
    assert all(other == first for other in others)
    ahead, back, result = first.panels
    assert first.title == "DistributedFeatureConv2d of 1x3x33x47, kernel 5x5, stride 2x2"
    assert "the weight, 8x3x5x5, lies on worker 0; each worker gets what it uses" in first.notes
    assert "not split, and not drawn: dim 0 (1), dim 1 (3)" in first.notes
    owned = [rect.title.partition(", 1x")[0] for rect in rects(ahead, "block")]
    assert owned[3] == "worker 3: [0:1, 0:3, 20:33, 7:47]"
    # outputs 0:8 of 15 and 0:11 of 22, so windows 0:19 and 14:33, 0:25 and 22:47
    assert set(arrows(ahead)) == {(1, 0), (3, 2), (0, 2), (1, 2), (1, 3)}
    assert arrows(ahead)[1, 0] == amount(3 * 19 * 18, 4) and arrows(back)[0, 1] == arrows(ahead)[1, 0]
    assert rects(result, "block")[3].title.startswith("worker 3: [0:1, 0:8, 8:15, 11:22], 1x8x7x11")


def test_a_pooling_a_halo_exchange_and_an_operator_after_a_call():
    def work():
        P = distdl.world().reshape(1, 1, 1, 3)
        pool = DistributedMaxPool2d(P, 3, stride=2)
        pool(torch.ones(1, 2, 7, (5, 0, 6)[P.rank], dtype=torch.float64))
        line = distdl.world().reshape(3)
        side = [(0, 1), (1, 1), (1, 0)][line.rank]
        halo = HaloExchange(line, [side], [side], [side])
        halo(torch.ones(4 + sum(side)))
        copies = Broadcast(line[1:2], line)
        copies(torch.ones(4) if line.rank == 1 else torch.ones(0))
        turn = Repartition(line.reshape(3, 1), line.reshape(1, 3))
        with pytest.raises(ValueError, match="not called"):
            distdl.draw(turn)
        operator = turn.agree(torch.ones(1, 3)).operators[0]
        return [distdl.draw(one).scene for one in (pool, halo, copies, operator)]

    scenes = on_threads(work, 3)
    pool, halo, copies, _ = scenes[0]
    assert "without a cell: worker 1" in pool.notes and arrows(pool.panels[0]).keys() == {(0, 1), (2, 1)}
    assert arrows(halo.panels[0]) == {(0, 1): "4 B", (1, 0): "4 B", (1, 2): "4 B", (2, 1): "4 B"}
    assert [rect.title for rect in rects(halo.panels[0], "block")][1] == "worker 1: [4:8], 4, 16 B"
    assert arrows(copies.panels[0]) == {(1, 0): "16 B", (1, 2): "16 B"}
    own = [scene[3] for scene in scenes]
    assert [set(arrows(one.panels[0])) for one in own] == [
        {(0, 1), (0, 2), (1, 0), (2, 0)}, {(0, 1), (1, 0), (1, 2), (2, 1)}, {(0, 2), (1, 2), (2, 0), (2, 1)}
    ]  # fmt: skip
    assert own[2].title == "Repartition: the plan of worker 2"


def test_circular_padding_comes_from_the_other_end(world):
    layer = DistributedConv1d(
        world(3).reshape(1, 1, 3), in_channels=1, out_channels=1, kernel_size=3, padding=1, padding_mode="circular"
    )
    ahead = distdl.draw(layer, shape=(1, 1, 9)).scene.panels[0]
    assert arrows(ahead) == dict.fromkeys([(a, b) for a in range(3) for b in range(3) if a != b], "1 cell")


def test_padding_that_repeats_cells_is_said_not_to_be_drawn(world):
    P = world(2).reshape(1, 1, 2)
    layer = DistributedConv1d(P, in_channels=1, out_channels=1, kernel_size=3, padding=1, padding_mode="reflect")
    notes = distdl.draw(layer, shape=(1, 1, 9)).scene.notes
    assert "the cells that padding by reflect repeats are not drawn" in notes


def test_channels_that_are_split(world):
    P = world(4)
    P_x = P.reshape(4)[:2].reshape(1, 2, 1)
    channels = {"in_channels": 4, "out_channels": 6}
    layer = DistributedChannelConv1d(P_x, P_x, P.reshape(2, 2, 1), **channels, kernel_size=3, padding=1)
    scene = distdl.draw(layer, shape=(2, 4, 8)).scene
    assert "what moves along channels is not drawn" in scene.notes
    assert [rect.title for rect in rects(scene.panels[-1], "block")] == [
        "worker 0: [0:2, 0:3, 0:8], 2x3x8, 48 cells", "worker 1: [0:2, 3:6, 0:8], 2x3x8, 48 cells"
    ]  # fmt: skip


def test_what_has_no_picture_is_an_error_that_says_what_has_one(world):
    P = world(4).reshape(2, 2)
    with pytest.raises(TypeError, match=r"shows a Partition, a Layout, .*; got a Tensor"):
        distdl.draw(torch.ones(2))
    linear = DistributedLinear(P[:1], P[:1], P, 4, 4)
    with pytest.raises(TypeError, match="convolutions and poolings, and layouts; got a DistributedLinear"):
        distdl.draw(linear)
    with pytest.raises(ValueError, match="takes a shape for layers and partitions; got one for a Layout"):
        distdl.draw(Layout.balanced(P, (4, 4)), shape=(4, 4))
    with pytest.raises(ValueError, match=r"Layout\.balanced needs a tensor with one dim for each axis"):
        distdl.draw(P, shape=(4,))
    halo = HaloExchange(P, [(0, 0)] * 2, [(0, 0)] * 2, [(0, 0)] * 2)
    with pytest.raises(ValueError, match=r"has not called it$"):
        distdl.draw(halo)
    with pytest.raises(ValueError, match="a HaloExchange takes no shape, as its x has its halos"):
        distdl.draw(halo, shape=(4, 4))
    conv = DistributedConv2d(P.reshape(1, 1, 2, 2), in_channels=3, out_channels=8, kernel_size=5)
    with pytest.raises(ValueError, match="needs x of 3 channels; got a shape of 1x7x33x47"):
        distdl.draw(conv, shape=(1, 7, 33, 47))
    with pytest.raises(ValueError, match="takes a dtype for what has none of its own; got one for a str"):
        distdl.draw("halo 12 --workers 4", dtype=torch.float32)
    for text in ("", "circle 3", "halo 12 --workers", "halo 4x4 --workers 2", "conv 2 --kernel 3 --workers 1"):
        with pytest.raises(ValueError):
            distdl.draw(text)


# -- what one sees


def test_amounts_do_not_lie_upon_each_other():
    for words in ("halo 12x12 --workers 2x2", "repartition 3x1 1x4 --shape 9x9", "conv 33x47 --kernel 5 --workers 2x2"):
        for panel in distdl.draw(words).scene.panels:
            written = [(arrow.at, len(arrow.amount) * 6.6) for arrow in panel.arrows if arrow.at]
            assert all(at[0] - wide / 2 >= 0 and at[0] + wide / 2 <= panel.width for at, wide in written)
            for place, (one, wide) in enumerate(written):
                for other, broad in written[place + 1 :]:
                    assert abs(one[1] - other[1]) >= 13 or abs(one[0] - other[0]) >= (wide + broad) / 2


def test_an_amount_without_a_place_is_said_to_be_elsewhere():
    one = Arrow(0, 1, (0, 20), (50, 20), "6 cells", "")
    covered = [Rect(0, y, 50, 2, "block", label="a very long name") for y in range(0, 50, 10)]
    (written,), notes = with_amounts([one], covered, 60)
    assert written.at is None and notes == ["amounts that have no place here are in the text and the tool tips"]


def test_equal_amounts_are_said_once():
    scene = distdl.draw("repartition 4x1 1x4 --shape 8x8 --dtype float32").scene
    assert "each arrow moves 16 B" in scene.notes and all(arrow.at is None for arrow in scene.panels[0].arrows)


@pytest.mark.parametrize("words", [
    "broadcast 1x3 4x3", "conv 33x47 --kernel 5 --stride 2 --padding 2 --workers 2x2", "layout 3x100 --workers 5x2",
    "halo 6x6x6x6 --workers 2x2x2x1",
])  # fmt: skip
def test_svg_has_a_tool_tip_for_each_part_and_its_own_background(words):
    drawing = distdl.draw(words)
    root = ET.fromstring(drawing._repr_svg_())
    _, _, width, height = map(float, root.get("viewBox").split())
    assert (float(root.get("width")), float(root.get("height"))) == (width, height)
    tips = [title.text for title in root.iter(f"{SVG}title")]
    for panel in drawing.scene.panels:
        assert panel.x + panel.width <= width and panel.y + panel.height <= height
        assert {rect.title for rect in panel.rects if rect.title} <= set(tips)
        assert {arrow.title for arrow in panel.arrows} <= set(tips)
    assert "prefers-color-scheme:dark" in root.find(f"{SVG}style").text
    assert root.find(f"{SVG}rect").get("class") == "distdl-paper"
    assert drawing.scene.title in [text.text for text in root.iter(f"{SVG}text")]


def test_words_are_escaped():
    from distdl.drawing.scene import composed
    from distdl.drawing.svg import svg

    ET.fromstring(svg(composed('a < b & "c"', [], [])))


def test_text():
    lines = str(distdl.draw("halo 6 --workers 2 --dtype float32")).splitlines()
    assert [line.strip(" ") for line in lines] == [
        "Halo of 6, 2 workers",
        "",
        "forward: what each worker reads of x",
        "....+----------+////       ////+----------+....",
        "....|          |////       ////|          |....",
        "....|    0     |////       ////|     1    |....",
        "....+----------+////       ////+----------+....",
        "dim 0: 6 across",
        "0 -> 1: [2:3], 4 B",
        "1 -> 0: [3:4], 4 B",
        "",
        "adjoint: gradients go back, and are added",
        "1 -> 0: [2:3], 4 B",
        "0 -> 1: [3:4], 4 B",
        "",
        "hatched: cells of other workers, in their colours; dotted: padding; dashed: what a worker reads",
    ]


def test_a_legend_names_what_is_in_the_picture():
    assert "dotted" not in str(distdl.draw("conv 8 --kernel 2 --workers 2"))
    assert "hatched" not in str(distdl.draw("pool 8 --kernel 2 --workers 2"))


def test_files(tmp_path):
    drawing = distdl.draw("broadcast 1 3")
    drawing.save(tmp_path / "one.SVG")
    assert (tmp_path / "one.SVG").read_text(encoding="utf-8") == drawing._repr_svg_()
    with pytest.raises(ValueError, match=r"saved as \.svg or \.png, by the ending of its path; got 'one\.pdf'"):
        drawing.save("one.pdf")
    assert repr(drawing) == "<distdl.drawing.Drawing: Broadcast from 1 workers to 3>"


def test_png_has_the_size_of_the_picture(tmp_path):
    pytest.importorskip("resvg_py")
    drawing = distdl.draw("halo 12x12 --workers 2x2")
    drawing.save(tmp_path / "halo.png")
    content = (tmp_path / "halo.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    size = round(drawing.scene.width), round(drawing.scene.height)
    assert struct.unpack(">II", content[16:24]) == (2 * size[0], 2 * size[1])
    assert struct.unpack(">II", drawing.png(zoom=1)[16:24]) == size


def test_without_what_draws_png_an_error_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(ImportError, match=r'pip install "distdl\[draw\]"'):
        distdl.draw("broadcast 1 3").save(tmp_path / "one.png")
    assert not list(tmp_path.iterdir())


# -- the command line


def test_the_command_prints_text_or_writes_a_file(tmp_path, capsys):
    assert main(["draw", "broadcast", "1x3", "4x3"]) == 0
    assert capsys.readouterr().out == str(distdl.draw("broadcast 1x3 4x3")) + "\n"
    path = tmp_path / "conv.svg"
    words = ["conv", "33x47", "--kernel", "5", "--stride", "2", "--workers", "2x2"]
    assert main(["draw", *words, "-o", str(path)]) == 0
    assert path.read_text() == distdl.draw(" ".join(words))._repr_svg_() and capsys.readouterr().out == ""


@pytest.mark.parametrize(("words", "error"), [
    ("circle 3", "invalid choice: 'circle'"),
    ("broadcast 1x3 4xa", "whole numbers are needed, with x between them, as 2x2; got 4xa"),
    ("broadcast 2x3 4x3", "Broadcast needs every axis of P_x to be 1 or to equal P_y's"),
    ("halo 12x12", "the following arguments are required: --workers"),
    ("halo 12x12 --workers 2", "Layout.balanced needs a tensor with one dim for each axis"),
    ("halo 12x12 --workers 2x2 --width 1x2x3", "one width, or one for each of 2 dims; got 1x2x3"),
    ("halo 12x12 --workers 2x2 -o halo.pdf", "saved as .svg or .png"),
    ("halo 12x12 --workers 0x2", "at least one worker along each axis is needed; got 0x2"),
    ("conv 3x3 --kernel 5 --workers 2x2", "needs an input at least as large as its kernel"),
    ("conv 3x3 --kernel 1x2x3 --workers 2x2", "kernel_size"),
    ("pool 33x47 --kernel 2 --padding 2 --workers 2x2", "Pooling needs padding of at most half the kernel"),
    ("repartition 4x1 1x4", "the following arguments are required: --shape"),
    ("repartition 4x1 4 --shape 8x8", "equally many axes"),
    ("all-gather 2x2 --axes 5 --shape 8x8", "axes"),
    ("layout 4x4 --workers 2x2 --dtype float33", "a dtype of torch is needed, as float32; got float33"),
])  # fmt: skip
def test_bad_input_is_a_clear_error_and_exit_code_2(words, error, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["draw", *words.split()])
    assert ended.value.code == 2 and error in capsys.readouterr().err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["draw", "--help"])
    shown = capsys.readouterr().out
    examples = [line.split("distdl draw ")[1] for line in shown.splitlines() if line.startswith("  distdl draw ")]
    assert ended.value.code == 0 and len(examples) == 5
    for example in examples:
        distdl.draw(example.partition(" -o")[0])


def test_all_arrows_of_one_worker_are_no_part_of_the_arrows():
    scene = distdl.draw("broadcast 1 100").scene
    assert len(scene.panels[0].arrows) == 100 and not any("arrows, those of" in note for note in scene.notes)


def test_each_picture_of_a_page_has_the_command_that_makes_it():
    docs = Path(__file__).parents[2] / "docs"
    pages = [page.read_text() for page in docs.rglob("*.md") if page.parent != docs / "reference"]
    commands = [re.findall(r"^distdl draw (.*) -o (\S+)$", page, re.MULTILINE) for page in pages]
    shown = [re.findall(r"\((?:\.\./)?pictures/(\S+)\)", page) for page in pages]
    for made, wanted in zip(commands, shown, strict=True):
        assert not made or [name for command, name in made] == wanted  # in a page that makes pictures, in their order
    made = {name: command for page in commands for command, name in page}
    assert len(made) == sum(map(len, commands)) >= 15 and {name for page in shown for name in page} == {*made}
    for command in made.values():
        assert len(distdl.draw(command).scene.panels) >= (1 if command.startswith("layout") else 2)
