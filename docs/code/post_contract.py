"""The contract of a back-end, run on Post: ``python post_contract.py [NAMES]``.

Without arguments it runs all checks, else those whose names contain one of the arguments. ``contract`` and its helpers
are in the folders tests/backends and tests of the sources, which have to be on PYTHONPATH.
"""

import sys
from functools import partial

from contract import CHECKS

import distdl


def check(words: list[str]) -> None:
    for name, function in CHECKS.items():
        if not words or any(word in name for word in words):
            function()
            if distdl.world().rank == 0:
                print(f"{name} passed", flush=True)


if __name__ == "__main__":
    distdl.run_workers(partial(check, sys.argv[1:]), workers=4, backend="post")
