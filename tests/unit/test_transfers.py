"""Transfers: executed on tensors of any layout and dtype they apply the plan's matrix. No worker runs."""

from collections import defaultdict

import numpy as np
import pytest
import torch
from covering import in_pairs
from plans import NAMES, plans

from distdl.exchange import transfer
from distdl.exchange.transfer import Transfer
from distdl.transport.communicator import Communicator, Pending


class Post(Communicator):
    """Workers that take turns in one thread: what one sends lies ready when another begins to wait."""

    def __init__(self, rank, letters):
        super().__init__()
        self.rank, self.size, self.letters = rank, 12, letters

    def exchange(self, sends, receives, tag=0):
        for target, tensor in sends:
            self.letters[self.rank, target, tag].append(tensor.clone())

        def finish():
            for source, tensor in receives:
                letter = self.letters[source, self.rank, tag].pop(0)
                assert letter.shape == tensor.shape and letter.dtype == tensor.dtype
                tensor.copy_(letter)

        return Pending(finish)


def laid_out(layout, extents, dtype, numbers):
    """A tensor of small whole numbers that is laid out in some way in memory."""
    dims = len(extents)
    if layout == "expanded":
        return torch.full([1] * dims, 3).to(dtype).expand(extents)
    x = torch.from_numpy(numbers.integers(1, 4, extents)).to(dtype)
    if layout == "reversed":
        return x.permute(*reversed(range(dims))).contiguous().permute(*reversed(range(dims)))
    if layout == "apart":
        space = torch.zeros([2 * n + 1 for n in extents], dtype=dtype)
        view = space[tuple(slice(1, 1 + 2 * n, 2) for n in extents)]
        view.copy_(x)
        return view
    return x


LAYOUTS = ["contiguous", "reversed", "apart", "expanded"]


@pytest.mark.parametrize(("name", "layout", "short"), list(in_pairs(NAMES, LAYOUTS, [0, 24, 1 << 15])))
def test_a_transfer_applies_the_matrix_of_its_plan(world, monkeypatch, name, layout, short):
    """Whether it copies short parts by address, some of them, or none."""
    monkeypatch.setattr(transfer, "_SHORT_COPY", short)
    forward, numbers = plans(world)[name](None), np.random.default_rng(0)
    for plan in (forward, forward.T):
        matrix = plan.matrix()
        for dtype in (torch.float32, torch.int64, torch.complex128, torch.bfloat16, torch.uint8):
            xs = {w: laid_out(layout, extents, dtype, numbers) for w, extents in plan.inputs.items()}
            before = {worker: x.clone() for worker, x in xs.items()}
            letters, begun, transfers = defaultdict(list), {}, {}
            for worker in range(12):
                x = xs.get(worker, torch.zeros(0, dtype=dtype))
                extents = plan.outputs.get(worker)
                transfers[worker] = Transfer(
                    Post(worker, letters), plan.pattern, plan.schedule(worker), x, (0,) if extents is None else extents,
                    extents is None, dtype, False,
                )  # fmt: skip
            for _ in range(2):
                begun = {w: one.begin(xs.get(w, torch.zeros(0, dtype=dtype)), 5) for w, one in transfers.items()}
                for _, pending in begun.values():
                    pending.wait()
                assert not any(letters.values())
                given = flat({worker: x.to(torch.complex128) for worker, x in xs.items()})
                found = flat({worker: begun[worker][0].to(torch.complex128) for worker in plan.outputs})
                assert np.array_equal(matrix @ given, found), dtype
            assert all(torch.equal(x, before[worker]) for worker, x in xs.items())


def test_a_transfer_may_make_y_in_the_memory_of_x(world, monkeypatch):
    """The same matrix, where the plan allows it: each worker has all of y in one place of x, but for what is added."""
    monkeypatch.setattr(transfer, "_SHORT_COPY", 0)
    reused, numbers = set(), np.random.default_rng(0)
    for name in NAMES:
        forward = plans(world)[name](None)
        for kind, plan in (("", forward), (".T", forward.T)):
            xs = {w: laid_out("contiguous", extents, torch.float64, numbers) for w, extents in plan.inputs.items()}
            expected = plan.matrix() @ flat(xs)
            letters, begun = defaultdict(list), {}
            for worker in range(12):
                x, extents = xs.get(worker, torch.zeros(0).double()), plan.outputs.get(worker)
                made = Transfer(
                    Post(worker, letters), plan.pattern, plan.schedule(worker), x, (0,) if extents is None else extents,
                    extents is None, torch.float64, False, reuses=True,
                )  # fmt: skip
                begun[worker] = made.begin(x, 5)
                if x.numel() and begun[worker][0].untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
                    reused.add(name + kind)
            for _, pending in begun.values():
                pending.wait()
            assert np.array_equal(flat({worker: begun[worker][0] for worker in plan.outputs}), expected), name + kind
    assert any(name.endswith(".T") for name in reused)


def flat(tensors):
    return np.concatenate([tensors[worker].numpy().ravel() for worker in sorted(tensors)] or [np.zeros(0)])
