"""Whether every part of the tests ran: ``check_ran.py REPORT``, where REPORT is what pytest writes with --junitxml.

Ends with an error that lists what did not run: a folder of tests, the contract of a back-end, single tests.
"""

from __future__ import annotations

import sys
from collections import Counter
from itertools import takewhile
from pathlib import Path
from xml.etree import ElementTree

CONTRACT = {"test_serial", "test_threads", "test_gloo", "test_mpi"}  # the same checks, once on each back-end


def folder_of(place: str) -> str:
    """The folder of a test: ``globals/views`` of ``tests.globals.views.test_strides``, in the folder of all tests."""
    folders = takewhile(lambda part: not part.startswith("test_"), place.split(".")[1:])
    return "/".join(folders)


def problems_of(report: Path, tests: Path) -> list[str]:
    """What is wrong with a report about the tests in a folder; nothing if all of them ran."""
    ran: Counter[str] = Counter()
    not_run = []
    for case in ElementTree.parse(report).iter("testcase"):
        place, name = case.get("classname", ""), case.get("name", "").partition("@")[0]
        skipped = case.find("skipped")
        if skipped is not None:
            not_run.append(f"not run: {place}.{name}: {skipped.get('message')}")
            continue
        folder = folder_of(place)
        ran[folder] += 1
        if folder == "backends":
            ran[name.split("[")[0]] += 1
    folders = {path.parent.relative_to(tests).as_posix() for path in tests.rglob("test_*.py")}
    problems = [f"no test of {part} ran" for part in sorted(folders | CONTRACT) if not ran[part]]
    counts = {part: ran[part] for part in sorted(CONTRACT)}
    if len(set(counts.values())) != 1:
        problems.append(f"the contract ran with different numbers of checks: {counts}")
    return problems + not_run


if __name__ == "__main__":
    found = problems_of(Path(sys.argv[1]), Path("tests"))
    if found:
        sys.exit("\n".join(found))
