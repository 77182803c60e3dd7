"""Models whose attention has functions of scores and masks, which know weights, buffers and activations."""

from copy import deepcopy

import pytest
import torch
from dense_flex import dense
from same import noise
from torch import nn
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint

import distdl

LENGTH, HEADS = 6, 2


class Attention(nn.Module):
    """Of (samples, positions, 8)."""

    def __init__(self, kind: str, attend, groups: int = 1) -> None:
        super().__init__()
        self.kind, self.attend = kind, attend
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 16 // groups)
        self.slopes = nn.Parameter(torch.linspace(0.5, 1, HEADS))
        self.table = nn.Embedding(2 * LENGTH, HEADS)
        self.register_buffer("documents", torch.arange(LENGTH) // 4)

    def forward(self, x):
        samples, queries, _ = x.shape
        q = self.query(x).view(samples, queries, HEADS, -1).transpose(1, 2)
        k, v = self.value(x).view(samples, queries, -1, 8 // HEADS).transpose(1, 2).chunk(2, 1)
        mod, mask = self.functions(x)
        if mask is not None:
            mask = create_block_mask(mask, samples, None, queries, queries, device="cpu")
        y = self.attend(q, k, v, mod, mask, enable_gqa=True)
        return x + y.transpose(1, 2).reshape(x.shape)

    def functions(self, x):
        def causal(b, h, i, j):
            return i >= j

        if self.kind == "window":
            return None, and_masks(causal, lambda b, h, i, j: i - j < 3)
        if self.kind == "documents":
            return None, and_masks(causal, lambda b, h, i, j: self.documents[i] == self.documents[j])
        if self.kind == "activations":  # (a mask, and scores, that follow from what is split)
            level = x.mean(-1)
            return lambda s, b, h, i, j: s + level[b, j], lambda b, h, i, j: (level[b, i] > level[b, j]) | (i == j)
        if self.kind == "slopes":
            return lambda s, b, h, i, j: s + self.slopes[h].exp() * (j - i), causal
        if self.kind == "table":
            return lambda s, b, h, i, j: s + self.table.weight[i - j + LENGTH, h], None
        if self.kind == "lookup":
            return lambda s, b, h, i, j: s + self.table(i - j + LENGTH)[h], None
        return lambda s, *_: 2 * torch.tanh(s / 2), None


class Network(nn.Module):
    def __init__(self, kind: str, attend, again=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(kind, attend), Attention(kind, attend, 2)])
        self.again = again

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.again is None else checkpoint(layer, x, use_reentrant=self.again)
        return x


KINDS = ["cap", "window", "documents", "activations", "slopes", "table", "lookup"]


def _check(kind, weights, grid, again=None):
    torch.manual_seed(0)
    # (torch differentiates no module there; it is the same table)
    plain = Network("table" if kind == "lookup" else kind, dense).double()
    network = Network(kind, flex_attention, again).double()
    network.load_state_dict(plain.state_dict())
    x = noise(2, LENGTH, 8)
    expected = plain(x)
    expected.cos().sum().backward()

    def work():
        P = distdl.world()[: torch.Size(grid).numel()].reshape(grid)
        model = distdl.distribute(deepcopy(network), P, weights=weights, fallback="error")
        for _ in range(2):
            model.zero_grad()
            y = model(distdl.distribute_tensor(x, P).requires_grad_())
            y.cos().sum().backward()
            torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-10, atol=1e-12)
            for name, theirs in plain.named_parameters():
                ours = model.get_parameter(name).grad
                ours = ours.full_tensor() if isinstance(ours, distdl.GlobalTensor) else ours
                assert theirs.grad is None or torch.allclose(ours, theirs.grad, rtol=1e-10, atol=1e-12), name

    distdl.run_workers(work, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights, grid", [("replicated", (2, 1, 2)), ("sharded", (1, 3, 1))])
def test_models(kind, weights, grid):
    _check(kind, weights, grid)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_checkpoints(weights, again):
    for kind in ("lookup", "activations"):
        _check(kind, weights, (1, 2, 1), again)


def test_scores_of_weights_alone():
    """Each worker computes them, and their gradients count once."""

    class Latents(nn.Module):
        def __init__(self, attend):
            super().__init__()
            self.attend = attend
            self.queries, self.keys = nn.Parameter(noise(1, 2, 5, 4)), nn.Parameter(noise(1, 2, 6, 4, seed=1))

        def forward(self, x):
            level = x.mean((0, 1, 3))
            y, sums = self.attend(
                self.queries, self.keys, self.keys, lambda s, b, h, i, j: s + level[i], return_lse=True
            )
            return x * y + sums[..., None]

    x = noise(2, 2, 5, 4)
    plain = Latents(dense)
    expected = plain(x)
    expected.cos().sum().backward()

    def work():
        for weights in ("replicated", "sharded"):
            P = distdl.world()[:2].reshape(1, 1, 2, 1)
            model = distdl.distribute(Latents(flex_attention), P, weights=weights, fallback="error")
            y = model(distdl.distribute_tensor(x, P))
            y.cos().sum().backward()
            assert torch.allclose(y.full_tensor(), expected, rtol=1e-12)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                whole = ours.grad.full_tensor() if isinstance(ours.grad, distdl.GlobalTensor) else ours.grad
                assert torch.allclose(whole, theirs.grad, rtol=1e-10)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("kind", ["window", "documents", "lookup"])
def test_summary(kind):
    """Without memory, also where masks and tables have some."""

    def work():
        P = distdl.world().reshape(1, 2, 1)
        network = nn.Sequential(Attention(kind, flex_attention))
        return str(distdl.summary(network, P, (2, LENGTH, 8), weights="sharded"))

    assert "Attention" in distdl.run_workers(work, 2)[0]
