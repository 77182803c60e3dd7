"""What needs a GPU: workers as threads on one device, and tensors of a device over transports that move host memory."""

import numpy as np
import pytest
import torch
from cases import MAKERS
from launchers import FOLDER, ended, mpirun

import distdl
from distdl.nn import AllSumReduce, Broadcast, DistributedConv2d, Repartition, SumReduce
from distdl.utilities.torch import zero_volume_tensor

pytestmark = pytest.mark.cuda


def on_device():
    """Every primitive on CUDA tensors gives what it gives on CPU tensors, forward and backward."""
    P = distdl.world()
    for name, make in MAKERS.items():
        for seed in range(4):
            case = make(P, np.random.default_rng(seed))
            results = []
            for device in ("cpu", "cuda"):
                x = case.xs[P.rank].to(device).requires_grad_()
                y = case.layer(x)
                (y * y).sum().backward()
                assert y.device.type == device == x.grad.device.type
                results.append((y.detach().cpu(), x.grad.cpu()))
            assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name
    return True


def test_threads_on_one_device():
    assert distdl.run_workers(on_device, 4) == [True] * 4


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


if __name__ == "__main__":
    on_device()
