"""The published names that exist so far, and the small helpers behind them."""

import importlib
import inspect
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from launchers import mpirun, python_path

import distdl
from distdl.backends.mpi.buffer import MPIBufferManager, MPIExpandableBuffer
from distdl.nn import HaloExchange, Repartition
from distdl.utilities.slicing import compute_subshape
from distdl.utilities.torch import distdl_padding_to_torch_padding, zero_volume_tensor

FOLDER = Path(__file__).parent
IMPORTS = {
    "distdl": ["nn", "backends", "utilities"],
    "distdl.backends.mpi.partition": ["MPIPartition", "MPICartesianPartition"],
    "distdl.backends.mpi.buffer": ["MPIExpandableBuffer", "MPIBufferManager"],
    "distdl.utilities.slicing": ["compute_subshape"],
    "distdl.utilities.torch": ["zero_volume_tensor", "distdl_padding_to_torch_padding"],
    "distdl.nn.broadcast": ["Broadcast"],
    "distdl.nn.sum_reduce": ["SumReduce"],
    "distdl.nn.all_sum_reduce": ["AllSumReduce"],
    "distdl.nn.repartition": ["Repartition"],
    "distdl.nn.transpose": ["DistributedTranspose"],
    "distdl.nn.halo_exchange": ["HaloExchange"],
    "distdl.nn.linear": ["DistributedLinear"],
    "distdl.nn.loss": ["DistributedLossBase", "ZeroVolumeCorrectorFunction"],
    "distdl.nn": [
        "Broadcast", "SumReduce", "AllSumReduce", "Repartition", "DistributedTranspose", "HaloExchange", "AllGather",
        "ReduceScatter", "Module", "DistributedLinear", "DistributedCrossEntropyLoss",
        *[f"Distributed{kind}Conv{n}d" for kind in ("", "Feature", "Channel", "General") for n in (1, 2, 3)],
        *[f"Distributed{kind}Pool{n}d" for kind in ("Max", "Avg") for n in (1, 2, 3)],
        *[f"Distributed{kind}Loss" for kind in ("L1", "MSE", "PoissonNLL", "BCE", "BCEWithLogits", "KLDiv")],
        *[f"Distributed{kind}Loss" for kind in ("SmoothL1", "Huber", "NLL")],
    ],
}  # fmt: skip
CONV = (
    "in_channels, out_channels, kernel_size, stride=1, padding=0, padding_mode='zeros', dilation=1, groups=1, bias=True"
)
SIGNATURES = {
    "Broadcast": "P_x, P_y, transpose_src=False, transpose_dest=False, preserve_batch=True",
    "SumReduce": "P_x, P_y, transpose_src=False, transpose_dest=False, preserve_batch=True",
    "AllSumReduce": "P_x, axes_reduce=None, axes_keep=None",
    "Repartition": "P_x, P_y, preserve_batch=True, buffer_manager=None",
    "HaloExchange": "P_x, halo_shape, recv_buffer_shape, send_buffer_shape, buffer_manager=None",
    "AllGather": "P_x, axes",
    "ReduceScatter": "P_x, axes, sizes=None",
    "DistributedLinear": "P_x, P_y, P_w, in_features, out_features, bias=True",
    "DistributedFeatureConv2d": f"P_x, {CONV}, buffer_manager=None",
    "DistributedChannelConv2d": f"P_x, P_y, P_w, {CONV}, buffer_manager=None",
    "DistributedGeneralConv2d": f"P_x, P_y, P_w, {CONV}, buffer_manager=None",
    "DistributedMaxPool2d": "P_x, kernel_size, stride=1, padding=0, dilation=1, buffer_manager=None",
    "DistributedAvgPool2d": "P_x, kernel_size, stride=1, padding=0, dilation=1, buffer_manager=None",
    "DistributedMSELoss": "P_x, reduction='mean'",
    "DistributedSmoothL1Loss": "P_x, reduction='mean', beta=1.0",
    "DistributedHuberLoss": "P_x, reduction='mean', delta=1.0",
    "DistributedNLLLoss": "P_x, weight=None, ignore_index=-100, reduction='mean'",
    "DistributedCrossEntropyLoss": "P_x, weight=None, ignore_index=-100, reduction='mean', label_smoothing=0.0",
}


@pytest.mark.parametrize("module", IMPORTS)
def test_names_can_be_imported(module):
    found = importlib.import_module(module)
    assert [name for name in IMPORTS[module] if not hasattr(found, name)] == []


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    parameters = inspect.signature(getattr(distdl.nn, name)).parameters.values()
    listed = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert ", ".join(listed) == SIGNATURES[name]


def test_transpose_is_repartition():
    assert distdl.nn.DistributedTranspose is Repartition is distdl.nn.transpose.DistributedTranspose


@pytest.mark.timeout(90)
def test_mpi_partitions():
    command = mpirun(4, FOLDER / "mpi_names.py")
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, env=python_path(DISTDL_TIMEOUT="20"))
    assert done.returncode == 0, done.stdout + done.stderr
    checks = [
        line[4:].split("(")[0]
        for line in (FOLDER / "mpi_names.py").read_text().splitlines()
        if line[:10] == "def check_"
    ]
    assert done.stdout.split() == checks and len(checks) >= 7


def test_zero_volume_tensor():
    assert zero_volume_tensor().shape == (0,) and zero_volume_tensor(np.int64(4)).shape == (4, 0)
    assert zero_volume_tensor().dtype == torch.get_default_dtype()
    x = zero_volume_tensor(2, dtype=torch.float64, requires_grad=True, device="cpu")
    assert x.dtype == torch.float64 and x.requires_grad
    zero_volume_tensor().requires_grad = True


def test_compute_subshape():
    assert compute_subshape([2, 3], [1, 0], [5, 7]).tolist() == [2, 3]
    assert compute_subshape(np.array([3]), (1,), [7]).tolist() == [2]
    assert compute_subshape(3, 0, 7) == 3 and isinstance(compute_subshape([1], [0], [4])[0], np.integer)
    with pytest.raises(ValueError, match=r"broadcast|length"):
        compute_subshape([2, 3], [1, 0], [5])
    with pytest.raises(ValueError, match=r"broadcast|length"):
        compute_subshape([2, 3], [1, 0], [5, 6, 7])


def test_padding_order():
    assert distdl_padding_to_torch_padding(np.array([[1, 2], [3, 4]])) == (3, 4, 1, 2)


def test_expandable_buffer():
    buffer = MPIExpandableBuffer(np.float32)
    assert buffer.raw_buffer.shape == (0,) and buffer.raw_buffer.dtype == np.float32
    buffer.expand(5)
    assert buffer.raw_buffer.shape == (5,) and buffer.capacity == 5
    first = buffer.raw_buffer
    assert buffer.get_view((2, 2)).shape == (2, 2) and buffer.raw_buffer is first
    buffer.get_view((2, 2))[:] = 7
    buffer.allocate_view((2, 3, 4))
    assert buffer.raw_buffer.shape == (24,) and buffer.raw_buffer is not first
    assert (buffer.get_view((2, 2)) == 7).all() and set(buffer.views) == {(2, 2), (2, 3, 4)}


def test_buffer_manager():
    manager = MPIBufferManager()
    assert manager.buffers_map == {}
    two = manager.request_buffers(2, np.float32)
    assert manager.request_buffers(3, np.float32)[:2] == two and list(manager.buffers_map) == [np.float32]
    assert len(manager.request_buffers(1, np.float64)) == 1


def test_layers_check_their_buffer_manager():
    P = distdl.world().reshape(1, 1)
    halo = np.zeros((2, 2), dtype=int)
    Repartition(P, P, buffer_manager=MPIBufferManager())
    HaloExchange(P, halo, halo, halo, buffer_manager=MPIBufferManager())
    with pytest.raises(ValueError, match="buffer_manager must be None or have request_buffers; got dict"):
        Repartition(P, P, buffer_manager={})
    with pytest.raises(ValueError, match="buffer_manager"):
        HaloExchange(P, halo, halo, halo, buffer_manager=3)


def test_overlaps_of_a_repartition():
    def main():
        P = distdl.world()
        same = Repartition(P.reshape(2, 1), P.reshape(2, 1))
        assert same.P_x_to_y_overlaps == []
        same(torch.ones(2, 3))
        here = P.rank
        expected = [(None, None, None)] * 2
        expected[here] = ((slice(0, 2), slice(0, 3)), (2, 3), "self")
        assert same.P_x_to_y_overlaps == expected == same.P_y_to_x_overlaps
        turn = Repartition(P.create_partition_inclusive([1, 0]).reshape(2, 1), P.reshape(1, 2))
        turn(torch.ones(2, 4))
        partners = [overlap[2] for overlap in turn.P_x_to_y_overlaps]
        assert partners == ["self" if w == here else {1: 0, 0: 1}[w] for w in (0, 1)]
        shapes = [overlap[1] for overlap in turn.P_x_to_y_overlaps]
        assert shapes == [(2, 2), (2, 2)] == [overlap[1] for overlap in turn.P_y_to_x_overlaps]

    distdl.run_workers(main, 2)
