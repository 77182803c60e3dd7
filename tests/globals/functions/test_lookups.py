"""Lookups in tables of a model: what they write into these, and what gradients tables get."""

import copy
import warnings

import pytest
import torch
from launched import assert_close as assert_very_close
from nets import assert_close, assert_identical, assert_same_state, network, partition, run
from same import noise
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
@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("rows", [3, 2])
def test_gradients_that_are_divided_by_how_often_a_row_is_looked_up(weights, padding, rows):
    """By all workers together, of which one has no index of two rows."""

    def work():
        sequential = network(lambda: nn.Embedding(9, 4, padding_idx=padding, scale_grad_by_freq=True))
        model = distdl.distribute(copy.deepcopy(sequential), partition((3, 1)), weights=weights, fallback="silent")
        for one, x in (
            (sequential, INDICES[:rows]),
            (model, distdl.distribute_tensor(INDICES[:rows], partition((3, 1)))),
        ):
            one(x).exp().sum().backward()
        assert_close(model.weight.grad, sequential.weight.grad)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("padding", [None, 4])
def test_second_derivatives_where_a_worker_has_no_indices(weights, padding):
    """One has an empty block, and another none."""

    def work():
        sequential = network(lambda: nn.Embedding(9, 4, padding_idx=padding))
        model = distdl.distribute(copy.deepcopy(sequential), partition((3, 1)), weights=weights, fallback="error")
        for one, x in ((sequential, INDICES[:2]), (model, distdl.distribute_tensor(INDICES[:2], partition((3, 1))))):
            (first,) = torch.autograd.grad(one(x).pow(3).sum(), [one.weight], create_graph=True)
            first.square().sum().backward()
        assert_close(model.weight.grad, sequential.weight.grad)

    run(work)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize(
    ("options", "fallback"),
    [
        ({"sparse": True}, "error"), ({"max_norm": 0.5, "mode": "sum"}, "error"), ({"mode": "max"}, "error"),
        ({"sparse": True, "padding_idx": 4, "max_norm": 0.5}, "silent"), ({"mode": "sum", "padding_idx": -9}, "silent"),
        ({"mode": "max", "padding_idx": 4}, "silent"),
        ({"scale_grad_by_freq": True}, "silent"),
    ],
)  # fmt: skip
def test_bags(weights, options, fallback):
    """With padding, or where frequencies count, they run on one worker. Sparse gradients are dense, as others' are."""

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


class _Weighted(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.bags, self.factors = nn.EmbeddingBag(9, 4, mode="sum", **options), nn.Parameter(torch.ones(9))

    def forward(self, indices):
        return self.bags(indices, per_sample_weights=self.factors[indices])


@pytest.mark.parametrize("options", [{}, {"padding_idx": 4}])
def test_bags_with_factors(options):
    """Those that are all padding, too."""
    indices = torch.tensor([[1, 2, 0], [4, 4, 4], [4, 6, 1]])

    def work():
        sequential = network(lambda: _Weighted(**options))
        for grid in ((3, 1), (1, 3)):
            model = distdl.distribute(copy.deepcopy(sequential), partition(grid), fallback="silent")
            y, expected = model(distdl.distribute_tensor(indices, partition(grid))), sequential(indices)
            assert_close(y, expected)
            sequential.zero_grad()
            y.exp().sum().backward()
            expected.exp().sum().backward()
            for ours, theirs in zip(model.parameters(), sequential.parameters(), strict=True):
                assert_close(ours.grad, theirs.grad)
        with pytest.raises(NotImplementedError, match="only supported for mode='sum'"):
            x = distdl.distribute_tensor(indices, partition((3, 1)))
            nn.functional.embedding_bag(x, model.bags.weight, mode="mean", per_sample_weights=model.factors[indices])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distdl.run_workers(work, 4)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 4}, {"include_last_offset": True}])
def test_bags_of_uneven_length(weights, mode, options):
    """One is empty, and some lie on two workers."""
    indices, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 8, 4, 0, 0]), torch.tensor([0, 3, 3, 7, 11])

    def work():
        sequential = network(lambda: nn.EmbeddingBag(9, 4, mode=mode, **options))
        model = distdl.distribute(copy.deepcopy(sequential), partition((3,)), weights=weights, fallback="silent")
        for given in (offsets, distdl.distribute_tensor(offsets, partition((2,)))):
            y = model(distdl.distribute_tensor(indices, partition((3,))), given)
            expected = sequential(indices, offsets)
            assert_close(y, expected)
            for one, result in ((model, y), (sequential, expected)):
                one.zero_grad()
                result.exp().sum().backward()
            assert_close(model.weight.grad, sequential.weight.grad)

    run(work)


def test_places_in_a_table_have_the_dtype_that_is_asked_for():
    """Also behind a search for others, where workers have no cells."""

    def work():
        table, x = (distdl.distribute_tensor(one, partition((2,))) for one in (torch.arange(5.0), torch.tensor([2.5])))
        for function, given in ((torch.searchsorted, (table, x)), (torch.bucketize, (x, table))):
            for narrow in (False, True):
                y = function(*given, out_int32=narrow)
                assert y.dtype is (torch.int32 if narrow else torch.int64) and y.tolist() == [3]

    distdl.run_workers(work, 3)


def _steps(optimiser, loss):
    for _ in range(3):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()


class Renormed(nn.Module):
    """Tables whose forward writes into them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 3, max_norm=0.5, dtype=torch.float64)
        self.bags = nn.EmbeddingBag(6, 3, max_norm=0.4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x).sum(1) + self.bags(x)


@pytest.mark.filterwarnings("ignore:.*has no op")
def test_tables_that_are_renormed_stay_equal():
    indices = torch.randint(0, 6, (4, 5), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    sequential = Renormed()
    state = {name: 3 * one.clone() for name, one in sequential.state_dict().items()}

    def steps(model, x):
        model.load_state_dict(state)
        optimiser = torch.optim.SGD(model.parameters(), 0.01)
        _steps(optimiser, lambda: model(x).square().sum())
        return model.state_dict()

    expected = {name: one.clone() for name, one in steps(sequential, indices).items()}

    def work() -> None:
        P = distdl.world()[:2].reshape(2, 1)
        for weights in ("replicated", "sharded"):
            model = distdl.distribute(Renormed(), P, weights=weights)
            for name, one in steps(model, distdl.distribute_tensor(indices, P)).items():
                torch.testing.assert_close(one, expected[name], rtol=1e-12, atol=1e-12)

    distdl.run_workers(work, 3)


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_tables_that_are_renormed_in_evaluation(weights):
    indices, table = torch.tensor([[4, 0, 5]]), 3 * noise(6, 3)

    def looked_up(model, given):
        model.load_state_dict({"weight": table})
        with torch.no_grad():
            return model(given), model.state_dict()["weight"].clone()

    y, shortened = looked_up(nn.Embedding(6, 3, max_norm=0.5, dtype=torch.float64), indices)

    def work() -> None:
        P = distdl.world()[:2].reshape(1, 2)
        model = distdl.distribute(nn.Embedding(6, 3, max_norm=0.5, dtype=torch.float64), P, weights=weights)
        for given in (indices, distdl.distribute_tensor(indices, P)):
            found, now = looked_up(model, given)
            assert_very_close(found, y)
            torch.testing.assert_close(now, shortened)

    distdl.run_workers(work, 3)
