"""Inject every fault that the tests know, some times over, and count by back-end how it ended: ``faults.py [RUNS]``.

A test that injects a fault into a run has the mark ``fault``, with the name of the back-end (without: the test's
parameter ``backend``), and how many faults, if more than one. The run has ended as told if the test passes: with the
error that ``docs/details/reliability.md`` tells of, on the workers that it names, and within the time.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


class Count:
    """A plugin of pytest that counts the faults of the tests that ran, and of those that passed."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.told: Counter[str] = Counter()
        self._marks: dict[str, tuple[str, int]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        chosen = []
        for item in items:
            mark = item.get_closest_marker("fault")
            if mark is not None:
                backend = mark.args[0] if mark.args else item.callspec.params["backend"]
                self._marks[item.nodeid] = backend, mark.kwargs.get("count", 1)
                chosen.append(item)
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and not report.skipped:
            backend, count = self._marks[report.nodeid]
            self.injected[backend] += count
            self.told[backend] += count * report.passed


def main(runs: int) -> int:
    count, begun = Count(), time.monotonic()
    for run in range(runs):
        pytest.main(["-q", f"--rootdir={ROOT}", str(ROOT / "tests")], plugins=[count])
        print(f"\n{date.today()}: {run + 1} runs in {time.monotonic() - begun:.0f} s")
        print("| Back-end | Faults injected | Ended as told |\n|---|---|---|")
        for backend, injected in sorted(count.injected.items()):
            print(f"| {backend} | {injected} | {count.told[backend]} |", flush=True)
    return int(count.injected != count.told or not count.injected)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
