"""What the normalisations are: weights and where they live, running statistics, and numbers that may be changed."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, nan
from typing import Any

import torch

from distdl.agreement import Headers
from distdl.geometry.boxes import Interval, Intervals, balanced, shape
from distdl.nn.layer import Layer, tiled
from distdl.nn.module import Option
from distdl.nn.parametrised import check_unfit, trained, unfit
from distdl.nn.placement import check_storable, keep_sequential_keys
from distdl.ops import Setup, Site
from distdl.ops.normalisation import BatchNorm, InstanceNorm
from distdl.partition import Layout, Partition, Signature
from distdl.transport import Label


class Number(Option[float | None]):
    """An option that may be changed, to the same value on all workers. It is part of every header.

    Args:
        optional: whether it may be None.
    """

    def __init__(self, optional: bool = False) -> None:
        self._optional = optional

    def __set__(self, module: torch.nn.Module, value: float | None) -> None:
        if value is None and not self._optional:
            raise ValueError(f"{type(module).__name__} needs a number for {self._name}; got None")
        module.__dict__[self._name] = None if value is None else float(value)


def reported(
    training: bool, running: Sequence[torch.Tensor], norms: tuple[int, ...], *numbers: float | None
) -> tuple[int, ...]:
    """What a normalisation adds to its header: its mode, whether it has running statistics, and its numbers.

    Args:
        norms: which norms of its parameters cannot be computed block by block, see ``Weights.unfit``.
    """
    return int(training), len(running[:2]), *norms, *map(_bits, numbers)


@dataclass(frozen=True, eq=False)
class Weights:
    """Where weight and bias of a normalisation live.

    They are split as evenly as possible along the dims of x in which they vary, and stored by the workers whose index
    is 0 in all other axes.

    Attributes:
        P_x: the partition of x.
        extents: global extents along the dims in which they vary.
        names: the names of the parameters that the layer has.
        full: whether the parameters have all dims of x, and workers that store none have None.
    """

    P_x: Partition
    extents: Mapping[int, int]
    names: tuple[str, ...]
    full: bool = False

    @cached_property
    def layout(self) -> Layout:
        """The layout of a weight as torch has it, with only the dims in which it varies."""
        blocks = self._blocks
        return Layout.along(self._stored.reshape([len(along) for along in blocks.values()]), [*blocks.values()])

    @cached_property
    def parameter_layout(self) -> Layout:
        """The layout of a parameter."""
        if not self.full:
            return self.layout
        places = self._stored.workers.shape
        return Layout.along(self._stored, [self._blocks.get(dim, [(0, 1)] * n) for dim, n in enumerate(places)])

    @cached_property
    def _blocks(self) -> dict[int, Intervals]:
        return {dim: balanced(extent, self.P_x.workers.shape[dim]) for dim, extent in self.extents.items()}

    @cached_property
    def _stored(self) -> Partition:
        axes = range(self.P_x.workers.ndim)
        stored: Partition = self.P_x[tuple(slice(None if dim in self.extents else 1) for dim in axes)]
        return stored

    @property
    def layouts(self) -> dict[str, Layout]:
        """Where each parameter lives: which block of the sequential layer's parameter is on which worker."""
        return dict.fromkeys(self.names, self.parameter_layout)

    def register(self, module: torch.nn.Module, names: tuple[str, str]) -> None:
        """Give a module its weight, of ones, and its bias, of zeros; or None for one that it does not have."""
        for name, value in zip(names, (1.0, 0.0), strict=True):
            module.register_parameter(name, self._initial(value) if name in self.names else None)

    def _initial(self, value: float) -> torch.nn.Parameter | None:
        layout, me = self.parameter_layout, self.P_x.comm.rank
        check_storable(layout)
        if me in layout.partition:
            return torch.nn.Parameter(torch.full(shape(layout[me]), value))
        return None if self.full else torch.nn.Parameter(torch.empty(0))

    def of(self, module: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        """The parameters of a module, with an empty tensor in place of one that this worker does not have."""
        found = [getattr(module, name) for name in self.names]
        return [torch.empty(0, device=getattr(x, "device", None)) if one is None else one for one in found]

    def unfit(self, module: torch.nn.Module) -> tuple[int, ...]:
        """For each parameter, the number of a norm of it that cannot be computed block by block; 0 if there is none."""
        return tuple(unfit(module, name, self.parameter_layout) for name in self.names)

    def signature(self, headers: Headers, number: int, label: Label) -> Signature:
        """The signature of one of the parameters, in the shape that torch has.

        Raises: ValueError if the block of some worker is not what it should be, or dtypes differ.
        """
        headers.check_blocks(self.parameter_layout, f"{label}: {self.names[number]}", 1 + number)
        dtype = headers.dtype(self._stored, label.kind, 1 + number)
        return Signature(self.layout, dtype, headers.derivatives[1 + number], headers.own[1 + number])


@dataclass(frozen=True, eq=False)
class Agreed:
    """How the setup of a normalisation follows from what its workers have reported.

    Attributes:
        op: the operation, with its first options.
        weights: where they live.
        numbers: the options that may be changed.
        runs: whether the operation may have running statistics.
    """

    op: Any
    weights: Weights
    numbers: tuple[str, ...] = ("eps",)
    runs: bool = False

    @property
    def read(self) -> Sequence[Partition]:
        return ()

    @property
    def identity(self) -> object:
        return (self.op, self.weights.P_x.workers.shape, self.weights.names)

    def __call__(self, headers: Headers, label: Label) -> Setup:
        P_x = self.weights.P_x
        x = tiled(headers, P_x, 0, label)
        op = self._configured(headers, label)
        rows = [self.weights.signature(headers, number, label) for number in range(len(self.weights.names))]
        setup: Setup = op.setup(Site._make((P_x, headers.members, label)), x, *rows)
        return setup

    def _configured(self, headers: Headers, label: Label) -> Any:
        """The operation with the options that all workers have now.

        Raises: ValueError if torch has put a norm on a parameter that is split; if workers differ in their mode, in
            whether they have running statistics, or in a number.
        """
        P_x, names = self.weights.P_x, self.weights.names
        training, running, *others = headers.extras(P_x).reshape(P_x.workers.size, -1).T
        numbers = others[len(names) :]
        for name, norms in zip(names, others, strict=False):
            check_unfit(str(label), name, int(norms.max()), self.weights.parameter_layout)
        if training.any() != training.all():
            raise ValueError(f"{label} needs to be in training or in evaluation mode on all workers alike")
        found: dict[str, list[Any]] = {"a number of running statistics": [int(one) for one in running]}
        found |= {name: [_number(int(one)) for one in bits] for name, bits in zip(self.numbers, numbers, strict=True)}
        for what, values in found.items():
            other = next((place for place, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                workers = P_x.workers.ravel()
                raise ValueError(
                    f"{label} needs {what} that is equal on all workers; worker {workers[0]} has {values[0]} and "
                    f"worker {workers[other]} has {values[other]}"
                )
        changed: dict[str, Any] = {name: found[name][0] for name in self.numbers}
        if self.runs:
            changed |= {"training": bool(training.all()), "running": bool(running[0])}
        return replace(self.op, **changed)


def _bits(number: float | None) -> int:
    """A float, or None, as an integer for a header."""
    bits: int = struct.unpack("<q", struct.pack("<d", nan if number is None else number))[0]
    return bits


def _number(bits: int) -> float | None:
    """The float, or None, from such an integer."""
    number: float = struct.unpack("<d", struct.pack("<q", bits))[0]
    return None if number != number else number


class NormalisationLayer(Layer):
    """What all normalisations are.

    Args:
        name: as of :class:`Layer`.
        agreed: how the setup follows from what the workers have reported.
        names: of the parameters, also of those that there are not.
    """

    P_x = Option[Partition]()
    eps = Number()

    def __init__(self, name: str, agreed: Agreed, names: tuple[str, str] = ("weight", "bias")) -> None:
        super().__init__(name, agreed.weights.P_x, agreed)
        self._weights = agreed.weights
        self._weights.register(self, names)
        keep_sequential_keys(self)

    @property
    def parameter_layouts(self) -> dict[str, Layout]:
        """Where each parameter lives: which block of the sequential layer's parameter is on which worker."""
        return trained(self, self._weights.layouts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._normalise(x)

    def _normalise(self, x: torch.Tensor, kept: Sequence[torch.Tensor] = (), *numbers: float | None) -> torch.Tensor:
        """What it makes of this worker's block.

        Args:
            kept: the running statistics, if there are any.
            numbers: the options that may change, beside eps.
        """
        weights = self._weights.of(self, x)
        norms = self._weights.unfit(self)
        setup = self.agree(x, *weights, extra=reported(self.training, kept, norms, self.eps, *numbers))
        moved = setup.move_in(x, *weights, *kept)
        y: torch.Tensor = setup.move_out(setup.local(*moved))
        return y


class TrackingLayer(NormalisationLayer):
    """A normalisation of channels that may keep running statistics.

    Every worker of P_x keeps the running mean and variance of its balanced block of channels. It also reads its block
    from the state of the sequential layer.

    Args:
        op: the operation, with its first options.
        affine: whether there are a weight and a bias.
        names: of the weight and the bias.
        full: whether these have all dims of x, as in :class:`Weights`.
    """

    num_features = Option[int]()
    momentum = Number(optional=True)
    affine = Option[bool]()
    track_running_stats = Option[bool]()
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    num_batches_tracked: torch.Tensor | None

    def __init__(
        self,
        P_x: Partition,
        op: BatchNorm | InstanceNorm,
        affine: bool,
        names: tuple[str, str] = ("weight", "bias"),
        full: bool = False,
    ) -> None:
        weights = Weights(P_x, op.extents, names if affine else (), full)
        name = f"{type(self).__name__} (P_x: {P_x}; {op.num_features})"
        super().__init__(name, Agreed(op, weights, ("eps", "momentum"), runs=True), names)
        self.P_x, self.num_features, self.eps, self.momentum = P_x, op.num_features, op.eps, op.momentum
        self.affine, self.track_running_stats = bool(affine), op.running
        check_storable(Layout.balanced(P_x[:1, :].reshape(-1)[: P_x.workers.shape[1]], (self.num_features,)))
        start, stop = _kept(self)
        for name, value in (("running_mean", torch.zeros(stop - start)), ("running_var", torch.ones(stop - start))):
            self.register_buffer(name, value if op.running else None)
        self.register_buffer("num_batches_tracked", torch.tensor(0) if op.running else None)
        self.register_load_state_dict_pre_hook(_read_own_channels)

    def _running(self) -> tuple[torch.Tensor, ...]:
        """Running mean, running variance and the number of batches, if it has them."""
        mean, variance, batches = self.running_mean, self.running_var, self.num_batches_tracked
        if mean is None or variance is None:
            return ()
        return mean, variance, torch.tensor(inf) if batches is None else batches

    @property
    def buffer_layouts(self) -> dict[str, Layout]:
        """Which channels of the running statistics each worker of P_x keeps; several keep the same ones."""
        if self.running_mean is None:
            return {}
        P_x = self.P_x
        channels = balanced(self.num_features, P_x.workers.shape[1])
        kept = [channels[P_x.index_of(worker)[1]] for worker in P_x.workers.ravel().tolist()]
        return dict.fromkeys(("running_mean", "running_var"), Layout.along(P_x.reshape(-1), [kept]))

    def reset_running_stats(self) -> None:
        """Start again: mean 0, variance 1, no batch counted."""
        for value, one in enumerate(self._running()[:2]):
            one.fill_(value)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()


def _kept(module: Any) -> Interval:
    """The channels whose running statistics this worker keeps."""
    P_x, me = module.P_x, module.P_x.comm.rank
    if me not in P_x:
        return 0, 0
    return balanced(module.num_features, P_x.workers.shape[1])[P_x.index_of(me)[1]]


def _read_own_channels(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take this worker's channels from running statistics of all channels."""
    for key in (prefix + "running_mean", prefix + "running_var"):
        if key in state and len(state[key]) == module.num_features:
            state[key] = state[key][slice(*_kept(module))]
