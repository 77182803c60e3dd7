"""Memory of activations goes when they go: no function of global tensors is part of a reference cycle."""

import ast
import gc
import pathlib

import pytest
import torch
from same import noise
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import distdl
import distdl.globals


def inside(function):
    """The functions inside a function that call themselves: each holds, in a cycle, all that it can see."""
    for one in ast.walk(function):
        if isinstance(one, ast.FunctionDef) and one is not function:
            names = {name.id for statement in one.body for name in ast.walk(statement) if isinstance(name, ast.Name)}
            if one.name in names:
                yield one.name


@pytest.mark.parametrize(
    "file", sorted(pathlib.Path(distdl.globals.__file__).parent.rglob("*.py")), ids=lambda p: p.stem
)
def test_no_inner_function_calls_itself(file):
    functions = [one for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.FunctionDef)]
    assert [(one.name, name) for one in functions for name in inside(one)] == []


def _run_uncollected(work):
    """Run it on three workers, while Python's collector of cycles is off."""
    gc.collect()
    gc.disable()
    try:
        distdl.run_workers(work, 3)
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "function",
    [
        nn.Conv1d(6, 6, 3, padding=1), nn.ConvTranspose1d(6, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.Linear(7, 7),
        nn.BatchNorm1d(6), nn.Softmax(1), nn.MaxPool1d(3, 1, 1), lambda x: x.flatten(1).mean(1, keepdim=True) * 2,
        lambda x: torch.cat([x[:, :3], x[:, 3:] + 1], 1).permute(0, 2, 1), nn.Upsample(scale_factor=2),
        lambda x: nn.functional.mse_loss(x, x.exp()), lambda x: (x @ x.transpose(1, 2)).sum(), torch.linalg.pinv,
    ],
    ids=lambda one: getattr(one, "__name__", type(one).__name__),
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:linalg_pinv has no op")
def test_an_activation_goes_with_its_last_name(function):
    if isinstance(function, nn.Module):
        function = function.double()

    def work():
        P = distdl.world().create_partition_inclusive(range(2)).create_cartesian_topology_partition((1, 2, 1))
        for repeat in range(2):  # (what the first imports and sets up may leave cycles, once)
            x = distdl.distribute_tensor(noise(2, 6, 7), P).requires_grad_()
            y = x * 2
            activation = StorageWeakRef(y.to_local().untyped_storage())
            z = function(y)
            del y
            (z * z).sum().backward()
            del z
            assert not repeat or activation.expired() or not x.to_local().numel()

    _run_uncollected(work)


REFUSED = {
    "of two": lambda x, plain: x ^ plain, "of itself": lambda x, plain: x.bitwise_and_(x),
    "of shapes": lambda x, plain: x + plain[:, :5], "an index": lambda x, plain: x[plain.long() + 9],
    "a fallback": lambda x, plain: torch.linalg.qr(x.long()), "a write": lambda x, plain: plain.t().add_(x),
}  # fmt: skip


@pytest.mark.parametrize("function", REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:linalg_qr has no op")
def test_what_an_error_refers_to_goes_with_it(function):
    """A plain tensor becomes global if nobody else has it, on every worker alike, whatever has been refused before."""

    def work():
        x = distdl.distribute_tensor(noise(6, 7), distdl.world()[:2].reshape(1, 2))
        plain = noise(6, 7)
        with pytest.raises(Exception, match=r"."):
            function(x, plain)
        assert torch._C._storage_Use_Count(plain.untyped_storage()._cdata) == 2  # (the tensor's, and ours)

    _run_uncollected(work)
