"""Global tensors, and a model that is distributed over them."""

from __future__ import annotations

import copy
import os
import threading

import torch
from torch import nn
from torch.nn import functional as F

import distdl
from contract.common import on_threads, raises, same_everywhere
from distdl.testing import Counting

TOLERANCE = 1e-10
_one_at_a_time = threading.Lock()


def noise(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rows(P):
    """Three of four workers, along the third of four dims; worker 0 holds no cells."""
    return P[1:].reshape(1, 1, 3, 1) if P.size == 4 else P.reshape(1, 1, 1, 1)


def assert_close(found, expected, what):
    whole = found.full_tensor() if isinstance(found, distdl.GlobalTensor) else found
    error = (whole.detach() - expected.detach()).abs().max().item()
    assert whole.shape == expected.shape and error <= TOLERANCE, f"{what} differs by {error}"


class UNet(nn.Module):
    """Two levels, with strided and transposed convolutions, three kinds of normalisation, and a skip."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(4)
        self.down = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(2, 6)
        self.up = nn.ConvTranspose2d(6, 4, 3, stride=2, padding=1)
        self.last = nn.Conv2d(8, 4, 3, padding="same", padding_mode="replicate", bias=False)
        self.norm3 = nn.InstanceNorm2d(4, affine=True)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        x = F.relu(self.norm1(self.first(x)))
        y = F.silu(self.norm2(self.down(x)))
        y = self.up(F.max_pool2d(y, 3, 1, 1), output_size=x.shape[2:])
        return self.head(F.relu(self.norm3(self.last(torch.cat([x, y], 1)))))


def network():
    """With the same weights each time (workers that are threads share torch's generator)."""
    model = UNet().double()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(0.4 * noise(*parameter.shape, seed=number))
    return model


def loss_of(scores, classes):
    """Cross entropy and Dice."""
    found, truth = scores.softmax(1), torch.zeros_like(scores).scatter_(1, classes.unsqueeze(1), 1.0)
    overlap = (2 * (found * truth).sum((2, 3)) / (found.sum((2, 3)) + truth.sum((2, 3)))).mean()
    return F.cross_entropy(scores, classes) + 1 - overlap


def _of_a_seed():
    torch.manual_seed(0)
    return [one.sum().item() for one in UNet().parameters()]


def check_workers_of_one_seed_build_what_one_worker_builds():
    """Processes at once; threads, which share a generator, one after another."""
    P = distdl.world()
    (expected,) = on_threads(_of_a_seed, 1)
    for turn in range(P.size if P.comm.threads else 1):
        if turn == P.rank or not P.comm.threads:
            found = _of_a_seed()
        P.allgather_data(0)
    assert found == expected


def check_a_tensor_becomes_global_and_whole_again():
    P = distdl.world()
    whole = noise(3, 2, 7, 5)
    last = P.size - 1
    x = distdl.distribute_tensor(whole if P.rank == last else None, rows(P), src=last).requires_grad_()
    assert x.shape == whole.shape and (P.size == 1 or x.to_local().numel() == 30 * (0, 3, 2, 2)[P.rank])
    for y in (x, x.redistribute(P.reshape(P.size, 1)), distdl.GlobalTensor.from_local(x.to_local(), rows(P))):
        assert torch.equal(y.full_tensor(), whole)
        part = y.full_tensor(on=last)
        assert torch.equal(part, whole) if P.rank == last else part.numel() == 0
    loss = (x.redistribute(P.reshape(1, 1, 1, P.size)) * x).exp().mean()
    values = P.allgather_data(loss.item())
    assert values == values[:1] * P.size and abs(values[0] - (whole * whole).exp().mean().item()) < TOLERANCE
    loss.backward()
    assert_close(x.grad, 2 * whole * (whole * whole).exp() / whole.numel(), "the gradient")


def _check_training(weights):
    P = distdl.world()
    grid = rows(P)
    alone = network()
    model = distdl.distribute(copy.deepcopy(alone), grid, weights=weights, fallback="error")
    steps = [torch.optim.AdamW(one.parameters(), 0.01, eps=1e-4) for one in (alone, model)]
    for step in range(3):
        x, classes = noise(3, 2, 7, 9, seed=50 + step), noise(3, 7, 9, seed=60 + step).abs().mul(2).clamp(max=2).long()
        first = P.rank == 0
        ours = distdl.distribute_tensor(x if first else None, grid).requires_grad_()
        truth = distdl.distribute_tensor(classes if first else None, grid[:, 0].reshape(1, *grid.workers.shape[2:]))
        losses = []
        for one, optimiser, batch in zip(
            (alone, model), steps, ((x.requires_grad_(), classes), (ours, truth)), strict=True
        ):
            optimiser.zero_grad()
            with distdl.ledger() as book:
                losses.append(loss_of(one(batch[0]), batch[1]))
                losses[-1].backward()
            assert not any("comparing" in entry.layer for entry in book.entries), str(book)
            optimiser.step()
        assert abs(losses[0].item() - losses[1].item()) < TOLERANCE
        assert_close(ours.grad, x.grad, "the input's gradient")
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert_close(p.grad, q.grad, f"the gradient of {name}")
        state = model.state_dict()
        for name, value in alone.state_dict().items():
            assert_close(state[name], value, name)
        same_everywhere(P, [value.sum().item() for value in state.values()])


def check_a_distributed_unet_trains_as_alone():
    _check_training("replicated")


def check_a_unet_whose_weights_are_stored_in_shares_trains_as_alone():
    _check_training("sharded")


def check_gradients_that_travel_while_the_backward_goes_on():
    """Weights of 3 MB each, whose gradients are one message each."""
    P, wide = distdl.world(), 620
    alone = nn.Sequential(nn.Linear(5, wide), nn.Tanh(), *[nn.Linear(wide, wide) for _ in range(3)], nn.Linear(wide, 2))
    alone = alone.double()
    with torch.no_grad():
        for number, parameter in enumerate(alone.parameters()):
            parameter.copy_(0.04 * noise(*parameter.shape, seed=number))
    grid = P[1:].reshape(3, 1) if P.size == 4 else P.reshape(P.size, 1)
    model = distdl.distribute(copy.deepcopy(alone), grid, fallback="error")
    for step in range(2):
        x = noise(7, 5, seed=step)
        for one, given in ((alone, x), (model, distdl.distribute_tensor(x, grid))):
            one(given).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert_close(p.grad, q.grad, f"the gradient of {name}")
    same_everywhere(P, [p.grad.sum().item() for p in model.parameters()])


def check_workers_that_call_different_functions_learn_it():
    if distdl.world().size == 1:
        return
    with _debugging():
        P = distdl.Partition(Counting(distdl.world().comm))
        x = distdl.distribute_tensor(noise(3, 2, 7, 5), rows(P))
    text = raises(
        RuntimeError,
        lambda: x.mean(2) if P.rank == 2 else x.sum(2),
        "worker 2 is in mean(",
        "is in sum(3x2x7x5 torch.float64",
    )
    same_everywhere(distdl.world(), text)
    assert abs(x.sum().item() - noise(3, 2, 7, 5).sum().item()) < TOLERANCE


class _debugging:
    """``DISTDL_DEBUG=1`` for what a world is told when its first global tensor is made.

    The variable is one for all workers that are threads: the last that leaves resets it.
    """

    inside = 0

    def __enter__(self):
        with _one_at_a_time:
            _debugging.inside += 1
            os.environ["DISTDL_DEBUG"] = "1"

    def __exit__(self, *error):
        with _one_at_a_time:
            _debugging.inside -= 1
            if not _debugging.inside:
                del os.environ["DISTDL_DEBUG"]
