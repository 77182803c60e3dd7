"""``backend="inductor"``: the numbers of the step up to rounding, its messages in their order, and clear errors."""

import pytest
import torch
from compiled_nets import trained
from test_exactness import together
from test_following import assert_same_ledger
from torch import nn

import distdl
from distdl.programs import inductor, worker
from distdl.programs.checking import assert_well_formed
from distdl.programs.inductor import with_inductor
from distdl.programs.segments import segmented

LEAST = 1e-12


class Waves(nn.Module):
    """Has several operators between two messages."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 2, 3, padding=1), nn.Conv2d(2, 1, 3, padding=1)

    def forward(self, x):
        y = self.first(x)
        return self.last((y.sin() * 2 + y.cos()) * y.tanh() - y)


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.cxx
@pytest.mark.compiles
@pytest.mark.timeout(200)
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("name", "workers"), [("perceptron", 1), ("lenet", 2), ("attention", 2), ("dropout", 2)])
def test_a_compiled_replay_has_the_numbers_of_the_step(name, workers):
    def work():
        step, left = trained(name, distdl.compile(backend="inductor"))
        (program,) = step.programs
        names = program.line.__globals__.values()
        return [one for one in names if getattr(one, "__module__", "") == "distdl.programs.inductor"], left

    theirs = together(lambda: trained(name, lambda one: one)[1], workers)
    for (functions, ours), others in zip(together(work, workers), theirs, strict=True):
        assert functions
        for number, (mine, other) in enumerate(zip(ours, others, strict=True)):
            for (what, a), (_, b) in zip(mine, other, strict=True):
                assert torch.allclose(a, b, rtol=LEAST, atol=LEAST), f"{what}, step {number}: {(a - b).abs().max()}"


@pytest.mark.cxx
@pytest.mark.compiles
@pytest.mark.timeout(200)
def test_a_ledger_of_a_compiled_replay_has_the_entries_of_the_step(monkeypatch):
    compiled = []

    def counted(step):
        found = with_inductor(step)
        compiled.append(sum(getattr(call.function, "__module__", "") == inductor.__name__ for call in found.calls))
        return found

    monkeypatch.setattr(worker, "with_inductor", counted)
    assert_same_ledger(distdl.compile(backend="inductor"), make=Waves)
    assert len(compiled) == 2 and min(compiled) > 0


@pytest.mark.parametrize("name", ["lenet", "u-net", "group-norm", "u-net-sharded"])
def test_segments_of_a_step_as_calls(name):
    """Each segment as one call that calls its operators: the step stays well-formed, and its messages in order."""

    def work():
        step, _ = trained(name, distdl.compile)
        (program,) = step.programs
        found = segmented(program.step, lambda segment: lambda *given: None)
        assert_well_formed(found)
        kinds = [
            [call for call in one.calls if call.kind in ("begin", "wait", "gradient")] for one in (program.step, found)
        ]
        assert kinds[0] == kinds[1]
        whole = segmented(program.step, lambda segment: None)
        assert len(whole.calls) == len(program.step.calls)
        return len(found.calls), len(program.step.calls)

    for few, many in together(work, 2):
        assert few < many


def test_errors(monkeypatch):
    with pytest.raises(ValueError, match='the backends "line" and "inductor"; got \'graph\''):
        distdl.compile(backend="graph")
    monkeypatch.setenv("CXX", "no-compiler-of-this-name")
    with pytest.raises(RuntimeError, match=r"needs a C.. compiler, and finds no no-compiler-of-this-name: install one"):
        distdl.compile(backend="inductor")
