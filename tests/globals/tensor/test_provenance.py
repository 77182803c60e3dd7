"""Plain tensors that come from blocks: what tells so of them, beside weights and global tensors."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import nn

x = noise(4, 3, 7, 5)


def grid(*extents):
    P = distdl.world().create_partition_inclusive(range(torch.Size(extents).numel()))
    return P.create_cartesian_topology_partition(extents)


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


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, w):
        ctx.save_for_backward(h, w)
        return h * w

    @staticmethod
    def backward(ctx, dy):
        h, w = ctx.saved_tensors
        return (dy * w).sum_to_size(h.shape), (dy * h).sum_to_size(w.shape)


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
