"""Losses of margins between classes."""

import pytest
import torch
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F

x, weight = noise(5, 4), noise(4, seed=1).abs()
CLASSES = torch.tensor([3, 0, 2, 2, 1])
LABELS = torch.tensor([[3, 0, -1, 2], [-1, 0, 0, 0], [1, 1, -1, 0], [0, 1, 2, 3], [2, -1, -1, -1]])
GRIDS = [(2, 2), (3, 1), (1, 3), (4, 1), (1, 4)]


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"p": 2, "margin": 0.5}, {"weight": weight}])
@pytest.mark.parametrize("split", [False, True])
def test_margins_from_one_class(options, reduction, split):
    def loss(x, classes):
        return F.multi_margin_loss(x, classes, reduction=reduction, **options)

    assert_same(loss, Global(x), Global(CLASSES) if split else CLASSES, grids=GRIDS)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("split", [False, True])
def test_margins_from_several_classes(reduction, split):
    def loss(x, labels):
        return F.multilabel_margin_loss(x, labels, reduction=reduction)

    assert_same(loss, Global(x), Global(LABELS) if split else LABELS, grids=GRIDS)


def test_a_single_sample():
    assert_same(lambda x: F.multi_margin_loss(x, torch.tensor(2), reduction="none"), Global(x[0]))
    assert_same(lambda x: F.multi_margin_loss(x, torch.tensor(2)), Global(x[0]))
    assert_same(lambda x: F.multilabel_margin_loss(x, LABELS[0], reduction="sum"), Global(x[0]))
    assert_same(lambda x: F.multilabel_margin_loss(x.mT, LABELS.mT.contiguous().clamp(max=3)), Global(x))


def test_another_power_than_one_and_two_is_torchs_error():
    assert_raises_the_same(lambda x: F.multi_margin_loss(x, CLASSES, p=3), x)
