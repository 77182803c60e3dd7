"""Tests of your own back-end: it is launched by its name in every way, and passes the whole contract."""

import os
import re
import subprocess
import sys
from pathlib import Path

import post
import pytest
from launchers import imported, torchrun

import distdl

FOLDER = Path(__file__).parent
TESTS = FOLDER.parents[1] / "tests"
PRINTED = [line[7:] for line in (FOLDER / "post.py").read_text().splitlines() if line.startswith("    #: ")]
RUN = [sys.executable, "-m", "distdl", "run", "-n", "2"]


def output_of(command, **variables):
    path = os.pathsep.join([str(TESTS), str(TESTS / "backends"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=170, env={**os.environ, "PYTHONPATH": path, **variables}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def kind():
    return type(distdl.world().comm).__name__, distdl.world("post") is distdl.world(), distdl.world().rank


@pytest.mark.timeout(120)
def test_run_workers_starts_what_the_environment_names(monkeypatch):
    monkeypatch.setenv("DISTDL_BACKEND", "post")
    assert distdl.run_workers(kind, workers=2) == [("PostCommunicator", True, rank) for rank in range(2)]


@pytest.mark.timeout(180)
def test_run_workers_starts_it_by_its_name():
    assert output_of([sys.executable, str(FOLDER / "post.py")]) == PRINTED


@pytest.mark.timeout(180)
def test_torchrun_launches_it_by_its_name():
    assert output_of(torchrun(4, FOLDER / "post.py"), DISTDL_BACKEND="post") == PRINTED


@pytest.mark.timeout(120)
def test_distdl_run_launches_it_by_its_name_with_a_script_that_does_not_know_it(tmp_path):
    script = tmp_path / "plain.py"
    script.write_text("import distdl\nP = distdl.world()\nP.print_sequential(f'{P.rank} {type(P.comm).__name__}')\n")
    (tmp_path / "post.py").write_text((FOLDER / "post.py").read_text())
    got = output_of([*RUN, "--backend", "post", str(script)])
    assert got == [f"{rank} PostCommunicator" for rank in range(2)]


def test_outside_of_a_job_it_says_how_to_launch_one():
    with pytest.raises(RuntimeError, match=r"the post back-end needs a job.*run_workers.*backend='post'"):
        post.open_post()


@pytest.mark.timeout(180)
def test_it_passes_the_checks_of_the_page():
    (page,) = re.findall(r"```text\n\$ .*post_contract\.py (.*?)\n(.*?)```", _page(), re.DOTALL)
    assert output_of([*imported(), str(FOLDER / "post_contract.py"), *page[0].split()]) == page[1].splitlines()


@pytest.mark.every_case
@pytest.mark.timeout(180)
def test_it_passes_the_contract():
    from contract import CHECKS

    got = output_of([sys.executable, str(FOLDER / "post_contract.py")])
    assert got == [f"{name} passed" for name in CHECKS]


def _page():
    return (FOLDER.parent / "developers" / "add-a-back-end.md").read_text()
