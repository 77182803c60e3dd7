"""Run the programs of others that distdl was tried with, and write what they gave into the page (`make tried`).

    python tests/tried/run.py                 all programs; docs/details/tried.md is written anew
    python tests/tried/run.py torchdiffeq     those of the files whose names are given; no table is written

Each file of ``programs/`` names in ``LIBRARIES`` what pip has to install. Installing, too, happens here: in the
environment of the interpreter that runs this, with the versions of ``constraints.txt``. Each file runs in a process
of its own. Exit status 1: a program differed, failed, took too long, or could not be installed.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "details" / "tried.md"
BEGIN, END = "<!-- table of make tried: begin -->", "<!-- table of make tried: end -->"
LIMIT = 600  # seconds for one file of programs


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="files of programs/, without .py")
    parser.add_argument("--inside", metavar="FILE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        return _run_inside(HERE / "programs" / f"{options.inside}.py")
    names = options.files or sorted(path.stem for path in (HERE / "programs").glob("*.py"))
    rows: list[dict[str, str]] = []
    for name in names:
        rows += _run_file(name)
    wrong = [row for row in rows if row["verdict"] != "equal"]
    if not options.files and not wrong:
        _write_table(rows)
    print(f"{len(rows) - len(wrong)} passed, {len(wrong)} failed")
    return 1 if wrong else 0


def _run_file(name: str) -> list[dict[str, str]]:
    path = HERE / "programs" / f"{name}.py"
    failed = {"library": name, "version": "", "program": "(all)", "splits": "", "difference": "", "fallback": ""}
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    wanted = _libraries(path)
    if wanted:
        installed = subprocess.run([*command, "-c", str(HERE / "constraints.txt"), *wanted], check=False)
        if installed.returncode:
            return [_told(failed | {"verdict": f"pip could not install {', '.join(wanted)}"})]
    rows: list[dict[str, str]] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    running = subprocess.Popen(
        [sys.executable, __file__, "--inside", name], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert running.stdout is not None
    deadline = time.monotonic() + LIMIT
    os.set_blocking(running.stdout.fileno(), True)
    try:
        output, _ = running.communicate(timeout=deadline - time.monotonic())
    except subprocess.TimeoutExpired:
        running.kill()
        output, _ = running.communicate()
        rows.append(_told(failed | {"verdict": f"was not done within {LIMIT} s"}))
    for line in output.splitlines():
        if line.startswith("{"):
            rows.append(_told(json.loads(line)))
    if running.returncode and not any(row["verdict"] != "equal" for row in rows):
        rows.append(_told(failed | {"verdict": f"ended with status {running.returncode}"}))
    return rows


def _told(row: dict[str, str]) -> dict[str, str]:
    fallback = f"; falls back: {row['fallback']}" if row["fallback"] else ""
    print(f"{row['library']} {row['version']}, {row['program']}, {row['splits']}: {row['verdict']}", end="")
    print(f" ({row['difference']}{fallback})" if row["difference"] else "", flush=True)
    return row


def _libraries(path: Path) -> list[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(getattr(one, "id", "") == "LIBRARIES" for one in node.targets):
            return [str(one) for one in ast.literal_eval(node.value)]
    return []


def _run_inside(path: Path) -> int:
    """Run the programs of a file, and print a line of JSON for each."""
    sys.path[:0] = [str(HERE), str(HERE.parent / "models"), str(path.parent)]
    import torchvision_operators

    torchvision_operators.declare_missing()
    import judge
    import torch

    torch.set_default_dtype(torch.float64)  # many models make constants of the default dtype

    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    for one in judge.PROGRAMS:
        row = {
            "library": one.libraries[0],
            "version": importlib.metadata.version(one.libraries[0]),
            "program": one.name,
            "splits": ", ".join("x".join(map(str, grid)) for grid in one.grids),
        }
        try:
            found = judge.judge(one)
        except Exception as error:  # any failure of a program is its verdict
            lines = str(error).strip().splitlines() or [""]
            row |= {"difference": "", "fallback": "", "verdict": f"{type(error).__name__}: {lines[0][:200]}"}
            if os.environ.get("DISTDL_DEBUG"):
                raise
        else:
            right = found.difference <= one.tolerance
            verdict = "equal" if right else f"differs in {found.where} (limit {one.tolerance:.0e})"
            row |= {
                "difference": f"{found.difference:.1e}",
                "fallback": ", ".join(found.fallbacks),
                "verdict": verdict,
            }
        print(json.dumps(row), flush=True)
    return 0


def _write_table(rows: list[dict[str, str]]) -> None:
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| library | version | program | splits | largest difference | falls back |", "| --- " * 6 + "|"]
    lines += [
        f"| {r['library']} | {r['version']} | {r['program']} | {r['splits']} | {r['difference']} | {r['fallback']} |"
        for r in sorted(rows, key=lambda r: (r["library"].lower(), r["program"].lower()))
    ]
    PAGE.write_text("\n".join([before + BEGIN, "", *lines, "", END + after]))


if __name__ == "__main__":
    sys.exit(main())
