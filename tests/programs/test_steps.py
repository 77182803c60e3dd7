"""When a step becomes a line, when it stays as it is, and that a line follows what changes under its feet."""

import random
import threading
import warnings
from collections import Counter

import pytest
import torch
from compiled_nets import UNet, bits, noise, weighted
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import FlopCounterMode

import distdl
from distdl.programs.calls import Call, Step, Value
from distdl.programs.checking import assert_well_formed
from distdl.programs.passes.dead import without_dead
from distdl.transport.recording import Recording

COUNTER, FACTOR = [0], 2.0


def on_threads(work, workers=2):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distdl.run_workers(work, workers)


def small():
    return weighted(nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.LeakyReLU(), nn.Conv2d(2, 1, 3, padding=1)))


def data(P, seed):
    grid = (1, 1, P.comm.size, 1)
    return distdl.distribute_tensor(noise((2, 1, 12, 8), seed), grid)


class Pair:
    """A model whose step is compiled, and one whose step is not, which do the same."""

    def __init__(self, body, make=small, **options):
        self.P = distdl.world()
        self.models = [distdl.distribute(make(), (1, 1, self.P.comm.size, 1), **options) for _ in range(2)]
        self.bodies = [self._of(body, model) for model in self.models]
        self.step = self.bodies[0] = distdl.compile(self.bodies[0])

    @staticmethod
    def _of(body, model):
        def step(x, y):
            return body(model, x, y)

        return step

    def call(self, seed=0, steps=True):
        """Call both, compare all that they leave, and descend."""
        for model in self.models:
            model.zero_grad()
        x, y = data(self.P, seed), data(self.P, 50 + seed)
        found = [body(x, y) for body in self.bodies]
        assert torch.equal(*map(bits, found))
        for one, other in zip(*(model.parameters() for model in self.models), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(bits(one.grad), bits(other.grad))
        for one, other in zip(*(model.buffers() for model in self.models), strict=True):
            assert torch.equal(one, other)
        with torch.no_grad():
            for one in (p for model in self.models for p in model.parameters() if p.grad is not None and steps):
                one -= 0.01 * one.grad
        return found[0]

    def lines(self):
        return [program.line is not None for program in self.step.programs]


def plain(model, x, y):
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def test_the_fourth_call_is_a_line():
    def work():
        pair = Pair(plain)
        known = []
        for seed in range(5):
            pair.call(seed)
            known.append(pair.lines())
        assert known == [[False], [False], [True], [True], [True]]
        (program,) = pair.step.programs
        text = str(pair.step)
        assert program.counts.exchanges > 3 and program.counts.messages > 0 and program.counts.nbytes > 0
        assert "# model.0" in text and "bytes to worker" in text and ".wait()" in text
        assert "nothing" in pair.step.explain()
        assert_well_formed(program.step)

    on_threads(work)


def test_a_result_is_new_memory_and_detached():
    def work():
        pair = Pair(plain)
        losses = [pair.call(0, steps=False) for _ in range(6)]
        assert not losses[-1].requires_grad
        assert losses[-1]._block.data_ptr() != losses[-2]._block.data_ptr() or not losses[-1].layout.active
        gradients = [p.grad for p in pair.models[0].parameters()]
        before = [one.clone() for one in gradients]
        pair.call(1, steps=False)
        for one, other in zip(gradients, before, strict=True):
            assert torch.equal(one, other)

    on_threads(work)


def test_a_line_sends_what_the_step_sends():
    def work():
        P = distdl.world()
        model = distdl.distribute(weighted(UNet()), (1, 1, P.comm.size, 1))
        x, y = (distdl.distribute_tensor(noise((2, 1, 16, 16), seed), (1, 1, P.comm.size, 1)) for seed in (1, 2))
        step = distdl.compile(lambda x, y: plain(model, x, y))
        told = []
        for _ in range(7):
            model.zero_grad()
            sent = Counter()
            P.comm.recorder = Recording(
                P.comm, begun=lambda call, sent=sent: sent.update([call.operation, *map(str, call.sends)])
            )
            step(x, y)
            P.comm.recorder = None
            told.append(sent)
        assert step.programs[0].line is not None
        assert told[-1]["all_max"] == 1
        del told[-1]["all_max"], told[4]["all_max"]
        eager = {}
        model.zero_grad()
        sent = Counter()
        P.comm.recorder = Recording(P.comm, begun=lambda call: sent.update([call.operation, *map(str, call.sends)]))
        plain(model, x, y)
        P.comm.recorder = None
        eager = sent
        assert told[-1] == told[4] == eager

    on_threads(work)


def reads_item(model, x, y):
    loss = plain(model, x, y)
    return loss if loss.item() > -1 else loss * 2


def reads_list(model, x, y):
    loss = plain(model, x, y)
    return loss if sum(next(model.parameters()).detach().reshape(-1).tolist()) < 1e9 else loss * 2


def counts(model, x, y):
    COUNTER[0] += 1
    loss = functional.mse_loss(model(x), y) * ((COUNTER[0] + 1) // 2 % 5 + 1)  # both steps of a pair have the same
    loss.backward()
    return loss


def rolls(model, x, y):
    random.random()
    return plain(model, x, y)


def keeps_graph(model, x, y):
    return functional.mse_loss(model(x), y)


def moves_data(model, x, y):
    loss = plain(model, x, y)
    for one in model.parameters():
        one.data = one.data * 0.5
    return loss


STAYS = {
    "data": (moves_data, "gets other memory, as by .data"),
    "item": (reads_item, "a value is read"),
    "tolist": (reads_list, "a value is read, by tolist"),
    "random": (rolls, "Python's random state advances"),
    "graph": (keeps_graph, "no backward"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_as_it_is_says_why_once(name):
    body, text = STAYS[name]

    def work():
        pair = Pair(body)
        for seed in range(5):
            pair.call(seed)
        assert pair.lines() == [False]
        assert (text in pair.step.explain() and ".py:" in pair.step.explain()) or name in ("random", "graph")

    with pytest.warns(UserWarning, match="stays as it is") as told:
        distdl.run_workers(work, 1)
    assert len([one for one in told if "stays as it is" in str(one.message)]) == 1


def test_a_constant_that_changes_stays_as_it_is():
    def work():
        COUNTER[0] = 0
        pair = Pair(counts)
        for seed in range(8):
            pair.call(seed)
        assert pair.lines() == [False]
        assert "another thing each time" in pair.step.explain()

    on_threads(work, 1)


def test_a_hook_stays_as_it_is():
    def work():
        pair = Pair(plain)
        seen = []
        for model in pair.models:
            model[0].register_forward_hook(lambda *_: seen.append(1))
        for seed in range(5):
            pair.call(seed)
        assert pair.lines() == [False] and len(seen) == 10
        assert "has a hook" in pair.step.explain()

    on_threads(work)


def halved(model):
    for one in model.parameters():
        one.data = one.data * 0.5


def loaded(model):
    model.load_state_dict({name: one + 0.25 for name, one in model.state_dict().items()})


def assigned(model):
    model.load_state_dict({name: one.clone() - 0.125 for name, one in model.state_dict().items()}, assign=True)


def replaced(model):
    layer = nn.Conv2d(1, 2, 3, padding=1)
    layer.load_state_dict({name: torch.ones_like(one) * 0.1 for name, one in layer.state_dict().items()})
    model[0] = layer


def frozen(model):
    model[0].weight.requires_grad_(False)


def evaluated(model):
    model.eval()


def hooked(model):
    model[2].register_forward_hook(lambda module, given, y: y * 2)


def scaled(model):
    model[1].negative_slope = 0.5


def hooked_behind(model):
    def double(bias):
        bias.grad.mul_(2)

    model[2].bias.register_post_accumulate_grad_hook(double)


CHANGES = [halved, loaded, scaled, assigned, replaced, frozen, evaluated, hooked, hooked_behind]


def unet():
    return weighted(UNet())


@pytest.mark.parametrize(
    ("make", "change"),
    [*((small, change) for change in CHANGES), *((unet, change) for change in (halved, loaded, assigned, evaluated))],
    ids=lambda one: one.__name__,
)
def test_what_changes_under_a_line_is_noticed(change, make):
    def body(model, x, y):
        return plain(model, x, y)

    def work():
        pair = Pair(body, make)
        for seed in range(4):
            pair.call(seed)
        assert pair.lines() == [True]
        for model in pair.models:
            change(model)
        for seed in range(4, 9):
            pair.call(seed)

    on_threads(work)


class Options:
    def __init__(self):
        self.scale = 2.0


HOLDERS = {
    "dict": (lambda: {"scale": 2.0}, lambda held: held["scale"], lambda held: held.update(scale=3.0)),
    "list": (lambda: [0, 2.0], lambda held: held[1], lambda held: held.__setitem__(1, 3.0)),
    "object": (Options, lambda held: held.scale, lambda held: setattr(held, "scale", 3.0)),
    "object in a dict": (
        lambda: {"a": Options()}, lambda held: held["a"].scale, lambda held: setattr(held["a"], "scale", 3.0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOLDERS)
def test_a_number_in_a_thing_of_the_user_is_noticed(name):
    make, read, change = HOLDERS[name]

    def work():
        held = make()

        def body(model, x, y):
            loss = functional.mse_loss(model(x), y) * read(held)
            loss.backward()
            return loss

        pair = Pair(body)
        for seed in range(9):
            if seed == 5:
                assert pair.lines() == [True]
                change(held)
            pair.call(seed)
        assert pair.lines() == [True, True]

    on_threads(work)


def test_the_learning_rate_of_an_optimiser_inside_is_noticed():
    def work():
        P, losses = distdl.world(), []
        for compiled in (False, True):
            model = distdl.distribute(small(), (1, 1, P.comm.size, 1))
            optimiser = torch.optim.SGD(model.parameters(), 0.1)

            def step(x, y, model=model, optimiser=optimiser):
                optimiser.zero_grad()
                loss = functional.mse_loss(model(x), y)
                loss.backward()
                optimiser.step()
                return loss

            called = distdl.compile(step) if compiled else step
            schedule = torch.optim.lr_scheduler.StepLR(optimiser, 5, 0.1)
            found = []
            for seed in range(11):
                found.append(called(data(P, seed), data(P, 50 + seed)).item())
                schedule.step()
            losses.append(found)
        assert losses[0] == losses[1]
        assert sum(one.line is not None for one in called.programs) == 2, called.explain()

    on_threads(work)


def test_a_hook_of_all_modules_is_called():
    def work():
        pair, calls = Pair(plain), []
        for seed in range(4):
            pair.call(seed)
        assert pair.lines() == [True]
        handle = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
        try:
            pair.call(5)
        finally:
            handle.remove()
        assert len(calls) == 8  # three layers and the model, of both models
        pair.call(6)

    on_threads(work, 1)


def test_a_number_in_the_result_that_changes_stays_as_it_is():
    def work():
        P, count = distdl.world(), iter(range(100))
        model = distdl.distribute(small(), (1, 1, P.comm.size, 1))

        @distdl.compile
        def step(x, y):
            return plain(model, x, y), next(count)

        assert [step(data(P, seed), data(P, 9))[1] for seed in range(6)] == list(range(6))
        assert "in its result changes" in step.explain()

    on_threads(work)


def test_another_batch_is_another_signature():
    def work():
        P = distdl.world()
        model = distdl.distribute(small(), (1, 1, P.comm.size, 1))

        @distdl.compile(signatures=2)
        def step(x, y):
            return plain(model, x, y)

        for number in range(12):
            batch = (4, 2, 3)[number % 3 if number > 8 else number % 2]
            x, y = (distdl.distribute_tensor(noise((batch, 1, 9, 8), seed), (1, 1, P.comm.size, 1)) for seed in (1, 2))
            model.zero_grad()
            found = bits(step(x, y))
            model.zero_grad()
            assert torch.equal(found, bits(plain(model, x, y)))
        assert len(step.programs) == 2

    on_threads(work)


def test_inference_becomes_a_line():
    def work():
        P = distdl.world()
        model = distdl.distribute(weighted(UNet()), (1, 1, P.comm.size, 1)).eval()

        @distdl.compile
        def predict(x):
            with torch.no_grad():
                return {"picture": model(x), "scale": 3}

        model(distdl.distribute_tensor(noise((2, 1, 16, 16), 9), (1, 1, P.comm.size, 1))).sum().backward()
        for number in range(5):
            x = distdl.distribute_tensor(noise((2, 1, 16, 16), number), (1, 1, P.comm.size, 1))
            found = predict(x)
            with torch.no_grad():
                assert torch.equal(bits(found["picture"]), bits(model(x)))
            assert found["scale"] == 3 and found["picture"].layout == x.layout
        assert predict.programs[0].line is not None

    on_threads(work)


def test_a_step_of_plain_torch():
    def work():
        model, other = small(), small()

        @distdl.compile
        def step(x):
            loss = (model(x) * FACTOR).square().mean()
            loss.backward()
            return loss

        for number in range(5):
            x = noise((2, 1, 6, 6), number)
            model.zero_grad()
            other.zero_grad()
            found = step(x)
            loss = (other(x) * FACTOR).square().mean()
            loss.backward()
            assert torch.equal(found.detach(), loss.detach())
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                assert torch.equal(one.grad, two.grad)
        assert step.programs[0].line is not None

    on_threads(work, 1)


def test_a_mode_of_the_user_sees_the_operators():
    def work():
        pair = Pair(plain)
        for seed in range(4):
            pair.call(seed)
        with FlopCounterMode(display=False) as counted:
            pair.step(data(pair.P, 0), data(pair.P, 1))
        assert counted.get_total_flops() > 0

    on_threads(work, 1)


def test_threads_record_at_the_same_time():
    told, lock = [], threading.Lock()

    def work():
        P = distdl.world()
        model = distdl.distribute(small(), (1, 1, P.comm.size, 1))
        x, y = data(P, 1), data(P, 2)
        for _ in range(25):  # two recordings each
            step = distdl.compile(lambda x, y: plain(model, x, y))
            for _ in range(4):
                model.zero_grad()
                step(x, y)
            with lock:
                told.append(step.programs[0].line is not None)

    on_threads(work, 4)
    assert told == [True] * 100


def test_dead_operators_go_and_messages_stay():
    add, mul = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
    x, a, b, c, y, waits = map(Value, range(6))
    calls = [
        Call("operator", add, (x, 1), {}, a, False),
        Call("operator", mul, (a, 2), {}, b, False),
        Call("operator", mul, (x, 3), {}, c, False),
        Call("begin", max, (c,), {}, [y, waits]),
        Call("wait", max, (waits,)),
    ]
    step = Step(calls, {x: None}, [a])
    assert_well_formed(step)
    left = without_dead(step)
    assert left.calls == [calls[0], *calls[2:]]
    assert_well_formed(left)
    for broken in (calls[1:], [*calls[:4]], [*calls, calls[0]], [*calls[:4], Call("operator", add, (y, 1)), calls[4]]):
        with pytest.raises(AssertionError):
            assert_well_formed(Step(broken, {x: None}, [c]))


def test_an_argument_that_requires_a_gradient_gets_it():
    def work():
        model = distdl.distribute(small(), (1, 1, distdl.world().comm.size, 1))
        step = distdl.compile(lambda x, y: plain(model, x, y))
        for seed in range(5):
            x = data(distdl.world(), seed).requires_grad_()
            model.zero_grad()
            step(x, data(distdl.world(), 50 + seed))
            assert x.grad is not None
        assert "an argument requires a gradient" in step.explain()

    on_threads(work)


def test_a_view_of_an_argument_that_nobody_sees_is_not_recorded():
    """Its place in memory would be that of the recorded argument, and the next one may lie elsewhere."""
    rows, weight = noise((9, 3), 0), nn.Parameter(noise((3,), 1))

    @distdl.compile
    def step(x):
        with _disable_current_modes():
            below = x[1:]
        loss = (below * weight).sum()
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match=r"a view of the shape \[1, 3\] was made where nobody sees it"):
        found = [step(rows[n : n + 2]) for n in range(6)]
    assert [one.item() for one in found] == [(rows[n + 1] * weight).sum().item() for n in range(6)]
