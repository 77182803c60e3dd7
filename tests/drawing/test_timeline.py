"""Pictures of compiled steps: their lanes, and an arrow with its bytes for each message of this worker."""

import copy
import warnings
import xml.etree.ElementTree as ET

import pytest
import torch
from torch import nn

import distdl
from distdl.drawing.timeline import _MOST, _exchanges, of_program
from distdl.programs.calls import Call, Value

NETWORK = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1))


def drawn(calls=4, reads=False, shape=(1, 1, 2, 1)):
    """What each worker draws of a step that it has called so often."""

    def work():
        model = distdl.distribute(copy.deepcopy(NETWORK), shape)

        @distdl.compile
        def step(x):
            loss = model(x).square().mean()
            loss.backward()
            return loss.item() if reads else loss

        for seed in range(calls):
            model.zero_grad()
            x = torch.randn(1, 1, 8, 6, generator=torch.Generator().manual_seed(seed))
            step(distdl.distribute_tensor(x, shape))
        try:
            return distdl.draw(step), step.programs, distdl.draw(step.programs[0])
        except ValueError as error:
            return str(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return distdl.run_workers(work, 2)


def test_each_message_is_an_arrow_with_its_bytes():
    for me, (drawing, (program,), _) in enumerate(drawn()):
        (panel,) = drawing.scene.panels
        sent = [(me, to, n) for call in program.step.calls for to, n in call.sends]
        received = [(source, me, n) for call in program.step.calls for source, n in call.receives]
        assert sorted((one.source, one.target) for one in panel.arrows) == sorted(ends[:2] for ends in sent + received)
        assert sum(int(one.amount.split()[0]) for one in panel.arrows if one.source == me) == program.counts.nbytes
        assert [rect.worker for rect in panel.rects if rect.kind == "lane"] == [0, 1]
        heights = [one.start[1] for one in panel.arrows]
        assert heights == sorted(set(heights))  # time goes down, and no two lie upon each other
        assert all(one.start[1] == one.end[1] for one in panel.arrows)
        names = [row.partition(": ")[0].strip() for row in panel.rows if " -> " in row]
        assert names[:2] == ["model.0", "model.2"] and "model.2" in names[2:]


def test_the_text_lists_exchanges_and_what_is_computed_between_them():
    drawing, (program,), one = drawn()[0]
    text = str(drawing)
    assert text.startswith("step: its messages\n\nsignature 1 on worker 0: ")
    assert "  model.0: conv2d: 0 -> 1 24 B, 1 -> 0 24 B\n" in text
    rows = drawing.scene.panels[0].rows
    computed = sum(int(row.split()[0]) for row in rows if row.endswith(("operator", "operators")))
    assert computed == program.counts.operators + program.counts.functions
    assert str(one) == text.replace("step: its messages", "Signature 1: its messages")
    assert ET.fromstring(drawing._repr_svg_()).get("aria-label") == "step: its messages"


def test_an_exchange_that_is_waited_for_later_has_two_rows():
    begin = Call("begin", len, results=[Value(0), Value(1)], sends=[(1, 8)], receives=[(1, 4)])
    other = Call("begin", max, results=[Value(2), Value(3)])
    calls = [begin, Call("operator", abs), other, Call("wait", len, (Value(1),)), Call("wait", max, (Value(3),))]
    (first, last), tail = _exchanges(calls)
    assert (first.name, list(first.messages(0))) == ("len", [(0, 1, 8)])
    assert (last.name, list(last.messages(0)), tail) == ("wait for len", [(1, 0, 4)], 0)


def test_of_many_messages_the_first_are_drawn_and_all_listed():
    class Program:
        number, counts, line, comm = 1, "many", len, None
        step = type("Step", (), {"calls": []})

    for number in range(_MOST + 10):
        Program.step.calls += [Call("begin", len, results=[None, Value(number)], sends=[(1, 8)])]
        Program.step.calls += [Call("wait", len, (Value(number),))]
    scene = of_program(Program)
    assert len(scene.panels[0].arrows) == _MOST and len(scene.panels[0].rows) == _MOST + 10
    assert f"the first {_MOST} of {_MOST + 10} messages are drawn; the text lists all" in scene.notes


def test_a_step_that_is_no_line_has_no_picture():
    for told in drawn(2):
        assert (
            told == "distdl.draw shows a compiled step once it is recorded, and step is not: call it three times first"
        )
    for told in drawn(4, reads=True):
        assert "and step is not: signature 1: a value is read" in told


@pytest.mark.parametrize("given", [{"shape": (2,)}, {"dtype": torch.float32}])
def test_a_compiled_step_takes_no_shape_and_no_dtype(given):
    with pytest.raises(ValueError, match="got one for a CompiledStep"):
        distdl.draw(distdl.compile(lambda: None), **given)
