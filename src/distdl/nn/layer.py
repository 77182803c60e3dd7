"""Layer: agree, move in, compute, move out. What all distributed layers and primitives have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from distdl.agreement import Agreement, Headers
from distdl.environment.arguments import check_fields, known
from distdl.exchange import Together
from distdl.nn.module import Module
from distdl.ops import Op, Setup, Site
from distdl.ops import setup as steps
from distdl.ops.setup import same
from distdl.partition import Layout, Partition, Signature
from distdl.partition.arguments import checks_arguments
from distdl.tensors.connection import outside
from distdl.transport import Label

Place = Partition | Layout | Callable[[Headers, int], Signature]


class Derivation(Protocol):
    """How the setup of a layer follows from what its members have reported.

    Attributes:
        read: for each tensor, the partition whose reports are read.
        identity: what distinguishes it from other derivations; equal on all members, and complete in its ``repr``.
    """

    @property
    def read(self) -> Sequence[Partition]: ...

    @property
    def identity(self) -> object: ...

    def __call__(self, headers: Headers, label: Label) -> Setup:
        """The setup. A pure function: an error in it is raised on all members, so no check may depend on the worker."""


@dataclass(frozen=True, eq=False)
class Application:
    """An operation that is applied to tensors, and where each tensor lives.

    Attributes:
        op: the operation.
        places: for each tensor, where it lives: a partition, over which its blocks tile it; a layout, for a parameter
            whose blocks are known; or a function of the headers and the number of the tensor.
        work: the workers that compute.
        configure: how the operation follows from further integers of the headers. Without it, the operation is ``op``.
        names: names of the tensors, for errors.
    """

    op: Op
    places: tuple[Place, ...]
    work: Partition
    configure: Callable[[Any, Headers], Op] | None = None
    names: tuple[str, ...] = ("x", "weight", "bias")

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def read(self) -> Sequence[Partition]:
        found = [place if isinstance(place, Partition) else getattr(place, "partition", None) for place in self.places]
        return () if None in found else [partition for partition in found if partition is not None]

    @property
    def identity(self) -> object:
        return (self.op, self.work.workers.shape)

    def __call__(self, headers: Headers, label: Label) -> Setup:
        op = self.op if self.configure is None else self.configure(self.op, headers)
        return op.setup(Site._make((self.work, headers.members, label)), *self._signatures(headers, label))

    def _signatures(self, headers: Headers, label: Label) -> Iterator[Signature]:
        for number, place in enumerate(self.places[: headers.tensors]):  # the bias, which is last, may be missing
            if isinstance(place, Layout):
                yield stored(headers, place, number, label, (*self.names, "a parameter")[min(number, len(self.names))])
            elif isinstance(place, Partition):
                yield tiled(headers, place, number, label)
            else:
                yield place(headers, number)


def tiled(headers: Headers, P: Partition, number: int, label: Label) -> Signature:
    """The signature of a tensor whose blocks tile it over a partition, one axis for each dim.

    Raises: ValueError if they form no grid, or differ in rank or dtype.
    """
    layout = Layout.tiled(P, headers.shapes(P, label.kind, P.workers.ndim, number))
    dtype = headers.dtype(P, label.kind, number)
    return known(Signature, layout, dtype, headers.derivatives[number], headers.own[number])


def stored(headers: Headers, layout: Layout, number: int, label: Label, name: str = "a parameter") -> Signature:
    """The signature of a parameter.

    Raises: ValueError if the block of some worker is not what the layout says, or dtypes differ.
    """
    headers.check_blocks(layout, f"{label}: {name}", number)
    dtype = headers.dtype(layout.partition, label.kind, number)
    return known(Signature, layout, dtype, headers.derivatives[number], headers.own[number])


class Layer(Module):
    """A module whose workers first agree on their tensors. Then each makes three steps: move in, compute, move out.

    A layer's forward is::

        setup = self.agree(x, self.weight)           # the same setup, or the same error, on every member
        return setup(x, self.weight)                 # the three steps

    A layer holds an operation, its parameters and where these live, and adds only a ``forward``. Families of layers
    have a base class in common; what is computed is up to the operation alone.

    Args:
        name: for people to read: the class, its partitions and main options.
        everyone: all workers that take part. The others return a clone of their input, connected to their parameters.
        derive: how the setup follows from what the members report.
        options: what distinguishes this layer from others with its name; equal on all members.
        along: partitions along whose axes shapes may change. (Headers of many workers are gathered along them.)
        alone: what a worker outside returns, from the tensors that it passed.
    Attributes:
        label: the name, and the layer's path in its model once the model has named it (see ``distdl.name_layers``).
    """

    @checks_arguments
    def __init__(
        self,
        name: str,
        everyone: Partition,
        derive: Derivation,
        options: object = (),
        along: Sequence[Partition] = (),
        alone: Callable[..., Any] = outside,
    ) -> None:
        super().__init__()
        self.label = Label(name, everyone.comm.calls(tuple(everyone.workers.ravel().tolist())).built())
        self._derive = derive
        self._member = everyone.comm.rank in everyone
        self._gives_copies = getattr(derive, "copies", False) and everyone.comm.size > 1
        self._agreement: Agreement[Setup] = Agreement.among(
            everyone, self.label, (options, derive.identity), self._set_up, along, derive.read
        )
        self._alone = Setup(Together(), alone, same)

    def agree(self, *tensors: Any, extra: tuple[int, ...] = ()) -> Setup:
        """Agree with the other members on this call's tensors. Every member calls it, in the same order.

        Args:
            tensors: this worker's tensors, at most four, as many on each member.
            extra: more integers for the header, the same number on each member.
        Returns: the setup. On a worker outside, it makes a clone of the first tensor.
        Raises: the same error on every member.
        """
        if not self._member:
            return self._alone
        return self._agreement.reach(tensors, extra)

    def forward(self, x: torch.Tensor) -> Any:
        setup = self.agree(x)
        return setup(x)

    def _set_up(self, headers: Headers) -> Setup:
        setup = self._derive(headers, self.label)
        if not isinstance(setup, Setup):
            raise TypeError(f"{self.label} needs a distdl.ops.Setup of its op; got {setup!r}")
        return setup


def given(*tensors: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The tensors that are not None."""
    return tuple(tensor for tensor in tensors if tensor is not None)


# for authors: the function itself, which distdl calls, checks no arguments
blank_shape = checks_arguments(steps.blank_shape)
