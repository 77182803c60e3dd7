"""Checkpoints: saved in one partition, loaded in another; errors are those of all workers."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from torch import nn

import distdl
from contract.common import on_threads, raises, same_everywhere
from distdl.nn import DistributedLinear


@contextmanager
def _folder(P):
    """A new folder, the same on every worker, which goes when all are done with it."""
    folder = Path(P.broadcast_data(tempfile.mkdtemp() if P.rank == 0 else None))
    yield folder
    P.allgather_data(0)
    if P.rank == 0:
        shutil.rmtree(folder)


def _weights(seed):
    return torch.randn((5, 7), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Affine(nn.Module):
    def __init__(self, P=None):
        super().__init__()
        grid = None if P is None else (P[:1].reshape(1, 1), P.reshape(1, P.size), P.reshape(P.size, 1))
        self.fc = nn.Linear(7, 5).double() if grid is None else DistributedLinear(*grid, 7, 5).double()


def _shared(P, seed):
    model = Affine()
    with torch.no_grad():
        model.fc.weight.copy_(_weights(seed))
        model.fc.bias.copy_(_weights(seed)[:, 0])
    return distdl.distribute(model, P.reshape(P.size, 1), weights="sharded")


def _trained(model, step):
    steps = torch.optim.Adam(model.parameters(), 0.1)
    for name, parameter in sorted(model.named_parameters()):
        parameter.grad = parameter.detach() * (step + len(name))
    steps.step()
    return steps


def check_what_one_partition_has_saved_another_loads():
    P = distdl.world()
    with _folder(P) as folder:
        model = _shared(P, 1)
        steps = _trained(model, 1)
        expected = distdl.export_state(model, steps)
        for wait in (True, False):
            distdl.save(folder, model, steps, step=3, wait=wait)
            distdl.finish_saving()
            for other in (Affine(P), _shared(P, 2)):
                theirs = torch.optim.Adam(other.parameters(), 0.2)
                assert distdl.load(folder, other, theirs) == 3
                state, kept = distdl.export_state(other, theirs)
                assert all(torch.equal(state[name], value) for name, value in expected[0].items())
                for number, values in expected[1]["state"].items():
                    assert all(torch.equal(kept["state"][number][key], value) for key, value in values.items())
                assert kept["param_groups"] == expected[1]["param_groups"]
        state, _ = distdl.export_state(model, on=P.size - 1)
        assert all(torch.equal(value, expected[0][name]) for name, value in state.items())
        assert len(state) == (2 if P.rank == P.size - 1 else 0)


def _save_on_threads(folder):
    model = _shared(distdl.world(), 1)
    steps = _trained(model, 1)
    distdl.save(folder, model, steps, step=5)
    return distdl.export_state(model, steps)


def _load_on_threads(folder):
    model = _shared(distdl.world(), 3)
    steps = torch.optim.Adam(model.parameters(), 0.2)
    assert distdl.load(folder, model, steps) == 6
    return distdl.export_state(model, steps)


def _assert_same(found, expected):
    """Two pairs of state_dicts, of a model and of Adam, to the last bit."""
    (state, steps), (other, others) = found, expected
    assert state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in other)
    assert steps["state"].keys() == others["state"].keys() and len(others["state"]) == 2
    for number, kept in others["state"].items():
        assert kept.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(steps["state"][number][key], value) for key, value in kept.items())
    assert steps["param_groups"][0]["lr"] == others["param_groups"][0]["lr"] == 0.1


def check_what_threads_have_saved_this_backend_loads_and_the_other_way():
    """Three threads save, this world loads, takes a step and saves, two threads load; the optimiser's state, too."""
    P = distdl.world()
    with _folder(P) as folder:
        expected = on_threads(partial(_save_on_threads, folder / "threads"), 3)[0]
        for place, model in enumerate((_shared(P, 2), Affine(P))):
            steps = torch.optim.Adam(model.parameters(), 0.2)
            assert distdl.load(folder / "threads", model, steps) == 5
            _assert_same(distdl.export_state(model, steps), expected)
            for parameter in model.parameters():
                parameter.grad = parameter.detach() * 2
            steps.step()
            distdl.save(folder / str(place), model, steps, step=6)
            mine = distdl.export_state(model, steps)
            assert not torch.equal(mine[0]["fc.weight"], expected[0]["fc.weight"])
            _assert_same(on_threads(partial(_load_on_threads, folder / str(place)), 2)[0], mine)


def check_a_damaged_checkpoint_is_the_same_error_on_all_workers():
    P = distdl.world()
    with _folder(P) as folder:
        distdl.save(folder, _shared(P, 1), step=3)
        if P.rank == 0:
            path = next(folder.glob("data-*/*.safetensors"))
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        P.allgather_data(0)
        model = _shared(P, 2)
        same_everywhere(P, raises(ValueError, lambda: distdl.load(folder, model), "is damaged: the checksum of"))
        assert torch.equal(model.fc.weight.full_tensor(), _weights(2))
        missing = folder / "missing"
        same_everywhere(P, raises(FileNotFoundError, lambda: distdl.load(missing, model), "no complete checkpoint"))
