"""Norms and clipping of gradients over workers, against torch's on the sequential network."""

import math

import pytest
import torch
from helpers_layers import every_worker_raises, filled, noise, on_workers

from distdl.nn import DistributedConv1d, DistributedLinear, Repartition
from distdl.nn.placement import parameter_layouts
from distdl.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from distdl.partition.layout import Layout

ORDERS = (2.0, 1, 3.5, 0.5, math.inf, "inf")


def pair(P, grid, slope=False):
    """A network with gradients, and the sequential one. Workers outside the grid have zero-volume parameters."""
    out, inner = grid
    P_w = P[: out * inner].reshape(out, inner)
    P_x, P_y = P[:inner].reshape(1, inner), P[:out].reshape(1, out)
    ours = [DistributedLinear(P_x, P_y, P_w, 7, 5), torch.nn.Tanh(), Repartition(P_y, P_x)]
    theirs = [torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Identity()]
    if slope:
        ours.append(torch.nn.PReLU(3))
        theirs.append(torch.nn.PReLU(3))
    ours, theirs = torch.nn.Sequential(*ours).double(), filled(torch.nn.Sequential(*theirs))
    for number, parameter in enumerate(theirs.parameters()):
        parameter.grad = noise(*parameter.shape, seed=9 + number)
    layouts = parameter_layouts(ours)
    named = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        gradient = named[name.replace("sublinear.", "")].grad
        parameter.grad = (layouts[name].block(gradient) if name in layouts else gradient).clone()
    return ours, theirs, layouts


@pytest.mark.parametrize(
    ("workers", "grid"), [(1, (1, 1)), (2, (1, 2)), (3, (3, 1)), (4, (2, 2)), (4, (1, 3)), (6, (2, 3))]
)
def test_every_parameter_counts_once(workers, grid):
    def main(P):
        for order in ORDERS:
            for slope in (False, True):
                ours, theirs, layouts = pair(P, grid, slope)
                for limit in (0.5, 1e6):
                    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit, order)
                    norm = clip_grad_norm_(ours, limit, order)
                    assert norm.dtype == torch.float64 and norm.shape == ()
                    assert torch.allclose(norm, expected, rtol=1e-12)
                    assert len(set(P.allgather_data(norm.item()))) == 1
                    named = dict(theirs.named_parameters())
                    for name, parameter in ours.named_parameters():
                        whole = named[name.replace("sublinear.", "")].grad
                        block = layouts[name].block(whole) if name in layouts else whole
                        assert torch.allclose(parameter.grad, block, rtol=1e-12)

    on_workers(workers, main)


def test_parameters_and_tensors_instead_of_a_network():
    def main(P):
        ours, theirs, _ = pair(P, (2, 2))
        expected = torch.nn.utils.get_total_norm([p.grad for p in theirs.parameters()])
        gradients = (p.grad for p in ours.parameters())
        assert torch.allclose(get_total_norm(gradients), expected, rtol=1e-12)
        assert torch.allclose(get_total_norm(torch.full((3,), P.rank + 1.0)), torch.tensor(90.0).double().sqrt())
        assert torch.equal(get_total_norm([], foreach=False), torch.zeros((), dtype=torch.float64))
        assert torch.allclose(clip_grad_norm_(iter(ours.parameters()), 1.0, foreach=False), expected, rtol=1e-12)
        assert torch.allclose(get_total_norm(ours), torch.ones((), dtype=torch.float64))
        pair_of_workers = P[:2]
        if pair_of_workers.active:
            assert abs(get_total_norm([torch.ones(2)], P=pair_of_workers).item() - 2) < 1e-6
        clip_grad_value_(ours, 0.01)
        assert all(p.grad.abs().le(0.01).all() for p in ours.parameters())

    on_workers(4, main)


def test_parameters_without_gradients_do_not_count():
    def main(P):
        ours, theirs, layouts = pair(P, (2, 2), slope=True)
        for network in (ours, theirs):
            for name, parameter in network.named_parameters():
                if name.endswith("bias") or name == "3.weight":
                    parameter.grad = None
        expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        assert torch.allclose(clip_grad_norm_(ours, 1.0), expected, rtol=1e-12)
        assert layouts

    on_workers(4, main)


def test_a_copy_that_one_worker_alone_uses_counts_once():
    def main(P):
        network = torch.nn.Linear(2, 2).double()
        if P.rank:
            for parameter in network.parameters():
                parameter.grad = None if P.rank == 1 else torch.zeros_like(parameter)
        else:
            network(torch.ones(1, 2).double()).sum().backward()
        assert get_total_norm(network).item() == math.sqrt(6)

    on_workers(3, main)


def test_numbers_that_are_not_finite():
    def main(P):
        for bad, worker in ((math.nan, 1), (math.inf, 0)):
            for slope in (False, True):
                ours, _, layouts = pair(P, (2, 2), slope)
                name = "3.weight" if slope else "0.sublinear.weight"
                if slope or P.rank == worker:
                    dict(ours.named_parameters())[name].grad.flatten()[0] = bad
                norm = get_total_norm(ours)
                assert norm.isnan() if math.isnan(bad) else norm.isinf()
                before = [p.grad.clone() for p in ours.parameters()]
                with pytest.raises(RuntimeError, match=f"norm of order 2.0 .* is {bad}"):
                    clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
                same = [
                    torch.equal(p.grad.nan_to_num(), b.nan_to_num())
                    for p, b in zip(ours.parameters(), before, strict=True)
                ]
                assert all(same) and layouts

    on_workers(4, main)


def unequal(P):
    network = torch.nn.PReLU()
    network.weight.grad = torch.full((1,), P.rank + 1.0)
    get_total_norm(network)


@pytest.mark.parametrize(("make", "words"), [
    (unequal, "copies of weight, whose gradients have to be equal: add them up over the workers first; their norms are "
              "1 (rank 0), 2 (rank 1), 3 (rank 2)"),
    (lambda P: get_total_norm([torch.ones(1)], 0), "norm_type larger than 0; got 0"),
    (lambda P: clip_grad_norm_([torch.ones(1)], 1.0, -math.inf), "norm_type larger than 0; got -inf"),
])  # fmt: skip
def test_refusals(make, words):
    assert words in every_worker_raises(3, make)


def test_after_a_step_of_a_convolution_with_stock_clipping_of_values():
    """A whole step: the same weights as sequentially."""

    def main(P):
        layer = DistributedConv1d(P.reshape(1, 1, 4), in_channels=2, out_channels=3, kernel_size=3).double()
        reference = filled(torch.nn.Conv1d(2, 3, 3))
        layer.load_state_dict(reference.state_dict())
        whole = noise(2, 2, 11)
        x = Layout.balanced(layer.P_x, whole.shape).block(whole)
        for network, part in ((layer, x), (reference, whole)):
            optimiser = torch.optim.SGD(network.parameters(), lr=0.1)
            network(part).square().sum().backward()
            (clip_grad_norm_ if network is layer else torch.nn.utils.clip_grad_norm_)(network.parameters(), 0.5)
            optimiser.step()
        layout = layer.parameter_layouts
        for name, parameter in reference.named_parameters():
            assert torch.allclose(layer.get_parameter(name), layout[name].block(parameter), rtol=1e-12)

    on_workers(4, main)
