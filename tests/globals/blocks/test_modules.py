"""Modules of distdl.nn between functions of global tensors."""

import pytest
import torch
from launched import Calling, assert_close, on_workers, split
from same import noise
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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
@on_workers
def test_primitives_take_weights_of_a_distributed_model_in_local_map(weights):
    """Each worker has a part of the gradient of what comes out, so that the adjoint adds them up."""
    everyone = distdl.world()
    sums = nn.AllSumReduce(everyone, (0,))

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            if type(x) is not distdl.GlobalTensor:
                return x * (self.weight.sin() * everyone.size) * self.bias.sum() * everyone.size
            return distdl.local_map(lambda x, w: x * sums(w.sin())[:1] * sums(self.bias * 1).sum())(x, self.weight)

    found = []
    for given in (split(noise(3, 5), 2, 1), noise(3, 5)):
        model = Scaled(5, 1, dtype=torch.float64)
        model.load_state_dict({"weight": noise(1, 5, seed=1), "bias": noise(1)})
        model = distdl.distribute(model, grid(2, 1), weights) if type(given) is distdl.GlobalTensor else model
        given.requires_grad_()
        y = model(given)
        y.square().sum().backward()
        found.append([y, given.grad, *(one.grad for one in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


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


LAYERS = [
    (lambda P: nn.DistributedConv2d(P, in_channels=3, out_channels=3, kernel_size=3, padding=1, bias=False).double(),
     lambda x: F.conv2d(x, noise(3, 3, 3, 3), padding=1)),
    (lambda P: nn.DistributedMaxPool2d(P, kernel_size=3, stride=1, padding=1), lambda x: F.max_pool2d(x, 3, 1, 1)),
    (lambda P: nn.DistributedAvgPool2d(P, kernel_size=3, stride=1, padding=1), lambda x: F.avg_pool2d(x, 3, 1, 1)),
    (lambda P: nn.DistributedGroupNorm(P, 3, 3).double(), lambda x: F.group_norm(x, 3)),
    (lambda P: nn.DistributedAdaptiveMaxPool2d(P, (4, 3)), lambda x: F.adaptive_max_pool2d(x, (4, 3))),
    (lambda P: nn.DistributedDropout(P, 1.0), lambda x: x * 0),
    (lambda P: nn.DistributedDropout(P, 0.0), lambda x: x),
    (lambda P: nn.Repartition(P, P), lambda x: x),
]  # fmt: skip


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize(("make", "function"), LAYERS)
@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("active", [1, 2])
@on_workers
def test_blocks_that_layers_of_a_distributed_model_give_meet_its_weights_in_local_map(
    active, checkpointed, differentiable, make, function, weights
):
    """Each worker has the gradient of its own block, and a part of that of a weight."""
    P = grid(1, 1, active, 1)

    class Scaled(torch.nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.scale = layer, torch.nn.Parameter(noise(3, 1, 1))

        def scaled(self, h):
            h = self.layer(h)
            return h * (self.scale if h.numel() else self.scale[:0].sum()) + h  # (one of the workers is idle)

        def checked(self, h):
            return checkpoint(self.scaled, h, use_reentrant=False) if checkpointed else self.scaled(h)

        def forward(self, x):
            return distdl.local_map(self.checked, out=P)(x) if type(x) is distdl.GlobalTensor else self.checked(x)

    layer = make(P)
    if hasattr(layer, "kernel_size") and hasattr(layer, "weight") and distdl.world().rank == 0:
        layer.load_state_dict({"weight": noise(3, 3, 3, 3)})
    found = []
    for model, given in (
        (distdl.distribute(Scaled(layer), P, weights), split(x, 1, 1, active, 1)),
        (Scaled(function), x),
    ):
        given = (given * 1).detach().requires_grad_(differentiable)
        y = model(given)
        y.square().sum().backward()
        found.append([y, model.scale.grad, *([given.grad] if differentiable else [])])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h, w)
        return h * w

    @staticmethod
    def backward(ctx, dy):
        h, w = ctx.saved_tensors
        return (dy * w).sum_to_size(h.shape), (dy * h).sum_to_size(w.shape)


@torch.library.custom_op("distdl_tests::times", mutates_args=())
def times(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return h * w


times.register_autograd(Times.backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


MIXED = {  # in a forward of a model, of a global tensor of one dim
    "a block and a weight": (lambda m, x, P: x.to_local() * m.w[0], "mul got a block .* beside a weight"),
    "without gradients": (lambda m, x, P: x.detach().to_local() ** 2 * m.w[0], "mul got a block .* beside a weight"),
    "in no_grad": (lambda m, x, P: torch.no_grad()(lambda: x.to_local() * m.w[0])(), "mul got a block .* a weight"),
    "a weight first": (lambda m, x, P: m.w[0] + x.to_local().sum(), "add got a block .* beside a weight"),
    "a global tensor": (lambda m, x, P: x * x.to_local(), "mul got a block .* beside a global tensor"),
    "in front of one": (lambda m, x, P: x.to_local().sum() + x.sum(), "add got a block .* beside a global tensor"),
    "in a list": (lambda m, x, P: torch.cat([x, x.to_local()]), "cat got a block .* beside a global tensor"),
    "a list of weights": (lambda m, x, P: torch.stack([m.w[0], x.to_local().sum()]), "stack got a block .* a weight"),
    "an index": (lambda m, x, P: m.w[x.to_local().long() % 2], "getitem__ got a block .* beside a weight"),
    "written": (lambda m, x, P: m.w.data.add_(x.to_local().sum()), "add_ got a block .* beside a weight"),
    "written there": (lambda m, x, P: x.to_local().mul_(m.w[0]), "mul_ got a block .* beside a weight"),
    "an item": (lambda m, x, P: (x * 1).__setitem__(0, x.to_local().sum()), "setitem__ got a block .* a global tensor"),
    "a dtype": (lambda m, x, P: m.w.to(x.to_local()), "to got a block .* beside a weight"),
    "a torch module": (
        lambda m, x, P: F.linear(x.to_local()[None, :1], m.w[:1, None]),
        "linear got a block .* a weight",
    ),
    "written into a table": (lambda m, x, P: torch.zeros(2).double().add_(x.to_local().sum()) * m.w[0], "mul got a bl"),
    "an autograd function": (lambda m, x, P: Times.apply(x.to_local(), m.w[0]), "function Times got a block"),
    "an operator": (lambda m, x, P: times(x.to_local(), m.w[0]), "got a block .* beside a weight"),
    "of a constant": (lambda m, x, P: Times.apply(noise(1), x.to_local()[:0].sum()) * m.w[0], "mul got a block"),
    "a layer": (lambda m, x, P: nn.DistributedDropout(P, 0.0)(x.to_local()) * m.w[0], "mul got a block .* a weight"),
    "its own data": (lambda m, x, P: nn.Repartition(P, P)(noise(2).requires_grad_()) * m.w[0], "mul got a block"),
    "a loss": (
        lambda m, x, P: nn.DistributedMSELoss(P)(x.to_local(), x.to_local() * 0) * m.w[0].exp(),
        "mul got a block .* beside a weight",
    ),
    "a loss beside a global one": (
        lambda m, x, P: x.sum() + nn.DistributedMSELoss(P)(x.to_local(), x.to_local() * 0),
        "add got a block .* beside a global tensor",
    ),
    "arguments of a loss": (
        lambda m, x, P: nn.DistributedMSELoss(P)(x, x.to_local()),
        "MSELoss got a block .* a global",
    ),
    "weights in a loss": (
        lambda m, x, P: nn.DistributedMSELoss(P)(x.to_local(), m.w),
        "MSELoss got a block .* a weight",
    ),
    "on worker 0": (lambda m, x, P: nn.Repartition(P, P[:1])(x.to_local()).sum() * m.w[0], "mul got a block"),
    "whole on worker 0": (lambda m, x, P: x.full_tensor(on=0).square().sum() * m.w[0], "mul got a block .* a weight"),
    "a sum": (
        lambda m, x, P: nn.AllSumReduce(P, (0,))(x.to_local().sum().reshape(1)) * x,
        "mul got a block .* a global",
    ),
    "a checkpoint": (
        lambda m, x, P: checkpoint(torch.mul, x.to_local(), m.w[0], use_reentrant=False),
        "mul got a block",
    ),
    "re-entry": (
        lambda m, x, P: checkpoint(torch.mul, x.to_local(), m.w[0], use_reentrant=True),
        "Function got a block",
    ),
    "known to re-entry": (
        lambda m, x, P: checkpoint(lambda h: h * m.w[0], x.to_local(), use_reentrant=True),
        "mul got a block",
    ),
}


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("name", MIXED)
@on_workers
def test_blocks_are_refused_beside_weights_and_global_tensors_in_a_forward(name, active, weights):
    """Of a weight each worker has a part of the gradient there, and of a block its own. The error is that of all."""
    use, text = MIXED[name]
    P = grid(active)
    model = distdl.distribute(Calling(lambda m, x: use(m, x, P)), P, weights=weights)
    with pytest.raises(RuntimeError, match=text + ".*distdl.local_map"):
        model(split(noise(6), active).requires_grad_())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        return 2 * ctx.saved_tensors[0] * dy


@pytest.mark.parametrize("follow", [
    lambda s: s, lambda s: s.sin() * 2, lambda s: s * torch.ones(1).double().requires_grad_(), Square.apply,
])  # fmt: skip
@pytest.mark.parametrize("active", [1, 2, 3])
@on_workers
def test_what_primitives_give_is_refused_beside_a_global_tensor(active, follow):
    """Its gradient would be added up over the workers twice. Workers outside raise the same error."""
    total = nn.AllSumReduce(grid(active), (0,))(split(noise(6), 2).requires_grad_().to_local().sum().reshape(1))
    with pytest.raises(RuntimeError, match=r"follows from what Broadcast, AllGather or AllSumReduce gives.*local_map"):
        split(noise(6), 2) * follow(total)


@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("follow", [lambda h: h, lambda h: h * torch.ones(1).double().requires_grad_()])
@pytest.mark.parametrize(("make", "function"), [(lambda P: lambda x: x, lambda x: x), LAYERS[1], LAYERS[-1]])
@on_workers
def test_blocks_beside_a_global_tensor_get_their_own_gradients_in_local_map(make, function, follow, active):
    P, x, found = grid(1, 1, active, 1), noise(2, 3, 6, 5), []

    def forward(model, given):
        if type(given) is not distdl.GlobalTensor:
            return given * function(given)
        times = distdl.local_map(lambda x, h: x * h if x.numel() else x * h.sum())
        return times(given, follow(make(P)(given.to_local())))

    model = distdl.distribute(Calling(forward), P)
    for given, one in (
        (split(x, 1, 1, active, 1).requires_grad_(), model),
        (x.clone().requires_grad_(), Calling(forward)),
    ):
        y = one(given)
        y.square().sum().backward()
        found.append([y, given.grad])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("active", [1, 2, 3])
@pytest.mark.parametrize("follow", [lambda h, w: h, lambda h, w: h * 2, lambda h, w: h * w])
@on_workers
def test_blocks_get_their_own_gradients_in_local_map_in_local_map(follow, active):
    """And a plain tensor that is an argument of both has its gradient added up once."""
    found, times = [], distdl.local_map(lambda z, h, w: z * h * w)
    for given in (split(noise(6, 5), active, 1).requires_grad_(), noise(6, 5).requires_grad_()):
        other, w = noise(6, 5, seed=1).requires_grad_(), noise(5).requires_grad_()
        if type(given) is distdl.GlobalTensor:
            other = split(noise(6, 5, seed=1), active, 1).requires_grad_()
            y = distdl.local_map(lambda h, w, z=other: times(z, follow(h, w), w).to_local())(given, w)
        else:
            y = other * follow(given, w) * w
        y.square().sum().backward()
        found.append((y, given.grad, other.grad, w.grad))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("active", [2, 3])
@pytest.mark.parametrize("call", [
    lambda x, s: Times.apply(x, s), lambda x, s: Times.apply(x, s * s),
    lambda x, s: checkpoint(lambda x, s: x * s, x, s, use_reentrant=True),
])  # fmt: skip
@on_workers
def test_what_primitives_give_is_no_variable_of_functions_of_global_tensors(call, active):
    given = split(noise(6), active).requires_grad_()
    total = nn.AllSumReduce(grid(active), (0,))(given.to_local().sum().reshape(1))
    with pytest.raises(RuntimeError, match="what Broadcast, AllGather or AllSumReduce gives"):
        call(given, total)
    with torch.no_grad():
        assert_close(call(given, total), call(noise(6).requires_grad_(), noise(6).sum().reshape(1)))


@on_workers
def test_blocks_whose_last_step_moves_on_some_workers_only_are_the_same_to_all():
    given, w = split(x, 1, 1, 3, 1).requires_grad_(), noise(1).requires_grad_()
    h = nn.DistributedAdaptiveMaxPool2d(grid(1, 1, 3, 1), (4, 3))(given.to_local())
    (given.square().sum() + h.sum() * w).sum().backward()
    assert w.grad is not None


def test_what_primitives_give_one_worker_alone_is_a_variable():
    def work():
        given, w = noise(6).requires_grad_(), noise(1).requires_grad_()
        total = nn.AllSumReduce(distdl.world(), (0,))(split(given, 1).to_local().sum().reshape(1))
        (split(given, 1) * Square.apply(total * w)).sum().backward()
        assert_close(given.grad, torch.autograd.functional.jacobian(lambda x: x.sum() ** 3 * w**2, noise(6))[0])

    distdl.run_workers(work, 1)


BESIDE = [
    (lambda P, x, w: nn.DistributedMSELoss(P)(x, x.detach() * 0), lambda x, w: x.square().mean()),
    (lambda P, x, w: nn.DistributedL1Loss(P, "sum")(x, x.detach() * 0) * w.sin(), lambda x, w: x.abs().sum() * w.sin()),
    (lambda P, x, w: nn.Repartition(P, P[:1])(x).square().sum() * w.sin(), lambda x, w: x.square().sum() * w.sin()),
]  # fmt: skip


@pytest.mark.parametrize("active", [1, 2])
@pytest.mark.parametrize(("ours", "theirs"), BESIDE)
@on_workers
def test_what_losses_and_sums_of_blocks_give_stands_beside_a_global_loss(ours, theirs, active):
    """Workers outside, of which there is one at least, take the same part in its gradient."""
    P, found = grid(active, 1), []
    for given in (split(noise(6, 5), active, 1).requires_grad_(), noise(6, 5).requires_grad_()):
        w = noise(1)[0].requires_grad_()
        beside = ours(P, given.to_local(), w) if type(given) is distdl.GlobalTensor else theirs(given, w)
        y = given.square().sum() + beside
        y.backward()
        found.append([y, given.grad, torch.zeros_like(w) if w.grad is None else w.grad])
    found[0][-1] = distdl.world().allreduce_data(found[0][-1])  # (each worker has a part, as of what meets blocks)
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize("call", [lambda layer, x: layer(x).to_local(), lambda layer, x: layer(x.to_local())])
@pytest.mark.parametrize(("make", "function"), LAYERS)
@on_workers
def test_a_block_that_a_layer_gives_one_of_several_workers_stands_beside_a_global_loss(make, function, call):
    layer, found = make(grid(1, 1, 1, 1)), []
    if hasattr(layer, "kernel_size") and hasattr(layer, "weight") and distdl.world().rank == 0:
        layer.load_state_dict({"weight": noise(3, 3, 3, 3)})
    for given in (split(x, 1, 1, 1, 1).requires_grad_(), x.clone().requires_grad_()):
        h = call(layer, given) if type(given) is distdl.GlobalTensor else function(given)
        y = given.square().sum() + h.square().sum()
        y.backward()
        found.append([y, given.grad])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("function", [
    lambda x: x, lambda x: x * 2, lambda x: F.conv2d(x, noise(3, 3, 3, 3), padding=1), lambda x: F.max_pool2d(x, 2),
    lambda x: x.softmax(2), lambda x: torch.cat([x, x], 2), lambda x: x.transpose(2, 3) @ x,
])  # fmt: skip
@pytest.mark.parametrize("active", [2, 3])
@on_workers
def test_losses_of_blocks_count_beside_a_global_loss_however_these_were_moved(active, function):
    found = []
    for given in (split(x, 1, 1, active, 1).requires_grad_(), x.clone().requires_grad_()):
        y = function(given)
        h = y.to_local() if type(y) is distdl.GlobalTensor else y
        (given.square().sum() + h.sin().sum()).backward()
        found.append(given.grad)
    assert_close(*found)


@pytest.mark.parametrize(
    ("make", "function"),
    [
        (lambda P: nn.DistributedMaxPool2d(P, 3, stride=1, padding=1), lambda x: F.max_pool2d(x, 3, 1, 1)),
        (
            lambda P: nn.DistributedUpsample(P, scale_factor=2, mode="nearest"),
            lambda x: F.interpolate(x, scale_factor=2),
        ),
        (lambda P: nn.Repartition(P, P), lambda x: x),
    ],
)
@pytest.mark.parametrize("active", [1, 2, 3])
@on_workers
def test_losses_of_blocks_that_layers_give_count_beside_a_global_loss(active, make, function):
    found, layer = [], make(grid(1, 1, active, 1))
    for given in (split(x, 1, 1, active, 1).requires_grad_(), x.clone().requires_grad_()):
        h = layer(given.to_local()) if type(given) is distdl.GlobalTensor else function(given)
        (given.square().sum() + h.sin().sum()).backward()
        found.append(given.grad)
    assert_close(*found)


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
