"""Torch's own wrappers of models around distributed ones."""

import copy

import torch
from launchers import forked, open_torch_group
from torch import nn

import distdl


def wrapped(model):
    """The model in each of torch's wrappers; or what is raised."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    wrappers = {
        "DDP": nn.parallel.DistributedDataParallel,
        "FSDP": lambda one: FullyShardedDataParallel(one, device_id=torch.device("cpu")),
        "fully_shard": fully_shard,
    }
    for name, wrap in wrappers.items():
        try:
            yield name, wrap(model)
        except Exception as error:
            yield name, f"{type(error).__name__}: {error}"


def all_wrappers():
    P = distdl.world()
    open_torch_group(P)
    torch.manual_seed(0)
    sequential = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(4, 3)
    shares = distdl.distribute(copy.deepcopy(sequential), P.reshape(2, 1), weights="sharded")
    for name, found in wrapped(shares):
        assert str(found).startswith("TypeError: DistributedDataParallel and FSDP need parameters that are"), (
            name,
            found,
        )
    assert torch.allclose(shares(x).full_tensor(), sequential(x))  # (nothing has changed it)
    replicas = distdl.distribute(copy.deepcopy(sequential), P.reshape(2, 1))
    model = nn.parallel.DistributedDataParallel(replicas)
    for one in (model, sequential):
        one(x).square().sum().backward()
    for one, other in zip(replicas.parameters(), sequential.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad)
    # The wrapper goes before its group: its reducer, where it has the last reference, ends the group with the
    # interpreter's lock held, and waits for a thread that needs the lock to let the records of its messages go.
    del model
    P.allgather_data("finished")
    torch.distributed.destroy_process_group()
    return True


def test_wrappers_refuse_shares_and_change_nothing_of_replicas():
    """They average gradients, which are the same on all workers."""
    import torch.distributed.fsdp  # noqa: F401 (once, in front of the fork)

    assert forked(all_wrappers, 2) == [True, True]
