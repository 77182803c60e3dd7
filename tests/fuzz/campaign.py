"""Fuzzing: ``python tests/fuzz/campaign.py CASES [SEED]`` runs so many new cases, and prints what came of them."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import Counter
from typing import Any

import disorders
import layers
import models
import movements
import tensors
from hypothesis import HealthCheck, Phase, given, seed, settings
from judging import judge, judge_chain, judge_disorder, judge_movements, judge_network
from team import Team, quietly

KINDS: dict[str, tuple[Any, Any, int]] = {  # the strategy, the judge, and how many cases in a hundred
    "programs of global tensors": (tensors.programs(), judge, 40),
    "wrong arguments of global tensors": (tensors.programs(wrong=True), judge, 25),
    "primitives, with faults": (movements.movements(), judge_movements, 10),
    "chains of layers": (layers.chains(), judge_chain, 10),
    "layers where one worker does otherwise": (layers.chains(faulty=True), judge_chain, 10),
    "layers in another order on one worker": (disorders.disorders(), judge_disorder, 5),
    "networks of torch's modules": (models.networks(), judge_network, 2),
}


def run(kind: str, cases: int, fixed: int | None) -> Counter[str]:
    """Run so many cases of a kind: always the same for a fixed seed.

    Returns: how many came out equal to the sequential computation, and how many with the same error on all workers.
    Raises: AssertionError for the first case that did neither, made as small as it goes.
    """
    strategy, judged, _ = KINDS[kind]
    counts: Counter[str] = Counter()
    team = Team()

    @settings(
        max_examples=cases, deadline=None, database=None, derandomize=fixed is None, print_blob=False,
        suppress_health_check=list(HealthCheck), phases=(Phase.generate, Phase.shrink),
    )  # fmt: skip
    @given(strategy)
    def check(case: Any) -> None:
        counts[quietly(lambda: judged(case, team))] += 1

    try:
        (check if fixed is None else seed(fixed)(check))()
    finally:
        team.close()
    return counts


if __name__ == "__main__":
    many, number = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else int.from_bytes(os.urandom(4))
    print(f"seed {number}")
    failed = False
    for name, (*_, share) in KINDS.items():
        begun = time.process_time()
        try:
            found = run(name, max(many * share // 100, 1), number)
        except Exception:  # (a case that did neither, or several of them)
            failed = True
            print(f"{name}: {traceback.format_exc()}", flush=True)
            continue
        each = (time.process_time() - begun) / max(sum(found.values()), 1) * 1000
        print(f"{name}: {dict(found)}, {each:.1f} ms each", flush=True)
    sys.exit(failed)
