"""Steps that use more of torch and of workers: a replay has the bits of the step, over several steps of AdamW."""

import pytest
import torch
from compiled_nets import UNet, bits, noise, weighted
from compiled_pairs import Pair, assert_same, on_threads, small, together
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.globals.layouts.context import Context
from distdl.tensors.draws import Draws

REPLAYS = 5


class Inner(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.first, self.last = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 1, 1)
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh(), nn.Dropout(p), nn.Conv2d(3, 3, 1))

    def forward(self, x):
        return self.last(self.middle(self.first(x)))

    def middle(self, x):
        return self.inner(x)


class Dropped(Inner):
    """A checkpoint that has to draw again what its forward drew."""

    def __init__(self):
        super().__init__(0.4)

    def middle(self, x):
        return self.inner(checkpoint(self.inner, x, use_reentrant=False))


class Noisy(Inner):
    """The same of plain noise."""

    def middle(self, x):
        return checkpoint(lambda x: self.inner(x) * torch.rand(3, 1, 1), x, use_reentrant=False)


class Cast(Inner):
    def middle(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.inner(x)
        return y.float()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        return self.head(self.inner(x.flatten(0, 1))[0]).reshape(x.shape)


def normed():
    return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.BatchNorm2d(2), nn.Tanh(), nn.Conv2d(2, 1, 3, padding=1))


def plain(model, x, y):
    loss = functional.mse_loss(model(x), y)
    loss.backward()
    return loss


def autocast(model, x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.mse_loss(model(x).float(), y)
    loss.backward()
    return loss


def penalty(model, x, y):
    """Of the gradient of the input, as for Wasserstein GANs."""
    x = x.detach().clone().requires_grad_()
    z = model(x)
    (dx,) = torch.autograd.grad(z.square().sum(), [x], create_graph=True)
    loss = functional.mse_loss(z, y) + 0.1 * dx.square().mean()
    loss.backward()
    return loss


def weights_penalty(model, x, y):
    loss = functional.mse_loss(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(one.square().sum() for one in gradients)).backward()
    return loss


ROWS, BATCH, BOTH = (1, 1, -1, 1), (-1, 1, 1, 1), (2, 1, 3, 1)
CASES = {
    "checkpoint with dropout": (Dropped, plain, ROWS, 2, {}),
    "checkpoint with noise": (Noisy, plain, ROWS, 2, {}),
    "autocast inside": (Cast, plain, ROWS, 2, {}),
    "autocast around the forward": (UNet, autocast, ROWS, 2, {}),
    "gradient of the input": (small, penalty, ROWS, 2, {}),
    "gradients of weights": (small, weights_penalty, ROWS, 2, {}),
    "lstm": (Recurrent, plain, BATCH, 2, {}),
    "six workers": (UNet, plain, BOTH, 6, {}),  # three samples over two, and 14 rows over three
    "six workers, shares": (small, plain, BOTH, 6, {"weights": "sharded"}),
    "six workers, one idle": (normed, plain, ROWS, 6, {}),
}


def trained(case, wrap):
    """What each step leaves. Of a compiled step, also how often it was replayed."""
    make, body, grid, _, options = CASES[case]
    extents = (3, 1, 5 if "idle" in case else 16, 8)
    grid = tuple(distdl.world().size if n == -1 else n for n in grid)
    model = distdl.distribute(weighted(make()), grid, **options)
    optimiser = torch.optim.AdamW(model.parameters(), 0.01)
    step, left = wrap(lambda x, y: body(model, x, y)), []
    for seed in range(3 + REPLAYS):
        optimiser.zero_grad()
        x, y = (distdl.distribute_tensor(noise(extents, one), grid) for one in (seed, 50 + seed))
        found = [("loss", bits(step(x, y)))]
        found += [(f"gradient of {key}", bits(one.grad)) for key, one in model.named_parameters()]
        optimiser.step()
        left.append(found + [(key, bits(one)) for key, one in (*model.named_parameters(), *model.named_buffers())])
    return left, [(program.replays, program.reasons) for program in getattr(step, "programs", ())]


@pytest.mark.parametrize("case", CASES)
def test_a_replay_has_the_bits_of_the_step(case):
    workers = CASES[case][3]
    theirs = together(lambda: trained(case, lambda step: step), workers)
    ours = together(lambda: trained(case, distdl.compile), workers)
    for (mine, programs), (others, _) in zip(ours, theirs, strict=True):
        assert programs == [(REPLAYS, [])]
        assert_same(mine, others)


def test_autocast_around_a_step_is_another_signature():
    def work():
        P = distdl.world()
        models = [distdl.distribute(weighted(small()), (1, 1, P.size, 1)) for _ in range(2)]
        compiled = distdl.compile(lambda x, y: plain(models[0], x, y))
        x, y = (distdl.distribute_tensor(noise((2, 1, 8, 8), seed), (1, 1, P.size, 1)) for seed in (1, 2))
        for dtype in (torch.bfloat16, None, torch.bfloat16, None):
            for _ in range(4):
                for model in models:
                    model.zero_grad()
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    loss, other = compiled(x, y), plain(models[1], x, y)
                assert torch.equal(bits(loss), bits(other))
                for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    assert torch.equal(bits(one.grad), bits(other.grad))
        assert [program.replays for program in compiled.programs] == [5, 5], compiled.explain()

    on_threads(work)


def test_a_model_with_a_checkpoint_that_draws_stays_as_it_is():
    def work():
        pair = Pair(Dropped)
        draws = Context.of(pair.P.comm).own(Draws)
        for seed in range(5):
            found = []
            for model in (pair.plain, pair.model):
                with draws.again(9, []):  # both draw the same
                    model.zero_grad()
                    y = model(x := pair.x(seed))
                    y.square().sum().backward()
                    found.append([*map(bits, (y, x.grad)), *(bits(one.grad) for one in model.parameters())])
            assert all(map(torch.equal, *found))
        assert pair.lines() == [False] and "a checkpoint in it draws random numbers" in pair.model.explain()

    on_threads(work)
