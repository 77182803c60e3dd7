"""Jobs in which a worker fails, for ``test_failures``: ``scenarios.py NAME [BACKEND]``."""

import os
import sys
import time

import torch

import distdl
from distdl.nn import AllSumReduce


def raises():
    """Worker 1 raises while the others wait for it."""
    P = distdl.world()
    layer = AllSumReduce(P.reshape(4), [0])
    layer(torch.ones(2))
    if P.rank == 1:
        raise KeyError("the reason")
    layer(torch.ones(2))


def dies():
    """Worker 1 ends without a word."""
    P = distdl.world()
    layer = AllSumReduce(P.reshape(4), [0])
    layer(torch.ones(2))
    if P.rank == 1:
        os._exit(3)
    layer(torch.ones(2))


def is_absent():
    """Worker 2 is busy with something else for longer than the others wait."""
    P = distdl.world()
    layer = AllSumReduce(P.reshape(4), [0])
    layer(torch.ones(2))
    if P.rank == 2:
        time.sleep(20)
    layer(torch.ones(2))


if __name__ == "__main__":
    distdl.run_workers(globals()[sys.argv[1]], 4, sys.argv[2] if len(sys.argv) > 2 else None)
