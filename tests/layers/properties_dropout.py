"""What dropout and embedding can, property by property, on a world of exactly 4 workers of any back-end.

A cell asserts and returns ``exact`` or ``refused``, or ``none`` where the property has no meaning for the layer.
"""

import torch
from helpers_layers import noise

from distdl.geometry.boxes import runs, slices
from distdl.nn import DistributedDropout, DistributedDropout1d, DistributedEmbedding
from distdl.partition.layout import Layout
from distdl.tensors.uniform import uniform_block


def assert_drops(P_x, shape, blocks=None, kind=DistributedDropout):
    """y and the gradient of x against the product of x and the global mask, computed as a whole."""
    torch.manual_seed(7)  # the processes of a launched job begin with different ones
    layer = kind(P_x, 0.4).double()
    owned = Layout.balanced(P_x, shape) if blocks is None else Layout.of(P_x, blocks)
    whole = noise(*shape)
    for number in (1, 2):
        extents = shape[: layer.leading]
        high, low, *rest = layer._marks
        key = (high * 2**32 + low, *rest, number)
        u = uniform_block(key, tuple((0, n) for n in extents), extents)
        factors = ((u >= 0.4).double() / 0.6).reshape(*extents, *[1] * (len(shape) - len(extents))).expand(shape)
        rate = (u < 0.4).double().mean().item()
        assert abs(rate - 0.4) < 3 / u.numel() ** 0.5  # six standard deviations
        x = (owned.block(whole) if P_x.active else torch.zeros(1, 0).double()).clone().requires_grad_()
        y = layer(x)
        (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
        dx.sum().backward()
        if P_x.active:
            mine, factor = owned.block(whole), owned.block(factors)
            assert torch.allclose(y, mine * factor, rtol=1e-12)
            assert torch.allclose(dx, 3 * mine**2 * factor**3, rtol=1e-12)
            assert torch.allclose(x.grad, 6 * mine * factor**3, rtol=1e-12)
    return "exact"


def assert_embeds(P_x, P_y, P_w, x, rows=7, columns=5, blocks=None, **options):
    """y, the gradient of the weight and the gradient of that against the sequential embedding."""
    layer = DistributedEmbedding(P_x, P_y, P_w, rows, columns, **options).double()
    sequential = torch.nn.Embedding(rows, columns, dtype=torch.float64, **options, _weight=noise(rows, columns))
    layout = layer.parameter_layouts["weight"]
    layer.weight.data = layout.block(sequential.weight.data).clone()
    owned = Layout.balanced(P_x, x.shape) if blocks is None else Layout.of(P_x, blocks)
    splits = Layout.balanced(P_y[(slice(0, 1),) * x.dim()].reshape(-1), (columns,)).intervals
    computed = Layout.of(P_y, [*owned.intervals, *splits])
    dy = noise(*x.shape, columns, seed=3).requires_grad_()
    expected = sequential(x)
    expected.backward(dy.detach())
    own = owned.block(x) if P_x.active else torch.zeros(x.shape[0], 0)
    y = layer(own)
    share = dy.detach()[slices(computed[P_y.comm.rank])] if P_y.comm.rank in P_y else torch.zeros_like(y)
    share.requires_grad_()
    (gradient,) = torch.autograd.grad(y, layer.weight, share, create_graph=True)
    if P_y.comm.rank in P_y:
        assert torch.equal(y, expected[slices(computed[P_y.comm.rank])])
    else:
        assert y.shape == (own.shape[0], 0)
    assert torch.allclose(gradient, layout.block(sequential.weight.grad), rtol=1e-12, atol=1e-14)
    (again,) = torch.autograd.grad(gradient.square().sum(), share)
    if P_y.comm.rank in P_y:
        twice = torch.nn.functional.embedding(x, 2 * sequential.weight.grad)
        if layer.padding_idx is not None:
            twice[x == layer.padding_idx] = 0
        assert torch.allclose(again, twice[slices(computed[P_y.comm.rank])], rtol=1e-10, atol=1e-12)
    return "exact"


def indices(*shape, rows=7):
    """The same indices on every worker."""
    return torch.randint(0, rows, shape, generator=torch.Generator().manual_seed(2))


def embeds(P, x_grid, work):
    """Over a grid of the indices, and rows x columns of work, on the workers of P in order."""
    rows, columns = work
    size = torch.tensor(x_grid).prod().item()
    P_x, P_y = P[:size].reshape(*x_grid), P[P.size - size * columns :].reshape(*x_grid, columns)
    return P_x, P_y, P[: size * rows * columns].reshape(*x_grid, *work)


def uneven(P, grid, columns=(1, 1)):
    return assert_embeds(*embeds(P, grid, columns), indices(5, 6), blocks=[runs([1, 4]), runs([6])])


def refused(P):
    """An index that is no row is the same error on every worker."""
    layer = DistributedEmbedding(*embeds(P, (1, 1), (2, 2)), 7, 5)
    try:
        layer(torch.tensor([[7]]) if P.rank == 0 else torch.zeros(1, 0))
    except ValueError as error:
        assert set(P.allgather_data(str(error))) == {str(error)} and "worker 0 has 7" in str(error)
        return "refused"
    raise AssertionError("an index out of range was accepted")


def none(P):
    return "none"


CELLS = {
    "DistributedDropout": {
        "stride": none,
        "dilation": none,
        "even kernel": none,
        "deep halo": none,
        "uneven": lambda P: assert_drops(P.reshape(2, 2), (9, 7), [runs([8, 1]), runs([2, 5])]),
        "empty": lambda P: assert_drops(P.reshape(1, 4), (9, 7), [runs([9]), runs([0, 3, 0, 4])]),
        "batch split": lambda P: assert_drops(P.reshape(4, 1, 1), (9, 2, 3)),
        "channel split": lambda P: assert_drops(P.reshape(1, 4, 1), (4, 9, 3)),
        "double backward": lambda P: assert_drops(P[:3].reshape(3, 1), (9, 7)),
        "padding modes": none,
    },
    "DistributedDropout1d": {
        "stride": none,
        "dilation": none,
        "even kernel": none,
        "deep halo": none,
        "uneven": lambda P: assert_drops(
            P.reshape(2, 1, 2), (9, 7, 5), [runs([8, 1]), runs([7]), runs([1, 4])], DistributedDropout1d
        ),
        "empty": lambda P: assert_drops(
            P.reshape(1, 2, 2), (9, 7, 5), [runs([9]), runs([0, 7]), runs([5, 0])], DistributedDropout1d
        ),
        "batch split": lambda P: assert_drops(P.reshape(4, 1, 1), (9, 7, 3), kind=DistributedDropout1d),
        "channel split": lambda P: assert_drops(P.reshape(1, 4, 1), (7, 9, 3), kind=DistributedDropout1d),
        "double backward": lambda P: assert_drops(P[:3].reshape(1, 1, 3), (9, 7, 4), kind=DistributedDropout1d),
        "padding modes": none,
    },
    "DistributedEmbedding": {
        "stride": none,
        "dilation": none,
        "even kernel": none,
        "deep halo": none,
        "uneven": lambda P: uneven(P, (2, 1), (1, 2)),
        "empty": lambda P: assert_embeds(*embeds(P, (1,), (4, 1)), indices(6, rows=3), rows=3, columns=2),
        "batch split": lambda P: assert_embeds(*embeds(P, (2, 1), (2, 1)), indices(5, 3)),
        "channel split": lambda P: assert_embeds(*embeds(P, (1,), (2, 2)), indices(9), padding_idx=-2),
        "double backward": lambda P: assert_embeds(*embeds(P, (2,), (2, 1)), indices(9), padding_idx=1),
        "padding modes": none,
    },
}
