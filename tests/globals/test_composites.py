"""Functions that are made of others."""

import warnings

import pytest
import torch
from launched import assert_close, split
from same import Global, assert_same, noise
from torch import nn
from torch.nn import functional as F

import distdl

x4, x3, x2 = noise(3, 5, 7, 6), noise(3, 5, 7), noise(5, 6)
signs = torch.tensor([1, -1, 1, -1, -1])
OPTIONS = [
    (lambda x: F.local_response_norm(x, 3, alpha=0.5, k=2.0), x4),
    (lambda x: F.local_response_norm(x, 4, alpha=0.5), x3),
    (lambda x: F.local_response_norm(x, 2, beta=0.5), noise(2, 3, 4, 3, 2)),
    (lambda x: torch.broadcast_tensors(x, x[:, :1], torch.arange(6.0))[1] * 2, x2),
    (lambda x: torch.clip_(x, -0.5, 0.5), x2),
    (lambda x: F.multilabel_soft_margin_loss(x, (noise(5, 6, seed=1) > 0).double()), x2),
    (lambda x: F.triplet_margin_loss(x, noise(5, 6, seed=1), noise(5, 6, seed=2), margin=2.0), x2),
    (lambda x: F.triplet_margin_loss(x, x * x, noise(5, 6, seed=2), swap=True, reduction="none"), x2),
    (lambda x: F.triplet_margin_with_distance_loss(x, x * x, noise(5, 6, seed=2)), x2),
    (lambda x: F.cosine_embedding_loss(x, noise(5, 6, seed=1), signs, margin=0.1), x2),
    (lambda x: F.cosine_embedding_loss(x, x.exp(), signs, reduction="sum"), x2),
    (lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), x4),
    (lambda x: F.max_unpool2d(*F.max_pool2d(x, 3, 2, return_indices=True), 3, 2, output_size=(3, 5, 7, 6)), x4),
    (lambda x: F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2), x3),
    (lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2), noise(1, 2, 4, 4, 6)),
]


@pytest.mark.parametrize(("function", "x"), OPTIONS)
def test_functions_that_are_made_of_others(function, x):
    assert_same(function, Global(x))


def test_second_derivatives():
    assert_same(lambda x: F.local_response_norm(x, 3, alpha=0.5), Global(x4), twice=True, tolerance=1e-10)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_recurrent_layers_fall_back(kind, weights):
    """Their weights are listed once, when they are made, and yet those that the forward reads get the gradients."""

    def made():
        torch.manual_seed(1)
        return getattr(nn, kind)(6, 4, num_layers=2, batch_first=True, bidirectional=True).double()

    x, alone = noise(3, 5, 6), made()
    expected = alone(x)[0]
    (expected * expected).sum().backward()
    models = [made() for _ in range(6)]

    def work():
        for grid in ((2, 1, 1), (1, 2, 1)):
            model = models[2 * distdl.world().comm.rank + grid.index(2)]
            given = split(x, *grid)
            model = distdl.distribute(model, given.layout.partition, weights=weights, fallback="silent")
            y = model(given)[0]
            assert_close(y, expected)
            (y * y).sum().backward()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                assert_close(ours.grad, theirs.grad)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distdl.run_workers(work, 3)
