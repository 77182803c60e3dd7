"""GlobalTensor: a tensor of the whole shape, of which each worker holds a block."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.tensor.table import METHODS
from distdl.partition import Layout
from distdl.partition.arguments import Split
from distdl.tensors.connection import replayed
from distdl.tensors.private_torch import TensorBase, make_wrapper_subclass, throw_on_mutable_data_ptr

_NOWHERE = torch.device("meta")


def complex_part(name: str) -> Any:
    """The attribute ``real`` or ``imag``: torch's, with a setter that writes by indexing.

    Torch's own setter asks no subclass of tensors. For a replica, it would read the node of the tensor that it is just
    writing, and wait for itself.
    """
    get: Callable[[Any], torch.Tensor] = getattr(TensorBase, name).__get__

    def set_part(x: Any, value: Any) -> None:
        get(x)[...] = value

    return property(lambda x: get(x), set_part)


class Tie(Protocol):
    """What ties a global tensor to a plain tensor, whole on every worker, that would be the same tensor in torch."""

    def holds(self) -> bool:
        """Whether the tie is still needed: the plain tensor may be written yet, or an error waits to be raised."""

    def check(self, x: GlobalTensor) -> None:
        """Bring to x what was written into the plain tensor. Called before x is used.

        Raises: RuntimeError if both were written.
        """


class GlobalTensor(torch.Tensor):
    """A tensor of a global shape that is split over a partition. Each worker has its block of it.

    Shape, size and dims are those of the whole tensor. Every torch function of a global tensor is a function of the
    whole tensor, and gives what torch would give on one worker. Every worker calls it, also those that hold no cell.
    The autograd graph is that of the blocks.

    Made by :func:`distdl.distribute_tensor` and :meth:`from_local`.

    Attributes:
        layout: which box of the tensor each worker holds. Each cell is held by exactly one worker; boxes may be empty.
    """

    # torch's stubs say of these methods that they give any tensor
    masked_fill: Callable[..., GlobalTensor]
    movedim: Callable[..., GlobalTensor]
    to: Callable[..., GlobalTensor]

    # which box of the tensor each worker holds
    _layout: KnownLayout
    # what all global tensors of its world share: layout.context, which is read in each function
    _context: Context
    # this worker's block: a plain tensor, which carries the autograd graph
    _block: torch.Tensor
    # the strides that the whole tensor would have in torch; () means contiguous
    _strides: tuple[int, ...] = ()
    # how many elements would lie before it in that memory
    _offset: int = 0
    # of a view: weak references to the tensor that it was taken from, to what that was taken from, and so on
    _views_of: tuple[weakref.ref[GlobalTensor], ...] = ()
    # a views.aliasing.Memory, the same object for all its views; copies that stand for views have others of its family
    _memory: Any = None
    # plain tensors, whole on every worker, that would be the same tensor in torch
    _ties: Sequence[Tie] = ()
    # how often it was given other data (p.data = ...), of which torch takes no note
    _given: int = 0
    # whether it is the .grad of a global tensor
    _is_gradient: bool = False
    # whether it is a parameter: torch asks a tensor of a subclass for this name
    _is_param: bool = False

    def __new__(cls, *args: Any, **options: Any) -> GlobalTensor:
        raise TypeError(
            "a global tensor is made by distdl.distribute_tensor(x, P) or GlobalTensor.from_local(block, P)"
        )

    @staticmethod
    def _of(block: torch.Tensor, layout: KnownLayout, above: torch.Tensor | None = None) -> GlobalTensor:
        """Make the global tensor of this worker's block. Sends no message.

        Args:
            above: if the block is a view, the block that it was taken from. So a view without cells stays connected to
                it in the graph, also once one of the two is written in place.
        """
        # on "meta", so that torch refuses ``plain.data = made``: to read a plain tensor with it would end the process
        made: GlobalTensor = make_wrapper_subclass(
            GlobalTensor,
            layout.size,
            dtype=block.dtype,
            device=_NOWHERE,
            requires_grad=block.requires_grad,
            dispatch_device=True,
        )
        throw_on_mutable_data_ptr(made)  # so C++ code that asks for its address gets an error, not a null pointer
        made._block = replayed(block, above) if layout.empty else block
        made._layout = layout
        made._context = layout.context
        return made

    # -- what is known without a message; torch's stubs let all of it be written

    @property
    def layout(self) -> KnownLayout:  # type: ignore[override]
        return self._layout

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._layout.size

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._layout.rulers)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self._block.dtype

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._block.device

    real, imag = complex_part("real"), complex_part("imag")

    @property
    def requires_grad(self) -> bool:
        required: bool = METHODS["requires_grad"](self)
        return required

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def dim(self) -> int:
        return len(self._layout.rulers)

    def size(self, dim: int | None = None) -> Any:
        return self._layout.size if dim is None else self._layout.size[dim]

    def numel(self) -> int:
        return self._layout.size.numel()

    def __len__(self) -> int:
        if not self._layout.rulers:
            raise TypeError("len() of a 0-d tensor")
        return self._layout.size[0]

    def is_floating_point(self) -> bool:
        return self._block.is_floating_point()

    def is_complex(self) -> bool:
        return self._block.is_complex()

    @property
    def names(self) -> Any:
        raise AttributeError(
            "dims have no names: torch 2.13 has no named tensors. Say dims by their numbers; x.layout tells how each "
            "is split"
        )

    # -- between blocks and whole tensors

    @staticmethod
    def from_local(block: torch.Tensor, P: Split, axes: Sequence[int | None] | None = None) -> GlobalTensor:
        """The global tensor whose blocks are given, one on each worker of ``P``. Collective; the workers agree once.

        Args:
            block: this worker's block, in as many dims as ``P`` has axes, or more (which are not split). Blocks may
                differ in size, as long as they form a grid. What a worker outside ``P`` passes is not read.
            P: a partition; or the shape of one, as ``(1, 1, 2, 2)`` for ``distdl.world().reshape(1, 1, 2, 2)``.
            axes: for each dim of the block, the axis of ``P`` along which the tensor is split; None for a dim that is
                not split. Along the axes that are not named, only the workers at place 0 hold cells.
        Returns: the tensor; differentiable with respect to the block.
        Raises: ValueError, the same on every worker, if blocks form no grid or differ in dtype, rank or kind of device.
        """
        made: GlobalTensor = METHODS["from_local"](block, P, axes)
        return made

    def to_local(self) -> torch.Tensor:
        """This worker's block, a plain tensor; without cells on a worker that has none. Differentiable.

        Inside of a distributed forward it is an error beside a weight or a global tensor: :func:`distdl.local_map` runs
        a function of both.
        """
        block: torch.Tensor = METHODS["to_local"](self)
        return block

    def full_tensor(self, on: int | None = None) -> torch.Tensor:
        """The whole tensor, as a plain tensor. Collective; differentiable.

        Args:
            on: the worker that gets it; the others get a tensor without cells. If not given, every worker gets it, and
                what follows is taken to be the same on every worker: gradients are not added up over workers.
        """
        whole: torch.Tensor = METHODS["full_tensor"](self, on)
        return whole

    def redistribute(self, to: Split | Layout, axes: Sequence[int | None] | None = None) -> GlobalTensor:
        """The same tensor, split over another partition as evenly as possible, or in a given layout. Differentiable.

        Args:
            to: a partition, the shape of one of all workers of the tensor's world, or a layout.
            axes: for each dim, the axis of the partition along which it is split (see
                :func:`distdl.distribute_tensor`).
        """
        moved: GlobalTensor = METHODS["redistribute"](self, to, axes)
        return moved

    @staticmethod
    def _call_module(module: Any, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a module of ``distdl.nn`` gives for arguments of which one is global."""
        return METHODS["call_module"](module, call, args, kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """The tensor itself, if cls is ``torch.Tensor``: libraries call this to be rid of a subclass of their own.

        Raises: TypeError for another class.
        """
        if cls in (torch.Tensor, GlobalTensor):
            return self
        raise TypeError(
            f"a global tensor cannot be a {cls.__name__}, whose functions would take a block for the whole tensor; "
            "give that class x.to_local() or x.full_tensor()"
        )

    def __copy__(self) -> GlobalTensor:
        copied: GlobalTensor = METHODS["copy"](self)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a global tensor cannot be pickled; pickle x.to_local() or x.full_tensor(), of a loss x.item(), of a model "
            "its state_dict(), and of an optimiser distdl.optimizer_state_dict(optimizer)"
        )


GlobalTensor.__module__ = "torch"  # opt_einsum and others choose by the first name of the class's module
