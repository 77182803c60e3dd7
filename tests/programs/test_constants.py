"""Values that a step may read, because they are the same in each call."""

import warnings

import pytest
import torch
from torch.nn import functional

import distdl


def dims(x, y):
    return y.sum(torch.arange(1, y.dim()).tolist()).sum()


def number(x, y):
    return y.sum() * int(torch.tensor([2, 3]).sum())


def compared(x, y):
    return y.sum() * (2 if torch.ones(3).equal(torch.ones(3)) else 3)


def written(x, y):
    n = torch.zeros(())
    n.copy_(y.sum())
    return y.sum() * n.item()


def written_through_a_view(x, y):
    n = torch.zeros(4)
    n[1:] = y.detach().sum()
    return y.sum() * sum(n.tolist())


def drawn(x, y):
    return y.sum() * torch.zeros(3).uniform_().sum().item()


def unset(x, y):
    return y.sum() * torch.empty_like(torch.zeros(3)).fill_(1).sum().item()


def shared(x, y):
    n = torch.zeros(3)
    n.numpy()[:] = 2
    return y.sum() * n.sum()


def of_the_argument(x, y):
    return y.sum() * torch.zeros_like(x).sum().item()


def of_a_weight(x, y):
    return y.sum() * len(torch.ones(2).masked_select(x.reshape(-1)[:2] > 0))


CASES = [
    (dims, True), (number, True), (compared, True), (written, False), (written_through_a_view, False), (drawn, False),
    (unset, False), (shared, False), (of_the_argument, False), (of_a_weight, False),
]  # fmt: skip


@pytest.mark.parametrize(("read", "is_line"), CASES, ids=lambda one: getattr(one, "__name__", ""))
def test_only_what_a_step_makes_of_numbers_may_be_read(read, is_line):
    model = torch.nn.Linear(3, 3)

    def step(x):
        loss = read(x, model(x))
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = distdl.compile(step)
        for seed in range(6):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
            found = []
            for one in (compiled, step):
                torch.manual_seed(seed)
                model.zero_grad()
                found.append((one(x).detach(), model.weight.grad))
            assert all(map(torch.equal, *found))
    assert (compiled.programs[0].line is not None) == is_line, compiled.explain()
    assert is_line or "a value is read" in compiled.explain()


def test_classes_become_one_hot_in_a_line():
    """Which reads the classes to check them, and a replay does that again."""

    def work():
        grid = (1, 1, distdl.world().comm.size, 1)
        model = distdl.distribute(torch.nn.Conv2d(1, 3, 1), grid)

        def step(x, classes):
            wanted = functional.one_hot(classes, 3).movedim(-1, 1).to(x.dtype)
            loss = functional.mse_loss(model(x), wanted)
            loss.backward()
            return loss

        compiled = distdl.compile(step)
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            x = distdl.distribute_tensor(torch.randn(2, 1, 5, 4, generator=generator), grid)
            classes = torch.randint(0, 3, (2, 5, 4), generator=generator)
            classes = distdl.distribute_tensor(classes, grid, axes=(0, 2, 3))
            losses = []
            for one in (compiled, step):
                model.zero_grad()
                losses.append(one(x, classes).full_tensor().detach())
            assert torch.equal(*losses)
        assert compiled.programs[0].line is not None, compiled.explain()

    distdl.run_workers(work, 2)
