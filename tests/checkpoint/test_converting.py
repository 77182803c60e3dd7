"""Directories of torch.distributed.checkpoint become checkpoints of ours, and ours theirs: to the last bit."""

import os
import pickle
import warnings
from pathlib import PosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from saved_models import assert_equal, equip, make, train
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import distdl
from distdl.__main__ import main
from distdl.checkpoint.converting import convert

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def trained():
    """A plain model in float64, and its optimiser, after a step."""
    model = make("plain", None)
    steps, schedule = equip(model)
    train(model, steps, schedule, None, 0, 1)
    return model, steps


def saved_by_torch(folder, state, **options):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True, **options)


@pytest.fixture
def theirs(tmp_path):
    """A directory that torch has saved, and what is in it."""
    model, steps = trained()
    state, optimiser = get_state_dict(model, steps)
    saved_by_torch(tmp_path / "theirs", {"model": state, "optim": optimiser, "step": 7, "note": "of the user's"})
    return tmp_path / "theirs", model, steps


def test_what_torch_has_saved_is_loaded_by_any_number_of_workers(theirs, tmp_path):
    folder, model, steps = theirs
    assert convert(folder, tmp_path / "ours") == f"{tmp_path / 'ours'}: model, optimizer, step; left out: note"

    def work(kind):
        P = distdl.world()
        other = make(kind, P, seed=1)
        their_steps, _ = equip(other)
        step = distdl.load(tmp_path / "ours", other, their_steps)
        return step, *distdl.export_state(other, their_steps)

    for kind, workers in (("sharded", 3), ("modules", 2), ("plain", 1)):
        for step, state, optimiser in distdl.run_workers(lambda kind=kind: work(kind), workers):
            assert step == 7
            assert_equal(state, dict(model.state_dict()))
            assert_equal(optimiser["state"], steps.state_dict()["state"])
            assert [group["lr"] for group in optimiser["param_groups"]] == [0.01, 0.003]


def test_what_workers_have_saved_is_loaded_by_torch_and_comes_back(tmp_path, capsys):
    def work():
        P = distdl.world()
        model = make("modules", P)
        steps, schedule = equip(model)
        train(model, steps, schedule, P, 0, 2)
        distdl.save(tmp_path / "ours", model, steps, schedule, step=2)
        return *distdl.export_state(model, steps), schedule.state_dict()

    state, optimiser, schedule = distdl.run_workers(work, 3)[0]
    assert main(["convert", str(tmp_path / "ours"), str(tmp_path / "theirs")]) == 0
    assert capsys.readouterr().out.endswith("model, optimizer, scheduler, step; left out: random numbers\n")
    model, steps = trained()
    own, of_optimiser = get_state_dict(model, steps)
    found = {"model": own, "optimizer": of_optimiser, "scheduler": {**schedule, "last_epoch": 0}, "step": 0}
    dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / "theirs"), no_dist=True)
    set_state_dict(model, steps, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    assert_equal(dict(model.state_dict()), state)
    assert_equal(steps.state_dict()["state"], optimiser["state"])
    assert found["scheduler"] == schedule and found["step"] == 2
    convert(tmp_path / "theirs", tmp_path / "again")
    model, (steps, after) = make("plain", None, seed=1), equip(make("plain", None))
    steps, after = equip(model)
    assert distdl.load(tmp_path / "again", model, steps, after) == 2
    assert_equal(dict(model.state_dict()), state)
    assert_equal(steps.state_dict()["state"], optimiser["state"])
    assert after.last_epoch == 2 and after.get_last_lr() == schedule["_last_lr"]


class Odd(nn.Module):
    """Dtypes, a number, no cells, and more than tensors."""

    def __init__(self, fill):
        super().__init__()
        for number, dtype in enumerate((torch.bfloat16, torch.complex64, torch.bool, torch.int8)):
            self.register_buffer(f"b{number}", torch.full((2, 3), fill).to(dtype))
        self.scalar, self.none = nn.Parameter(torch.tensor(2.5 * fill)), nn.Parameter(torch.zeros(0, 3))
        self.extra = {"seen": [fill, (1, None)], "inf": float("inf")}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_odd_tensors(tmp_path):
    distdl.save(tmp_path / "ours", Odd(1.0))
    convert(tmp_path / "ours", tmp_path / "theirs")
    convert(tmp_path / "theirs", tmp_path / "again")
    found = Odd(0.0)
    assert distdl.load(tmp_path / "again", found) is None
    assert_equal(dict(found.state_dict()), dict(Odd(1.0).state_dict()))


class InRows(dcp.DefaultSavePlanner):
    """Saves each matrix in two blocks of rows, as two workers would."""

    def create_local_plan(self):
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            data = item.tensor_data
            for begin, stop in ((0, 1), (1, data.size[0])):
                chunk = metadata.ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([stop - begin, data.size[1]]))
                index = metadata.MetadataIndex(item.index.fqn, [begin, 0])
                shard = planner.TensorWriteData(chunk, data.properties, data.size)
                items.append(planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=shard))
        self.plan = planner.SavePlan(items, planner_data=plan.planner_data)
        return self.plan

    def resolve_data(self, item):
        chunk = item.tensor_data.chunk
        return self.state_dict[item.index.fqn].narrow(0, chunk.offsets[0], chunk.sizes[0]).detach()


def test_blocks_are_put_together_and_a_bare_state_dict_is_a_model(tmp_path):
    state = {"a.weight": torch.randn(3, 4), "b.weight": torch.randn(2, 2, dtype=torch.float64)}
    saved_by_torch(tmp_path / "theirs", state, planner=InRows())
    assert len(pickle.loads((tmp_path / "theirs/.metadata").read_bytes()).storage_data) == 4
    assert convert(tmp_path / "theirs", tmp_path / "ours") == f"{tmp_path / 'ours'}: model"
    model = nn.ModuleDict({"a": nn.Linear(4, 3, bias=False), "b": nn.Linear(2, 2, bias=False).double()})
    distdl.load(tmp_path / "ours", model)
    assert_equal(dict(model.state_dict()), state)


def test_where_the_model_is_can_be_said(tmp_path, capsys):
    model, steps = trained()
    state, optimiser = get_state_dict(model, steps)
    saved_by_torch(tmp_path / "theirs", {"app": {"net": state, "opt": optimiser}})
    source, target = str(tmp_path / "theirs"), str(tmp_path / "ours")
    assert main(["convert", source, target]) == 1
    assert "it is not clear where the model is: there are app. Say it by --model" in capsys.readouterr().out
    assert main(["convert", source, target, "--model", "app.nothing"]) == 1
    assert main(["convert", source, target, "--model", "app.net", "--optimizer", "app.opt"]) == 0
    other, (other_steps, _) = make("plain", None, seed=1), equip(make("plain", None))
    other_steps, _ = equip(other)
    distdl.load(target, other, other_steps)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    assert main(["convert", source, target, "--model", "app.net"]) == 1
    assert "a conversion needs a new or empty folder" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "missing"), str(tmp_path / "new")]) == 1
    assert not (tmp_path / "new").exists()


def test_an_optimiser_that_has_numbers_in_the_place_of_names(tmp_path):
    model, steps = trained()
    saved_by_torch(tmp_path / "theirs", {"model": model.state_dict(), "optimizer": steps.state_dict()})
    with pytest.raises(ValueError, match="an optimiser is converted if its state has the names of the parameters"):
        convert(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


class Forged:
    """What runs when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_reading_executes_no_code(theirs, tmp_path):
    """Neither from the metadata nor from values."""
    folder, _, _ = theirs
    plain = (folder / ".metadata").read_bytes()
    forged = pickle.loads(plain)
    forged.planner_data["x"] = Forged(tmp_path / "executed")
    for content in (pickle.dumps(Forged(tmp_path / "executed")), pickle.dumps(forged)):
        (folder / ".metadata").write_bytes(content)
        with pytest.raises(ValueError, match=r"\.metadata is damaged, or forged: .* names posix.mkdir"):
            convert(folder, tmp_path / "ours")
    saved_by_torch(tmp_path / "values", {"model": {"w": torch.ones(2)}, "step": Forged(tmp_path / "executed")})
    with pytest.raises(ValueError, match="step is none of the numbers, strings, tensors and containers that are read"):
        convert(tmp_path / "values", tmp_path / "ours")
    assert not (tmp_path / "executed").exists() and not (tmp_path / "ours").exists()


DAMAGE = {
    "no pickle": (lambda content: b"nothing", "UnpicklingError"),
    "short": (lambda content: content[:-20], "is damaged, or forged"),
    "another value": (lambda content: pickle.dumps([1]), "it is a list"),
    "bytes of megabytes": (lambda content: b"\x8e" + (1 << 60).to_bytes(8, "little"), "is damaged, or forged"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_metadata(theirs, tmp_path, name):
    folder, _, _ = theirs
    damage, words = DAMAGE[name]
    (folder / ".metadata").write_bytes(damage((folder / ".metadata").read_bytes()))
    with pytest.raises(ValueError, match=words):
        convert(folder, tmp_path / "ours")


def outside(found):
    index = next(iter(found.storage_data))
    found.storage_data[index] = filesystem._StorageInfo("../theirs/__0_0.distcp", 0, 100)


def cut(found):
    found.state_dict_metadata["model.conv.weight"].chunks[0].sizes = torch.Size([4, 2, 3, 3])


def unknown(found):
    found.state_dict_metadata["model.conv.weight"] = [1]


def large(found):
    one = found.state_dict_metadata["model.conv.weight"]
    one.size = one.chunks[0].sizes = torch.Size([1 << 40, 1 << 10])
    one.chunks[0].offsets = torch.Size([0, 0])


def without_dtype(found):
    found.state_dict_metadata["model.conv.weight"].properties = 1


@pytest.mark.parametrize(
    ("forge", "words"),
    [
        (outside, "is no file of the directory"),
        (cut, "do not tile its"),
        (unknown, "model.conv.weight is a list"),
        (large, "theirs is damaged"),
        (without_dtype, "theirs is damaged"),
    ],
)
def test_forged_metadata(theirs, tmp_path, forge, words):
    folder, _, _ = theirs
    found = pickle.loads((folder / ".metadata").read_bytes())
    forge(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=words):
        convert(folder, tmp_path / "ours")


@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_are_read_by_the_name_that_any_python_gives_them(theirs, tmp_path, module):
    """Of 3.13, it is ``pathlib._local.PosixPath``."""
    folder, _, _ = theirs
    found = pickle.loads((folder / ".metadata").read_bytes())  # (where it was saved is a path)
    content = pickle.dumps(found, protocol=2)  # (in which names are lines)
    named = f"c{PosixPath.__module__}\nPosixPath\n".encode()
    assert named in content
    (folder / ".metadata").write_bytes(content.replace(named, f"c{module}\nPosixPath\n".encode()))
    assert "model, optimizer, step" in convert(folder, tmp_path / "ours")


@pytest.mark.fault("serial", count=2)
def test_truncated_and_missing_files(theirs, tmp_path):
    folder, _, _ = theirs
    path = next(folder.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"theirs is damaged: "):
        convert(folder, tmp_path / "ours")
    path.unlink()
    with pytest.raises(ValueError, match=r"theirs is damaged: .*No such file"):
        convert(folder, tmp_path / "ours")


def test_no_warnings(theirs, tmp_path):
    folder, _, _ = theirs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(folder, tmp_path / "ours")
        convert(tmp_path / "ours", tmp_path / "again")
