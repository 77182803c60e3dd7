"""What tests of operations need: the setups of all workers, carried out together, without a world and an agreement.

Each worker makes its three steps in a thread of its own, on a partition whose workers only know each other's letters.
So what is sent, added up and differentiated is what workers do; but the signatures are given and not agreed on.
"""

from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import reduce
from operator import or_
from queue import SimpleQueue

import torch

from distdl.geometry.boxes import slices
from distdl.ops import Site
from distdl.partition import Layout, Partition, Signature
from distdl.tensors.derivatives import Derivatives
from distdl.transport import Label
from distdl.transport.communicator import Communicator, LongGroup, Pending

PATIENCE = 60  # seconds: a letter that is never sent is an error, not a wait


class Letters(dict):
    """A queue for each sender, reader and tag: the same for two workers that are the first to ask at one time."""

    def __missing__(self, key):
        return self.setdefault(key, SimpleQueue())


class Correspondent(Communicator):
    """A worker that writes letters: copies, for each pair of workers in the order in which they were sent."""

    def __init__(self, rank, size, letters):
        super().__init__()
        self.rank, self.size, self.letters = rank, size, letters

    def exchange(self, sends, receives, tag=0):
        for target, tensor in sends:
            self.letters[self.rank, target, tag].put(tensor.detach().clone())

        def finish():
            for source, tensor in receives:
                letter = self.letters[source, self.rank, tag].get(timeout=PATIENCE)
                assert letter.shape == tensor.shape and letter.dtype == tensor.dtype
                with torch.no_grad():
                    tensor.copy_(letter)

        return Pending(finish)


def together(size, function):
    """``function(P)`` for every worker, P being the partition of all of them: the list of what they return."""
    letters = Letters()
    with ThreadPoolExecutor(size) as pool:
        calls = [pool.submit(function, Partition(Correspondent(rank, size, letters))) for rank in range(size)]
        wait(calls)
    failed = [call.exception() for call in calls if call.exception()]
    for error in sorted(failed, key=lambda error: type(error).__name__ == "Empty"):
        raise error  # the first that is not a letter that was waited for
    assert all(queue.empty() for queue in letters.values())
    return [call.result() for call in calls]


def site(work, *others, name="Op"):
    """Where an operation is carried out. Those of the other partitions are members, too."""
    members = reduce(or_, others, work)
    return Site(work, LongGroup(members.workers.ravel().tolist()), Label(name))


def signature(layout, dtype=torch.float64, gradient=True, blank=(0,)):
    """The signature of a tensor of which each worker has the block that the layout says, or none of shape ``blank``."""
    me = layout.partition.comm.rank
    local = layout.shapes[me] if me in layout.partition else blank
    return Signature(layout, dtype, Derivatives(gradient and dtype.is_floating_point), local)


@dataclass(frozen=True)
class Case:
    """An operation and what it is in one place.

    Attributes:
        size: number of workers.
        op: a value, or a function of P.
        work: ``work(P)`` is the partition of those that compute.
        places: ``places(P)`` are the layouts of the tensors it takes.
        sequential: torch's function of the whole tensors. It returns a tensor, or as many as there are layouts of
            results.
        inputs: the whole tensors; random ones if not given.
        batch: extent of the tensors of zero volume that a worker without a block passes; None for ``(0,)``.
        others: ``others(P)`` are the partitions of members that neither compute nor have an input.
        dims: of the tensors of zero volume, where all their extents are 0, as global tensors have them.
    """

    size: int
    op: object
    work: object
    places: object
    sequential: object
    inputs: tuple = ()
    batch: int | None = None
    others: object = lambda P: ()
    dims: int | None = None

    def set_up(self, P, wholes, gradient):
        """This worker's setup, and the layouts of its inputs; None outside all partitions."""
        layouts, op, work = self.places(P), self.op(P) if callable(self.op) else self.op, self.work(P)
        here = site(work, *(layout.partition for layout in layouts), *self.others(P))
        if P.comm.rank not in here.members:
            return None
        given = [
            signature(layout, whole.dtype, gradient, self.blank) for layout, whole in zip(layouts, wholes, strict=True)
        ]
        return op.setup(here, *given), layouts

    @property
    def blank(self):
        """Shape of the tensor of zero volume that a worker without a block passes."""
        if self.dims is not None:
            return (0,) * self.dims
        return (0,) if self.batch is None else (self.batch, 0)


def assert_computes(case, tolerance=1e-10):
    """Check the results of all workers, and the gradients of all inputs, against the sequential function.

    Of an input that every worker has whole, the gradients of all workers together are the gradient.
    """
    wholes = _wholes(case)
    differentiable = [whole.requires_grad for whole in wholes]
    expected = _listed(case.sequential(*wholes))
    generator = torch.Generator().manual_seed(7)
    cotangents = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in expected]
    asked = [whole for whole in wholes if whole.requires_grad]
    gradients = iter(torch.autograd.grad(expected, asked, cotangents))
    gradients = [next(gradients) if one else None for one in differentiable]

    def main(P):
        found = case.set_up(P, wholes, True)
        if found is None:
            return []
        setup, layouts = found
        xs, terms = [], []
        for layout, whole in zip(layouts, wholes, strict=True):
            inside = P.comm.rank in layout.partition
            block = layout.block(whole.detach()).clone() if inside else whole.new_zeros(case.blank)
            xs.append(block.requires_grad_(whole.requires_grad))
        ys = _listed(setup.move_out(setup.local(*_listed(setup.move_in(*xs)))))
        dys = []
        for y, layout, whole, cotangent in zip(ys, setup.results, expected, cotangents, strict=True):
            assert not y._is_view() or not y.requires_grad, "a result is a view"
            if P.comm.rank in layout.partition:
                _assert_close(y, layout.block(whole), tolerance, "a result")
                dys.append(layout.block(cotangent).clone())
            else:
                assert y.numel() == 0
                dys.append(torch.zeros_like(y))
        torch.autograd.backward(ys, dys)
        for x, layout, gradient in zip(xs, layouts, gradients, strict=True):
            if gradient is not None:
                assert x.grad is not None and x.grad.shape == x.shape
                if layout.is_everywhere:
                    terms.append((x.grad, gradient))
                elif P.comm.rank in layout.partition:
                    _assert_close(x.grad, layout.block(gradient), tolerance, "a gradient")
        return terms

    for terms in zip(*filter(None, together(case.size, main)), strict=True):
        _assert_close(sum(term for term, _ in terms), terms[0][1], tolerance, "a sum of gradients")


def matrices(case):
    """The matrix of an operation that is linear in its first tensor, as all workers compute it together, and torch's.

    Each column is the result for a tensor that is 1 in one place.
    """
    wholes = [whole.detach() for whole in _wholes(case)]
    first, others = wholes[0], wholes[1:]
    units = torch.eye(first.numel(), dtype=first.dtype).reshape(-1, *first.shape)
    zero = torch.zeros_like(first)
    expected = [case.sequential(unit, *others) - case.sequential(zero, *others) for unit in units]

    def main(P):
        found = case.set_up(P, wholes, False)
        if found is None:
            return None
        setup, layouts = found

        def compute(*tensors):
            blocks = [
                layout.block(whole).clone() if P.comm.rank in layout.partition else whole.new_zeros(case.blank)
                for layout, whole in zip(layouts, tensors, strict=True)
            ]
            (y,) = _listed(setup.move_out(setup.local(*_listed(setup.move_in(*blocks)))))
            return y

        rest = compute(zero, *others)
        return setup.results[0], [compute(unit, *others) - rest for unit in units]

    columns = []
    found = together(case.size, main)
    for number, column in enumerate(expected):
        whole = torch.full_like(column, float("nan"))
        for worker, one in enumerate(found):
            if one is not None and worker in one[0].partition:
                whole[slices(one[0][worker])] = one[1][number]
        columns.append(whole.flatten())
    return torch.stack(columns, 1), torch.stack([column.flatten() for column in expected], 1)


def balanced_over(*extents):
    """``balanced_over(3, 8)(P)``: the layout that splits a tensor of these extents as evenly as possible over P."""
    return lambda P: Layout.balanced(P, extents)


def _wholes(case):
    if case.inputs:
        return [one.clone().requires_grad_(one.dtype.is_floating_point) for one in case.inputs]
    generator = torch.Generator().manual_seed(3)
    extents = [layout.extents for layout in case.places(Partition(Correspondent(0, case.size, {})))]
    drawn = [torch.randn(one, dtype=torch.float64, generator=generator) for one in extents]
    return [one.requires_grad_() for one in drawn]


def _listed(one):
    return one if isinstance(one, (tuple, list)) else (one,)


def _assert_close(found, expected, tolerance, what):
    assert found.shape == expected.shape and found.dtype == expected.dtype, (what, found.shape, expected.shape)
    scale = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
    assert not expected.numel() or (found - expected).abs().max().item() <= tolerance * scale, (what, found, expected)
