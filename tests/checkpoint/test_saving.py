"""Steps that are kept, saving while training goes on, what is read and written, what can be kept."""

import contextlib
import copy
import errno
import io
import json
import os
import stat
import threading
from collections import Counter

import pytest
import torch
from saved_models import assert_equal, equip, make, noise
from torch import nn

import distdl
from distdl.__main__ import main
from distdl.checkpoint import files, saving


def steps_in(path):
    return sorted(int(one.name.removeprefix("step-")) for one in path.glob("step-*"))


def test_keep(tmp_path):
    model = nn.Linear(2, 2)
    for step in (10, 20, 30):
        nn.init.constant_(model.weight, step)
        distdl.save(tmp_path, model, step=step, keep=2)
    assert steps_in(tmp_path) == [20, 30]
    assert distdl.load(tmp_path / "step-000000020", model) == 20 and model.weight[0, 0] == 20
    distdl.save(tmp_path, model, step=20, keep=2)  # the same step again: now it is the last
    assert steps_in(tmp_path) == [20, 30] and distdl.load(tmp_path, model) == 20
    distdl.save(tmp_path, model, step=5, keep=2)  # back to an earlier step
    assert steps_in(tmp_path) == [5, 20] and distdl.load(tmp_path, model) == 5
    (tmp_path / "step-000000005" / "index.json").unlink()  # as if it were not complete
    assert distdl.load(tmp_path, model) == 20
    distdl.save(tmp_path, model, step=30, keep=1)
    assert steps_in(tmp_path) == [30]
    with pytest.raises(ValueError, match="is a folder of steps; save there with keep="):
        distdl.save(tmp_path, model, step=6)
    with pytest.raises(ValueError, match="is a checkpoint itself"):
        distdl.save(tmp_path / "step-000000030", model, step=6, keep=2)


class Shown(nn.Module):
    """A module whose state has its parameter in it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.state = None

    def get_extra_state(self):
        return {"weight": self.weight.detach(), "first": self.weight.detach()[:1]}

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("wait", [True, False])
def test_tensors_that_share_memory(wait, tmp_path):
    """Each is kept by itself."""
    model = nn.Sequential(Shown(), nn.Linear(2, 2))
    rate = torch.tensor(0.01)
    steps = torch.optim.Adam([{"params": one.parameters(), "lr": rate} for one in model])
    distdl.save(tmp_path, model, steps, wait=wait)
    distdl.finish_saving()
    with torch.no_grad():
        model[0].weight.zero_()
    rate.zero_()
    distdl.load(tmp_path, model, steps)
    assert model[0].weight.tolist() == [1.0, 2.0]
    assert_equal(model[0].state, {"weight": torch.tensor([1.0, 2.0]), "first": torch.tensor([1.0])})
    assert_equal([group["lr"] for group in steps.param_groups], [torch.tensor(0.01)] * 2)


def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch):
    """Files still have to be brought to the disk: an error there is one of the save."""
    plain = os.fsync

    def refuse(number, of=stat.S_ISDIR):
        if of(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        plain(number)

    model = nn.Linear(2, 2)
    monkeypatch.setattr(os, "fsync", refuse)
    distdl.save(tmp_path, model, step=4)
    assert distdl.load(tmp_path, model) == 4
    monkeypatch.setattr(os, "fsync", lambda number: refuse(number, stat.S_ISREG))
    with pytest.raises(OSError, match="Invalid argument"):
        distdl.save(tmp_path, model, step=5)
    assert distdl.load(tmp_path, model) == 4


@pytest.mark.parametrize("kind", ["sharded", "modules"])
def test_saving_does_not_stop_training(kind, tmp_path, monkeypatch):
    """What is saved is what was there at the call, though weights change before it is written."""
    plain, written = files.write_blocks, threading.Event()

    def slow(path, blocks, shows):
        assert written.wait(30)
        return plain(path, blocks, shows)

    def work():
        P = distdl.world()
        model = make(kind, P)
        steps, schedule = equip(model)
        distdl.save(tmp_path, model, steps, schedule, step=1, wait=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        assert not (tmp_path / "index.json").exists()
        P.allgather_data(0)
        written.set()
        distdl.finish_saving()
        other = make(kind, P, seed=1)
        assert distdl.load(tmp_path, other) == 1
        return distdl.export_state(other)[0]

    monkeypatch.setattr(saving, "write_blocks", slow)
    for state in distdl.run_workers(work, 3):
        assert_equal(state, dict(make("plain", None).state_dict()))


def test_a_save_ends_the_one_before(tmp_path):
    def work():
        model = make("sharded", distdl.world())
        for step in range(4):
            distdl.save(tmp_path, model, step=step, keep=2, wait=False)
        return distdl.load(tmp_path, model)

    assert distdl.run_workers(work, 2) == [3, 3]
    assert steps_in(tmp_path) == [2, 3]


def test_each_worker_reads_the_cells_that_it_has(tmp_path, monkeypatch):
    """And each block is checked by one worker."""
    model = nn.Linear(40, 30, bias=False)

    def save():
        distdl.save(tmp_path, distdl.distribute(copy_of(model), distdl.world().reshape(-1, 1), weights="sharded"))

    def copy_of(one):
        other = nn.Linear(40, 30, bias=False)
        other.load_state_dict(one.state_dict())
        return other

    read, checked = Counter(), Counter()
    plain_read, plain_check = files.Reader._slice, files.Reader.check

    def note_read(self, key, saved, block, box):
        cells = plain_read(self, key, saved, block, box)
        read[key.partition("/")[0], distdl.world().rank] += cells.numel()
        return cells

    def note_check(self, key, block):
        checked[key, block] += 1
        plain_check(self, key, block)

    def load():
        P = distdl.world()
        other = distdl.nn.DistributedLinear(P[:1].reshape(1, 1), P.reshape(1, 4), P.reshape(4, 1), 40, 30, bias=False)
        distdl.load(tmp_path, other)
        return other.sublinear.weight.numel()

    distdl.run_workers(save, 3)
    monkeypatch.setattr(files.Reader, "_slice", note_read)
    monkeypatch.setattr(files.Reader, "check", note_check)
    sizes = distdl.run_workers(load, 4)
    assert [read["model", worker] for worker in range(4)] == sizes and sum(sizes) == 1200
    assert set(checked.values()) == {1} and sum(key == "model/weight" for key, _ in checked) == 3


def test_copies_are_written_once_and_evenly(tmp_path):
    def work():
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(6)])
        for number, layer in enumerate(model):
            layer.weight.data.copy_(noise(64, 64, seed=number))
        distdl.save(tmp_path, distdl.distribute(model, distdl.world().reshape(-1, 1)))

    distdl.run_workers(work, 3)
    sizes = json.loads((tmp_path / "index.json").read_text())["sizes"]
    assert len(sizes) == 3 and all(2 * 64 * 64 * 4 < size < 2 * 64 * 64 * 4 + 16_000 for size in sizes.values())


def test_buffers_that_differ_are_those_of_the_first_worker(tmp_path):
    """All of them: a mean of one worker and a variance of another would fit no data."""

    def work():
        model = nn.Sequential(nn.Linear(64, 3), nn.BatchNorm1d(3))
        for parameter in model.parameters():
            parameter.data.fill_(1.0)
        for buffer in model[1].buffers():
            buffer.fill_(1 + distdl.world().rank)
        distdl.save(tmp_path, model)
        state, _ = distdl.export_state(model)
        distdl.load(tmp_path, model)
        return [{int(one.max()) for one in found.values()} for found in (dict(model.state_dict()), state)]

    assert distdl.run_workers(work, 3) == [[{1}, {1}]] * 3


class Odd(nn.Module):
    """Tensors of many dtypes, without dims, without cells, with two names, as views; and more than tensors."""

    def __init__(self, fill):
        super().__init__()
        dtypes = (torch.bfloat16, torch.complex128, torch.complex64, torch.bool, torch.uint8, torch.float8_e4m3fn)
        for number, dtype in enumerate(dtypes):
            self.register_buffer(f"b{number}", (noise(3, 4, seed=number) * 3 * fill).to(dtype))
        self.register_buffer("passing", torch.zeros(2), persistent=False)
        self.scalar = nn.Parameter(torch.tensor(2.5 * fill))
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.tied = self.scalar
        self.view = nn.Parameter((noise(4, 6, seed=9) * fill).T[1:4])
        self.extra = {"seen": [fill, (1, None)], 3: torch.tensor(fill), "inf": float("inf")}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_odd_tensors(tmp_path):
    def work(workers):
        distdl.save(tmp_path, Odd(1.0))
        found = Odd(0.0)
        distdl.load(tmp_path, found)
        assert_equal(dict(found.state_dict()), dict(Odd(1.0).state_dict()))
        state, none = distdl.export_state(found, on=workers - 1)
        assert none is None
        if distdl.world().rank == workers - 1:
            assert_equal(state, dict(Odd(1.0).state_dict()))
            assert list(state) == list(Odd(1.0).state_dict())
            again = Odd(0.0)
            again.load_state_dict(state)
        else:
            assert state == {}

    for workers in (1, 2):
        distdl.run_workers(lambda workers=workers: work(workers), workers)


def test_complex_numbers_that_lie_between_others(tmp_path):
    """In the file one of the two begins at an odd multiple of 8 bytes, where torch's loops would end the process."""

    def made(fill):
        values = {"a": fill * noise(3) + 1j, "b": fill * noise(1), "c": fill * noise(3) - 1j}
        return nn.ParameterDict({name: nn.Parameter(value) for name, value in values.items()})

    distdl.save(tmp_path, made(1.0))
    found = made(0.0)
    distdl.load(tmp_path, found)
    assert_equal(dict(found.state_dict()), dict(made(1.0).state_dict()))


def test_keys_that_read_alike(tmp_path):
    """Tensors under 1 and "1", and under "a/b" and "b" in "a", are different ones."""
    extra = {1: torch.tensor(1.0), "1": torch.tensor(2.0), "a": {"b": torch.tensor(3.0)}, "a/b": torch.tensor(4.0)}

    def made(extra):
        model = Odd(1.0)
        model.extra = extra
        return model

    distdl.save(tmp_path, made(extra))
    found, again = made(None), made(None)
    distdl.load(tmp_path, found)
    state, _ = distdl.export_state(found)
    distdl.import_state(again, state)
    for one in (found.extra, state["_extra_state"], again.extra):
        assert_equal(one, extra)


def test_a_module_with_two_names_is_listed_in_both_places():
    shared = nn.Sequential(nn.Linear(2, 2), Odd(1.0))
    whole = nn.ModuleDict({"a": nn.Linear(2, 2), "b": shared, "c": nn.Linear(2, 2), "d": shared})

    def work():
        model = copy.deepcopy(whole)
        assert list(distdl.export_state(model)[0]) == list(model.state_dict())

    distdl.run_workers(work, 2)


def test_a_scheduler_that_keeps_what_cannot_be_kept(tmp_path):
    model = nn.Linear(1, 1)
    steps = torch.optim.SGD(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(steps, 1)
    schedule.function = print
    with pytest.raises(ValueError, match="scheduler/function is a builtin_function_or_method"):
        distdl.save(tmp_path, model, steps, schedule)


@pytest.mark.parametrize("name", ["ReduceLROnPlateau", "OneCycleLR", "CosineAnnealingWarmRestarts", "SequentialLR"])
def test_schedulers(name, tmp_path):
    def made():
        model = nn.Linear(1, 1)
        steps = torch.optim.SGD(model.parameters(), momentum=0.5)
        kinds = torch.optim.lr_scheduler
        arguments = {
            "ReduceLROnPlateau": (),
            "OneCycleLR": (0.1, 10),
            "CosineAnnealingWarmRestarts": (4,),
            "SequentialLR": ([kinds.ConstantLR(steps), kinds.ExponentialLR(steps, 0.9)], [2]),
        }
        return model, steps, getattr(kinds, name)(steps, *arguments[name])

    def advance(steps, schedule, count):
        for _ in range(count):
            steps.step()
            schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))
        return steps.param_groups[0]["lr"]

    model, steps, schedule = made()
    advance(steps, schedule, 3)
    distdl.save(tmp_path, model, steps, schedule)
    other = made()
    distdl.load(tmp_path, *other)
    assert_equal(other[2].state_dict(), schedule.state_dict())
    assert advance(*other[1:], 4) == advance(steps, schedule, 4)


def test_inspect(tmp_path):
    def work():
        model = make("sharded", distdl.world())
        distdl.save(tmp_path, model, *equip(model), step=7)

    def printed(*arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            status = main(["inspect", *map(str, arguments)])
        return status, out.getvalue()

    distdl.run_workers(work, 2)
    status, text = printed(tmp_path)
    assert status == 0
    for words in (
        "step 7",
        "2 workers",
        "conv.weight",
        "5x2x3x3",
        "float64",
        "AdamW",
        "group 1: 2 parameters, lr 0.003",
    ):
        assert words in text, text
    status, text = printed(tmp_path, "--check")
    assert status == 0 and "all checksums are right" in text
    path = next(tmp_path.glob("data-*/*1.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    status, text = printed(tmp_path, "--check")
    assert status == 1 and "is damaged: the checksum of" in text
    status, text = printed(tmp_path / "none")
    assert status == 1 and "there is no complete checkpoint" in text
