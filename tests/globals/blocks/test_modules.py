"""Modules of distdl.nn between functions of global tensors."""

import pytest
import torch
from launched import Calling, assert_close, on_workers, split
from same import noise
from torch.nn import functional as F

import distdl
from distdl import nn

x = noise(4, 3, 7, 5)


def grid(*extents):
    P = distdl.world().create_partition_inclusive(range(torch.Size(extents).numel()))
    return P.create_cartesian_topology_partition(extents)


@pytest.mark.parametrize("place", [(2, 1, 1, 1), (1, 1, 2, 1), (1, 2, 1, 1)])
@on_workers
def test_a_mixed_network(place):
    """Convolution and losses of nn, activations of torch; the input comes split in any way."""
    P = grid(1, 1, 2, 1)
    conv = nn.DistributedConv2d(P, in_channels=3, out_channels=4, kernel_size=3, padding=1).double()
    norm = nn.DistributedGroupNorm(P, 2, 4).double()
    weight, bias = torch.nn.Parameter(noise(4, 3, 3, 3)), torch.nn.Parameter(noise(4))
    me = distdl.world().comm.rank
    with torch.no_grad():
        if me == 0:
            conv.weight.copy_(weight), conv.bias.copy_(bias)
    ours, theirs = split(x, *place).requires_grad_(), x.clone().requires_grad_()
    y = norm(F.gelu(conv(ours)) * 2)
    z = F.group_norm(F.gelu(F.conv2d(theirs, weight, bias, padding=1)) * 2, 2)
    assert type(y) is distdl.GlobalTensor
    assert_close(y, z)
    loss, expected = nn.DistributedMSELoss(P)(y, noise(4, 4, 7, 5)), F.mse_loss(z, noise(4, 4, 7, 5))
    assert loss.shape == () and loss.item() == pytest.approx(expected.item(), rel=1e-12)
    (loss * 3).backward()
    (expected * 3).backward()
    assert_close(ours.grad, theirs.grad)
    if me == 0:
        assert_close(conv.weight.grad, weight.grad)


@on_workers
def test_losses_of_classes():
    P = grid(1, 2, 1, 1)
    numbers = (noise(4, 7, 5) * 5).long().abs() % 3
    odds = noise(4, 3, 7, 5).softmax(1)
    for target in (numbers, split(numbers, 1, 2, 1), odds, split(odds, 2, 1, 1, 1)):
        ours, theirs = split(x, 1, 1, 1, 2).requires_grad_(), x.clone().requires_grad_()
        loss = nn.DistributedCrossEntropyLoss(P)(ours, target)
        plain = target.full_tensor() if isinstance(target, distdl.GlobalTensor) else target
        expected = F.cross_entropy(theirs, plain)
        loss.backward()
        expected.backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
        assert_close(ours.grad, theirs.grad)
    each = nn.DistributedCrossEntropyLoss(P, reduction="none")(split(x, 1, 2, 1, 1), numbers)
    assert_close(each, F.cross_entropy(x, numbers, reduction="none"))


@on_workers
def test_linear_layers_and_other_partitions():
    P_x, P_y, P_w = grid(1, 2), grid(1, 1), grid(1, 2)
    layer = nn.DistributedLinear(P_x, P_y, P_w, in_features=6, out_features=3, bias=False).double()
    rows = noise(4, 6)
    ours = split(rows, 2, 1).requires_grad_()
    y = layer(ours)
    assert y.shape == (4, 3) and y.layout.partition.workers.tolist() == [[0]]
    y.pow(2).sum().backward()
    weights = [
        one.full_tensor() for one in (distdl.GlobalTensor.from_local(layer.sublinear.weight.detach(), P_w), y.detach())
    ]
    assert_close(weights[1], rows @ weights[0].T)
    assert_close(ours.grad, 2 * weights[1] @ weights[0])


@on_workers
def test_linear_layers_of_more_dims_than_axes():
    P_x, P_y, P_w = grid(1, 2), grid(2, 1).reshape(1, 2), grid(2, 1).reshape(2, 1)
    layer = nn.DistributedLinear(P_x, grid(1, 1), grid(1, 2), 6, 5).double()
    other = nn.DistributedLinear(grid(1, 1), P_y, P_w, 6, 5).double()
    for made in (layer, other):
        for parameter in made.parameters():
            parameter.data.fill_(0.5)
        for shape, ways in (((4, 3, 6), ((2, 1, 1), (1, 1, 2))), ((2, 3, 2, 6), ((1, 2, 1, 1),))):
            for way in ways:
                rows = noise(*shape)
                ours, theirs = split(rows, *way).requires_grad_(), rows.clone().requires_grad_()
                y, expected = (
                    made(ours),
                    F.linear(theirs, torch.full((5, 6), 0.5).double(), torch.full((5,), 0.5).double()),
                )
                assert_close(y, expected)
                y.pow(2).sum().backward()
                expected.pow(2).sum().backward()
                assert_close(ours.grad, theirs.grad)
        with pytest.raises(ValueError, match="at least as many dims as P_x has axes"):
            made(split(noise(6), 2))


@on_workers
def test_repartition_is_a_redistribution():
    moved = nn.Repartition(grid(2, 1, 1, 1), grid(1, 1, 2, 1))(split(x, 1, 2, 1, 1))
    assert_close(moved, x)
    assert moved.layout.partition.workers.shape == (1, 1, 2, 1)


@on_workers
def test_a_module_of_nn_in_a_distributed_model():
    """Its parameters are its own: they neither enter nor are they summed over all workers."""
    P = grid(1, 1, 2, 1)
    conv = nn.DistributedConv2d(P, in_channels=3, out_channels=3, kernel_size=1).double()
    if distdl.world().comm.rank == 0:
        with torch.no_grad():
            conv.weight.copy_(noise(3, 3, 1, 1)), conv.bias.copy_(noise(3))
    model = distdl.distribute(torch.nn.Sequential(torch.nn.GELU(), conv), P)
    model(x).sum().backward()
    w, b = noise(3, 3, 1, 1).requires_grad_(), noise(3).requires_grad_()
    F.conv2d(F.gelu(x), w, b).sum().backward()
    if distdl.world().comm.rank == 0:
        assert_close(conv.weight.grad, w.grad)
        assert_close(conv.bias.grad, b.grad)


@pytest.mark.parametrize(("make", "function"), [
    (lambda P: nn.DistributedMaxPool2d(P, 3, stride=2, return_indices=True),
     lambda x: F.max_pool2d(x, 3, 2, return_indices=True)),
    (lambda P: nn.DistributedAdaptiveMaxPool2d(P, (4, 3), return_indices=True),
     lambda x: F.adaptive_max_pool2d(x, (4, 3), return_indices=True)),
])  # fmt: skip
@on_workers
def test_several_results(make, function):
    found = []
    for given, call in (
        (split(x, 1, 1, 2, 1).requires_grad_(), make(grid(1, 1, 2, 1))),
        (x.clone().requires_grad_(), function),
    ):
        y, indices = call(given)
        y.square().sum().backward()
        found.append([y, indices, given.grad])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@on_workers
def test_arguments_by_name():
    P = grid(1, 1, 2, 1)
    loss = nn.DistributedMSELoss(P)
    ours, theirs = split(x, 1, 1, 2, 1), noise(4, 3, 7, 5, seed=1)
    for found in (loss(ours, target=theirs), loss(x=ours, target=split(theirs, 2, 1, 1, 1))):
        assert_close(found, F.mse_loss(x, theirs))
    with pytest.raises(TypeError, match="DistributedMSELoss: missing a required argument"):
        loss(input=ours, target=theirs)


@on_workers
def test_what_works_on_blocks_says_so():
    P = grid(1, 2, 1, 1)
    with pytest.raises(TypeError, match="AllSumReduce works on blocks"):
        nn.AllSumReduce(P, (1,))(split(x, 1, 2, 1, 1))
    with pytest.raises(ValueError, match="a dim for each axis of P_x"):
        nn.DistributedDropout(P)(split(noise(3, 5), 2, 1))


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("make", [
    lambda P: nn.AllSumReduce(P, (0,)), lambda P: nn.Broadcast(P[:1], P), lambda P: nn.Repartition(P, P),
    lambda P: nn.SumReduce(P, P[:1]), lambda P: nn.DistributedDropout(P), lambda P: nn.DistributedL1Loss(P),
])  # fmt: skip
@pytest.mark.parametrize("active", [1, 2, 3])
@on_workers
def test_modules_of_nn_refuse_weights_of_a_distributed_model(active, make, weights):
    layer = make(grid(active, 1))

    def forward(model, x):
        return layer(model.w, model.w) if isinstance(layer, nn.DistributedL1Loss) else layer(model.w * 2)

    model = distdl.distribute(Calling(forward), grid(2, 1), weights)
    with pytest.raises(RuntimeError, match=r"got a weight of a distributed model.*Call it in distdl.local_map"):
        model(split(noise(6, 5), 2, 1))


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
@on_workers
def test_gradients_of_a_mixed_network_are_clipped_as_those_of_the_sequential_one(order, weights):
    """Weights of a distributed model count once, whether the network, its parameters or their gradients are passed."""
    P = grid(1, 1, 2, 1)
    sequential = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.GELU(), torch.nn.Conv2d(4, 2, 1))
    sequential.load_state_dict({name: noise(*one.shape) for name, one in sequential.state_dict().items()})
    sequential.double()(x).square().sum().backward()
    conv = nn.DistributedConv2d(P, in_channels=3, out_channels=4, kernel_size=3, padding=1).double()
    if distdl.world().rank == 0:
        conv.load_state_dict(sequential[0].state_dict())
    mixed = torch.nn.Sequential(conv, torch.nn.GELU(), torch.nn.Conv2d(4, 2, 1).double())
    mixed[2].load_state_dict(sequential[2].state_dict())
    whole = torch.nn.Sequential(*(torch.nn.Conv2d(*sizes) for sizes in ((3, 4, 3, 1, 1), (4, 2, 1)))).double()
    whole.load_state_dict({name.replace("2.", "1."): one for name, one in sequential.state_dict().items()})
    whole.insert(1, torch.nn.GELU())
    expected = torch.nn.utils.get_total_norm([one.grad for one in sequential.parameters()], order)
    for model in (distdl.distribute(mixed, P, weights), distdl.distribute(whole, P, weights)):
        model(split(x, 1, 1, 2, 1)).square().sum().backward()
        gradients = [one.grad for one in model.parameters()]
        for given in (model, gradients):
            assert nn.utils.get_total_norm(given, order).item() == pytest.approx(expected.item(), rel=1e-12)
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.5, order).item() == pytest.approx(expected.item())
        assert nn.utils.get_total_norm(model, order).item() == pytest.approx(0.5, rel=1e-5)
