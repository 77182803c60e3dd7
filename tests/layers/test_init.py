import math

import pytest
import torch
from helpers_layers import on_workers

from distdl.geometry.boxes import slices
from distdl.nn import DistributedLinear, init
from distdl.partition.layout import Layout

FILLS = {
    "uniform_": ({"a": -1.0, "b": 3.0}, 1.0, 4 / math.sqrt(12)),
    "normal_": ({"mean": 2.0, "std": 0.5}, 2.0, 0.5),
    "trunc_normal_": ({"a": -1.0, "b": 1.0}, 0.0, 0.5396),
    "xavier_uniform_": ({"gain": 2.0}, 0.0, 2 * math.sqrt(2 / (48 * 15 + 40 * 15))),
    "xavier_normal_": ({}, 0.0, math.sqrt(2 / (48 * 15 + 40 * 15))),
    "kaiming_uniform_": ({"nonlinearity": "relu"}, 0.0, math.sqrt(2 / (48 * 15))),
    "kaiming_normal_": ({"mode": "fan_out", "a": 1.0}, 0.0, math.sqrt(1 / (40 * 15))),
    "constant_": ({"value": 3.0}, 3.0, 0.0),
}
SHAPE = (40, 48, 3, 5)


def filled_whole(P, grid, fill, dtype=torch.float64):
    """A parameter, filled block by block, as one tensor."""
    layout = Layout.balanced(P[: math.prod(grid)].reshape(*grid), SHAPE)
    parameter = torch.nn.Parameter(layout.block(torch.zeros(SHAPE, dtype=dtype)).clone())
    assert getattr(init, fill)(parameter, layout, **FILLS[fill][0]) is parameter
    whole = torch.full(SHAPE, math.nan, dtype=dtype)
    for worker, block in enumerate(P.allgather_data(parameter.detach())):
        if worker in layout:
            whole[slices(layout[worker])] = block
    return whole


@pytest.mark.parametrize("workers", [2, 3, 4, 6])
def test_values_follow_from_the_global_parameter(workers):
    torch.manual_seed(11)
    expected, found = [], []
    on_workers(1, lambda P: expected.extend(filled_whole(P, (1, 1, 1, 1), fill) for fill in FILLS))
    grid = {2: (1, 2, 1, 1), 3: (1, 1, 3, 1), 4: (3, 1, 1, 1), 6: (2, 1, 1, 3)}[workers]

    def main(P):
        values = [filled_whole(P, grid, fill) for fill in FILLS]
        found.extend(values if P.rank == 0 else [])

    on_workers(workers, main)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("fill", FILLS)
def test_they_are_torchs_distributions(fill):
    options, mean, deviation = FILLS[fill]
    theirs = getattr(torch.nn.init, fill)(torch.empty(SHAPE, dtype=torch.float64), **{"val" if k == "value" else k: v
        for k, v in options.items()}, **({} if fill == "constant_" else {"generator": torch.Generator()}))  # fmt: skip
    found = []
    on_workers(1, lambda P: found.append(filled_whole(P, (1, 1, 1, 1), fill)))
    for whole in (found[0], theirs):
        assert abs(whole.mean().item() - mean) <= 0.02 * deviation
        assert abs(whole.std().item() - deviation) <= 0.01 * deviation
    assert (
        abs(found[0].max() - theirs.max()) <= 0.4 * deviation and abs(found[0].min() - theirs.min()) <= 0.4 * deviation
    )


def test_what_does_not_fit_is_refused():
    def main(P):
        layer = DistributedLinear(P.reshape(1, 2), P[:1].reshape(1, 1), P.reshape(1, 2), 4, 3)
        layouts = layer.parameter_layouts
        with pytest.raises(ValueError, match="at least 2 dims; got one of shape 3"):
            init.xavier_normal_(layer.sublinear.bias, layouts["sublinear.bias"])
        with pytest.raises(ValueError, match="stores 6 elements of the parameter of shape 3x4; got one of shape"):
            init.normal_(torch.empty(4), layouts["sublinear.weight"])
        with pytest.raises(ValueError, match="fan_in or fan_out; got 'fan'"):
            init.kaiming_normal_(layer.sublinear.weight, layouts["sublinear.weight"], mode="fan")

    on_workers(2, main)
