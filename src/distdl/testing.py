"""Help for tests of distributed code: also for primitives and layers of your own.

All checkers are called by every worker together. They raise the same AssertionError on every worker, which names the
workers, the tensors and the first few cells that are off, with both values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from distdl.geometry.boxes import Intervals, balanced
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.layout import Layout
from distdl.transport.communicator import Communicator, Group, Message, Pending, name_workers
from distdl.transport.recording import Call, Recording
from distdl.workers.launch import run_workers

__all__ = ["Counting", "Silent", "assert_adjoint", "assert_matches_sequential", "run_workers"]

_CELLS = 4  # how many cells an error names of each tensor that is off
_LINES = 24  # how many lines an error has
_PROBES = 4096  # up to so many cells of input and output, a backward that is no adjoint is looked at cell by cell


class Counting(Recording):
    """A communicator that passes everything on to another one and keeps count.

    Build partitions on it: ``Partition(Counting(distdl.world().comm))``.

    Attributes:
        sent, received: number of point-to-point messages to, and from, each worker.
        log: every call in order: its name, and the workers that take part.
    """

    @checks_arguments
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

    Args:
        rank, size: its number, and how many workers there are.
    Raises: ValueError unless it is one of them.
    """

    @checks_arguments
    def __init__(self, rank: int, size: int) -> None:
        if isinstance(rank, bool) or not 0 <= rank < size:
            raise ValueError(f"Silent needs a rank from 0 to size - 1; got rank {rank} and size {size}")
        super().__init__()
        self.rank, self.size = rank, size

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        raise AssertionError("a message was sent")


def _check_layer(name: str, layer: Any) -> None:
    if not callable(layer) or not isinstance(getattr(layer, "P_x", None), Partition):
        raise TypeError(f"{name} needs layer to be a module with a partition P_x; got {type(layer).__name__}")


@checks_arguments
def assert_adjoint(layer: Any, x: torch.Tensor, dy: torch.Tensor | None = None, tolerance: float = 1e-12) -> None:
    """Check that a linear layer's backward is its adjoint: ``<F x, dy> = <x, F* dy>``, summed over all workers.

    Of complex tensors, real and imaginary parts are cells of their own, as for torch's gradients.

    If it is not, and the tensors are small, the forward is called for each cell of the input, and the backward for each
    cell of the output, so that the error names pairs of cells where the two differ. Cells are numbered as in the
    worker's own tensor, for those of a primitive need not be blocks of one.

    Args:
        layer: a module with a partition ``P_x``.
        x: this worker's input.
        dy: this worker's cotangent, in the shape of the output; random if not given.
        tolerance: largest difference, relative to the product of the norms.
    Raises: AssertionError, the same on every worker, if it is not.
    """
    _check_layer("assert_adjoint", layer)
    everyone = Partition(layer.P_x.comm)
    x = x.detach().clone().requires_grad_()
    y, findings = layer(x), _Findings(everyone, layer)
    findings.check_connected(y)
    if dy is None:
        dy = _noise(y, layer.P_x.comm.rank)
    y.backward(dy)
    gradient = x.grad
    if gradient is None or gradient.shape != x.shape:
        found = "None" if gradient is None else f"of shape {list(gradient.shape)}"
        findings.add(f"the gradient of x is {found}; x is of shape {list(x.shape)}")
    findings.tell("the backward is not the adjoint")
    assert gradient is not None
    y, x = y.detach(), x.detach()
    pairs = [(y, dy), (x, gradient), (y, y), (dy, dy), (x, x), (gradient, gradient)]
    products = [(_reals(one).double() * _reals(other).double()).sum() for one, other in pairs]
    sums = everyone.allreduce_data(torch.stack(products)).tolist()
    forward, adjoint = sums[:2]
    scale = max((sums[2] * sums[3]) ** 0.5, (sums[4] * sums[5]) ** 0.5)
    if not abs(forward - adjoint) <= tolerance * scale:
        raise AssertionError(
            f"{_named(layer, everyone)}: the backward is not the adjoint: <Fx, dy> = {forward!r} and <x, F*dy> = "
            f"{adjoint!r}{_where_nan(everyone, y, gradient)}{_where_no_adjoint(layer, everyone, x, y, tolerance)}"
        )


@checks_arguments
def assert_matches_sequential(
    layer: Any,
    reference: torch.nn.Module,
    x: torch.Tensor,
    blocks: Sequence[Intervals] | None = None,
    tolerance: float = 1e-10,
) -> None:
    """Check a layer against the sequential one: y and its split, the gradient of x, and those of all parameters.

    The error numbers cells as in the whole tensor.

    Args:
        layer: a module with partitions ``P_x`` and ``P_y`` and, if it has parameters, ``parameter_layouts`` in the
            order of the sequential layer's parameters, whose blocks it is given.
        reference: the sequential layer, the same on every worker.
        x: the global input, the same on every worker; in float64 for the given tolerance.
        blocks: how x is split, for each dim the intervals along its axis; as evenly as possible if not given.
        tolerance: largest difference, relative to the largest element of the reference.
    Raises: AssertionError, the same on every worker, if they differ.
    """
    _check_layer("assert_matches_sequential", layer)
    P_x, P_y = layer.P_x, getattr(layer, "P_y", layer.P_x)
    me, everyone = P_x.comm.rank, Partition(P_x.comm)
    layouts = getattr(layer, "parameter_layouts", {})
    own = dict(layer.named_parameters())  # the published batch norm has none where it stores none
    layer.zero_grad()
    reference.zero_grad()
    _check_parameters(layouts, reference)
    for (name, layout), parameter in zip(layouts.items(), reference.parameters(), strict=True):
        if me in layout.partition or name in own:
            layer.get_parameter(name).data = layout.block(parameter.data).clone()
    owned = Layout.balanced(P_x, x.shape) if blocks is None else Layout.of(P_x, blocks)
    whole = x.detach().clone().requires_grad_()
    expected = reference(whole)
    dy = _noise(expected, 1)
    expected.backward(dy)
    local = owned.block(x).clone().requires_grad_()
    y, findings = layer(local), _Findings(everyone, layer)
    findings.check_connected(y)
    computed = _tiling(P_y, everyone.allgather_data(tuple(y.shape)))
    if computed.extents != tuple(expected.shape):
        raise AssertionError(f"y has the shape {computed.extents}, not {expected.shape}")
    _assert_split(computed, owned)
    y.backward(computed.block(dy) if me in P_y else torch.zeros_like(y))
    if me in P_y:
        findings.compare("y", y, expected, computed, tolerance)
    assert whole.grad is not None
    findings.compare("the gradient of x", local.grad, whole.grad, owned, tolerance)
    for (name, layout), parameter in zip(layouts.items(), reference.parameters(), strict=True):
        # else the parameter is frozen in both
        if name in own and (parameter.grad is not None or own[name].grad is not None):
            whole_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            findings.compare(f"the gradient of {name}", own[name].grad, whole_gradient, layout, tolerance)
    findings.tell("it differs from the sequential layer")


def _check_parameters(layouts: Mapping[str, Layout], reference: torch.nn.Module) -> None:
    ours = [f"{name} {list(layout.extents)}" for name, layout in layouts.items()]
    theirs = [f"{name} {list(parameter.shape)}" for name, parameter in reference.named_parameters()]
    wrong = [layout.extents for layout in layouts.values()] != [tuple(one.shape) for one in reference.parameters()]
    if wrong:
        raise AssertionError(
            f"parameter_layouts has to list the parameters of the sequential layer, in its order and of its shapes; it "
            f"has {', '.join(ours) or 'none'}, and the sequential layer {', '.join(theirs) or 'none'}"
        )


class _Findings:
    """What is off on this worker, until all workers are told.

    Args:
        everyone: all workers.
        layer: what is checked.
    """

    def __init__(self, everyone: Partition, layer: Any) -> None:
        self._everyone, self._layer = everyone, layer
        self._found: list[str] = []

    def add(self, text: str) -> None:
        """Note something."""
        self._found.append(text)

    def check_connected(self, y: Any) -> None:
        """Check that the workers have results that all of them can differentiate. Collective.

        Raises: AssertionError, the same on every worker, if they have not.
        """
        if not isinstance(y, torch.Tensor):
            self.add(f"y is a {type(y).__name__}; it has to be a tensor")
        elif not y.requires_grad:
            self.add("y does not depend on x in the autograd graph, so this worker has no part in the backward")
        self.tell("there is no y to differentiate")

    def compare(
        self, what: str, ours: torch.Tensor | None, whole: torch.Tensor, layout: Layout, tolerance: float
    ) -> None:
        """Note the cells of this worker's block that are not those of the whole tensor."""
        me = self._everyone.comm.rank
        theirs = layout.block(whole.detach())
        if ours is None or ours.shape != theirs.shape:
            found = "None" if ours is None else f"of shape {list(ours.shape)}"
            self.add(f"{what} is {found}; it has to be of shape {list(theirs.shape)}")
            return
        ours = ours.detach()
        largest = whole.detach().abs().max().item() if whole.numel() else 0.0
        difference = (ours - theirs).abs()
        off = ~(difference <= tolerance * max(largest, 1e-300))  # nan is off, too
        if not off.any():
            return
        begins = [start for start, _ in layout[me]] if me in layout.partition else [0] * ours.dim()
        cells = [
            f"cell {_numbered(place, begins)} is {ours[tuple(place)].item()!r}, not {theirs[tuple(place)].item()!r}"
            for place in off.nonzero()[:_CELLS].tolist()
        ]
        self.add(
            f"{int(off.sum())} of {off.numel()} cells of {what} are off, by up to {difference[off].max().item():.3g} "
            f"where the largest is {largest:.3g}: {_listed(cells, int(off.sum()))}"
        )

    def tell(self, what: str) -> None:
        """Tell all workers what was found on each of them. Collective.

        Raises: AssertionError, the same on every worker, if something was.
        """
        told = self._everyone.allgather_data(self._found)
        off = [worker for worker, found in enumerate(told) if found]
        if off:
            lines = [f"\n  worker {worker}: {text}" for worker in off for text in told[worker]]
            name = _named(self._layer, self._everyone)
            raise AssertionError(f"{name}: {what} on {name_workers(off)}:{_shortened(lines)}")


def _named(layer: Any, everyone: Partition) -> str:
    """The layer as worker 0 shows it. Collective."""
    return str(everyone.broadcast_data(str(layer) if everyone.comm.rank == 0 else None))


def _where_nan(everyone: Partition, y: torch.Tensor, gradient: torch.Tensor) -> str:
    """Which workers' results and gradients have cells that are nan. Collective."""
    named = (("y", y), ("the gradient of x", gradient))
    own = [f"{int(one.isnan().sum())} of {one.numel()} cells of {name}" for name, one in named if one.isnan().any()]
    told = everyone.allgather_data(own)
    lines = [f"\n  worker {worker}: nan in {' and '.join(found)}" for worker, found in enumerate(told) if found]
    return _shortened(lines)


def _where_no_adjoint(layer: Any, everyone: Partition, x: torch.Tensor, y: torch.Tensor, tolerance: float) -> str:
    """Which cells of the output depend on which of the input in another way than the backward says. Collective."""
    shapes = everyone.allgather_data((tuple(_reals(x).shape), tuple(_reals(y).shape)))
    kinds = everyone.allgather_data((x.is_complex(), y.is_complex()))
    inputs = [(worker, cell) for worker, (of_x, _) in enumerate(shapes) for cell in range(torch.Size(of_x).numel())]
    outputs = [(worker, cell) for worker, (_, of_y) in enumerate(shapes) for cell in range(torch.Size(of_y).numel())]
    if len(inputs) + len(outputs) > _PROBES:
        return ""

    def joined(local: torch.Tensor) -> torch.Tensor:
        return torch.cat([one.reshape(-1).double() for one in everyone.allgather_data(_reals(local.detach()))])

    def units(cells: list[tuple[int, int]], like: torch.Tensor) -> Iterator[torch.Tensor]:
        for worker, cell in cells:
            unit = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
            if worker == everyone.comm.rank:
                _reals(unit).view(-1)[cell] = 1
            yield unit

    def pulled_back(dy: torch.Tensor) -> torch.Tensor:
        at = torch.zeros_like(x).requires_grad_()
        layer(at).backward(dy)
        assert at.grad is not None
        return at.grad

    with torch.no_grad():
        forward = torch.stack([joined(layer(unit)) for unit in units(inputs, x)], 1)
    backward = torch.stack([joined(pulled_back(unit)) for unit in units(outputs, y)])
    # with a nan in the scale, all cells would be off
    scale = forward.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp(min=1e-300)
    off = ~((forward - backward).abs() <= tolerance * scale)
    lines = [f"\n  by {int(off.sum())} of {off.numel()} pairs of cells of input and output:"] if off.any() else []
    for row, column in off.nonzero().tolist():
        (source, i), (target, o) = inputs[column], outputs[row]
        places = [
            _unravelled(i, shapes[source][0], kinds[source][0]), _unravelled(o, shapes[target][1], kinds[target][1])
        ]  # fmt: skip
        lines.append(
            f"\n  y{places[1]} on worker {target} contains {forward[row, column].item():.6g} times x{places[0]} on "
            f"worker {source}; the backward gives {backward[row, column].item():.6g} times its gradient back"
        )
    return _shortened(lines)


def _noise(beside: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers for each cell of a tensor, the same on any device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(beside.shape, dtype=beside.dtype, generator=generator, device="cpu").to(beside.device)


def _reals(x: torch.Tensor) -> torch.Tensor:
    """A tensor as real numbers, of which each complex one has two, in a last dim."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _unravelled(cell: int, shape: Sequence[int], is_complex: bool = False) -> str:
    place = [int(one) for one in np.unravel_index(cell, shape)]
    part = (".real", ".imag")[place.pop()] if is_complex else ""
    return _numbered(place, [0] * len(place)) + part


def _numbered(place: Sequence[int], begins: Sequence[int]) -> str:
    return f"[{', '.join(str(at + begin) for at, begin in zip(place, begins, strict=True))}]"


def _listed(cells: Sequence[str], count: int) -> str:
    more = f", and {count - len(cells)} more" if count > len(cells) else ""
    return "; ".join(cells) + more


def _shortened(lines: Sequence[str]) -> str:
    more = f"\n  and {len(lines) - _LINES} more lines" if len(lines) > _LINES else ""
    return "".join(lines[:_LINES]) + more


def _tiling(P: Partition, shapes: Sequence[tuple[int, ...]]) -> Layout:
    gave = {worker: shapes[worker] for worker in P.workers.ravel().tolist()}
    if len({len(shape) for shape in gave.values()}) > 1:
        listed = ", ".join(f"{list(shape)} on {worker}" for worker, shape in gave.items())
        raise AssertionError(f"y has to have as many dims on every worker; it has the shapes {listed}")
    local = np.array(list(gave.values()))
    return Layout.tiled(P, local.reshape(*P.workers.shape, -1), "y")


def _assert_split(y: Layout, x: Layout) -> None:
    """Check that y is split as evenly as possible, or in a dim that stays as it was, as x is."""
    for dim, (extent, along) in enumerate(zip(y.extents, y.intervals, strict=True)):
        same = x.intervals[dim] if dim < len(x.extents) and x.extents[dim] == extent else None
        if along not in (balanced(extent, len(along)), same):
            raise AssertionError(
                f"dim {dim} of y is split as {along}, neither as evenly as possible nor as x is, {same}"
            )
