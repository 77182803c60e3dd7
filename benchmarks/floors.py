"""The floor: a transport's own collectives, called directly, under an autograd Function that does nothing else.

Each step makes the output allocations and the copies that out-of-place semantics require, and no more. It is the least
that a primitive on top of the transport costs as long as its outputs are fresh memory.
"""

import torch


class MPITransport:
    """mpi4py, blocking."""

    def __init__(self):
        from mpi4py import MPI

        self.MPI = MPI
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank = self.comm.rank

    def barrier(self):
        self.comm.Barrier()

    def gather(self, value):
        return self.comm.allgather(value)

    def broadcast(self, tensor):
        self.comm.Bcast(tensor.numpy(), 0)

    def reduce(self, tensor):
        """Sum onto worker 0, into its tensor."""
        if self.rank == 0:
            self.comm.Reduce(self.MPI.IN_PLACE, tensor.numpy(), self.MPI.SUM, 0)
        else:
            self.comm.Reduce(tensor.numpy(), None, self.MPI.SUM, 0)

    def all_reduce(self, tensor):
        self.comm.Allreduce(self.MPI.IN_PLACE, tensor.numpy(), self.MPI.SUM)

    def all_to_all(self, received, sent):
        self.comm.Alltoall(sent.numpy(), received.numpy())

    def all_gather(self, gathered, tensor):
        self.comm.Allgather(tensor.numpy(), gathered.numpy())

    def reduce_scatter(self, kept, tensor):
        self.comm.Reduce_scatter_block(tensor.numpy(), kept.numpy(), self.MPI.SUM)

    def swap(self, received, sent):
        self.comm.Sendrecv(sent.numpy(), 1 - self.rank, 0, received.numpy(), 1 - self.rank, 0)


class GlooTransport:
    """torch.distributed over gloo."""

    def __init__(self):
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.dist = dist
        self.rank = dist.get_rank()

    def barrier(self):
        self.dist.barrier()

    def gather(self, value):
        values = [None] * self.dist.get_world_size()
        self.dist.all_gather_object(values, value)
        return values

    def broadcast(self, tensor):
        self.dist.broadcast(tensor, 0)

    def reduce(self, tensor):
        # gloo leaves partial sums in the other members' tensors, so those have to give a copy
        self.dist.reduce(tensor if self.rank == 0 else tensor.clone(), 0)

    def all_reduce(self, tensor):
        self.dist.all_reduce(tensor)

    def all_to_all(self, received, sent):
        self.dist.all_to_all_single(received, sent)

    def all_gather(self, gathered, tensor):
        self.dist.all_gather_into_tensor(gathered, tensor)

    def reduce_scatter(self, kept, tensor):
        self.dist.reduce_scatter_tensor(kept, tensor)

    def swap(self, received, sent):
        works = [self.dist.irecv(received, 1 - self.rank), self.dist.isend(sent, 1 - self.rank)]
        for work in works:
            work.wait()


def transport_of(backend):
    return {"mpi": MPITransport, "gloo": GlooTransport}[backend]() if backend in ("mpi", "gloo") else None


class Floor(torch.autograd.Function):
    """``forward(x)`` and ``backward(dy)`` are two plain functions."""

    @staticmethod
    def forward(ctx, x, there, back):
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, dy):
        return ctx.back(dy), None, None


def broadcast(t, shape):
    """From worker 0 to both, and back the sum onto worker 0."""

    def copied(x):
        y = torch.empty(shape)
        if t.rank == 0:
            y.copy_(x)
        t.broadcast(y)
        return y

    def added(dy):
        if t.rank:
            t.reduce(dy.detach())
            return torch.zeros(0)
        dx = torch.empty(shape)
        dx.copy_(dy)
        t.reduce(dx)
        return dx

    return copied, added


def sum_reduce(t, shape):
    copied, added = broadcast(t, shape)
    return added, copied


def all_sum(t, shape):
    def there(x):
        y = torch.empty(shape)
        y.copy_(x)
        t.all_reduce(y)
        return y

    return there, there


def repartition(t, shape):
    """From rows to columns of a square tensor and back; shape is that of the rows."""
    rows, columns = shape

    def there(x):
        sent = torch.empty(2, rows, columns // 2)
        sent.copy_(x.view(rows, 2, columns // 2).transpose(0, 1))
        y = torch.empty(2 * rows, columns // 2)
        t.all_to_all(y, sent)
        return y

    def back(dy):
        received = torch.empty(2, rows, columns // 2)
        t.all_to_all(received, dy)
        dx = torch.empty(rows, columns)
        dx.view(rows, 2, columns // 2).copy_(received.transpose(0, 1))
        return dx

    return there, back


def halo(t, shape):
    """One row of halo between two workers that split the rows."""
    inner, outer = (-2, -1) if t.rank == 0 else (1, 0)

    def there(x):
        y = torch.empty(shape)
        y.copy_(x)
        t.swap(y[outer], x.detach()[inner])
        return y

    def back(dy):
        dx = torch.empty(shape)
        dx.copy_(dy)
        received = torch.empty(shape[1:])
        t.swap(received, dy[outer])
        dx[outer] = 0
        dx[inner] += received
        return dx

    return there, back


def all_gather(t, shape):
    def there(x):
        y = torch.empty(2 * shape[0], *shape[1:])
        t.all_gather(y, x.detach())
        return y

    def back(dy):
        dx = torch.empty(shape)
        t.reduce_scatter(dx, dy)
        return dx

    return there, back


def reduce_scatter(t, shape):
    """shape is that of the kept block."""
    there, back = all_gather(t, shape)
    return (lambda x: back(x.detach())), there
