"""A replayed step gives the bits of the step as it is: loss, gradients, statistics, weights, and what is drawn."""

import warnings

import pytest
import torch
from compiled_nets import NETS, trained

import distdl


def together(work, workers):
    """What each worker gives."""
    found = {}

    def run():
        P = distdl.world()
        found[P.comm.rank] = work()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(3)
        distdl.run_workers(run, workers)
    return [found[rank] for rank in range(workers)]


def assert_same(ours, theirs):
    for worker, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
        for number, (one, other) in enumerate(zip(mine, others, strict=True)):
            for (name, a), (_, b) in zip(one, other, strict=True):
                assert torch.equal(a, b), f"{name}, worker {worker}, step {number}"


def compiled(name, workers, **options):
    def work():
        step, left = trained(name, distdl.compile, **options)
        return [(program.line is not None, program.reasons) for program in step.programs], left

    found = together(work, workers)
    for programs, _ in found:
        assert [one for one, _ in programs] == [True], programs
    return [left for _, left in found]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("name", NETS)
def test_a_replay_has_the_bits_of_the_step(name, workers):
    theirs = together(lambda: trained(name, lambda step: step)[1], workers)
    assert_same(compiled(name, workers), theirs)


@pytest.mark.parametrize("name", ["u-net", "perceptron-sharded"])
def test_gradients_add_up(name):
    theirs = together(lambda: trained(name, lambda step: step, zero=False)[1], 2)

    def work():
        step, left = trained(name, distdl.compile, zero=False)
        return [program.line is not None for program in step.programs], left

    ours = together(work, 2)
    assert [programs for programs, _ in ours] == [[False, True]] * 2  # the first call is another signature
    assert_same([left for _, left in ours], theirs)
