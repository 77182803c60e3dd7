"""What needs a GPU: workers as threads on one device, tensors of a device over transports that move host memory, and
NCCL between two processes that share the device."""

import copy
import subprocess
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from cases import MAKERS
from launchers import FOLDER, ended, mpirun, python_path
from torch import nn
from torch.nn import functional

import distdl
from distdl.nn import (
    AllSumReduce,
    Broadcast,
    DistributedBatchNorm,
    DistributedConv2d,
    DistributedMaxPool2d,
    Repartition,
    SumReduce,
)
from distdl.testing import assert_adjoint
from distdl.utilities.torch import zero_volume_tensor

pytestmark = pytest.mark.cuda
HALVES = [(2, 1, 1, 1), (1, 1, 2, 1)]


def on_device():
    """Every primitive on CUDA tensors gives what it gives on CPU tensors, forward and backward."""
    P = distdl.world()
    for name, make in MAKERS.items():
        for seed in range(4):
            case = make(P, np.random.default_rng(seed))
            results = []
            for device in ("cpu", "cuda"):
                x = case.xs[P.rank].detach().to(device).requires_grad_()
                y = case.layer(x)
                (y * y).sum().backward()
                assert y.device.type == device == x.grad.device.type
                results.append((y.detach().cpu(), x.grad.cpu()))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name
    return True


def test_threads_on_one_device():
    assert distdl.run_workers(on_device, 4) == [True] * 4


def test_transforms_on_threads():
    def main():
        P = distdl.world().reshape(2, 1)
        x = torch.arange(12.0, dtype=torch.float64, device="cuda").reshape(4, 3) / 10

        def f(x):
            return (x.cumsum(0).sin() * x).sum()

        for transform in (torch.func.grad, torch.func.hessian):
            for mode in (nullcontext, torch.inference_mode):
                with mode():
                    found = transform(f)(distdl.distribute_tensor(x.clone(), P)).full_tensor()
                assert torch.allclose(found, transform(f)(x)), (transform, mode)
        return True

    assert distdl.run_workers(main, 2) == [True, True]


@pytest.mark.timeout(120)
def test_gloo_stages_through_host_memory():
    assert distdl.run_workers(on_device, 2, "gloo") == [True] * 2


@pytest.mark.timeout(120)
def test_mpi_stages_through_host_memory():
    command = mpirun(2, FOLDER / "test_cuda.py")
    done = ended(command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_backward_of_cuda_tensors_runs_on_the_workers_own_thread():
    import threading

    def main():
        seen = []
        x = torch.ones(2, requires_grad=True, device="cuda")
        y = AllSumReduce(distdl.world().reshape(2), [0])(x)
        y.register_hook(lambda grad: seen.append(threading.current_thread().name))
        y.sum().backward()
        return seen == [f"worker {distdl.world().rank}"]

    assert distdl.run_workers(main, 2) == [True, True]


def test_streams_of_the_workers_wait_for_each_other():
    def main():
        P = distdl.world()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            x = torch.zeros(1 << 22, device="cuda")
            for _ in range(50):
                x += P.rank + 1
            y = SumReduce(P, P[:1])(Broadcast(P[:1], P)(x if P.rank == 0 else zero_volume_tensor(device="cuda")))
            x.fill_(-1.0)  # the senders may write again as soon as the call has returned
        stream.synchronize()
        return P.rank != 0 or bool((y == 50 * 4).all())

    assert distdl.run_workers(main, 4) == [True] * 4


def test_layers_on_a_device_with_zero_volume_inputs_of_the_host():
    def main():
        P = distdl.world()
        grid = P.reshape(1, 1, 2, 2)
        conv = DistributedConv2d(grid, in_channels=1, out_channels=2, kernel_size=3, padding=1).cuda()
        x = torch.ones(2, 1, 8, 8, device="cuda") if P.rank == 0 else zero_volume_tensor(2, device="cuda")
        y = conv(Repartition(P[:1].reshape(1, 1, 1, 1), grid)(x))
        y.sum().backward()
        return y.device.type == "cuda" and conv.weight.grad.device.type == "cuda"

    assert distdl.run_workers(main, 4) == [True] * 4


class Net(nn.Module):
    """What a step on a device goes through: halos, moments, windows, tables of indices."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.BatchNorm2d(4), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
        self.up, self.last = nn.ConvTranspose2d(8, 4, 2, 2), nn.Conv2d(8, 3, 1)
        self.norm = nn.LayerNorm(3)

    def forward(self, x):
        x = self.first(x)
        y = self.last(torch.cat([self.up(self.down(x)), x], 1))
        y = functional.adaptive_avg_pool2d(y, 5) + y.std((2, 3), keepdim=True)
        return self.norm(y.movedim(1, -1)).movedim(-1, 1)


def network():
    """The network, with the same weights on every worker. (torch's generator is one for all threads.)"""
    generator = torch.Generator().manual_seed(0)
    made = Net().double()
    with torch.no_grad():
        for parameter in made.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
            parameter.copy_(values * 0.3)
    return made.cuda()


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 2, 12, 14, generator=generator, dtype=torch.float64, device="cpu")
    return x.cuda(), torch.randint(0, 3, (4, 5, 5), generator=generator, device="cpu").cuda()


def stepping(model, x, labels):
    """A function that takes a step of training."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step():
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return step


def distributed(made, grid, weights):
    """A distributed copy of a network, and the batch, which worker 0 has."""
    P = distdl.world()
    Q = P[: int(torch.Size(grid).numel())].reshape(*grid)
    x, labels = (one if P.rank == 0 else None for one in batch())
    model = distdl.distribute(copy.deepcopy(made), Q, weights=weights, fallback="error")
    return model, distdl.distribute_tensor(x, Q), distdl.distribute_tensor(labels, Q, axes=(0, 2, 3))


def trains(grids=((4, 1, 1, 1), (1, 1, 2, 2), (1, 1, 3, 1))):
    """Three steps of training on a device give the weights and statistics that they give sequentially."""
    made = network()
    alone = copy.deepcopy(made)
    step = stepping(alone, *batch())
    losses = [step().item() for _ in range(3)]
    for grid in grids:
        for weights in ("replicated", "sharded"):
            model, x, labels = distributed(made, grid, weights)
            assert x.to_local().device.type == labels.to_local().device.type == "cuda"
            step = stepping(model, x, labels)
            assert [step().item() for _ in range(3)] == pytest.approx(losses, abs=1e-12)
            for (name, ours), theirs in zip(model.state_dict().items(), alone.state_dict().values(), strict=True):
                assert ours.is_cuda and torch.allclose(ours, theirs, rtol=0, atol=1e-10), name
    return True


def test_models_train_on_threads():
    assert distdl.run_workers(trains, 4) == [True] * 4


@pytest.mark.timeout(120)
def test_models_train_over_gloo():
    assert distdl.run_workers(partial(trains, HALVES), 2, "gloo") == [True] * 2


def trains_by_default():
    """The same where a program makes its tensors on the device, unless it says otherwise."""
    torch.set_default_device("cuda")
    try:
        return trains(HALVES)
    finally:
        torch.set_default_device(None)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_models_train_where_the_device_is_the_default(backend):
    assert distdl.run_workers(trains_by_default, 2, backend) == [True] * 2


def test_index_tensors_of_the_host():
    """As torch does, global tensors of a device take index tensors of the host, beside those of the device, too."""
    x, i, j = torch.randn(5, 7, dtype=torch.float64), torch.tensor([1, -2, 0, 4]), torch.tensor([3, 0, 6, -1])

    def main():
        P = distdl.world()
        whole = x.cuda()
        for grid in ((2, 1), (1, 2)):
            for first in (i, i.cuda()):
                for second in (j, j.cuda()):
                    for table in (whole, distdl.distribute_tensor(whole, P.reshape(*grid))):
                        for split in (first, distdl.distribute_tensor(first, P)):
                            found = table[split, second]
                            found = found.full_tensor() if type(found) is distdl.GlobalTensor else found
                            assert found.is_cuda and torch.equal(found.cpu(), x[i, j])
        return True

    assert distdl.run_workers(main, 2) == [True, True]


def capture(step, parameters):
    """A step goes into a CUDA graph, whose replay computes the gradients that it computes itself."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = None
            step()
    torch.cuda.synchronize()
    expected = [parameter.grad.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    graph.replay()
    torch.cuda.synchronize()
    for parameter, gradient in zip(parameters, expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-12)
    return graph


def captured():
    """Steps of a distributed model, and of modules whose shapes are fixed, as CUDA graphs."""
    made = network()
    P = distdl.world()
    for weights in ("replicated", "sharded"):
        model, x, labels = distributed(made, (1, 1, P.size, 1), weights)
        capture(lambda: functional.cross_entropy(model(x), labels).backward(), list(model.parameters()))  # noqa: B023
    Q = P.reshape(1, 1, P.size, 1)
    convolution = DistributedConv2d(Q, in_channels=2, out_channels=3, kernel_size=3, padding=1, bias=False)
    modules = nn.Sequential(convolution, DistributedBatchNorm(Q, 3), DistributedMaxPool2d(Q, kernel_size=2))
    modules = modules.double().cuda()
    block = torch.arange(4.0 * 2 * 6 * 10, dtype=torch.float64, device="cuda").reshape(4, 2, 6, 10).cos()
    with distdl.fixed_shapes():
        capture(lambda: modules(block).square().sum().backward(), [p for p in modules.parameters() if p.numel()])
    return True


def test_a_step_of_one_worker_goes_into_a_graph():
    assert distdl.run_workers(captured, 1) == [True]


@pytest.mark.timeout(180)
def test_nccl_between_two_processes():
    """NCCL refuses two processes of one host that share a GPU; these say that they are on two."""
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29541", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    job = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "DISTDL_BACKEND": "nccl"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / "test_cuda.py"), "nccl"],
            env=python_path(**here, **job, RANK=str(rank), NCCL_HOSTID=f"host {rank}"),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        printed = [process.communicate(timeout=150)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(printed)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_waits_for_the_device():
    made = network()

    def main():
        P = distdl.world()
        for weights in ("replicated", "sharded"):
            step = stepping(*distributed(made, (1, 1, 2, 2), weights))
            for _ in range(4):
                step()
            for mode in ("error", "default"):
                P.allgather_data(torch.zeros(1))  # (no worker is in another step when the mode of all changes)
                torch.cuda.set_sync_debug_mode(mode)
                P.allgather_data(torch.zeros(1))
                step()

    try:
        distdl.run_workers(main, 4)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_is_out_of_range_is_an_error_and_the_device_goes_on():
    def main():
        Q = distdl.world().reshape(2, 1)
        table, x = torch.zeros(5, 3, device="cuda"), torch.arange(8.0, device="cuda").reshape(4, 2)
        wrong = distdl.distribute_tensor(torch.tensor([[0, 1], [2, 9]], device="cuda"), Q)
        y = distdl.distribute_tensor(x, Q)
        for call in (
            lambda: functional.embedding(wrong, table),
            lambda: y[torch.tensor([0, 7], device="cuda")],
            lambda: y.gather(1, wrong),
            lambda: functional.cross_entropy(y, torch.tensor([0, 1, 0, 3], device="cuda")),
        ):
            with pytest.raises((IndexError, RuntimeError), match=r"out of (bounds|range)"):
                call()
        return bool((y.full_tensor() == x).all())

    assert distdl.run_workers(main, 2) == [True, True]


@pytest.mark.filterwarnings("ignore:RNN module weights are not part")
def test_recurrent_layers_on_a_device():
    """Their states of a share of the samples lie apart in memory, which cuDNN does not take."""
    torch.manual_seed(0)
    layer, cell = nn.LSTM(3, 4, 2, bidirectional=True).double().cuda(), nn.GRUCell(3, 4).double().cuda()
    x, h = (torch.randn(*shape, dtype=torch.float64, device="cuda") for shape in ((6, 5, 3), (5, 4)))

    def run(layer, cell, x, h):
        y, (last, _) = layer(x)
        z = cell(x[2], h)
        (y.square().sum() + last.sum() + z.square().sum()).backward()
        return [y, z, *(p.grad.clone() for p in (*layer.parameters(), *cell.parameters()))]

    expected = run(copy.deepcopy(layer), copy.deepcopy(cell), x, h)

    def main():
        P = distdl.world().reshape(1, 2, 1)
        models = (distdl.distribute(copy.deepcopy(one), P, fallback="error") for one in (layer, cell))
        y, z, *gradients = run(*models, distdl.distribute_tensor(x, P), h)
        return all(
            torch.allclose(ours, theirs, rtol=0, atol=1e-12)
            for ours, theirs in zip([y.full_tensor(), z.full_tensor(), *gradients], expected, strict=True)
        )

    assert distdl.run_workers(main, 2) == [True, True]


def test_padded_averages_in_channels_last():
    """Of which the gradient by torch's own kernel was wrong."""
    x = torch.arange(2.0 * 3 * 9 * 8, dtype=torch.float64).reshape(2, 3, 9, 8).sin().requires_grad_()
    expected = functional.avg_pool2d(x, 3, 2, 1)
    expected.square().sum().backward()

    def main():
        P = distdl.world().reshape(1, 1, 2, 1)
        whole = x.detach().cuda().contiguous(memory_format=torch.channels_last)
        ours = distdl.distribute_tensor(whole, P).requires_grad_()
        y = functional.avg_pool2d(ours, 3, 2, 1)
        y.square().sum().backward()
        right = torch.allclose(ours.grad.full_tensor().cpu(), x.grad, rtol=0, atol=1e-12)
        return right and torch.allclose(y.full_tensor().cpu(), expected, rtol=0, atol=1e-12)

    assert distdl.run_workers(main, 2) == [True, True]


def test_adjoints_are_checked_on_the_device():
    def main():
        P = distdl.world().reshape(1, 1, 2, 1)
        layer = (
            DistributedConv2d(P, in_channels=1, out_channels=2, kernel_size=3, padding=1, bias=False).double().cuda()
        )
        assert_adjoint(layer, torch.ones(1, 1, 4, 5, dtype=torch.float64, device="cuda"))

    distdl.run_workers(main, 2)


if __name__ == "__main__":
    on_device()
    if sys.argv[1:] == ["nccl"]:
        captured()  # (first: nothing of another step is on the device yet)
        trains(HALVES)
        model, x, labels = distributed(network(), HALVES[1], "replicated")
        weights = list(model.parameters())
        still_there = capture(lambda: functional.cross_entropy(model(x), labels).backward(), weights)  # (at the end)
