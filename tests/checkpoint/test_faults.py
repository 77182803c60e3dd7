"""What goes wrong with a checkpoint is the same error on every worker, and nothing is loaded in part."""

import contextlib
import copy
import json
import resource
import time
import zlib

import pytest
import torch
from saved_models import assert_equal, equip, make
from torch import nn

import distdl
from distdl.__main__ import main as command_line
from distdl.checkpoint import files, folders, loading, randomness, saving

WORKERS = 3


def run(work, workers=WORKERS):
    """Run it on every worker; each has to raise the same error, which is returned as its type and its text."""

    def caught():
        try:
            work()
        except Exception as error:
            return type(error), str(error)
        return None

    (found,) = set(distdl.run_workers(caught, workers))
    assert found is not None, "nothing was raised"
    return found


def save(path, **options):
    def work():
        P = distdl.world()
        model = make("sharded", P)
        distdl.save(path, model, *equip(model), **options)

    distdl.run_workers(work, WORKERS)


def refused(path, kind="modules", change=lambda model: None, optimiser=True):
    """The error of loading, after which the model and the optimiser are as they were."""
    lasting = []

    def work():
        P = distdl.world()
        model = make(kind, P, seed=1)
        change(model)
        steps, schedule = equip(model)
        before = distdl.export_state(model, steps)
        try:
            distdl.load(path, model, steps if optimiser else None, schedule if optimiser else None)
        finally:
            assert_equal(distdl.export_state(model, steps), before)
            lasting.append(True)

    found = run(work)
    assert len(lasting) == WORKERS
    return found


def zeros(layer):
    """A layer that is the same on every worker."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer.double()


def add_layer(model):
    model.more = zeros(nn.Linear(2, 2))


def drop_layer(model):
    del model.norm


def widen(model):
    model.conv = zeros(nn.Conv2d(2, 6, 3))


def narrow(model):
    model.fc.float()


@pytest.mark.fault("threads")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_layer, "the checkpoint has no more.bias, more.weight, and the model has it"),
        (drop_layer, "the model has no norm.bias"),
        (widen, "conv.weight is 5x2x3x3 torch.float64 in the checkpoint and 6x2x3x3 torch.float64 in the model"),
        (narrow, "fc.weight is 3x5 torch.float64 in the checkpoint and 3x5 torch.float32 in the model"),
    ],
)
def test_another_model(change, words, tmp_path):
    save(tmp_path)
    kind, text = refused(tmp_path, "replicated", change)
    assert kind is ValueError and words in text


@pytest.mark.fault("threads")
def test_an_optimiser_with_other_groups(tmp_path):
    def work():
        model = make("modules", distdl.world())
        distdl.load(tmp_path, model, torch.optim.AdamW(model.parameters()))

    save(tmp_path)
    assert "has 1 groups of parameters; saved were 2" in run(work)[1]

    def no_norm():
        model = make("modules", distdl.world())
        groups = [list(getattr(model, name).parameters()) for name in ("conv", "fc")]
        distdl.load(tmp_path, model, torch.optim.AdamW([{"params": one} for one in groups]))

    assert "the model has no norm.bias in group 0 of its optimiser" in run(no_norm)[1]


@pytest.mark.fault("threads")
def test_what_is_not_in_it(tmp_path):
    assert run(lambda: distdl.load(tmp_path / "none", nn.Linear(1, 1)))[0] is FileNotFoundError
    distdl.save(tmp_path, nn.Linear(1, 1))
    model = nn.Linear(1, 1)
    steps = torch.optim.SGD(model.parameters())
    assert run(lambda: distdl.load(tmp_path, model, steps)) == (ValueError, "the checkpoint has no optimiser")
    schedule = torch.optim.lr_scheduler.StepLR(steps, 1)
    assert run(lambda: distdl.load(tmp_path, model, None, schedule)) == (ValueError, "the checkpoint has no scheduler")


def files_of(path):
    index = json.loads((path / "index.json").read_text())
    return sorted((path / index["folder"]).iterdir())


def alter(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-100])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"0")


@pytest.mark.fault("threads")
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: alter(files_of(path)[1], -1), "is damaged: the checksum of"),
        (lambda path: alter(files_of(path)[1], 20), "is damaged: "),  # its header
        (lambda path: truncate(files_of(path)[2]), "is damaged: it has"),
        (lambda path: lengthen(files_of(path)[0]), "is damaged: it has"),
        (lambda path: files_of(path)[0].unlink(), "is missing"),
        (lambda path: alter(path / "index.json", 1000), "index.json is damaged"),
        (lambda path: truncate(path / "index.json"), "index.json is damaged"),
        (lambda path: (path / "index.json").write_text("[" * 100_000), "index.json is damaged"),
        (lambda path: (path / "index.json").write_text("{}"), "is no index of a checkpoint"),
        (
            lambda path: (path / "index.json").write_bytes(b"\x80\x04"),
            "index.json is damaged: 'utf-8' codec",
        ),  # a pickle
    ],
)
def test_damage(damage, words, tmp_path):
    save(tmp_path)
    damage(tmp_path)
    kind, text = refused(tmp_path)
    assert kind is ValueError and words in text and "worker" not in text.partition(" is ")[2].partition("(on")[0]


def rewrite(path, change):
    """Change an index, and make its checksum fit."""
    content = json.loads((path / "index.json").read_text())
    del content["crc32"]
    change(content)
    content["crc32"] = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    (path / "index.json").write_text(json.dumps(content))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return (x * self.scale).sum()


def test_a_count_that_an_earlier_version_took_for_a_moment(tmp_path):
    """Beside a parameter that is a number, in a checkpoint of before: it does not become a tensor of shares."""

    def made():
        P = distdl.world()
        model = distdl.distribute(Scaled(), P.reshape(P.size, 1), weights="sharded")
        return model, torch.optim.Adam(model.parameters())

    def saved():
        model, optimiser = made()
        model(distdl.distribute_tensor(torch.ones(4, 3), distdl.world().reshape(WORKERS, 1))).backward()
        optimiser.step()
        distdl.save(tmp_path, model, optimiser)

    def loaded():
        model, optimiser = made()
        distdl.load(tmp_path, model, optimiser)
        return [(type(one["step"]), float(one["step"])) for one in optimiser.state.values()]

    distdl.run_workers(saved, WORKERS)
    rewrite(tmp_path, lambda index: index["optimiser"]["state"]["model/scale"]["step"].update(follows=True))
    assert distdl.run_workers(loaded, WORKERS) == [[(torch.Tensor, 1.0)]] * WORKERS


def of_bias(index):
    return index["tensors"]["model/fc.bias"]


def in_state(index, **found):
    index["optimiser"]["state"]["model/fc.bias"]["exp_avg"] = found


@pytest.mark.fault("threads")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index.update(folder="../elsewhere"), "is no folder of files"),
        (lambda index: index.update(version=2), "is of version 2 of the format"),
        (lambda index: index["tensors"]["model/fc.bias"]["blocks"].pop(), "do not tile it"),
        (lambda index: index["tensors"]["model/fc.bias"].update(dtype="pickle"), "is damaged"),
        (lambda index: index.update(scheduler={"exec": "print"}), "stands for no value"),
        (
            lambda index: index["tensors"].pop("optimiser/model/fc.bias/exp_avg"),
            "it has no optimiser/model/fc.bias/exp_avg",
        ),
        (lambda index: of_bias(index)["blocks"][0].update(file="../x"), "a number from 0 is needed; it is '../x'"),
        (lambda index: of_bias(index)["blocks"][0].update(box=[[-(10**30), 3]]), "a number from 0 is needed"),
        (lambda index: of_bias(index).update(shape=[10**30]), "do not tile it"),
        (lambda index: index.update(sizes={}), "it has no size of the file of worker"),
        (lambda index: index.update(step=[1, 2]), "a number from 0 is needed; it is '[1, 2]'"),
        (lambda index: index.update(step=float("nan")), "Out of range float values"),
        (lambda index: index.update(scheduler_kind=["StepLR"]), "is no kind of a scheduler"),
        (lambda index: index.update(workers=0), "a number from 1 is needed"),
        (lambda index: index.update(aliases={"model/more": "model/none"}), "it has no model/none"),
        (lambda index: index.update(extra_state=None), "'None' is no extra_state"),
        (lambda index: index.update(random={"layers": 3, "draws": None}), "'3' is no random layers"),
        (lambda index: index.update(random={"layers": {}, "draws": [1, [[2]]]}), "is no random draws"),
        (lambda index: index.update(random="x"), "is damaged: TypeError"),
        (lambda index: index.update(scheduler=[1]), "needs a scheduler of the class that was saved"),
        (lambda index: index.update(scheduler={"dict": [3]}), "stands for no value"),
        (lambda index: index.update(scheduler={"dict": [[{"dict": []}, 3]]}), "unhashable"),
        (lambda index: index["optimiser"].update(groups=[{}, {}]), "is damaged: KeyError: 'params'"),
        (lambda index: index["optimiser"]["groups"][0].update(options=7), "'7' is no options of a group"),
        (lambda index: index["optimiser"].update(state=None), "'None' is no state of an optimiser"),
        (lambda index: index["optimiser"]["state"].update({"model/fc.bias": 5}), "is no state of an optimiser"),
        (lambda index: in_state(index, tensor="../../passwd", follows=True), "it has no ../../passwd"),
    ],
)
def test_a_forged_index(change, words, tmp_path, capsys):
    def work():
        model = make("sharded", distdl.world())
        steps, schedule = equip(model)
        (model(distdl.distribute_tensor(torch.ones(1, 2, 4, 4).double(), model.forward.P)).sum()).backward()
        steps.step()
        distdl.save(tmp_path, model, steps, schedule)

    distdl.run_workers(work, WORKERS)
    rewrite(tmp_path, change)
    kind, text = refused(tmp_path)
    assert kind is ValueError and words in text
    if "index.json is damaged" in text:
        for command in (["inspect", str(tmp_path)], ["convert", str(tmp_path), str(tmp_path / "theirs")]):
            assert command_line(command) == 1 and words in capsys.readouterr().out


def test_what_is_no_state_of_a_generator():
    randomness.check({"torch": torch.get_rng_state()})
    with pytest.raises(ValueError, match=r"\(3,\) torch.uint8 is no state of torch's torch generator"):
        randomness.check({"torch": torch.zeros(3, dtype=torch.uint8)})


@pytest.mark.fault("threads")
@pytest.mark.parametrize("optimiser", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_an_optimiser_of_another_class(optimiser, tmp_path):
    def work():
        model = make("replicated", distdl.world())
        distdl.load(tmp_path, model, optimiser([{"params": one["params"]} for one in equip(model)[0].param_groups]))

    save(tmp_path)
    kind, text = run(work)
    assert kind is ValueError and f"saved was the optimiser AdamW, and not {optimiser.__name__}: it has no " in text


def test_adam_takes_what_adamw_has_left(tmp_path):
    def work():
        model = make("replicated", distdl.world())
        groups = [{"params": one["params"]} for one in equip(model)[0].param_groups]
        return distdl.load(tmp_path, model, torch.optim.Adam(groups))

    save(tmp_path, step=4)
    assert distdl.run_workers(work, 2) == [4, 4]


class Tuned(torch.optim.AdamW):
    """An optimiser that derives from the one that was saved, and has one option more."""

    def __init__(self, groups):
        super().__init__(groups)
        self.defaults["mine"] = 3


class Renamed(torch.optim.lr_scheduler.MultiStepLR):
    """A scheduler that derives from the one that was saved."""


def test_a_class_that_has_gained_something_since(tmp_path):
    def work(kind, optimiser=None):
        model = make("replicated", distdl.world())
        steps, _ = equip(model)
        if optimiser is not None:
            steps = optimiser([{"params": one["params"]} for one in steps.param_groups])
        schedule = kind(steps, [7])
        schedule.added = 3
        found = distdl.load(tmp_path, model, steps, schedule)
        return found, schedule.added, sorted(schedule.milestones)

    save(tmp_path, step=4)
    same = torch.optim.lr_scheduler.MultiStepLR
    for arguments in ((same,), (Renamed,), (Renamed, Tuned)):
        assert distdl.run_workers(lambda arguments=arguments: work(*arguments), 2) == [(4, 3, [2, 3])] * 2


def test_a_checkpoint_that_does_not_say_the_class_of_its_scheduler(tmp_path):
    """One that was saved before distdl kept it."""
    model = make("plain", None)
    steps, schedule = equip(model)
    distdl.save(tmp_path, model, steps, schedule, step=4)
    rewrite(tmp_path, lambda index: index.pop("scheduler_kind"))
    schedule.added = 3
    assert distdl.load(tmp_path, model, steps, schedule) == 4 and schedule.added == 3


@pytest.mark.fault("threads")
@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingLR", "ReduceLROnPlateau", "ChainedScheduler"])
def test_a_scheduler_of_another_class(name, tmp_path):
    """Also one that torch refuses only when the model has been set: then that is undone."""
    kinds = torch.optim.lr_scheduler
    others = {
        "StepLR": lambda steps: kinds.StepLR(steps, 3),
        "CosineAnnealingLR": lambda steps: kinds.CosineAnnealingLR(steps, 3),
        "ReduceLROnPlateau": kinds.ReduceLROnPlateau,
        "ChainedScheduler": lambda steps: kinds.ChainedScheduler([kinds.ConstantLR(steps)]),
    }

    def work():
        model = make("modules", distdl.world(), seed=1)
        steps, _ = equip(model)
        schedule = others[name](steps)
        before, told = distdl.export_state(model, steps), schedule.state_dict()
        try:
            distdl.load(tmp_path, model, steps, schedule)
        finally:
            assert_equal(distdl.export_state(model, steps), before)
            assert {key: str(one) for key, one in schedule.state_dict().items()} == {k: str(v) for k, v in told.items()}

    save(tmp_path)
    assert ("the class that was saved, MultiStepLR; a " in run(work)[1]) is (name != "ChainedScheduler")


class Noted(nn.Module):
    """A module with a state of its own, which some workers do not take."""

    def __init__(self, value, takes=True):
        super().__init__()
        self.weight, self.takes = nn.Parameter(torch.full((2,), float(value or 0))), takes
        self.value = value

    def get_extra_state(self):
        if self.value is None:
            raise RuntimeError("it is not set yet")
        return {"value": self.value}

    def set_extra_state(self, state):
        if not self.takes and state["value"] != self.value:
            raise KeyError("of a user")
        self.value = state["value"]


@pytest.mark.fault("threads")
def test_a_worker_that_cannot_set_what_it_has_read(tmp_path):
    """What it and the others have set by then is undone."""
    distdl.save(tmp_path, Noted(7))
    left = []

    def work():
        model = Noted(1, takes=distdl.world().rank != 1)
        try:
            distdl.load(tmp_path, model)
        finally:
            left.append((model.value, model.weight.tolist()))

    assert run(work) == (RuntimeError, "KeyError: 'of a user' (on worker 1)")
    assert left == [(1, [1.0, 1.0])] * WORKERS


def test_a_module_that_has_no_state_yet(tmp_path):
    distdl.save(tmp_path, Noted(7))
    model = Noted(None)
    distdl.load(tmp_path, model)
    assert model.value == 7 and model.weight.tolist() == [7.0, 7.0]


class Further(nn.Linear):
    """A module that has more in its state_dict than parameters and buffers; or not, but for another name."""

    def __init__(self, *names):
        super().__init__(2, 2)
        self.names = names

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination.update({prefix + name: torch.ones(1) for name in self.names})
        destination[prefix + "kernel"] = destination.pop(prefix + "weight")


def test_what_a_module_alone_keeps_in_its_state_dict(tmp_path):
    distdl.save(tmp_path, zeros(Further()))
    assert distdl.load(tmp_path, zeros(Further())) is None
    model = nn.ModuleDict({"inner": Further("scale")})
    for call in (lambda: distdl.save(tmp_path, model), lambda: distdl.export_state(model)):
        with pytest.raises(ValueError, match=r"the _save_to_state_dict of a Further gives inner.scale, too"):
            call()


@pytest.mark.fault("threads")
def test_extra_states_that_are_missing_or_too_many(tmp_path):
    """As torch's load_state_dict refuses them."""

    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

    for model, name in ((Noted(7), "has"), (Plain(), "none")):
        distdl.save(tmp_path / name, nn.ModuleDict({"inner": model}))
    for name, other, words in (
        ("has", Plain(), "the model keeps no extra state of inner, of which the checkpoint has one"),
        ("none", Noted(3), "the checkpoint has no extra state of inner, which the model keeps"),
    ):

        def work(name=name, other=other):
            distdl.load(tmp_path / name, nn.ModuleDict({"inner": copy.deepcopy(other)}))

        assert run(work) == (ValueError, words)


@pytest.mark.fault("threads")
def test_a_tensor_that_cannot_be_set(tmp_path, monkeypatch):
    """What was set before it is undone, and it stays as it is."""
    save(tmp_path)
    plain, chosen = loading._swap, []

    def choose(model):
        if distdl.world().rank == 1:
            chosen.append(list(model.parameters())[-1])

    def swap(record, cells):
        if chosen and record.tensor is chosen[0]:
            chosen.clear()  # (the second time it works)
            raise RuntimeError("out of memory")
        plain(record, cells)

    monkeypatch.setattr(loading, "_swap", swap)
    assert refused(tmp_path, change=choose) == (RuntimeError, "out of memory (on worker 1)")


@pytest.mark.fault("threads")
def test_a_model_without_memory(tmp_path):
    def work(rank):
        model = nn.Linear(2, 2, device="meta" if distdl.world().rank >= rank else None)
        distdl.load(tmp_path, model)

    distdl.save(tmp_path, nn.Linear(2, 2))
    text = (
        "a checkpoint needs a model whose tensors have memory; weight is on the device meta. Materialise the model "
        "first (torch.nn.Module.to_empty)"
    )
    assert run(lambda: work(0)) == (ValueError, text)
    assert run(lambda: work(2)) == (ValueError, f"{text} (on worker 2)")
    assert run(lambda: distdl.save(tmp_path / "new", nn.Linear(2, 2, device="meta"))) == (ValueError, text)


@pytest.mark.fault("threads")
def test_workers_that_call_differently(tmp_path):
    cases = [
        (lambda rank, model: distdl.save(tmp_path, model, step=rank), "needs the same step on every worker"),
        (
            lambda rank, model: distdl.save(tmp_path if rank else 3, model),
            "TypeError|expected str, bytes or os.PathLike|argument should be a str",
        ),
        (lambda rank, model: distdl.save(tmp_path, nn.Linear(2, 2 + rank // 2)), "2x2 float32 on worker 0 and 3x2"),
        (lambda rank, model: distdl.save(tmp_path, model if rank else None), "(on worker 0)"),
        (lambda rank, model: distdl.save(tmp_path, model, keep=2), "needs step= beside keep="),
        (lambda rank, model: distdl.save(tmp_path, model, step=-1), "needs step= to be a number from 0"),
        (lambda rank, model: distdl.save(tmp_path, model, step=1, keep=0), "needs keep= to be a number from 1"),
        (lambda rank, model: distdl.save(tmp_path, model, scheduler=3), "needs a scheduler with a state_dict"),
        (lambda rank, model: distdl.save(tmp_path, model, optimiser=3), "needs an optimiser of torch's; got a int"),
        (
            lambda rank, model: distdl.save(tmp_path, model, torch.optim.SGD(model.parameters(), 0.1 + rank)),
            "options of group 0 of the optimiser have to be the same on every worker; lr is 0.1 on worker 0 and 1.1",
        ),
        (
            lambda rank, model: distdl.save(tmp_path, model, torch.optim.SGD(nn.Linear(1, 1).parameters())),
            "parameter 0 of group 0 (1x1) is none of them",
        ),
    ]
    for of, words in cases:

        def call(of=of):
            torch.manual_seed(0)
            model = nn.Linear(2, 2)
            for parameter in model.parameters():
                parameter.data.fill_(1.0)
            of(distdl.world().rank, model)

        _, text = run(call)
        assert any(one in text for one in words.split("|")), text
    assert not (tmp_path / "index.json").exists()


@pytest.mark.fault("threads")
@pytest.mark.parametrize("weight", [[[1.0, 2.0], [3.0, 4.0]], [[1.0, 0.0], [2.0, 0.0]]])
def test_copies_that_differ(weight, tmp_path):
    """In their values, or in the order of these."""

    def work():
        model = nn.Linear(2, 2)
        for parameter in model.parameters():
            parameter.data.zero_()
        model.weight.data.copy_(torch.tensor(weight) if distdl.world().rank == 2 else torch.tensor([[2.0, 0], [1, 0]]))
        distdl.save(tmp_path, model)

    kind, text = run(work)
    assert kind is ValueError and "copies of model/weight have to be equal; worker 0 and worker 2" in text


@pytest.mark.fault("threads")
@pytest.mark.parametrize("wait", [True, False])
def test_a_worker_that_cannot_write(wait, tmp_path, monkeypatch):
    """What was there stays; what was half written is removed; another save works."""
    save(tmp_path, step=1)
    before = files_of(tmp_path)
    plain = files.write_blocks

    def full(path, blocks, shows):
        if path.name == files.name_of(1):
            raise OSError(28, "No space left on device")
        return plain(path, blocks, shows)

    def work():
        model = make("sharded", distdl.world(), seed=2)
        distdl.save(tmp_path, model, step=2, wait=wait)
        distdl.finish_saving()

    monkeypatch.setattr(saving, "write_blocks", full)
    kind, text = run(work)
    assert kind is OSError and "No space left on device" in text and "(on worker 1)" in text
    assert ("earlier distdl.save" in text) is not wait
    assert files_of(tmp_path) == before and len(list(tmp_path.glob("data-*"))) == 1
    monkeypatch.undo()
    distdl.run_workers(work, WORKERS)
    assert len(list(tmp_path.glob("data-*"))) == 1 and files_of(tmp_path) != before
    model = make("plain", None)
    assert distdl.load(tmp_path, model) == 2
    assert_equal(dict(model.state_dict()), dict(make("plain", None, seed=2).state_dict()))


@contextlib.contextmanager
def no_byte_more():
    """No file of this process can grow: what a full disk does, also to the small files by which workers agree."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.fault("threads")
@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_without_a_free_byte(wait, tmp_path):
    """It is told as soon as it is asked for, and not at the time limit."""
    save(tmp_path, step=1)
    before = files_of(tmp_path)

    def work():
        P = distdl.world()
        model = make("sharded", P, seed=2)
        distdl.save(tmp_path, model, step=2, wait=wait)
        distdl.finish_saving()

    began = time.monotonic()
    with no_byte_more():
        kind, text = run(work)
    assert kind is OSError and ".safetensors cannot be written: " in text and "File too large" in text
    assert ("earlier distdl.save" in text) is not wait and time.monotonic() - began < 20
    assert files_of(tmp_path) == before and len(list(tmp_path.glob("data-*"))) == 1
    assert distdl.load(tmp_path, make("plain", None)) == 1


@pytest.mark.fault("threads")
@pytest.mark.parametrize("kind", ["a file", "below a file", "a link to nothing", "no name"])
def test_a_path_where_no_folder_can_be(kind, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    path = {"a file": "file", "below a file": "file/x", "a link to nothing": "link", "no name": "x" * 5000}[kind]
    assert run(lambda: distdl.save(tmp_path / path, zeros(nn.Linear(1, 1))))[0] is OSError
    assert run(lambda: distdl.load(tmp_path / path, nn.Linear(1, 1)))[0] in (OSError, FileNotFoundError)


def test_what_does_not_belong_there_is_not_followed(tmp_path):
    """A link in the place of the data is removed, and not what it leads to; a file among steps stays."""
    save(tmp_path / "one")
    (data,) = {file.parent for file in files_of(tmp_path / "one")}
    data.rename(tmp_path / "elsewhere")
    data.symlink_to(tmp_path / "elsewhere")
    save(tmp_path / "one", step=2)
    assert not data.exists() and len(list((tmp_path / "elsewhere").iterdir())) == WORKERS
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "step-000000007").touch()
    save(tmp_path / "steps", step=8, keep=1)
    assert distdl.load(tmp_path / "steps", make("plain", None)) == 8


@pytest.mark.fault("threads")
def test_two_saves_into_one_place(tmp_path):
    other = folders.Place(tmp_path, None, None, "0" * 16)  # that of another job
    kind, text = run(lambda: distdl.save(tmp_path, make("plain", None)))
    assert kind is ValueError and text.startswith(f"another save into {tmp_path} goes on")
    assert other.data.exists()
    other.release()
    save(tmp_path)
    assert not other.data.exists()
