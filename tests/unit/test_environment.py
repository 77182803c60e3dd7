"""Environment variables: a value that breaks the rule is one ValueError that names variable, rule and value."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import distdl
from distdl import environment
from distdl.workers.worlds import launched

SOURCE = Path(distdl.__file__).parent
TIMEOUT = "the environment variable DISTDL_TIMEOUT has to be a number of seconds above 0 and at most 2000000; it is "
MEMORY = "the environment variable DISTDL_RECYCLED_MEMORY has to be a whole number of MiB from 0 to .*; it is "
WRONG_TIMES = ["abc", "", "0", "-1", "nan", "inf", "-inf", "1e400", "2000001", "1,5"]


@pytest.mark.parametrize("text", WRONG_TIMES)
def test_a_wrong_timeout_is_one_error_wherever_a_world_is_opened(monkeypatch, text):
    monkeypatch.setenv("DISTDL_TIMEOUT", text)
    for backend, workers in (("threads", 2), ("serial", 1), ("gloo", 2)):
        with pytest.raises(ValueError, match=f"{TIMEOUT}{text!r}"):
            distdl.run_workers(os.getpid, workers, backend)


def test_right_timeouts(monkeypatch):
    for text, seconds in (("0.3", 0.3), ("1e3", 1000.0), (" 40 ", 40.0), ("2000000", 2e6)):
        monkeypatch.setenv("DISTDL_TIMEOUT", text)
        assert environment.timeout() == seconds
    monkeypatch.delenv("DISTDL_TIMEOUT")
    assert environment.timeout() == 600


@pytest.mark.parametrize("text", ["abc", "-1", "", "1.5", "inf", "9" * 30, "٣"])
def test_a_wrong_amount_of_memory(monkeypatch, text):
    monkeypatch.setenv("DISTDL_RECYCLED_MEMORY", text)
    with pytest.raises(ValueError, match=f"{MEMORY}{text!r}"):
        environment.recycled_memory()
    monkeypatch.setenv("DISTDL_RECYCLED_MEMORY", "3")
    assert environment.recycled_memory() == 3 << 20


def test_a_wrong_amount_of_memory_is_an_error_on_import():
    variables = {**os.environ, "DISTDL_RECYCLED_MEMORY": "-1", "PYTHONPATH": str(SOURCE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", "import distdl.tensors.memory"],
        env=variables,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1 and "DISTDL_RECYCLED_MEMORY has to be a whole number" in done.stderr, done.stderr


def test_who_tunes_malloc(monkeypatch):
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    for name in [name for name in os.environ if name.startswith("MALLOC_")]:
        monkeypatch.delenv(name)
    assert not environment.tunes_malloc()
    for name, text in (("MALLOC_MMAP_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=128")):
        with monkeypatch.context() as context:
            context.setenv(name, text)
            assert environment.tunes_malloc()
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.x86_shstk=on")
    assert not environment.tunes_malloc()


def test_switches_are_0_or_1(monkeypatch):
    for name, read in (("DISTDL_DEBUG", environment.debug), ("DISTDL_CUDA_AWARE_MPI", environment.cuda_aware_mpi)):
        for text, value in (("1", True), ("0", False), ("", False)):
            monkeypatch.setenv(name, text)
            assert read() is value
        for text in ("abc", "true", "2", "-1"):
            monkeypatch.setenv(name, text)
            with pytest.raises(ValueError, match=f"{name} has to be 0 or 1; it is '{text}'"):
                read()


def test_debug_of_another_value_is_an_error_on_all_workers(monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "abc")

    def main():
        P = distdl.world().reshape(2)
        with pytest.raises(ValueError, match="DISTDL_DEBUG has to be 0 or 1; it is 'abc'"):
            distdl.distribute_tensor(torch.ones(4), P)
        return True

    assert distdl.run_workers(main, 2) == [True, True]


def test_an_unknown_backend_names_the_variable(monkeypatch, capsys, tmp_path):
    from distdl.__main__ import main

    monkeypatch.setenv("DISTDL_BACKEND", "smoke")
    with pytest.raises(ValueError, match=r"DISTDL_BACKEND is 'smoke': the back-ends are serial, threads, mpi, gloo"):
        distdl.run_workers(os.getpid, 2)
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "empty.py")])
    assert "DISTDL_BACKEND is 'smoke': the back-ends are serial" in capsys.readouterr().err


def test_numbers_of_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE has to be a whole number from 0 to .*; it is 'four'"):
        launched()


def test_variables_with_a_rule_are_read_in_one_place():
    readers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(f'environ{how}"DISTDL_' in path.read_text() for how in (".get(", "[")) or "getenv" in path.read_text()
    }
    assert readers == {"environment/variables.py"}
