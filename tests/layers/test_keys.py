"""The state of a sequential layer, read and written."""

import copy
from functools import partial

import pytest
import torch
from helpers_layers import every_worker_raises, filled, noise, on_workers
from torch.nn.utils import parametrizations, parametrize, prune

from distdl.geometry.boxes import runs
from distdl.nn import (
    DistributedBatchNorm,
    DistributedConv1d,
    DistributedConv2d,
    DistributedConvTranspose1d,
    DistributedEmbedding,
    DistributedGroupNorm,
    DistributedInstanceNorm,
    DistributedLayerNorm,
    DistributedLinear,
    DistributedRMSNorm,
)
from distdl.nn.placement import parameter_layouts
from distdl.nn.utils import get_total_norm, orthogonal, spectral_norm, weight_norm
from distdl.partition.layout import Layout


def one_worker_layers(P):
    one = P[:1]
    yield DistributedLinear(one.reshape(1, 1), one.reshape(1, 1), one.reshape(1, 1), 5, 3), torch.nn.Linear(5, 3)
    square = one.reshape(1, 1, 1, 1)
    options = {"in_channels": 2, "out_channels": 3, "kernel_size": 3}
    yield DistributedConv2d(square, **options), torch.nn.Conv2d(**options)
    yield DistributedConv2d(square, square, square, **options, bias=False), torch.nn.Conv2d(**options, bias=False)
    column = one.reshape(1, 1)
    yield DistributedEmbedding(one, column, column, 5, 3), torch.nn.Embedding(5, 3)


def test_one_worker_has_the_sequential_keys_both_ways():
    """Also beside idle workers, in a network, and in a copy."""

    def main(P):
        for ours, theirs in one_worker_layers(P):
            ours, theirs = torch.nn.Sequential(torch.nn.Tanh(), copy.deepcopy(ours)), torch.nn.Sequential(
                torch.nn.Tanh(), theirs
            )  # fmt: skip
            state = {
                key: noise(*value.shape, seed=n).float() for n, (key, value) in enumerate(theirs.state_dict().items())
            }
            before = dict(state)
            ours.load_state_dict(state, strict=True)
            assert state == before and list(ours.state_dict()) == list(state)
            if P.rank == 0:
                assert all(torch.equal(ours.state_dict()[key], value) for key, value in state.items())
                theirs.load_state_dict(ours.state_dict(), strict=True)
                assert all(torch.equal(theirs.state_dict()[key], value) for key, value in state.items())
            ours.load_state_dict(ours.state_dict(), strict=True)
            with pytest.raises(RuntimeError, match="Unexpected key"):
                ours.load_state_dict({**state, "1.other": torch.ones(1)})

    on_workers(2, main)


def test_split_parameters_read_their_blocks_of_a_sequential_state():
    def main(P):
        network = torch.nn.Sequential(
            DistributedLinear(P[:2].reshape(1, 2), P[:2].reshape(1, 2), P.reshape(2, 2), 5, 3),
            DistributedConv2d(P.reshape(1, 1, 2, 2), in_channels=2, out_channels=3, kernel_size=3),
        )
        sequential = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Conv2d(2, 3, 3))
        for parameter in sequential.parameters():
            parameter.data = noise(*parameter.shape).float()
        network.load_state_dict(sequential.state_dict(), strict=True)
        assert [*network.state_dict()] == ["0.sublinear.weight", "0.sublinear.bias", "1.weight", "1.bias"]
        layouts = parameter_layouts(network)
        for (name, layout), whole in zip(layouts.items(), sequential.parameters(), strict=True):
            assert torch.equal(network.get_parameter(name), layout.block(whole))
        network.load_state_dict(network.state_dict(), strict=True)

    on_workers(4, main)


class Doubled(torch.nn.Module):
    """A parametrisation that is computed element by element."""

    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def split_linear(P, features=(5, 3), grid=(2, 2)):
    out, inner = grid
    team = P[: out * inner]
    return DistributedLinear(team[:inner].reshape(1, inner), team[:out].reshape(1, out), team.reshape(*grid), *features)


def test_layouts_follow_the_names_of_pruned_and_parametrised_parameters():
    """The order of the names changes, and the layouts go with the names; a worker is idle."""

    def main(P):
        conv = DistributedConv1d(P[:4].reshape(1, 1, 4), in_channels=2, out_channels=3, kernel_size=3)
        linear = split_linear(P)
        before = {**conv.parameter_layouts, **linear.parameter_layouts}
        prune.identity(conv, "weight")
        prune.l1_unstructured(linear.sublinear, "weight", 0.5)
        parametrize.register_parametrization(linear.sublinear, "bias", Doubled())
        found = {**conv.parameter_layouts, **linear.parameter_layouts}
        originals = {
            "bias": "bias",
            "weight_orig": "weight",
            "sublinear.weight_orig": "sublinear.weight",
            "sublinear.parametrizations.bias.original": "sublinear.bias",
        }
        assert list(found) == list(originals)
        for name, layout in found.items():
            assert layout is before[originals[name]]
            parameter = (linear if name.startswith("sub") else conv).get_parameter(name)
            assert parameter.shape == (layout.shapes[P.rank] if P.rank in layout.partition else (0,))

    on_workers(5, main)


def test_layouts_follow_pruned_parameters_of_normalisations():
    """Also where some workers have none."""

    def main(P):
        for layer, name, other in (
            (DistributedLayerNorm(P[:2].reshape(1, 2), 5), "weight", "bias"),
            (DistributedGroupNorm(P[:2].reshape(1, 2), 2, 6), "weight", "bias"),
            (DistributedBatchNorm(P[:2].reshape(2, 1), 6), "gamma", "beta"),
        ):
            before = layer.parameter_layouts
            if getattr(layer, name) is None:
                assert before.keys() == layer.parameter_layouts.keys() == {name, other}
                continue
            prune.identity(layer, name)
            assert list(layer.parameter_layouts) == [other, f"{name}_orig"]
            for key, layout in layer.parameter_layouts.items():
                parameter = layer.get_parameter(key)
                assert parameter.shape == (layout.shapes[P.rank] if P.rank in layout.partition else (0,))

    on_workers(3, main)


@pytest.mark.parametrize("grid", [(2, 2), (1, 3), (4, 1)])
def test_a_pruned_and_a_parametrised_linear_layer_train_as_the_sequential_one(grid):
    """With a mask of the whole weight; three output channels on four workers leave one block empty."""

    def main(P):
        ours, theirs = split_linear(P, grid=grid).double(), filled(torch.nn.Linear(5, 3))
        ours.load_state_dict(theirs.state_dict())
        mask = (noise(3, 5, seed=4) > 0).double()
        prune.custom_from_mask(theirs, "weight", mask)
        prune.custom_from_mask(ours.sublinear, "weight", ours.parameter_layouts["sublinear.weight"].block(mask))
        for module in (theirs, ours.sublinear):
            parametrize.register_parametrization(module, "bias", Doubled())
        whole = noise(4, 5)
        x = Layout.balanced(ours.P_x, whole.shape).block(whole) if P.rank in ours.P_x else torch.zeros(4, 0)
        for _ in range(3):
            for network, part in ((theirs, whole), (ours, x)):
                optimiser = torch.optim.SGD(network.parameters(), lr=0.05)
                optimiser.zero_grad()
                network(part).square().sum().backward()
                optimiser.step()
            norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
            assert torch.allclose(get_total_norm(ours), norm, rtol=1e-12)
        named = dict(theirs.named_parameters())
        assert len(ours.parameter_layouts) == 2
        for name, layout in ours.parameter_layouts.items():
            expected = layout.block(named[name.removeprefix("sublinear.")])
            assert torch.allclose(ours.get_parameter(name), expected, rtol=1e-12)
        before = {key: value.clone() for key, value in theirs.state_dict().items()}
        ours.load_state_dict(before)  # the mask comes in blocks, too
        assert torch.equal(ours.sublinear.weight_mask, ours.parameter_layouts["sublinear.weight_orig"].block(mask))

    on_workers(5, main)


def whole_conv(P):
    return DistributedConv1d(P[:4].reshape(1, 1, 4), in_channels=4, out_channels=4, kernel_size=2)


def whole_transposed(P):
    return DistributedConvTranspose1d(P[:4].reshape(1, 1, 4), in_channels=4, out_channels=4, kernel_size=2)


def split_out(P):
    return DistributedConv1d(
        P[:1].reshape(1, 1, 1), P[:4].reshape(1, 4, 1), P[:4].reshape(4, 1, 1), in_channels=4, out_channels=4,
        kernel_size=2,
    )  # fmt: skip


def split_both(P):
    return DistributedConv1d(
        P[:2].reshape(1, 2, 1), P[:2].reshape(1, 2, 1), P[:4].reshape(2, 2, 1), in_channels=4, out_channels=4,
        kernel_size=2,
    )  # fmt: skip


def split_table(P):
    return DistributedEmbedding(P[:1], P[:1].reshape(1, 1), P[:4].reshape(4, 1), 6, 5)


NORMS = {
    "spectral": (spectral_norm, parametrizations.spectral_norm, {"n_power_iterations": 2}),
    "weight": (weight_norm, parametrizations.weight_norm, {}),
    "weight, dim 1": (weight_norm, parametrizations.weight_norm, {"dim": 1}),
    "weight, all": (weight_norm, parametrizations.weight_norm, {"dim": None}),
    "orthogonal": (orthogonal, parametrizations.orthogonal, {}),
}


@pytest.mark.parametrize(("norm", "make"), [
    *((norm, make) for norm in NORMS for make in (whole_conv, whole_transposed)),
    ("weight", split_out), ("orthogonal", split_out),
])  # fmt: skip
def test_norms_of_parameters_give_what_they_give_sequentially(norm, make):
    """With an idle worker, in training, after the state of the sequential layer has been read: y and all gradients."""
    ours_of, torch_of, options = NORMS[norm]
    torch.manual_seed(3)
    transposed = make is whole_transposed
    sequential = (torch.nn.ConvTranspose1d if transposed else torch.nn.Conv1d)(4, 4, 2).double()
    sequential = torch_of(sequential, **options)
    state = copy.deepcopy(sequential.state_dict())

    def main(P):
        theirs = copy.deepcopy(sequential)
        ours = ours_of(make(P).double(), **options)
        mine = {key: value for key, value in state.items() if P.rank == 0 or not key.endswith("base")}
        if make is whole_conv or make is whole_transposed:
            ours.load_state_dict(mine, strict=P.rank == 0 or norm != "orthogonal")
        else:
            theirs = parametrised_from(P, ours, theirs, norm)
        whole = noise(2, 4, 8).requires_grad_()
        owned = Layout.balanced(ours.P_x, whole.shape)
        x = owned.block(whole.detach()).clone().requires_grad_() if P.rank in ours.P_x else torch.zeros(2, 0)
        y, expected = ours(x.requires_grad_()), theirs(whole)
        computed = Layout.balanced(ours.P_y, expected.shape)
        (y**3).sum().backward()
        (expected**3).sum().backward()
        if P.rank in ours.P_y:
            assert torch.allclose(y, computed.block(expected), rtol=1e-10)
        if P.rank in ours.P_x:
            assert torch.allclose(x.grad, owned.block(whole.grad), rtol=1e-10)
        layouts, named = ours.parameter_layouts, dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            assert parameter.grad is not None
            if name in layouts:
                assert torch.allclose(parameter.grad, layouts[name].block(named[name].grad), rtol=1e-8, atol=1e-12)
        assert list(layouts) == [name for name in named if norm != "weight, all" or not name.endswith("0")]

    on_workers(5, main)


def parametrised_from(P, ours, theirs, norm):
    """The sequential layer with the weight that the blocks of ours make up."""
    blocks = P.allgather_data(ours.weight.detach())
    theirs = torch.nn.Conv1d(4, 4, 2).double()
    theirs.weight.data = torch.cat(blocks[:4])
    theirs.bias.data = torch.cat(P.allgather_data(ours.bias.detach())[:4])
    if norm == "orthogonal":
        matrices = theirs.weight.detach()
        gram = matrices.mT @ matrices
        assert torch.allclose(gram, torch.eye(2, dtype=gram.dtype).expand(4, 2, 2), atol=1e-10)
        theirs = parametrizations.orthogonal(theirs)
        for worker, state in enumerate(P.allgather_data(ours.state_dict())[:4]):
            for key, value in theirs.state_dict().items():
                if key != "bias":
                    value[worker] = state[key][0]
        return theirs
    return parametrizations.weight_norm(theirs)


def test_a_norm_of_a_weight_of_which_some_blocks_are_empty():
    def main(P):
        layer = DistributedConv1d(
            P[:1].reshape(1, 1, 1), P.reshape(1, 3, 1), P.reshape(3, 1, 1), in_channels=2, out_channels=2, kernel_size=2
        )
        weight_norm(layer)
        y = layer(torch.ones(1, 2, 4) if P.rank == 0 else torch.zeros(1, 0))
        y.sum().backward()
        assert y.shape == (1, P.rank < 2, 3)
        assert [tuple(p.grad.shape) for p in layer.parameters()] == (
            [(1,), (1, 1, 1), (1, 2, 2)] if P.rank < 2 else [(0,), (0,), (0, 2, 2)]
        )
        assert tuple(runs([1, 1, 0])) == layer.parameter_layouts["parametrizations.weight.original0"].intervals[0]

    on_workers(3, main)


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: spectral_norm(split_out(P)), "spectral_norm of weight needs the whole of it on one worker; weight has "
                                            "the global shape 4x4x2 and is split into 4x1x1 blocks"),
    (lambda P: spectral_norm(split_linear(P)), "DistributedLinear: spectral_norm of weight needs the whole"),
    (lambda P: weight_norm(split_both(P)), "weight_norm of weight needs all that it takes the norm of on one worker"),
    (lambda P: weight_norm(split_out(P), dim=None), "weight_norm of weight needs"),
    (lambda P: weight_norm(split_out(P), dim=-2), "weight_norm of weight needs"),
    (lambda P: orthogonal(split_linear(P)), "orthogonal of weight needs its last two dims on one worker"),
    (lambda P: weight_norm(split_table(P), dim=1), "weight_norm of weight needs"),
    (lambda P: weight_norm(split_out(P), "kernel"), "weight or bias; got 'kernel'"),
    (lambda P: weight_norm(torch.nn.Tanh()), "of Tanh"),
])  # fmt: skip
def test_norms_over_several_workers_are_refused_on_all_of_them(make, words):
    assert words in every_worker_raises(5, make)


def of_torch(P, layer, norm, *x):
    """One of torch's functions, where there is a block, and the forward."""
    owner = getattr(layer, "sublinear", layer)
    if owner.weight.numel():
        norm(owner)
    layer(*x)


SPLIT_NORMALISATIONS = [
    (lambda P: DistributedBatchNorm(P.reshape(2, 2, 1), 3), "gamma", "1x3x1", "1x2x1"),
    (lambda P: DistributedGroupNorm(P.reshape(2, 2, 1), 3, 3), "weight", "3", "2"),
    (lambda P: DistributedGroupNorm(P.reshape(2, 2, 1), 3, 3), "bias", "3", "2"),
    (lambda P: DistributedInstanceNorm(P.reshape(2, 2, 1), 3, affine=True), "weight", "3", "2"),
    (lambda P: DistributedLayerNorm(P.reshape(2, 2, 1), [3, 5]), "weight", "3x5", "2x1"),
    (lambda P: DistributedRMSNorm(P.reshape(2, 2, 1), [3, 5]), "weight", "3x5", "2x1"),
]


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: of_torch(P, split_out(P), parametrizations.spectral_norm, torch.ones(1, 4 * (P.rank == 0), 4)),
     "spectral_norm of weight needs the whole of it"),
    (lambda P: of_torch(P, split_out(P), torch.nn.utils.spectral_norm, torch.ones(1, 4 * (P.rank == 0), 4)),
     "spectral_norm of weight needs the whole of it"),
    (lambda P: of_torch(P, split_both(P), torch.nn.utils.weight_norm, torch.ones(1, 2 * (P.rank < 2), 4)),
     "weight_norm of weight needs all"),
    (lambda P: of_torch(P, split_linear(P), parametrizations.orthogonal, torch.ones(1, (3, 2, 0, 0, 0)[P.rank])),
     "orthogonal of weight needs its last two dims"),
    (lambda P: of_torch(P, split_table(P), parametrizations.spectral_norm, torch.tensor([1][P.rank > 0 :])),
     "spectral_norm of weight needs the whole of it"),
    *((lambda P, make=make, norm=norm: of_torch(P, make(P), norm, torch.ones(2, 2 - P.rank % 2, 5)),
       f"{words} on one worker; {name} has the global shape {extents} and is split into {blocks} blocks")
      for make, name, extents, blocks in SPLIT_NORMALISATIONS
      for norm, words in (
          (partial(parametrizations.spectral_norm, name=name), f"spectral_norm of {name} needs the whole of it"),
          (partial(torch.nn.utils.spectral_norm, name=name), f"spectral_norm of {name} needs the whole of it"),
          (partial(parametrizations.weight_norm, name=name, dim=None),
           f"weight_norm of {name} needs all that it takes the norm of"),
      )),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_norms_that_torch_has_put_on_split_parameters_are_an_agreed_error(make, words):
    """Every worker has a block: where there is none, most of torch's functions raise an error of their own."""
    assert words in every_worker_raises(4, make)


@pytest.mark.parametrize("call", [
    parametrizations.weight_norm, parametrizations.orthogonal, torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm,
    lambda layer: prune.l1_unstructured(layer, "weight", 3),
    lambda layer: prune.global_unstructured([(layer, "weight")], prune.L1Unstructured, amount=3),
    lambda layer: prune.random_structured(layer, "weight", 0.5, 0),
    lambda layer: prune.ln_structured(layer, "weight", 0.5, 2, 0),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_what_the_docs_warn_of_is_an_error_of_torch_only_where_nothing_is_stored(call):
    def main(P):
        layer = whole_conv(P)
        if P.rank == 0:
            call(layer)
        else:
            with pytest.raises((RuntimeError, ValueError), match=r"0 elements|=0|of 1 dimensions|multidimensional"):
                call(layer)

    on_workers(4, main)


@pytest.mark.parametrize(("name", "sequential"), [("gamma", "weight"), ("beta", "bias")])
def test_a_norm_of_what_batch_norm_stores_on_one_worker(name, sequential):
    """Called by every worker, of which the others have no such parameter."""

    def main(P):
        layer, theirs = DistributedBatchNorm(P.reshape(3, 1), 2).double(), filled(torch.nn.BatchNorm1d(2))
        layer.load_state_dict(theirs.state_dict())
        spectral_norm(layer, name)
        assert not P.rank or layer.gamma is layer.beta is None
        parametrizations.spectral_norm(theirs, sequential)
        whole = noise(6, 2)
        assert torch.allclose(layer(whole[2 * P.rank :][:2]), theirs(whole)[2 * P.rank :][:2], rtol=1e-10)

    on_workers(3, main)
