"""What compiled steps cost: the memory of a replay, and the processor time of a recording."""

from statistics import median
from time import process_time

import pytest
from compiled_nets import UNet, noise, weighted
from compiled_pairs import together
from torch import nn
from torch.nn import functional

import distdl
from distdl.workers.footprint import Footprint


class Peak(Footprint):
    """The most bytes of tensors at once."""

    logs = True  # a compiled step is replayed beside it


def perceptron():
    return nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 32))


NETS = {
    "u-net": (lambda: UNet(8), (2, 1, 64, 64), (1, 1, -1, 1)),
    "perceptron": (perceptron, (256, 32), (-1, 1)),
}


class Trained:
    """A step of a net, as it is and compiled."""

    def __init__(self, net, of="step"):
        make, extents, grid = NETS[net]
        grid = tuple(distdl.world().size if n == -1 else n for n in grid)
        self.model = distdl.distribute(weighted(make()), grid)
        self.x, self.y = (distdl.distribute_tensor(noise(extents, seed), grid) for seed in (1, 2))
        called = distdl.compile(self.model) if of == "model" else self.model
        self.step = lambda: self._step(self.model)
        self.compiled = distdl.compile(self.step) if of == "step" else lambda: self._step(called)
        self.programs = lambda: (self.compiled if of == "step" else called).programs

    def _step(self, model):
        loss = functional.mse_loss(model(self.x), self.y)
        loss.backward()
        return loss

    def peak(self, step):
        self.model.zero_grad()
        with Peak() as found:
            found.count(*self.model.parameters(), *self.model.buffers(), self.x._block, self.y._block)
            step()
        return found.peak

    def time(self, step):
        self.model.zero_grad()
        begun = process_time()
        step()
        return process_time() - begun


@pytest.mark.parametrize("of", ["step", "model"])
@pytest.mark.parametrize("net", NETS)
def test_a_replay_holds_no_more_than_the_step(net, of):
    """But for the gradient of a model's result: autograd keeps it until the node's backward is done."""

    def work():
        trained = Trained(net, of)
        for _ in range(4):
            trained.model.zero_grad()
            trained.compiled()
        replays = [trained.peak(trained.compiled) for _ in range(2)]
        assert [program.replays for program in trained.programs()] == [3]
        more = trained.y._block.nbytes if of == "model" else 0
        return replays, [trained.peak(trained.step) for _ in range(2)], more

    ((replays, steps, more),) = together(work, 1)
    assert max(replays) <= min(steps) + more


def test_recording_takes_at_most_five_steps():
    """Of a step that takes some 20 ms: of smaller ones, Python takes more."""

    def work():
        trained = Trained("u-net")
        steps, recordings = [], []
        for _ in range(4):
            step = distdl.compile(lambda: trained.step())
            trained.time(step)
            recordings += [trained.time(step) for _ in range(2)]
            assert step.programs[0].recorded == 2 and step.programs[0].line is not None
            steps += [trained.time(trained.step) for _ in range(2)]
        return median(recordings), median(steps)

    ((recording, step),) = together(work, 1)
    assert recording <= 5 * step, f"{recording:.3f} s, {step:.3f} s"
