"""A linear layer by torch's DTensor, right and wrong."""

import tempfile

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import distdl


def sequential(x, w):
    w.requires_grad_()
    y = x @ w
    y.square().mean().backward()
    return {"y": y, "gradient of w": w.grad}


def candidate(x, w, local):
    """With rows of x on each worker. ``local`` declares the sum of gradients on one worker to be that of all."""
    P = distdl.world()
    mesh = init_device_mesh("cpu", (P.size,))
    rows = x.tensor_split(P.size)[P.rank]
    x = DTensor.from_local(rows, mesh, [Shard(0)], shape=x.shape, stride=x.stride())
    w = DTensor.from_local(w, mesh, [Replicate()]).requires_grad_()
    y = x @ w
    (y.to_local().square().sum() / y.numel()).backward()
    gradient = w.grad
    return {"y": y, "gradient of w": gradient.to_local() if local else gradient}


def right(x, w):
    return candidate(x, w, False)


def wrong(x, w):
    return candidate(x, w, True)


def verified():
    P = distdl.world()
    meeting = P.broadcast_data(tempfile.mkdtemp() if P.rank == 0 else None)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}/store", rank=P.rank, world_size=P.size)
    try:
        return _verified()
    finally:
        torch.distributed.destroy_process_group()


def _verified():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((7, 4), (4, 3))]
    found = distdl.verify(sequential, right, inputs)
    try:
        distdl.verify(sequential, wrong, inputs)
    except AssertionError as error:
        return found.compared, found.backend, str(error)
    return None
