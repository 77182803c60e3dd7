import copy
import functools
import itertools

import pytest
import torch
from helpers_layers import assert_options, every_worker_raises, noise, on_workers
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.geometry.boxes import runs
from distdl.nn import (
    DistributedDropout,
    DistributedDropout1d,
    DistributedDropout2d,
    DistributedDropout3d,
    DistributedLinear,
    repeat_calls,
)
from distdl.partition.layout import Layout
from distdl.testing import Counting, assert_matches_sequential
from distdl.utilities.torch import zero_volume_tensor

KINDS = {2: DistributedDropout, 3: DistributedDropout1d, 4: DistributedDropout2d, 5: DistributedDropout3d}


def assembled(P, owned, block):
    """The global tensor of which every worker has a block."""
    whole = torch.full(owned.extents, torch.nan, dtype=block.dtype)
    for worker, part in enumerate(P.allgather_data(block.detach())):
        if worker in owned.partition:
            whole[tuple(slice(*interval) for interval in owned[worker])] = part
    return whole


def global_masks(P, grid, blocks, shape, kinds, calls=2):
    """What the layers make of ones, the gradients too: one global tensor for each call."""
    team = P[: torch.tensor(grid).prod().item()].reshape(*grid)
    owned = Layout.balanced(team, shape) if blocks is None else Layout.of(team, blocks)
    found = []
    layers = [kind(team, 0.4).double() for kind in kinds]
    for layer, _ in itertools.product(layers, range(calls)):
        x = owned.block(torch.ones(shape, dtype=torch.float64)) if team.active else zero_volume_tensor(3, torch.float64)
        x = x.clone().requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert y.dtype == torch.float64 and x.grad.shape == x.shape and torch.equal(x.grad, y)
        found.append(assembled(P, owned, y))
    return found


def alone(shape, kinds, **options):
    found = []
    on_workers(1, lambda P: found.extend(global_masks(P, (1,) * len(shape), None, shape, kinds, **options)))
    return found


@pytest.mark.parametrize(
    ("workers", "grid", "blocks"),
    [
        (2, (1, 1, 2, 1), None),
        (3, (1, 3, 1, 1), None),
        (4, (2, 1, 1, 2), None),
        (4, (1, 1, 1, 3), None),
        (6, (1, 2, 3, 1), None),
        (4, (1, 1, 4, 1), [runs([3]), runs([5]), runs([1, 0, 5, 1]), runs([4])]),
        (6, (1, 2, 1, 2), [runs([3]), runs([0, 5]), runs([7]), runs([1, 3])]),
    ],
)
def test_masks_are_the_same_on_any_partition(workers, grid, blocks):
    torch.manual_seed(5)
    shape, kinds = (3, 5, 7, 4), (DistributedDropout, DistributedDropout2d, DistributedDropout)
    expected = alone(shape, kinds)
    found = []

    def main(P):
        masks = global_masks(P, grid, blocks, shape, kinds)
        found.extend(masks if P.rank == 0 else [])

    on_workers(workers, main)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


def test_masks_differ_by_layer_call_and_seed_and_have_the_rate():
    state = torch.get_rng_state()
    try:
        found = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            before = torch.get_rng_state()
            found += alone((40, 50), (DistributedDropout, DistributedDropout))
            assert torch.equal(torch.get_rng_state(), before)
    finally:
        torch.set_rng_state(state)
    for mask in found:
        assert set(mask.unique().tolist()) == {0, 1 / (1 - 0.4)}
        assert abs((mask == 0).double().mean().item() - 0.4) < 0.04
    for one, other in itertools.combinations(found, 2):
        assert 0.4 < ((one == 0) == (other == 0)).double().mean().item() < 0.64


def test_whole_channels():
    for dims, kind in list(KINDS.items())[1:]:
        for mask in alone((6, 9, 4, 3, 2)[:dims], (kind,)):
            flat = mask.flatten(2)
            assert torch.equal(flat, flat[..., :1].expand_as(flat)) and flat[..., 0].unique().numel() == 2


def test_no_mask_all_masked_and_evaluating():
    def main(P):
        team = distdl.Partition(Counting(P.comm))
        x = noise(2, 3).requires_grad_()
        layer = DistributedDropout(team.reshape(1, 2))
        assert layer.eval()(x) is x and DistributedDropout(team.reshape(1, 2), p=0.0)(x) is x
        assert not team.comm.log and layer.calls.number == 0
        y = DistributedDropout(team.reshape(1, 2), p=1.0)(x)
        y.sum().backward()
        assert not y.any() and not x.grad.any()
        team.comm.reset()
        layer.train()
        layer(x)
        assert [name for name, _ in team.comm.log] == ["all_max", "all_gather"]
        team.comm.reset()
        layer(x)
        assert [name for name, _ in team.comm.log] == ["all_max"]
        team.comm.reset()
        with distdl.fixed_shapes():
            layer(x)
        assert not team.comm.log and layer.calls.number == 3

    on_workers(2, main)


class Given(torch.nn.Module):
    """A sequential dropout with a given mask."""

    def __init__(self, factors):
        super().__init__()
        self.factors = factors

    def forward(self, x):
        return x * self.factors


def test_matches_a_sequential_product_and_differentiates_twice():
    torch.manual_seed(3)
    shape = (4, 5)

    def main(P):
        layer = DistributedDropout(P.reshape(2, 2), 0.3)
        owned = Layout.balanced(layer.P_x, shape)
        factors = assembled(P, owned, layer(owned.block(torch.ones(shape, dtype=torch.float64))))
        layer.calls.number = 0
        assert_matches_sequential(layer, Given(factors), noise(*shape))
        layer.calls.number = 0
        x = owned.block(noise(*shape)).clone().requires_grad_()
        (dx,) = torch.autograd.grad((layer(x) ** 3).sum(), x, create_graph=True)
        dx.sum().backward()
        assert torch.allclose(x.grad, 6 * x.detach() * owned.block(factors) ** 3, rtol=1e-12)

    on_workers(4, main)


def test_dtypes_autocast_copies_and_idle_workers():
    def main(P):
        team = P[:2].reshape(1, 2)
        layer = DistributedDropout(team)
        x = torch.ones(3, 4) if P.rank < 2 else torch.zeros(3, 0)
        for dtype in (torch.bfloat16, torch.float64, torch.complex64):
            assert layer(x.to(dtype)).dtype == dtype
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.float32
        twin = copy.deepcopy(layer)
        assert torch.equal(twin(x), layer(x)) and (P.rank == 2 or not torch.equal(layer(x), layer(x)))
        y = DistributedDropout(team)(torch.ones(3, 4).double() if P.rank == 0 else torch.zeros(3, 0))
        assert P.rank == 2 or y.dtype == torch.float64
        z = torch.nn.Sequential(layer, torch.nn.ReLU()).double()(x.double())
        assert z.shape == x.shape and z is not x

    on_workers(3, main)


def network(P):
    grid = P.reshape(2, 2)
    linears = [DistributedLinear(grid[:1], grid[:1], grid, 6, 6).double() for _ in range(2)]
    return torch.nn.Sequential(linears[0], DistributedDropout(grid[:1]), torch.nn.Tanh(), linears[1])


def once(net, x, call):
    call(net, x.requires_grad_()).square().sum().backward()


def without_input_gradient(net, x, call):
    call(torch.nn.Sequential(net[1], net[0]), x).square().sum().backward()
    call(net[3], x).square().sum().backward()


def accumulated(net, x, call):
    for k in range(3):
        call(net, x + k).square().sum().backward()


def kept(net, x, call):
    y = call(net, x).square().sum()
    y.backward(retain_graph=True)
    y.backward()


def nested(net, x, call):
    def outer(x):
        return call(net, net[3](x)).sin()

    call(outer, x).square().sum().backward()


def several(net, x, call):
    y = call(net, call(net, x))
    y.square().sum().backward()


def out_of_order(net, x, call):
    losses = [call(net, x + k).square().sum() for k in range(3)]
    for k in (1, 0, 2):
        losses[k].backward(retain_graph=True)
    losses[1].backward()


def twice_within(net, x, call):
    call(lambda x: net(net(x)), x).square().sum().backward()


def nested_several(net, x, call):
    def outer(x):
        return call(net, net(call(net, x))).sin()

    call(outer, call(outer, x)).square().sum().backward()


def silent(net, x):
    with torch.no_grad():
        noise = net(x)
    return torch.sin(x) * noise


def without_gradients(net, x, call):
    y = call(lambda x: silent(net, x), x.requires_grad_())
    call(net, y + silent(net, x)).square().sum().backward()


def given_repeat_calls(net, x, call):
    call(net, call(net, x, context_fn=repeat_calls), context_fn=repeat_calls).square().sum().backward()


def inside_hooks(net, x, call):
    """Of the user's, whose variables have the names of those of torch's checkpoints."""
    frame, target_frame_ref = [], None

    def pack(x):
        frame.append(target_frame_ref)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        call(net, call(net, x)).square().sum().backward()


def derivative_within(net, x, call):
    def flow(x):
        (dx,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        return net(x + dx)

    call(flow, call(flow, x.requires_grad_())).square().sum().backward()


RIGHT = [
    once, without_input_gradient, accumulated, kept, nested, several, out_of_order, twice_within, nested_several,
    without_gradients, given_repeat_calls, inside_hooks, derivative_within,
]  # fmt: skip


@pytest.mark.parametrize("run", RIGHT)
def test_a_checkpoint_repeats_the_mask(run):
    def main(P):
        net = network(P)
        found = []
        for plain in (True, False):
            one, x = copy.deepcopy(net), noise(3, 3) if P.rank < 2 else torch.zeros(3, 0, dtype=torch.float64)

            def call(layer, x, plain=plain, **options):
                return layer(x) if plain else checkpoint(layer, x, use_reentrant=False, **options)

            run(one, x, call)
            found.append([parameter.grad for parameter in one.parameters()])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
        assert any(gradient.any() for gradient in found[0]) or P.rank == 3

    on_workers(4, main)


def reentrant(net, x, call):
    checkpoint(net, x.requires_grad_(), use_reentrant=True).square().sum().backward()


def reentrant_without_gradients(net, x, call):
    checkpoint(lambda x: silent(net, x), x.requires_grad_(), use_reentrant=True).square().sum().backward()


def more_often(net, x, call):
    count = iter((1, 2))

    def growing(x):
        for _ in range(next(count)):
            x = net(x)
        return x

    call(growing, x.requires_grad_()).square().sum().backward()


WRONG = {
    reentrant: "use_reentrant=False",
    reentrant_without_gradients: "without gradients",
    more_often: "more often than in its forward",
}


@pytest.mark.parametrize("run", WRONG)
def test_a_repeat_that_may_be_wrong_raises_on_every_worker(run):
    def main():
        net, x = DistributedDropout(distdl.world().reshape(1, 2)), torch.ones(2, 3)
        call = functools.partial(checkpoint, use_reentrant=False, early_stop=False)
        with pytest.raises(RuntimeError) as error:
            run(net, x, call)
        return str(error.value)

    for text in distdl.run_workers(main, 2):
        assert WRONG[run] in text


def test_workers_with_other_seeds_follow_the_first():
    """As processes have that never set one."""

    def masks(seeds):
        def main(P):
            layer = DistributedDropout(P)
            layer._marks = (1, seeds[P.rank], 1, 3)
            return layer(torch.ones(20))

        return torch.cat(distdl.run_workers(lambda: main(distdl.world()), 2))

    assert torch.equal(masks([2, 2]), masks([2, 3])) and not torch.equal(masks([2, 3]), masks([3, 2]))


@pytest.mark.parametrize(("make", "words"), [
    (lambda P: DistributedDropout(P, p=1.5), "DistributedDropout needs p from 0 to 1; got 1.5"),
    (lambda P: DistributedDropout(P, inplace=True), "never writes into its input"),
    (lambda P: DistributedDropout2d(P.reshape(1, 2, 1)), "batch x channels x 2 dims of space; got 1x2x1"),
    (lambda P: DistributedDropout(P)(torch.ones(2, 3)), "1 dims"),
    (lambda P: DistributedDropout(P.reshape(1, 2))(torch.ones(2 + P.rank, 3)), "form a grid"),
    (lambda P: DistributedDropout(P)(torch.ones(2, dtype=torch.int64)), "floating-point or complex numbers; got torch"),
])  # fmt: skip
def test_bad_input_is_the_same_error_on_every_worker(make, words):
    assert words in every_worker_raises(2, make)


def test_options_are_kept_and_shown():
    def main(P):
        for dims, kind in KINDS.items():
            P_x = P.reshape(2, *[1] * (dims - 1))
            layer = kind(P_x, 0.25)
            assert_options(layer, P_x=P_x, p=0.25, inplace=False)
            assert repr(layer) == f"{kind.__name__}(P_x: {P_x}; p=0.25, inplace=False)"

    on_workers(2, main)


def test_in_place_behind_a_mask_of_an_empty_block():
    """The second derivatives come past the movement before the layer on every worker."""

    def main(P):
        root, team = P[:1].reshape(1, 1), P[:3].reshape(3, 1)
        x = (noise(2, 3) if P.rank == 0 else torch.zeros(2, 0, dtype=torch.float64)).clone().requires_grad_()
        y = DistributedDropout(team, 0.3)(distdl.nn.Repartition(root, team)(x))
        assert not y._is_view()
        (dx,) = torch.autograd.grad((torch.relu_(y) ** 3).sum(), x, create_graph=True)
        (dx**2).sum().backward()
        assert P.rank or torch.allclose(
            x.grad * x * (1 / 2), dx**2 * 2
        )  # dx = 3 c x**2, so its square's is 36 c c x**3

    on_workers(4, main)
