"""What ``distdl doctor`` has the workers of a back-end try: ``python -m distdl.commands.selftest WORKERS``.

Worker 0 prints what was found as one line of JSON behind :data:`MARK`. Launchers may start it, too:
``srun --mpi=pmix -n 2 python -m distdl.commands.selftest 2``.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from typing import Any

import torch

from distdl.commands.usage import is_first
from distdl.globals import distribute, distribute_tensor
from distdl.partition import Partition
from distdl.tracing.clocks import align
from distdl.workers.launch import run_workers
from distdl.workers.worlds import launched, world

MARK = "distdl-selftest "
_TOLERANCE = 1e-12  # of float64, relative
_ROUNDS = 200
_LARGE = 1 << 24  # bytes


def examine() -> dict[str, Any]:
    """Try the world that this worker was launched in: every worker calls it. Numbers are in seconds and bytes.

    Returns: ``workers``; ``device`` of the tensors; ``adjoint``: by how much a distributed convolution and its backward
        fail the dot test; ``exact``: by how much its result and gradients differ from the sequential ones. With two
        workers or more also ``latency`` and ``bandwidth`` of an exchange between two of them, and ``clocks``: how far
        apart the workers' clocks are, and the error of that number.
    Raises: AssertionError, the same on every worker, for wrong numbers.
    """
    P = world()
    device = torch.device("cuda") if launched() == "nccl" else torch.device("cpu")
    found: dict[str, Any] = {"workers": P.size, "device": device.type}
    found["adjoint"], found["exact"] = _convolution(P, device)
    for name in ("adjoint", "exact"):
        if not found[name] <= _TOLERANCE:
            raise AssertionError(f"wrong numbers: {name} is off by {found[name]:.2g}, relative to the largest value")
    if P.size > 1:
        found["latency"] = _exchange(P, device, 8, _ROUNDS)
        found["bandwidth"] = _LARGE / _exchange(P, device, _LARGE, 5)
        apart = P.allgather_data(align(P.comm))
        found["clocks"] = {"apart": max(abs(one) for one, _ in apart), "error": max(error for _, error in apart)}
    return found


def _convolution(P: Partition, device: torch.device) -> tuple[float, float]:
    """The errors of a strided convolution over uneven blocks: of the dot test, and beside the sequential one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 4 * P.size + 3, 5, generator=generator, dtype=torch.float64).to(device).requires_grad_()
    sequential = torch.nn.Conv2d(2, 3, 3, stride=2, padding=1, bias=False)
    weight = torch.randn(sequential.weight.shape, generator=generator, dtype=torch.float64)
    sequential = sequential.double().to(device)
    sequential.weight.data = weight.to(device)
    layer = distribute(copy.deepcopy(sequential), P.reshape(1, 1, P.size, 1))
    expected = sequential(x)
    dy = torch.randn(expected.shape, generator=generator, dtype=torch.float64).to(device)
    expected.backward(dy)
    split: Any = distribute_tensor(x.detach(), P.reshape(1, 1, P.size, 1)).requires_grad_()
    y = layer(split)
    y.backward(distribute_tensor(dy, P.reshape(1, 1, P.size, 1)))
    whole = y.detach().full_tensor()
    pairs: list[tuple[Any, Any]] = [
        (whole, expected.detach()),
        (split.grad.full_tensor(), x.grad),
        (layer.weight.grad, sequential.weight.grad),
    ]
    exact = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
    forward, adjoint = float((whole * dy).sum()), float((x.detach() * pairs[1][0]).sum())
    scale = float(whole.norm() * dy.norm())
    return max(P.allgather_data(abs(forward - adjoint) / scale)), max(P.allgather_data(exact))


def _exchange(P: Partition, device: torch.device, size: int, rounds: int) -> float:
    """Seconds of one exchange of so many bytes each way between workers 0 and 1: the least of three tries."""
    sent = torch.zeros(size // 8, dtype=torch.float64, device=device)
    received, seconds, other = torch.empty_like(sent), [], 1 - P.rank
    for _ in range(4):
        P.allreduce_data(0)
        begun = time.perf_counter()
        for _ in range(rounds if P.rank < 2 else 0):
            P.comm.exchange([(other, sent)], [(other, received)]).wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begun) / rounds)
    return float(max(P.allgather_data(min(seconds[1:]))))


def main() -> None:
    """Start the workers that the command line asks for, unless this is one of them, and print what worker 0 found."""
    found = run_workers(examine, int(sys.argv[1]))[0]
    if is_first():
        print(f"\n{MARK}{json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
