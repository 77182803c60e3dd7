"""Optimisers inside of a compiled step: a replay calls their steps as they are, and gets the numbers of the step."""

import pytest
import torch
from compiled_nets import noise, weighted
from compiled_pairs import on_threads, small
from torch.nn import functional
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.lr_scheduler import ExponentialLR, StepLR

import distdl

REPLAYS = 6


class Trained:
    """A step with all that it trains: as it is, or compiled."""

    def __init__(self, make, of, wrap=lambda step: step, **options):
        self.P = distdl.world()
        self.grid = (1, 1, self.P.size, 1)
        self.models = [distdl.distribute(weighted(small(), seed), self.grid, **options) for seed in (1, 2)]
        self.optimisers = [make(list(model.parameters())) for model in self.models]
        self.step = wrap(lambda x, y: of(self, x, y))

    def call(self, seed):
        """Train, and return all that it leaves."""
        x, y = (distdl.distribute_tensor(noise((2, 1, 12, 8), one), self.grid) for one in (seed, 50 + seed))
        found = [self.step(x, y)]
        for one, optimiser in zip(self.models, self.optimisers, strict=True):
            found += [*one.parameters(), *(each.grad for each in one.parameters())]
            found += [each for state in optimiser.state.values() for each in state.values()]
        return [None if one is None else torch.as_tensor(getattr(one, "_block", one)).clone() for one in found]


def plain(trained, x, y):
    (model, _), (optimiser, _) = trained.models, trained.optimisers
    optimiser.zero_grad()
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    optimiser.step()
    return loss


def in_turn(trained, x, y):
    """One model learns to tell what the other one makes, as in a GAN."""
    (makes, tells), (first, second) = trained.models, trained.optimisers
    second.zero_grad()
    loss = functional.mse_loss(tells(makes(x).detach()), y)
    loss.backward()
    second.step()
    first.zero_grad()
    other = tells(makes(x)).square().mean()
    other.backward()
    first.step()
    return loss + other.detach()


def compared(make, of, *, before=lambda trained: None, **options):
    """Train both for some steps, and compare what they leave. Returns the compiled step."""
    theirs, ours = Trained(make, of, **options), Trained(make, of, distdl.compile, **options)
    for one in (theirs, ours):
        before(one)
    for seed in range(4 + REPLAYS):
        for number, (one, other) in enumerate(zip(theirs.call(seed), ours.call(seed), strict=True)):
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one, other), f"tensor {number} of step {seed}"
    return ours.step


def replays(step):
    return [program.replays for program in step.programs]


MAKES = {
    "AdamW": lambda given: AdamW(given, 0.01),
    "Adam for each": lambda given: Adam(given, 0.01, foreach=True),
    "Adam one by one": lambda given: Adam(given, 0.01, foreach=False, amsgrad=True),
    "Adam, a rate that is a tensor": lambda given: Adam(given, torch.tensor(0.01), foreach=False),
    "fused Adam": lambda given: Adam(given, 0.01, fused=True),
    "RMSprop": lambda given: RMSprop(given, 0.01, momentum=0.5),
    "SGD": lambda given: SGD(given, 0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", MAKES)
def test_an_optimiser_in_a_line_does_what_it_does_in_the_step(name):
    def work():
        step = compared(MAKES[name], plain)
        assert replays(step) == [0, REPLAYS], step.explain()  # the first call has no gradients before

    on_threads(work)


@pytest.mark.parametrize(("of", "options"), [(in_turn, {}), (plain, {"weights": "sharded"})])
def test_several_optimisers_and_weights_in_shares(of, options):
    def work():
        step = compared(MAKES["AdamW"], of, **options)
        assert replays(step) == [0, REPLAYS], step.explain()
        assert "optimised(step, [model" in str(step) or "optimised(step, [" in str(step)

    on_threads(work, 3)


def test_hooks_of_an_optimiser_are_called_once():
    def clipped(trained):
        def clip(optimiser, args, kwargs):
            trained.called = getattr(trained, "called", 0) + 1
            for one in optimiser.param_groups[0]["params"]:
                one.grad.mul_(0.5)

        trained.optimisers[0].register_step_pre_hook(clip)

    def work():
        assert replays(compared(MAKES["AdamW"], plain, before=clipped)) == [0, REPLAYS]

    on_threads(work)


@pytest.mark.parametrize("make", [lambda one: ExponentialLR(one, 0.9), lambda one: StepLR(one, 6)])
def test_a_scheduler_inside_stays_as_it_is(make):
    """Also one that changes the rate only now and then."""

    def with_scheduler(trained):
        trained.scheduler = make(trained.optimisers[0])

    def scheduled(trained, x, y):
        loss = plain(trained, x, y)
        trained.scheduler.step()
        return loss

    def work():
        step = compared(MAKES["AdamW"], scheduled, before=with_scheduler)
        assert "as a scheduler does" in step.explain()

    on_threads(work)


def test_a_rate_that_a_scheduler_changes_outside_is_another_signature():
    def work():
        theirs, ours = (Trained(MAKES["AdamW"], plain, wrap) for wrap in (lambda step: step, distdl.compile))
        schedulers = [StepLR(one.optimisers[0], 6) for one in (theirs, ours)]
        for seed in range(12):
            for one, other in zip(theirs.call(seed), ours.call(seed), strict=True):
                assert one is other is None or torch.equal(one, other)
            for one in schedulers:
                one.step()
        assert replays(ours.step) == [0, 2, 3], ours.step.explain()

    on_threads(work)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_replay_with_an_optimiser_is_compared(name):
    """All that the optimiser keeps is put back before the replay."""

    def work():
        theirs, ours = Trained(MAKES[name], plain), Trained(MAKES[name], plain, distdl.compile(check=True))
        for seed in range(7):
            for one, other in zip(theirs.call(seed), ours.call(seed), strict=True):
                assert one is other is None or torch.equal(one, other)
        assert [program.checked for program in ours.step.programs] == [False, True]

    on_threads(work)


def test_a_step_that_gets_a_closure_stays_as_it_is():
    def closed(trained, x, y):
        (model, _), (optimiser, _) = trained.models, trained.optimisers

        def loss():
            optimiser.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimiser.step(loss)

    def work():
        step = compared(MAKES["AdamW"], closed)
        assert "the step of its AdamW gets a closure" in step.explain()

    on_threads(work)


class Halving(SGD):
    """An optimiser of a user's: its step does more than torch's."""

    def step(self):
        super().step()
        self.param_groups[0]["lr"] /= 2


def test_an_optimiser_of_a_user_stays_as_it_is():
    def work():
        step = compared(lambda parameters: Halving(parameters, 0.5), plain)
        assert "the step of a Halving, which is no optimiser of torch, is in it" in step.explain()

    on_threads(work)


def test_a_step_of_an_optimiser_by_another_name_stays_as_it_is():
    def renamed(trained):
        trained.update = trained.optimisers[0].step

    def updated(trained, x, y):
        (model, _), (optimiser, _) = trained.models, trained.optimisers
        optimiser.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        trained.update()
        return loss

    def work():
        step = compared(lambda parameters: SGD(parameters, 0.1, momentum=0.9), updated, before=renamed)
        assert "writes into a tensor that the function does not name" in step.explain()

    on_threads(work)
