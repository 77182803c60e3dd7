"""Help for tests of distributed code: also for primitives and layers of your own.

All checkers are called by every worker together, raise AssertionError, and say what differs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from distdl.geometry.boxes import Interval, balanced
from distdl.partition import Partition
from distdl.partition.layout import Layout
from distdl.transport.communicator import Communicator, Group, Message, Pending
from distdl.transport.recording import Call, Recording
from distdl.workers.launch import run_workers

__all__ = ["Counting", "Silent", "assert_adjoint", "assert_matches_sequential", "run_workers"]


class Counting(Recording):
    """A communicator that passes everything on to another one and keeps count.

    Build partitions on it: ``Partition(Counting(distdl.world().comm))``.

    Attributes:
        sent, received: number of point-to-point messages to, and from, each worker.
        log: every call in order: its name, and the workers that take part.
    """

    def __init__(self, inner: Communicator) -> None:
        super().__init__(inner, begun=self._count)
        self.reset()

    def reset(self) -> None:
        """Count from zero again."""
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()
        self.log: list[tuple[str, Group]] = []

    def _count(self, call: Call) -> None:
        self.log.append((call.operation, call.workers))
        self.sent.update(worker for worker, _ in call.sends)
        self.received.update(worker for worker, _ in call.receives)


class Silent(Communicator):
    """One of many workers, for what needs no message: plans of any number of workers can be made on it. A message is
    an error.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        raise AssertionError("a message was sent")


def assert_adjoint(layer: Any, x: torch.Tensor, dy: torch.Tensor | None = None, tolerance: float = 1e-12) -> None:
    """Check that a linear layer's backward is its adjoint: ``<F x, dy> = <x, F* dy>``, summed over all workers.

    Args:
        layer: a module with a partition ``P_x``.
        x: this worker's input.
        dy: this worker's cotangent, in the shape of the output; random if not given.
        tolerance: largest difference, relative to the product of the norms.
    """
    x = x.detach().clone().requires_grad_()
    y = layer(x)
    if dy is None:
        seed = torch.Generator().manual_seed(layer.P_x.comm.rank)
        dy = torch.randn(y.shape, dtype=y.dtype, generator=seed)
    y.backward(dy)
    assert x.grad is not None and x.grad.shape == x.shape, f"the gradient of x has shape {x.grad}, not {x.shape}"
    y = y.detach()
    products = [(y * dy).sum(), (x.detach() * x.grad).sum(), (y * y).sum(), (dy * dy).sum()]
    products += [(x.detach() ** 2).sum(), (x.grad**2).sum()]
    everyone = Partition(layer.P_x.comm)
    sums = everyone.allreduce_data(torch.stack([product.double() for product in products])).tolist()
    forward, adjoint = sums[:2]
    scale = max((sums[2] * sums[3]) ** 0.5, (sums[4] * sums[5]) ** 0.5)
    assert abs(forward - adjoint) <= tolerance * scale, (
        f"the backward of {layer} is not its adjoint: <Fx, dy> = {forward!r} and <x, F*dy> = {adjoint!r}"
    )


def assert_matches_sequential(
    layer: Any,
    reference: torch.nn.Module,
    x: torch.Tensor,
    blocks: Sequence[Sequence[Interval]] | None = None,
    tolerance: float = 1e-10,
) -> None:
    """Check a layer against the sequential one: y and its split, the gradient of x, and those of all parameters.

    Args:
        layer: a module with partitions ``P_x`` and ``P_y`` and, if it has parameters, ``parameter_layouts`` in the
            order of the sequential layer's parameters, whose blocks it is given.
        reference: the sequential layer, the same on every worker.
        x: the global input, the same on every worker; in float64 for the given tolerance.
        blocks: how x is split, for each dim the intervals along its axis; as evenly as possible if not given.
        tolerance: largest difference, relative to the largest element of the reference.
    """
    P_x, P_y = layer.P_x, getattr(layer, "P_y", layer.P_x)
    layouts = getattr(layer, "parameter_layouts", {})
    own = dict(layer.named_parameters())  # the published batch norm has none where it stores none
    layer.zero_grad()
    reference.zero_grad()
    for (name, layout), parameter in zip(layouts.items(), reference.parameters(), strict=True):
        if P_x.comm.rank in layout.partition or name in own:
            layer.get_parameter(name).data = layout.block(parameter.data).clone()
    owned = Layout.balanced(P_x, x.shape) if blocks is None else Layout.of(P_x, blocks)
    whole = x.detach().clone().requires_grad_()
    expected = reference(whole)
    dy = torch.randn(expected.shape, dtype=expected.dtype, generator=torch.Generator().manual_seed(1))
    expected.backward(dy)
    local = owned.block(x).clone().requires_grad_()
    y = layer(local)
    everyone = Partition(P_x.comm)
    shapes = everyone.allgather_data(tuple(y.shape))
    computed = _tiling(P_y, shapes)
    assert computed.extents == tuple(expected.shape), f"y has the shape {computed.extents}, not {expected.shape}"
    _assert_split(computed, owned)
    y.backward(computed.block(dy) if P_x.comm.rank in P_y else torch.zeros_like(y))
    _assert_close("y", y, computed.block(expected) if P_x.comm.rank in P_y else y, tolerance, expected)
    assert whole.grad is not None
    _assert_close("the gradient of x", local.grad, owned.block(whole.grad), tolerance, whole.grad)
    for (name, layout), parameter in zip(layouts.items(), reference.parameters(), strict=True):
        if name not in own:
            continue
        assert parameter.grad is not None
        gradient = own[name].grad
        _assert_close(f"the gradient of {name}", gradient, layout.block(parameter.grad), tolerance, parameter.grad)


def _tiling(P: Partition, shapes: Sequence[tuple[int, ...]]) -> Layout:
    local = torch.tensor([shapes[worker] for worker in P.workers.ravel().tolist()])
    return Layout.tiled(P, local.reshape(*P.workers.shape, -1).numpy(), "y")


def _assert_split(y: Layout, x: Layout) -> None:
    """Check that y is split as evenly as possible, or in a dim that stays as it was, as x is."""
    for dim, (extent, along) in enumerate(zip(y.extents, y.intervals, strict=True)):
        same = x.intervals[dim] if dim < len(x.extents) and x.extents[dim] == extent else None
        assert along in (balanced(extent, len(along)), same), (
            f"dim {dim} of y is split as {along}, neither as evenly as possible nor as x is, {same}"
        )


def _assert_close(
    what: str, ours: torch.Tensor | None, theirs: torch.Tensor, tolerance: float, scale: torch.Tensor
) -> None:
    assert ours is not None, f"{what} is None"
    assert ours.shape == theirs.shape, f"{what} has the shape {list(ours.shape)}, not {list(theirs.shape)}"
    if not ours.numel():
        return
    difference = (ours.detach() - theirs.detach()).abs().max().item()
    largest = scale.detach().abs().max().item()
    assert difference <= tolerance * max(largest, 1e-300), (
        f"{what} differs by {difference:.3g} from the sequential one, whose largest element is {largest:.3g}"
    )
