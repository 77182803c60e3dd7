"""The page on GPUs: its snippets run on the CPU, and on a GPU where there is one; its messages are those that come."""

import re
import runpy
from functools import partial
from pathlib import Path

import pytest
import torch
from launchers import ended, torchrun
from torch import nn

import distdl
from distdl.backends import torch_distributed

PAGE = (Path(__file__).parents[2] / "docs" / "guide" / "gpu.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", PAGE, re.DOTALL)
((SCRIPT, PRINTED), *_) = BLOCKS
SNIPPETS = [code for code, printed in BLOCKS if not printed]
ROWS = " ".join(PAGE.partition("## Mistakes")[2].split())


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_the_training_script_prints_the_same_under_torchrun(script):
    done = ended(torchrun(4, script))
    assert done.returncode == 0 and done.stdout == PRINTED, done.stdout + done.stderr


@pytest.mark.cuda
def test_the_training_script_uses_the_gpu(script, capsys):
    torch.cuda.reset_peak_memory_stats()
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == PRINTED
    assert torch.cuda.max_memory_allocated() > 0


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))


@pytest.mark.parametrize(
    ("device", "grid"),
    [
        ("cpu", (1, 1, 2, 2)),
        pytest.param("cuda", (1, 1, 1, 1), marks=pytest.mark.cuda),  # (threads cannot make the graph)
    ],
)
def test_the_snippets_run(device, grid, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: device == "cuda")
    image = torch.rand(2, 1, 8, 8)

    def main():
        P = distdl.world().reshape(*grid)
        target = torch.zeros(2, 8, 8, dtype=torch.int64, device=device)
        names = {"distdl": distdl, "torch": torch, "nn": nn, "P": P, "Net": Net, "image": image}
        names["target"] = distdl.distribute_tensor(target, P, axes=(0, 2, 3))
        for code in SNIPPETS:
            exec(code, names)
        x, before = names["x"], names["model"].state_dict()["0.weight"].clone()
        names["step"]()
        assert names["device"].type == x.device.type == device
        assert torch.equal(x.full_tensor().cpu(), image)
        return not torch.equal(names["model"].state_dict()["0.weight"], before)

    workers = int(torch.Size(grid).numel())
    assert distdl.run_workers(main, workers) == [True] * workers


@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, 0),
        ({"LOCAL_RANK": "3", "SLURM_LOCALID": "0"}, 3),  # (torchrun, which srun has started)
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}, 2),  # (mpirun likewise)
        ({"SLURM_LOCALID": "5"}, 1),  # (more workers than GPUs)
    ],
)
def test_own_device_is_that_of_the_launchers_number(variables, number, monkeypatch):
    """(No GPU: torch.cuda is imitated.)"""
    (code,) = (one for one in SNIPPETS if "def own_device" in one)
    taken, names = [], {}
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    exec(code, names)
    assert taken == [number] and names["device"] == torch.device("cuda")


# -- mistakes; the device "meta" stands for a GPU


def test_a_batch_on_another_device_than_the_model_is_an_error_on_every_worker():
    def main():
        P = distdl.world().reshape(1, 1, 2, 2)
        model = distdl.distribute(Net(), P)
        x = distdl.distribute_tensor(torch.ones(2, 1, 8, 8, device="meta") if P.rank == 0 else None, P)
        with pytest.raises(RuntimeError, match="Tensor on device cpu is not on the expected device meta"):
            model(x)
        return True

    assert distdl.run_workers(main, 4) == [True] * 4


def test_the_batch_of_another_worker_is_not_read_whatever_its_device():
    def main():
        P = distdl.world().reshape(2, 1)
        x = distdl.distribute_tensor(torch.ones(4, 4, device="meta" if P.rank else "cpu"), P)
        return x.to_local().sum().item()

    assert distdl.run_workers(main, 2) == [8, 8]


def test_blocks_on_devices_of_two_kinds_are_the_error_that_is_quoted():
    def main():
        P = distdl.world().reshape(2, 1)
        with pytest.raises(ValueError) as raised:
            distdl.GlobalTensor.from_local(torch.ones(2, 4, device="cpu" if P.rank else "meta"), P)
        return str(raised.value).replace("meta", "cuda")

    for message in distdl.run_workers(main, 2):
        begin, end = re.search(r"`(GlobalTensor\.from_local .*?), \.\.\.; (got .*?)`", ROWS).groups()
        assert message.startswith(begin) and message.endswith(end), message


@pytest.mark.parametrize(
    ("begin", "call"),
    [("this worker has", partial(torch_distributed._take_gpu, 2)), ("the nccl", torch_distributed._check_nccl)],
)
def test_the_errors_of_nccl_are_those_that_are_quoted(begin, call, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RuntimeError, match=re.escape(re.search(f"`({begin} .*?)`", ROWS)[1])):
        call()
