"""``distdl summary``, ``distdl suggest`` and ``distdl verify``: what they print, and their exit status."""

import json
import subprocess

import pytest

from distdl.__main__ import main
from distdl.commands.run import launch_command, launch_environment

NETWORKS = """
import distdl, torch
from torch import nn

def right():
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))

class Doubled(nn.Module):
    def forward(self, x):
        if not isinstance(x, distdl.GlobalTensor):
            return x
        return distdl.local_map(lambda block: block * (1 + distdl.world().rank))(x)

def wrong():
    return right().append(Doubled())

def embedding():
    return nn.Embedding(10, 4)

def sized(channels):
    return nn.Conv2d(1, channels, 3)

number = 3
"""


@pytest.fixture
def networks(tmp_path, monkeypatch):
    """The name of a module in the current folder that builds models."""
    name = f"networks_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    return name


def test_summary_prints_the_table_of_one_worker(networks, capsys):
    assert (
        main(["summary", f"{networks}:right", "--input", "1x1x64x64", "--partition", "1x1x2x2", "--worker", "3"]) == 0
    )
    shown = capsys.readouterr().out
    assert "Conv2d" in shown and "worker 3" in shown and "1x1x2x2" in shown


def test_suggest_ranks_grids(networks, capsys):
    assert main(["suggest", f"{networks}:right", "--input", "2x1x16x16", "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert all(grid in shown for grid in ("2x1x1x1", "1x1x2x1", "1x1x1x2"))


@pytest.mark.parametrize(("options", "grid"), [
    (["-n", "3"], [1, 1, 1, 3]), (["--partition", "1x1x2x2"], [1, 1, 2, 2]),
    (["-n", "2", "--weights", "sharded"], [1, 1, 1, 2]),
])  # fmt: skip
def test_verify_prints_a_certificate(networks, capsys, options, grid):
    assert main(["verify", f"{networks}:right", "--input", "2x1x13x17", "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["partition"] == grid
    assert (found["subject"], found["dtypes"]) == ("Sequential", ["float64", "int64"])
    assert 0 < found["largest"] < 1e-12


def test_verify_of_a_wrong_model_names_the_module_and_fails(networks, capsys):
    assert main(["verify", f"{networks}:wrong", "--input", "1x1x13x17", "-n", "2"]) == 1
    assert "First in the forward, the output of 4 (step 1) differs" in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_difference_is_data_with_json(networks, capsys, backend):
    options = ["--input", "1x1x13x17", "-n", "2", "--json", "--backend", backend]
    assert main(["verify", f"{networks}:wrong", *options]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is False and "First in the forward, the output of 4" in found["problem"]
    first = found["forward"]
    assert (first["kind"], first["name"], first["step"]) == ("output", "4", 1)
    assert first["agrees before"] == "the output of 3 (step 1)" and first["largest"] > first["allowed"]
    assert 0 < found["differing"] <= found["tensors"] and found["backward"]["kind"].startswith("gradient")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("model", "status"), [("right", 0), ("wrong", 1)])
def test_workers_of_a_launched_job_verify_and_one_of_them_prints(networks, model, status):
    program = ["-m", "distdl", "verify", f"{networks}:{model}", "--input", "1x1x13x17", "--json"]
    done = subprocess.run(
        launch_command("gloo", 2, program), env=launch_environment("gloo"), capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, json.loads(done.stdout)["equal"]) == (status, status == 0), done.stderr


@pytest.mark.timeout(120)
def test_a_launched_job_of_another_size_is_an_error_of_the_command(networks):
    model = [f"{networks}:right", "--input", "1x1x13x17", "--partition", "1x1x2x2"]
    done = subprocess.run(
        launch_command("mpi", 2, ["-m", "distdl", "verify", *model]),
        env=launch_environment("mpi"), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert "this job was launched with 2 workers; launch it with 4, or verify on 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_verify_starts_processes(networks, capsys):
    assert main(["verify", f"{networks}:right", "--input", "1x1x13x17", "-n", "2", "--backend", "gloo"]) == 0
    assert "Sequential on 2 workers as 1x1x1x2 (gloo) equals the sequential one" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "text"), [
    ("{}", "a model is named as module:factory"), ("nowhere_at_all:net", "there is no module 'nowhere_at_all'"),
    ("{}:left", "has no left"), ("{}:number", "has to build a torch.nn.Module"),
    ("{}:sized", "has to build a model without arguments: missing a required argument: 'channels'"),
])  # fmt: skip
def test_a_model_that_cannot_be_built_is_an_error_of_the_command(networks, capsys, model, text):
    with pytest.raises(SystemExit) as caught:
        main(["summary", model.format(networks), "--input", "1x1x8x8", "--partition", "1x1x2x2"])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


def test_verify_gives_whole_numbers_to_a_model_that_looks_up_rows(networks, capsys):
    assert main(["verify", f"{networks}:embedding", "--input", "4x6", "-n", "2", "--dtype", "int64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["compared"]["gradients of weights"], found["dtypes"]) == (2, ["float64"])


@pytest.mark.parametrize(("options", "text"), [
    (["-n", "0"], "at least one; got 0"), (["--steps", "0"], "at least one; got 0"),
    (["-n", "3", "--partition", "1x1x2x2"], "a partition of 4 workers is not one of 3"),
    (["--backend", "nowhere_at_all"], "got 'nowhere_at_all'"),
])  # fmt: skip
def test_options_of_verify_that_cannot_be_are_errors_of_the_command(networks, capsys, options, text):
    with pytest.raises(SystemExit) as caught:
        main(["verify", f"{networks}:right", "--input", "1x1x13x17", *options])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
