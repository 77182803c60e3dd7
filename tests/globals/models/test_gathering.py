"""Weights in shares that come together as messages."""

import pytest
import torch
from nets import batch, network, partition, run, sharded
from torch import nn

import distdl
from distdl.globals.models import gathering


def weights_in(book):
    return [one for one in book.entries if one.layer.startswith("weights")]


@pytest.fixture
def apart(monkeypatch):
    """The weights of each module come by themselves."""
    monkeypatch.setattr(gathering, "PREFETCHED", -1)


@pytest.mark.usefixtures("apart")
def test_weights_come_together_once_for_each_module_and_once_more_in_backward():
    def work():
        model = sharded(network(), (2, 1, 2))
        x, target = batch(0)
        modules = 6 + 1 + 1  # (those with weights, the model's own, and its frozen one, which moves by itself)
        for _ in range(2):
            with distdl.ledger() as book:
                loss = nn.functional.mse_loss(model(x), target)
            assert sum(one.calls for one in weights_in(book)) == modules, str(book)
            with distdl.ledger() as book:
                loss.backward()
            # all again, and back go the gradients of all that has some
            assert sum(one.calls for one in weights_in(book)) == modules + modules - 1, str(book)

    run(work)


@pytest.mark.usefixtures("apart")
def test_a_table_comes_together_once():
    """The gradient of a lookup reads no row. What else a module does may, and then the table comes again."""
    indices = torch.tensor([[1, 2, 0, 2], [8, 3, 3, 1]])

    def model(own):
        made = network(lambda: nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 3)).double())
        if own:
            made[0].forward = lambda x: nn.functional.embedding(x, made[0].weight) @ made[0].weight.mT @ made[0].weight
        return made

    def work():
        for own in (False, True):
            alone, ours = model(own), distdl.distribute(model(own), partition((2, 2)), weights="sharded")
            with distdl.ledger() as book:
                y = ours(distdl.distribute_tensor(indices, partition((2, 2))))
            assert sum(one.calls for one in weights_in(book)) == 2, str(book)
            with distdl.ledger() as book:
                y.square().sum().backward()
            assert sum(one.calls for one in weights_in(book)) == 3 + own, str(book)
            alone(indices).square().sum().backward()
            for mine, theirs in zip(ours.parameters(), alone.parameters(), strict=True):
                assert torch.allclose(mine.grad.full_tensor(), theirs.grad, 1e-12, 1e-12)

    run(work)
