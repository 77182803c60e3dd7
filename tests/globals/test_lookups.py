"""Lookups in tables of a model: what they write into these, and what gradients tables get."""

import copy
import warnings

import pytest
import torch
from nets import assert_close, assert_identical, assert_same_state, network, partition, run
from torch import nn

import distdl

INDICES = torch.tensor([[1, 2, 0], [3, 4, 4], [0, 6, 1]])


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("split", [True, False])
def test_rows_that_are_looked_up_are_shortened_in_every_table(weights, split):
    """Those that another worker has looked up, too."""

    def work():
        sequential = network(lambda: nn.Embedding(9, 4, max_norm=0.5))
        model = distdl.distribute(copy.deepcopy(sequential), partition((3, 1)), weights=weights, fallback="error")
        indices = distdl.distribute_tensor(INDICES, partition((3, 1))) if split else INDICES[0]
        for one, x in ((sequential, INDICES if split else INDICES[0]), (model, indices)):
            optimiser = torch.optim.SGD(one.parameters(), 0.1, momentum=0.9)
            for _ in range(2):
                optimiser.zero_grad()
                one(x).exp().sum().backward()
                optimiser.step()
            if split:  # (without gradients, nobody is asked about plain indices in a plain copy of shares)
                with torch.no_grad():
                    one(x)
        assert_same_state(model, sequential)
        if weights == "replicated":
            assert_identical(model)
        if split:
            wrong = distdl.distribute_tensor(INDICES + 5, partition((3, 1)))
            with pytest.raises(IndexError, match="index out of range"):
                model(wrong)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize(
    ("options", "fallback"),
    [
        ({"sparse": True}, "error"), ({"max_norm": 0.5, "mode": "sum"}, "error"), ({"mode": "max"}, "error"),
        ({"sparse": True, "padding_idx": 4, "max_norm": 0.5}, "silent"),
    ],
)  # fmt: skip
def test_bags(weights, options, fallback):
    """Those with padding run on one worker. A sparse gradient is dense there, as the parts of other workers are."""

    def work():
        sequential = network(lambda: nn.EmbeddingBag(9, 4, **options))
        model = distdl.distribute(copy.deepcopy(sequential), partition((3, 1)), weights=weights, fallback=fallback)
        y, expected = model(distdl.distribute_tensor(INDICES, partition((3, 1)))), sequential(INDICES)
        assert_close(y, expected)
        y.exp().sum().backward()
        expected.exp().sum().backward()
        assert_close(model.weight.grad, sequential.weight.grad.to_dense())
        assert_close(model.weight, sequential.weight)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distdl.run_workers(work, 4)
