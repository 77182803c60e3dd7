"""Random functions of plain tensors in a distributed model: every worker draws the same, in any partition."""

from functools import partial

import pytest
import torch
from launched import assert_close, on_workers, split
from nets import Again
from same import noise
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distdl

x43 = noise(4, 6)


class _Drawing(nn.Module):
    """A model that adds to its input what it draws by a function of it and of a weight."""

    def __init__(self, draw, checkpointed=False):
        super().__init__()
        self.draw, self.checkpointed = draw, checkpointed
        self.w = nn.Parameter(noise(6))
        self.register_buffer("table", noise(6, seed=1))

    def step(self, x):
        return torch.tanh(x * self.w) * self.draw(x, self.w, self.table)

    def forward(self, x):
        first = checkpoint(self.step, x, use_reentrant=False) if self.checkpointed else self.step(x)
        return first + self.step(x)


f64 = torch.float64
DRAWS = {
    "rand": lambda x, w, t: torch.rand(x.shape, dtype=f64),
    "randn": lambda x, w, t: torch.randn(x.size(0), 1, dtype=f64),
    "randint": lambda x, w, t: torch.randint(0, 90, (x.shape[1],)),
    "randperm": lambda x, w, t: torch.randperm(x.shape[1]),
    "normal": lambda x, w, t: torch.normal(t, 2.0),
    "normal of a weight": lambda x, w, t: torch.normal(w, 2.0),
    "multinomial": lambda x, w, t: torch.multinomial(t.abs(), 6),
    "multinomial of a weight": lambda x, w, t: torch.multinomial(w.abs(), 6),
    "poisson": lambda x, w, t: torch.poisson(t.abs() * 50),
    "bernoulli": lambda x, w, t: torch.bernoulli(torch.full((4, 6), 0.5, dtype=f64)),
    "uniform_": lambda x, w, t: torch.empty(4, 6, dtype=f64).uniform_(-1, 3),
    "normal_ of a weight": lambda x, w, t: torch.empty_like(w.detach()).normal_(),
    "rand_like": lambda x, w, t: torch.rand_like(t),
    "dropout of a buffer": lambda x, w, t: F.dropout(t.expand(4, 6), 0.5),
    "dropout of a weight": lambda x, w, t: F.dropout(w.expand(4, 6), 0.5),
}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_every_worker_draws_the_same_in_any_partition(draw, checkpointed):
    """A recomputed forward, too: then gradients are those of the forward that ran."""
    found = []

    def work(grid):
        x = split(x43, *grid).requires_grad_()
        model = distdl.distribute(_Drawing(draw, checkpointed), x.layout.partition)
        y = model(x)
        gradients = torch.autograd.grad((y * y).sum(), [x, model.w])
        found.append(
            [y.full_tensor().detach(), *(one.full_tensor() if one is not gradients[1] else one for one in gradients)]
        )

    torch.manual_seed(3)
    state = torch.get_rng_state()
    for workers, grid in ((1, (1, 1)), (3, (1, 2)), (5, (2, 2))):
        distdl.run_workers(lambda grid=grid: work(grid), workers)
    assert len(found) == 9
    assert torch.equal(torch.get_rng_state(), state)
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            assert_close(ours, theirs)
    first, second = (found[0][0], found[0][1])
    assert first.any() and second.any()


def test_a_checkpoint_changes_nothing():
    found = []

    def work(checkpointed):
        x = split(x43).requires_grad_()
        model = distdl.distribute(_Drawing(DRAWS["rand"], checkpointed), x.layout.partition)
        model(x).sum().backward()
        found.append((x.grad.full_tensor(), model.w.grad))

    for checkpointed in (False, True):
        torch.manual_seed(3)
        distdl.run_workers(lambda c=checkpointed: work(c), 3)
    for other in found[1:]:
        assert torch.equal(other[0], found[0][0])
        assert_close(other[1], found[0][1])


def _of_blocks(model, x, again):
    def outer(a):
        return torch.rand(6) * again(lambda a: F.dropout(a, 0.5) * torch.rand(6) * model.w, a)

    return distdl.local_map(lambda a: again(outer, a))(x * 1)


DRAWN_AGAIN = {
    "of whole tensors": lambda m, x, again: again(lambda x: F.dropout(x, 0.5) * torch.rand(6) * m.w, x * 1),
    "of weights": lambda m, x, again: x * again(lambda w: F.dropout(w, 0.5) * torch.rand(6), m.w),
    "of a plain tensor": lambda m, x, again: (
        x * again(lambda t: t * torch.rand(6) * m.w, m.table.clone().requires_grad_())
    ),
    "of blocks, one in another": _of_blocks,
}


def _gradients_again(use, kinds, of_plain):
    """Those of a model that recomputes, in ways that are given, what it draws; all are to be the same."""
    found = []

    class Model(_Drawing):
        def forward(self, x):
            return use(self, x, self.draw)

    def work(again):
        x = split(x43).requires_grad_()
        model = distdl.distribute(Model(again), x.layout.partition)
        y = model(x)
        ((y.full_tensor() if of_plain else y) ** 2).sum().backward()
        found.append([x.grad.full_tensor(), *([] if model.w.grad is None else [model.w.grad])])

    for again in kinds:
        torch.manual_seed(3)
        distdl.run_workers(lambda again=again: work(again), 3)
    return found


def _at_once(function, x):
    return function(x)


@pytest.mark.parametrize("of_plain", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("use", DRAWN_AGAIN.values(), ids=DRAWN_AGAIN)
def test_checkpoints_draw_what_they_drew(use, reentrant, of_plain):
    """Also where the backward is one of a plain tensor, which says nothing of the workers."""
    first, *rest = _gradients_again(use, [_at_once, partial(checkpoint, use_reentrant=reentrant)], of_plain)
    for other in rest:
        for ours, theirs in zip(other, first, strict=True):
            assert_close(ours, theirs)


@pytest.mark.parametrize("of_plain", [False, True])
def test_backwards_of_autograd_functions_draw_what_their_forward_drew(of_plain):
    def use(model, x, again):
        return again(lambda x: F.dropout(x, 0.5) * torch.rand(6) * model.table, x * 1)

    first, *rest = _gradients_again(use, [_at_once, lambda function, x: Again.apply(x, function)], of_plain)
    for other in rest:
        assert_close(other[0], first[0])


@on_workers
def test_calls_differ_and_a_generator_of_the_model_is_used():
    own = torch.Generator()
    drawn = []

    def draw(x, w, t):
        drawn.append((torch.rand(3), torch.rand(3, generator=own.manual_seed(5)), F.dropout(w, 0.5, training=False)))
        return 1.0

    model = distdl.distribute(_Drawing(draw), split(x43).layout.partition)
    for _ in range(2):
        model(split(x43))
    assert len({tuple(one.tolist()) for one, *_ in drawn}) == 4
    assert all(torch.equal(one, torch.rand(3, generator=torch.Generator().manual_seed(5))) for _, one, _ in drawn)
    assert all(torch.equal(one.detach(), noise(6)) for *_, one in drawn)
