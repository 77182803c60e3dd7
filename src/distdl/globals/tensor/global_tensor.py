"""GlobalTensor: a tensor of the whole shape, of which each worker holds a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, Protocol

import torch

from distdl.globals.layouts.context import Context, KnownLayout, other_world, worlds
from distdl.globals.tensor import debug
from distdl.globals.tensor.block import WHOLE, Block, as_block, check_unmixed, unblocked
from distdl.globals.tensor.ddp_and_fsdp import check_unwrapped
from distdl.globals.tensor.failed import depends_on_values, meet_in
from distdl.globals.tensor.provenance import note_local
from distdl.globals.tensor.replicas import Replica, complex_part, without_gradients
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import METHODS, TABLE, check_is_tensor, name_of
from distdl.nn.compiling import leave_uncompiled
from distdl.partition import Layout
from distdl.partition.arguments import Split
from distdl.tensors.connection import is_ordinary_view, replayed
from distdl.tensors.derivatives import recorded
from distdl.tensors.function import TransformError

_base: Any = torch._C.TensorBase  # (its attributes are computed; their types say what they give)
_has_no_memory: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
_NOWHERE = torch.device("meta")
NO_BLOCKS = (
    "of which no worker can have a block. Make it of x.full_tensor(); or in the place of a nested tensor, pad tensors "
    "to one length, stack them, and keep a mask"
)
_raw_node = _base.grad_fn.__get__
_raw_wants, _raw_requires = _base.requires_grad.__get__, _base.requires_grad.__set__


class Tie(Protocol):
    """What ties a global tensor to a plain one, whole on every worker, that is the same tensor in torch."""

    def holds(self) -> bool:
        """Whether there may still be anything to say."""

    def check(self, x: GlobalTensor) -> None:
        """Before x is used: bring what has been written into the other one, or raise RuntimeError."""


class GlobalTensor(torch.Tensor):
    """A tensor of a global shape that is split over a partition. Each worker has its block of it.

    Shape, size and dims are those of the whole tensor. Every torch function of a global tensor is a function of the
    whole tensor, and gives what torch would give on one worker. Every worker calls it, also those that hold no cell.
    The autograd graph is that of the blocks.

    Made by :func:`distdl.distribute_tensor` and :meth:`from_local`.

    Attributes:
        layout: which box of the tensor each worker holds. Each cell is held by exactly one worker; boxes may be empty.
    """

    # (of those of torch's methods that we call ourselves, torch says that they give some tensor)
    masked_fill: Callable[..., GlobalTensor]
    movedim: Callable[..., GlobalTensor]
    to: Callable[..., GlobalTensor]

    _layout: KnownLayout
    _block: torch.Tensor
    _context: Context
    _views_of: tuple[Any, ...]  # what it is a view of, what that is a view of, and so on: weak references
    _strides: tuple[int, ...]  # those of the whole tensor in torch, if it is not contiguous there
    _offset: int  # how many elements lie before it in that memory, if any
    _ties: list[Tie]
    _wants: bool  # whether it says that it requires a gradient
    _memory: Any  # what it has in common with its views: ties.Memory

    def __new__(cls, *args: Any, **options: Any) -> GlobalTensor:
        raise TypeError(
            "a global tensor is made by distdl.distribute_tensor(x, P) or GlobalTensor.from_local(block, P)"
        )

    @staticmethod
    def _of(block: torch.Tensor, layout: KnownLayout, above: torch.Tensor | None = None) -> GlobalTensor:
        """The global tensor of which this worker has this block; that may be a view of a block that is above."""
        # (on "meta", so that torch refuses it as the .data of a plain tensor, reading which would end the process)
        wants = block.requires_grad
        made: GlobalTensor = torch.Tensor._make_wrapper_subclass(
            GlobalTensor, layout.size, dtype=block.dtype, device=_NOWHERE, requires_grad=wants, dispatch_device=True
        )
        _has_no_memory(made)  # (C++ code that asks for its address gets an error, and not nothing to read from)
        made._block = replayed(block, above) if layout.empty else block
        made._layout = layout
        made._context = layout.context
        made._wants = wants
        return made

    # -- what torch calls

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch._C._are_functorch_transforms_active():  # (what is set up now, and kept, would be wrapped)
            raise TransformError
        if Block in types:
            check_unmixed(name_of(func), types)
            args, kwargs = map_tensors((args, kwargs or {}), unblocked)
        if Replica in types:
            args, kwargs = without_gradients(args, kwargs or {})
        if worlds.count > 1 and func not in _DIFFERENTIATING and not _is_of_lists(func):
            check_one_world(name_of(func), (args, kwargs))
        handler = TABLE.get(func)
        if handler is None:
            handler = TABLE[None]  # the fallback
        if kwargs and "out" in kwargs:
            if kwargs["out"] is not None:
                handler = TABLE["out"]
            else:
                kwargs = {name: value for name, value in kwargs.items() if name != "out"}
        if kwargs and ("axis" in kwargs or "keepdims" in kwargs) and isinstance(func, _COMPILED) and func in TABLE:
            kwargs = {_NUMPY.get(name, name): value for name, value in kwargs.items()}
        if kwargs and not args and "input" in kwargs and isinstance(func, _COMPILED) and func not in _INPUT_LATER:
            args, kwargs = (kwargs["input"],), {name: value for name, value in kwargs.items() if name != "input"}
        around, _handled.func = _handled.func, func
        try:
            y = debug.noted(handler, func, args, kwargs or {}) if debug.on else handler(func, args, kwargs or {})
            if not torch.is_grad_enabled():
                _settle_view(y)
            return y
        except AttributeError as error:
            check_is_tensor(error.obj, func, args, kwargs or {})
            raise
        except RuntimeError as error:
            if depends_on_values(error):
                one: Any = next(one for one in tensors_in((args, kwargs)) if type(one) in (GlobalTensor, Replica))
                meet_in(error, f"a call of {name_of(func)}", one._context)
            raise
        finally:
            _handled.func = around

    @classmethod  # (torch's stubs have the default, a function of C)
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:  # C++ code groups tensors by their devices
            return args[0]._block.device
        if func is torch.ops.aten.detach.default:  # autograd hands out what it has saved for a checkpoint
            return cls._of(args[0]._block.detach(), args[0]._layout)
        if func in _COPIES:  # as torch.as_tensor does
            with recorded():
                return cls._of(func(args[0]._block, *args[1:], **(kwargs or {})), args[0]._layout)
        if func is torch.ops.aten.set_.source_Tensor and type(args[0]) is cls:  # as parametrisations do
            return TABLE[func](func, args, kwargs or {})
        if (
            func is torch.ops.aten._local_scalar_dense.default
        ):  # a number is asked for, as by torch.full((2, 3), x.max())
            return _number(args[0])
        if func is torch.ops.aten.copy_.default and type(args[0]) is not GlobalTensor:
            raise RuntimeError(
                "a global tensor would be written into a plain tensor, which is the same on every worker, where nobody "
                "asks us (as plain.real = x does); make what is written global first"
            )
        if func is torch.ops.aten._nested_tensor_from_tensor_list.default:
            raise TypeError(f"nested_tensor of a global tensor: its result is a nested tensor, {NO_BLOCKS}")
        check_unwrapped()
        raise TransformError(
            f"{func} has reached a global tensor without passing through its table of functions (as scripted "
            "functions, C++ code, and transforms of torch.func do); a block would be taken for the whole tensor. Call "
            "it on x.to_local() or x.full_tensor(), or through distdl.local_map"
        )

    # -- what is known without a message (torch's stubs let all of it be written)

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
        if is_leaf(self):  # (so is a view made without gradients, which requires one as its base does)
            check_usable(self)
        return self._block.requires_grad

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
        check_usable(self)
        note_local(self._block)
        return as_block(self._block)

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
        """What a module of ``distdl.nn`` does with arguments of which one is global."""
        return METHODS["call_module"](module, call, args, kwargs)

    def as_subclass(self, cls: Any) -> Any:
        """Itself as a ``torch.Tensor``: libraries shed the class of their own so.

        Raises: TypeError for another class.
        """
        if cls in (torch.Tensor, GlobalTensor):
            return self
        raise TypeError(
            f"a global tensor cannot be a {cls.__name__}, whose functions would take a block for the whole tensor; "
            "give that class x.to_local() or x.full_tensor()"
        )

    def __copy__(self) -> GlobalTensor:
        check_usable(self)
        view: GlobalTensor = METHODS["whole_view"](self, self._block.detach().requires_grad_(self._block.requires_grad))
        return view

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a global tensor cannot be pickled; pickle x.to_local() or x.full_tensor(), of a loss x.item(), of a model "
            "its state_dict(), and of an optimiser distdl.optimizer_state_dict(optimizer)"
        )


WHOLE[GlobalTensor] = "a global tensor"
leave_uncompiled(GlobalTensor.__dict__["__torch_function__"].__func__)

# torch.tensor(x); torch.asarray(x, copy=True); torch.Tensor(x)
_COPIES = frozenset([torch.ops.aten._to_copy.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default])


def _below(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator that a mode which sees each of them, as a selective checkpoint does, has got and calls itself."""
    return GlobalTensor.__torch_dispatch__(func, (GlobalTensor,), args, kwargs)


TABLE.update(dict.fromkeys((torch.ops.prim.device.default, torch.ops.aten.detach.default, *_COPIES), _below))

# (torch's own functions take these names of NumPy's, too)
_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_COMPILED = (BuiltinFunctionType, MethodDescriptorType)
# (of all others, it is the first argument)
_INPUT_LATER = frozenset([torch.where, torch.searchsorted, torch.polygamma, torch.special.polygamma])


class _Handled(threading.local):
    """Which function of global tensors a worker is in.

    Attributes:
        func: the function; None outside of all.
    """

    func: Any = None


_handled = _Handled()
# (in which a checkpoint computes its forward again, on every worker)
_DIFFERENTIATING = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)


def _number(x: GlobalTensor) -> Any:
    """The value of a tensor without dims, which torch's own code takes for a number; it comes to every worker.

    Raises: TypeError where that is inside a function of global tensors, for not every worker may get as far as there.
    """
    func = _handled.func
    if func is not None and func not in _DIFFERENTIATING:
        name = getattr(func, "__name__", "a function")
        raise TypeError(f"{name} of a global tensor needs a number where it got another one; pass its .item()")
    return x.item()


GlobalTensor.__module__ = "torch"  # opt_einsum and others choose by the first name of the class's module


def note_requires(x: GlobalTensor) -> None:
    """Take note of whether the block of a global tensor requires a gradient, which may have changed in place."""
    wants = x._block.requires_grad
    if wants is x._wants or (wants and not (x._block.is_floating_point() or x._block.is_complex())):
        return  # (``number.lt_(x)`` has a graph, which torch lets no leaf say)
    x._wants = wants
    with torch._C.DisableTorchFunctionSubclass():
        _raw_requires(x, wants)  # for check_usable


def _settle_view(y: Any) -> None:
    """Let what a function has given without gradients be no view, if in torch it is none: it may be written later."""
    if type(y) is GlobalTensor:
        # (of a view that was made without gradients, torch refuses that, but only the workers would whose block is one)
        if y._block._is_view() and not is_ordinary_view(y._block):
            if "_views_of" not in y.__dict__:
                y._block = y._block.detach()
            elif "_memory" in y.__dict__:
                y._memory.has_plain_views = True
    elif isinstance(y, (tuple, list)):  # (also with names, as of max)
        for one in y:
            _settle_view(one)


def is_leaf(x: GlobalTensor) -> bool:
    """Whether the block of a global tensor is a leaf; it counts as one where nothing is recorded.

    (There, torch asks nobody, and would raise for a view of what requires a gradient once it has been written.)
    """
    return not torch.is_grad_enabled() or x._block.is_leaf


def _is_of_lists(func: Any) -> bool:
    """Whether a function does the same to each tensor of a list, as those of optimisers do."""
    name = getattr(func, "__name__", "")
    return "_foreach_" in name or "_fused_" in name


def check_one_world(name: str, values: Any) -> None:
    """Check that what stands in one function is of one world: the same numbers are other workers in another.

    Raises: ValueError if it is not.
    """
    given = [one for one in tensors_in(values) if type(one) in (GlobalTensor, Replica)]
    found: dict[Context, None] = dict.fromkeys(one._context for one in given)  # type: ignore[attr-defined]  # (both have it)
    if len(found) > 1:
        raise other_world(name, *found)


def check_usable(x: GlobalTensor) -> None:
    """Check that a global tensor is what its block says.

    Raises: RuntimeError if it came out of an autograd function that knows nothing of blocks, or if it was written
        through another name.
    """
    with torch._C.DisableTorchFunctionSubclass():
        node, wants = _raw_node(x), _raw_wants(x)
    if node is None and wants and not x._block.requires_grad:
        if "_views_of" in x.__dict__:  # (a view made without gradients requires one as long as its base does)
            note_requires(x)
        else:  # one that autograd has saved, and handed out again
            x._block = x._block.detach().requires_grad_()
    if node is not None:
        name = type(node).__name__.removesuffix("Backward")
        raise RuntimeError(
            f"the autograd function {name} was applied to a global tensor by a reference to {name}.apply that is older "
            "than the import of distdl; it computes on the whole tensor, but its gradient would be lost. Import distdl "
            "before the module that takes this reference"
        )
    for tie in x.__dict__.get("_ties", ()):
        tie.check(x)
    memory = x.__dict__.get("_memory")
    if memory is not None and memory.family is not None:
        memory.check(x)
