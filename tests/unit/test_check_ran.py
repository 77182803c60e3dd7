"""The check of continuous integration that every part of the tests ran."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACT = [
    ("backends.test_x", f"test_{name}[{check}]") for name in ("serial", "threads", "gloo", "mpi") for check in "ab"
]


def check(report, cases, skipped=()):
    listed = "".join(f'<testcase classname="tests.{place}" name="{name}"/>' for place, name in cases)
    listed += "".join(
        f'<testcase classname="tests.{place}" name="{name}"><skipped message="no reason"/></testcase>'
        for place, name in skipped
    )
    report.write_text(f"<testsuites><testsuite>{listed}</testsuite></testsuites>")
    command = [sys.executable, ROOT / ".ci" / "check_ran.py", report]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("left_out", "skipped", "problem"), [
    (None, [], ""),
    (("layers.test_x", "test_x"), [], "no test of layers ran\n"),
    (("globals.views.test_x", "test_x"), [], "no test of globals/views ran\n"),
    (CONTRACT[-1], [], "'test_mpi': 1"),
    (None, [("layers.test_x", "test_y[1]")], "not run: tests.layers.test_x.test_y[1]: no reason\n"),
])  # fmt: skip
def test_a_part_that_did_not_run_is_an_error(tmp_path, left_out, skipped, problem):
    folders = {path.parent.relative_to(ROOT / "tests").parts for path in (ROOT / "tests").rglob("test_*.py")}
    cases = [(".".join((*folder, "test_x")), "test_x") for folder in sorted(folders)] + CONTRACT
    done = check(tmp_path / "report.xml", [case for case in cases if case != left_out], skipped)
    assert problem in done.stderr and done.returncode == (1 if problem else 0), done.stderr
