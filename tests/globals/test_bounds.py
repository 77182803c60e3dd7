"""Indices that are out of range: all workers raise what torch raises, where the values have entered."""

import pytest
import torch
from launched import assert_close, on_workers, split
from torch.nn import functional as F

import distdl
from distdl import GlobalTensor
from distdl.globals.bounds import Bounds, bounds_of

labels = torch.arange(20).reshape(4, 5) % 3
wrong = labels.clone()
wrong[3, 4] = 7  # on worker 1 only
scores = torch.arange(60.0).reshape(4, 3, 5).sin()

FUNCTIONS = {
    "cross_entropy": lambda x, t: F.cross_entropy(x, t),
    "nll_loss": lambda x, t: F.nll_loss(x, t, reduction="sum"),
    "embedding": lambda x, t: F.embedding(t, x.new_zeros(3, 2) if type(t) is torch.Tensor else torch.zeros(3, 2)),
    "one_hot": lambda x, t: F.one_hot(t, 3),
    "gather": lambda x, t: x.gather(1, t.unsqueeze(1)),
    "take_along_dim": lambda x, t: x[0, :, 0].take_along_dim(t),
    "scatter": lambda x, t: torch.zeros_like(x).scatter_(1, t.unsqueeze(1), 1.0),
    "table": lambda x, t: torch.zeros(3)[t],
    "index": lambda x, t: x[0, t],
    "index_select": lambda x, t: x.index_select(1, t.flatten()),
    "index_add": lambda x, t: x.index_add(-2, t.flatten(), torch.ones(4, 20, 5)),
    "index_fill": lambda x, t: x.index_fill(1, t.flatten(), 2.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_worker_raises_what_torch_raises(name):
    function = FUNCTIONS[name]
    with pytest.raises((IndexError, RuntimeError)) as expected:
        function(scores, wrong)

    def work():
        for grid in ((2, 1, 1), (1, 3, 1)):
            x = split(scores, *grid)
            for target in (split(wrong, 2), split(wrong.t().contiguous(), 1, 2).t().int().long(), wrong):
                if name == "embedding" and target is wrong:
                    continue  # (nothing in it is global)
                with pytest.raises(expected.type) as found:
                    function(x, target)
                assert str(found.value) == str(expected.value)
            assert function(x, split(labels, 2)).shape == function(scores, labels).shape  # and all go on

    distdl.run_workers(work, 3)


@on_workers
def test_shorter_integers_have_other_values():
    wraps, table = labels + 2**40, torch.arange(3.0)
    assert_close(table[split(wraps, 2).int()], table[wraps.int()])
    assert_close(table[split(labels, 2).short().long()], table[labels])
    assert bounds_of(split(wrong, 2).byte().long()) == Bounds(0, 0, 7, 7)
    assert bounds_of(split(wraps, 2).short()) is None


@on_workers
def test_places_to_ignore():
    x = split(scores)
    for mark in (255, -100, -1, 5):
        marked = torch.where(wrong == 7, mark, labels)
        expected = F.cross_entropy(scores, marked, ignore_index=mark)
        entered = split(marked, 2)
        blocks = GlobalTensor.from_local(entered.to_local(), entered.layout.partition)
        for target in (entered, marked, blocks):
            assert_close(F.cross_entropy(x, target, ignore_index=mark), expected)
            if mark != -100:
                with pytest.raises(IndexError, match=f"Target {mark} is out of bounds"):
                    F.cross_entropy(x, target)
        none = torch.full_like(labels, mark)
        assert F.cross_entropy(x, split(none), ignore_index=mark).isnan()
    marked = torch.where(labels == 0, 255, wrong)
    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        F.cross_entropy(x, split(marked), ignore_index=255)


@on_workers
def test_what_was_written_is_not_known():
    def known(x):
        return bounds_of(x) is not None

    t = split(wrong, 2)
    assert bounds_of(t) == (0, 0, 7, 7) and known(t.T) and known(t.reshape(2, 2, 5).long()) and not known(t[:2])
    for view in (lambda x: x.view(-1), lambda x: x[3], lambda x: x[:, :2], lambda x: x.unsqueeze(0)[:, 1:]):
        t = split(wrong, 2)
        view(t).add_(0)
        assert not known(t) and not known(t.view(-1))
    t = split(wrong, 2)
    t[t == 7] = 0
    assert_close(F.cross_entropy(split(scores), t), F.cross_entropy(scores, torch.where(wrong == 7, 0, wrong)))
    assert not known(t + 0)


SHARES = {
    "data": lambda x, y: setattr(x, "data", y),
    "data of a plain one": lambda x, y: setattr(x, "data", labels),
    "set_": lambda x, y: x.set_(y),
}


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@on_workers
def test_of_other_data_is_not_known_what_was_known_before(share):
    for grid in ((2, 1), (1, 2)):
        t = split(wrong, 2)
        share(t, split(labels, *grid))
        assert bounds_of(t) is None
        assert_close(F.cross_entropy(split(scores.double()), t), F.cross_entropy(scores.double(), labels))


ALIASES = {
    "x.data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "data of another": lambda t: _given(t, "data"),
    "set_": lambda t: _given(t, "set_"),
}


def _given(t, how):
    other = split(labels.t().contiguous(), 1, 2).t()
    if how == "data":
        other.data = t
    else:
        other.set_(t)
    return other


@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
@on_workers
def test_what_was_written_by_another_name_is_not_known(alias):
    t = split(wrong, 2)
    view = t.view(-1)
    alias(t)[t == 7] = 0
    assert bounds_of(t) is bounds_of(view) is None
    assert_close(F.cross_entropy(split(scores), t), F.cross_entropy(scores, torch.where(wrong == 7, 0, wrong)))


def test_of_values_that_are_computed_the_worker_that_has_a_wrong_one_raises():
    def work():
        for grid in ((2, 1, 1), (1, 2, 1)):
            for target in (split(labels, 2) + 0, split(wrong, 2)[:3]):  # none is wrong
                F.cross_entropy(split(scores, *grid)[: target.shape[0]], target)
        F.nll_loss(split(scores, 1, 2, 1), split(wrong, 2) + 0)

    with pytest.raises(IndexError, match="Target 7 is out of bounds"):
        distdl.run_workers(work, 3)


def test_bounds():
    assert Bounds.of(torch.tensor([])) is None and Bounds.of(torch.ones(2)) is None
    assert Bounds.of(torch.tensor([3, 255, 8, -1])) == (-1, 3, 8, 255)
    assert Bounds.merged([None, (3, 3, 8, 255), (1, 1, 9, 9)]) == (1, 1, 9, 255)
    assert Bounds.merged([None]) is None
    assert Bounds.of(torch.tensor([255, 255])).without(255) is None
