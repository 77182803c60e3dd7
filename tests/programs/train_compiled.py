"""Run by processes: the bits of compiled steps and models, and of the same as they are."""

import sys
import warnings

import torch
from compiled_nets import trained

import distdl
from distdl.globals.layouts.context import Context
from distdl.tensors.draws import Draws

NAMES = ("u-net", "lenet", "dropout", "u-net-sharded")
MODELS = ("u-net", "dropout", "u-net-sharded")


def main():
    draws = Context.of(distdl.world().comm).own(Draws)
    for name, of in [*((name, "step") for name in NAMES), *((name, "model") for name in MODELS)]:
        draws.resume(3, [])
        step, ours = trained(name, distdl.compile, of=of)
        draws.resume(3, [])
        _, theirs = trained(name, lambda one: one, of=of)
        assert [program.line is not None for program in step.programs] == [True], (name, step.explain())
        for number, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
            for (what, a), (_, b) in zip(mine, others, strict=True):
                assert torch.equal(a, b), f"{name}: {what}, step {number}"
        if distdl.world().comm.rank == 0:
            print(f"{name}, {of}: the same bits", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    distdl.run_workers(main, int(sys.argv[1]))
