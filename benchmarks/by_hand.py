"""A U-Net over blocks of rows written by hand: torch's operators, mpi4py's messages, and a Function around each pair.

What somebody writes who knows the network, its sizes and MPI, and wants this one program to be fast. All workers have
equally many rows, and in the steps of a network all is even, so nothing is checked or agreed. To be beside `global`,
which runs the network of torch as it is.

    mpirun -n 2 python benchmarks/by_hand.py    # by how much it differs from the sequential network after three steps
"""

import sys

import networks
import torch
from floors import MPITransport
from networks import Plain, UNet
from torch import nn

_backward = torch.ops.aten.convolution_backward.default
_backward_of_norm = torch.ops.aten.native_batch_norm_backward.default


class ByHand(Plain):
    """Layers in two dims for blocks of rows, of an `MPITransport`."""

    def __init__(self, transport):
        super().__init__(2)
        self.transport = transport

    def conv(self, inputs, outputs, kernel=3, stride=1, bias=True):
        if kernel == 1:
            return nn.Conv2d(inputs, outputs, 1)
        return _Conv(self.transport, inputs, outputs)

    def norm(self, channels):
        return _Norm(self.transport, channels)


class _Conv(nn.Conv2d):
    def __init__(self, transport, inputs, outputs):
        super().__init__(inputs, outputs, 3, padding=1)
        self.neighbours = _Neighbours(transport)

    def forward(self, x):
        return _Convolution.apply(x, self.weight, self.bias, self.neighbours)


class _Norm(nn.BatchNorm2d):
    def __init__(self, transport, channels):
        super().__init__(channels)
        self.transport = transport

    def forward(self, x):
        self.num_batches_tracked.add_(1)
        return _Normalisation.apply(x, self.weight, self.bias, self.running_mean, self.running_var, self.transport)


class _Neighbours:
    """The workers above and below, and the row that each of them gets."""

    def __init__(self, transport):
        self.comm, rank, size = transport.comm, transport.rank, transport.comm.size
        self.outer = [one for one, there in ((0, rank > 0), (-1, rank < size - 1)) if there]
        self.border = [one for one in (0, -1) if one not in self.outer]

    def begin(self, x):
        """Send them the outer rows of x; what comes in their place, and what to wait for."""
        rows, requests = [], []
        for one in self.outer:
            edge = x[:, :, one].contiguous()
            got, other = torch.empty_like(edge), self.comm.rank + (1 if one else -1)
            requests += [self.comm.Irecv(got.numpy(), other), self.comm.Isend(edge.numpy(), other)]
            rows.append(got)
        return rows, requests


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, neighbours):
        rows, requests = neighbours.begin(x)
        samples, channels, height, width = x.shape
        window = x.new_empty(samples, channels, height + 2, width)
        window[:, :, 1:-1].copy_(x)
        for one in neighbours.border:
            window[:, :, one].zero_()
        for request in requests:
            request.Wait()
        for one, row in zip(neighbours.outer, rows, strict=True):
            window[:, :, one].copy_(row)
        ctx.save_for_backward(window, weight)
        ctx.neighbours = neighbours
        return torch.conv2d(window, weight, bias, 1, (0, 1))

    @staticmethod
    def backward(ctx, dy):
        window, weight = ctx.saved_tensors
        mask = [ctx.needs_input_grad[0], True, True]
        dx, dweight, dbias = _backward(
            dy, window, weight, [weight.shape[0]], [1, 1], [0, 1], [1, 1], False, [0, 0], 1, mask
        )
        if dx is not None:
            rows, requests = ctx.neighbours.begin(dx)
            dx = dx[:, :, 1:-1].contiguous()
            for request in requests:
                request.Wait()
            for one, row in zip(ctx.neighbours.outer, rows, strict=True):
                dx[:, :, one].add_(row)
        return dx, dweight, dbias, None


class _Normalisation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, running_mean, running_var, transport):
        # (a twentieth of the time of torch.var_mean, but a variance that is small beside the mean loses digits)
        moments = x.new_empty(2, x.shape[1])
        torch.sum(x, (0, 2, 3), out=moments[0])
        torch.linalg.vector_norm(x, 2, (0, 2, 3), out=moments[1])
        moments[1].square_()
        transport.all_reduce(moments)
        ctx.cells, ctx.transport = x.numel() // x.shape[1] * transport.comm.size, transport
        mean, var = moments.div_(ctx.cells).unbind()
        var.addcmul_(mean, mean, value=-1)
        running_mean.lerp_(mean, 0.1)
        running_var.mul_(0.9).add_(var, alpha=0.1 * ctx.cells / (ctx.cells - 1))
        ctx.save_for_backward(x, weight, mean, var)
        return torch.batch_norm(x, weight, bias, mean, var, False, 0.1, 1e-5, False)

    @staticmethod
    def backward(ctx, dy):
        x, weight, mean, var = ctx.saved_tensors
        dx, dweight, dbias = _backward_of_norm(dy, x, weight, mean, var, mean, var, False, 1e-5, [True, True, True])
        sums = torch.stack((dweight, dbias))
        ctx.transport.all_reduce(sums)
        scale = (var + 1e-5).rsqrt_()
        by_x = sums[0].mul_(scale).mul_(scale).mul_(weight).div_(-ctx.cells)
        shift = sums[1].mul_(scale).mul_(weight).div_(ctx.cells).addcmul_(by_x, mean)
        dx.addcmul_(x, by_x.view(1, -1, 1, 1)).sub_(shift.view(1, -1, 1, 1))
        return dx, dweight, dbias, None, None, None


def training(network, criterion, x, target, transport):
    """A step, in which all gradients of weights are summed in one message."""
    optimiser = torch.optim.SGD(network.parameters(), lr=0.01)
    parameters = list(network.parameters())
    sizes, flat = [one.numel() for one in parameters], torch.cat([one.detach().view(-1) for one in parameters])

    def step():
        optimiser.zero_grad()
        (criterion(network(x), target) / transport.comm.size).backward()
        torch.cat([one.grad.view(-1) for one in parameters], out=flat)
        transport.all_reduce(flat)
        for one, grad in zip(parameters, flat.split(sizes), strict=True):
            one.grad = grad.view_as(one)
        optimiser.step()

    return step


def check(transport):
    """The largest difference of the state, in float64, from that of the sequential network, which sees all rows."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    rank, size = transport.rank, transport.comm.size
    x, truth = torch.randn(2, 1, 12 * size, 16), torch.randn(2, 2, 12 * size, 16)
    alone, split = UNet(Plain(2), 8), UNet(ByHand(transport), 8)
    split.load_state_dict(alone.state_dict())
    part, own = (one.chunk(size, 2)[rank].clone() for one in (x, truth))
    steps = (
        networks.training(alone, nn.functional.mse_loss, x, truth),
        training(split, nn.functional.mse_loss, part, own, transport),
    )
    for _ in range(3):
        for step in steps:
            step()
    pairs = zip(alone.state_dict().values(), split.state_dict().values(), strict=True)
    return max(transport.gather(max((a - b).abs().max().item() for a, b in pairs)))


if __name__ == "__main__":
    transport = MPITransport()
    apart = check(transport)
    if transport.rank == 0:
        print(f"{transport.comm.size} workers: largest difference {apart:.1e}")
    sys.exit(apart > 1e-9)
