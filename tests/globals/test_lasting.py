"""What the comparisons rely on: an error of a worker is the test's error, and the next test has a new world."""

import pytest
import torch
from lasting import LastingWorld
from same import Global, assert_same, noise

import distdl
from distdl.transport.communicator import CommunicationError


def test_an_error_of_one_worker_ends_the_world_and_the_next_work_has_another():
    world, found = LastingWorld(3), []

    def note():
        found.append(distdl.world().comm.hub)

    def fails():
        note()
        if distdl.world().rank == 1:
            raise KeyError("the reason")
        distdl.world().allgather_data("never through")

    for work in (note, note):
        world.run(work)
    with pytest.raises(KeyError, match="the reason"):
        world.run(fails)
    world.run(note)
    world.close()
    assert len(found) == 12 and found[:9] == found[:1] * 9 and found[9:] == found[9:10] * 3
    assert found[0] is not found[9]


def test_workers_that_make_different_calls_are_an_error():
    world = LastingWorld(2)
    with pytest.raises(CommunicationError):
        world.run(lambda: distdl.world().rank or distdl.world().allreduce_data(1))
    world.close()


@pytest.mark.parametrize("wrong", ["results", "gradients"])
def test_a_difference_on_one_worker_is_found(wrong):
    def function(x):
        if not isinstance(x, distdl.GlobalTensor):
            return x.sin()
        y = x.sin()
        if wrong == "results" and distdl.world().rank == 1:
            with torch.no_grad():
                y.to_local().add_(1e-6)
        return y if wrong == "results" else y + 1e-6 * x - 1e-6 * x.detach()

    with pytest.raises(AssertionError, match=wrong):
        assert_same(function, Global(noise(5, 7)))
    assert_same(torch.sin, Global(noise(5, 7)))
