r"""Parameters of which every worker stores its share: they come together just before a module uses them.

A parameter is a global tensor that is split over all workers. The forward of the module that owns it gathers it,

.. math:: w_t = w, \qquad \partial w[\text{box of } s] = \sum_t \partial w_t[\text{box of } s]

and after the module's forward the whole is gone again. What autograd would keep of it for backward is not kept: the
weights are gathered once more when the gradient of the module's result is there, and go when theirs has been given to
the shares (the adjoint of gathering: a reduce-scatter). So between steps a worker has its shares. At the peak it has,
beside them, the weights of the modules whose forward runs, one inside another (most often one module has weights of its
own), twice while the message is unpacked, or in backward those of one module and their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch

from distdl.exchange import Operator
from distdl.geometry.boxes import Shape, balanced, shape, slices
from distdl.globals.context import Context, KnownLayout
from distdl.globals.entry import full_tensor
from distdl.globals.models.copies import Parameters
from distdl.globals.replicas import Replica, map_tensors
from distdl.globals.tensor import GlobalTensor
from distdl.nn.module import Module
from distdl.partition import Partition
from distdl.tensors.derivatives import NONE, saved_tensors_hooks
from distdl.tensors.function import Function


class Shares:
    """Every worker has a share of every parameter."""

    def __init__(self, module: torch.nn.Module, P: Partition) -> None:
        self._settle(module, P)
        split_parameters(module, self._context)
        for child in module.modules():
            child.register_forward_pre_hook(_Begin(self))
            child.register_forward_hook(_End(self), always_call=True)
            child.register_state_dict_post_hook(_whole_state)

    def _settle(self, module: torch.nn.Module, P: Partition) -> None:
        self.module, self.P = module, P
        self.running = 0
        self.keep = _Keep()
        self._frames: list[_Frame] = []
        self._hooks: Any = None

    @property
    def _context(self) -> Context:
        return Context.of(self.P.comm)

    def __deepcopy__(self, memo: dict[int, Any]) -> Shares:
        """Those of a copied model. A part of the model that is copied by itself keeps these."""
        if id(self.module) not in memo:
            return self
        made = memo[id(self)] = Shares.__new__(Shares)
        made._settle(deepcopy(self.module, memo), self.P)
        return made

    def begin(self) -> None:
        # (inside of hooks of others, as in a checkpoint of the whole model, it is up to them what is kept)
        if torch.is_grad_enabled() and saved_tensors_hooks() is None:
            self._hooks = torch.autograd.graph.saved_tensors_hooks(self.keep, _restore)
            self._hooks.__enter__()
            if self._frames:  # that of the model itself, which began before
                self._frames[-1].hooks = self.keep

    def end(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__()
            self._hooks = None

    def begin_module(self, module: torch.nn.Module) -> None:
        self._frames.append(_Frame(module, _hooks_now()))

    def end_module(self, module: torch.nn.Module, result: Any) -> None:
        if self._frames and self._frames[-1].module is module:
            frame = self._frames.pop()
            if frame.gathered:
                _gather_before(result, frame.gathered)
            for one in frame.gathered:
                one.release()

    def of(self, owner: Parameters, parameter: torch.Tensor) -> torch.Tensor:
        if type(parameter) is not GlobalTensor:
            return parameter
        frame = self._frames[-1] if self._frames else None
        if frame is None or frame.hooks is not _hooks_now():
            # a checkpoint of a function, that runs or is recomputed: both gather each weight by itself
            return self._gather([parameter], None)[0]
        if id(parameter) not in frame.copies:
            wanted = [parameter]
            if frame.module._parameters is owner:  # its own weights come together as one message
                alike = (parameter.dtype, parameter.device, parameter.requires_grad)
                listed = [one for one in owner.values() if type(one) is GlobalTensor]
                wanted = [one for one in listed if (one.dtype, one.device, one.requires_grad) == alike]
            for one, copy in zip(wanted, self._gather(wanted, frame), strict=True):
                frame.copies[id(one)] = copy
        return frame.copies[id(parameter)]

    def _gather(self, parameters: list[GlobalTensor], frame: _Frame | None) -> list[torch.Tensor]:
        gathered = Gathered(Gathering.of(parameters), parameters, self.keep)
        copies = gathered.copies()
        if frame is not None and frame.hooks is self.keep:
            gathered.hold(copies)
            frame.gathered.append(gathered)
        return [Replica._of(one, self._context) if one.requires_grad else one for one in copies]


class _Frame:
    """A module whose forward runs.

    Attributes:
        hooks: that keep what was saved for backward where it began.
        copies: what it has gathered, by the id of the parameter.
        gathered: those that autograd is not to keep.
    """

    def __init__(self, module: torch.nn.Module, hooks: Any) -> None:
        self.module, self.hooks = module, hooks
        self.copies: dict[int, torch.Tensor] = {}
        self.gathered: list[Gathered] = []


class _Begin:
    def __init__(self, shares: Shares) -> None:
        self.shares = shares

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        self.shares.begin_module(module)


class _End:
    def __init__(self, shares: Shares) -> None:
        self.shares = shares

    def __call__(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        self.shares.end_module(module, result)


def _hooks_now() -> Any:
    hooks = saved_tensors_hooks()
    return None if hooks is None else hooks[0]


# -- where shares lie


def split_parameters(module: torch.nn.Module, context: Context) -> None:
    """Make every parameter of a module a global tensor that is split over all workers. Its names stay."""
    loads = dict.fromkeys(context.everyone, 0)  # cells that each worker has got
    made: dict[int, torch.nn.Parameter] = {}
    apart = {id(one) for child in module.modules() if isinstance(child, Module) for one in child.parameters()}
    for child in module.modules():
        for name, parameter in list(child._parameters.items()):
            if parameter is None or id(parameter) in apart:  # (those of distdl.nn live on some workers as it is)
                continue
            if id(parameter) not in made:
                layout = share_layout(context, tuple(parameter.shape), loads)
                whole = parameter.detach()
                block = whole[slices(layout.box)].clone() if layout.active else whole.new_zeros(layout.local)
                made[id(parameter)] = torch.nn.Parameter(GlobalTensor._of(block, layout), parameter.requires_grad)
                for worker in layout:
                    loads[worker] += prod(layout.shapes[worker])
            setattr(child, name, made[id(parameter)])  # (recurrent layers take note of it)


def share_layout(context: Context, extents: Shape, loads: dict[int, int]) -> KnownLayout:
    """The split of a parameter over all workers in which the largest block is smallest; along few dims, if it can be.

    Who has the least so far gets the largest block, so that what does not divide evenly does not always go to the same.
    """
    workers = sorted(context.everyone, key=lambda worker: (loads[worker], worker))
    if not extents:
        return context.whole((), workers[0])

    def cost(places: Shape) -> tuple[int, int, Shape]:
        largest = prod(-(-extent // n) for extent, n in zip(extents, places, strict=True))
        return largest, sum(n > 1 for n in places), tuple(-n for n in places)

    places = min(_grids(len(workers), len(extents)), key=cost)
    intervals = [balanced(extent, n) for extent, n in zip(extents, places, strict=True)]
    sizes = np.ones(places, dtype=np.int64)
    for dim, along in enumerate(intervals):
        lengths = np.array([stop - start for start, stop in along])
        sizes *= lengths.reshape([-1 if axis == dim else 1 for axis in range(len(places))])
    array = np.empty(sizes.size, dtype=np.int64)
    array[np.argsort(-sizes.ravel(), kind="stable")] = workers
    return context.layout(context.array(array.reshape(places)), intervals)


def _grids(count: int, dims: int) -> Iterator[Shape]:
    """All arrays of so many workers with so many axes."""
    if dims == 1:
        yield (count,)
        return
    for n in range(1, count + 1):
        if count % n == 0:
            for rest in _grids(count // n, dims - 1):
                yield (n, *rest)


# -- how they come together


class _Piece(NamedTuple):
    """What one worker has of one tensor, and where it stands in what all of them send."""

    tensor: int
    box: tuple[slice, ...]
    shape: Shape
    start: int
    stop: int


class Gathering:
    """How parameters come together on every worker, as one message.

    Behind a worker's shares stands one more number for each tensor: on the way back, how many workers have a gradient
    of it, so that one that nobody has stays none.
    """

    def __init__(self, layouts: Sequence[KnownLayout], dtype: torch.dtype) -> None:
        self.layouts, self.dtype = tuple(layouts), dtype
        context = layouts[0].context
        self._pieces: list[_Piece] = []
        self._counts: list[slice] = []  # for each worker, where those numbers stand
        intervals = []
        stop = 0
        for worker in context.everyone:
            first = stop
            for tensor, layout in enumerate(layouts):
                if worker in layout.partition:
                    box = layout[worker]
                    start, stop = stop, stop + prod(shape(box))
                    self._pieces.append(_Piece(tensor, slices(box), shape(box), start, stop))
            self._counts.append(slice(stop, stop + len(layouts)))
            stop += len(layouts)
            intervals.append((first, stop))
        self._own = context.layout(context.world, [intervals])
        self._whole = context.everywhere((stop,))
        self.context = context
        self._operator: Operator = context.moving(self._own, self._whole, dtype, NONE, "weights")

    @classmethod
    def of(cls, parameters: Sequence[GlobalTensor]) -> Gathering:
        layouts, dtype = tuple(one._layout for one in parameters), parameters[0].dtype
        return layouts[0].context.keep((cls, layouts, dtype), lambda: cls(layouts, dtype))

    def gather(self, blocks: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The whole tensors."""
        counts = blocks[0].new_zeros(len(blocks))
        found = self._operator.execute(torch.cat([*(block.reshape(-1) for block in blocks), counts]))
        wholes = tuple(found.new_empty(layout.extents) for layout in self.layouts)
        for tensor, box, extents, start, stop in self._pieces:
            wholes[tensor][box] = found[start:stop].reshape(extents)
        return wholes

    def scatter(self, parts: Sequence[torch.Tensor | None], device: torch.device) -> tuple[torch.Tensor | None, ...]:
        """This worker's shares of the sums over all workers; none where nobody has a part."""
        given = torch.tensor([part is not None for part in parts], dtype=self.dtype, device=device)
        flat = torch.zeros(self._whole.extents, dtype=self.dtype, device=device)
        for tensor, box, extents, start, stop in self._pieces:
            part = parts[tensor]
            if part is not None:
                flat[start:stop].view(extents).copy_(part[box])
        for counts in self._counts:
            flat[counts] = given
        own = self._operator.T.execute(flat)
        *shares, owners = own.split([*(prod(layout.local) for layout in self.layouts), len(parts)])
        return tuple(
            share.reshape(layout.local) if n else None
            for share, layout, n in zip(shares, self.layouts, owners.real.tolist(), strict=True)
        )


class Gathered:
    """Parameters that have come together, for as long as they are needed; they can come together again."""

    def __init__(self, gathering: Gathering, parameters: list[GlobalTensor], keep: _Keep) -> None:
        self.gathering, self._parameters, self._keep = gathering, parameters, keep
        self._versions = [one._block._version for one in parameters]
        self._wholes: tuple[torch.Tensor, ...] | None = None

    def copies(self) -> tuple[torch.Tensor, ...]:
        """The whole tensors, which depend on the shares."""
        copies: tuple[torch.Tensor, ...] = _Gather.apply(
            self.gathering, self, *(one._block for one in self._parameters)
        )
        return copies

    def hold(self, copies: Sequence[torch.Tensor]) -> None:
        """From here on, autograd does not keep these tensors, but this object."""
        self._wholes = tuple(one.detach() for one in copies)
        for place, one in enumerate(self._wholes):
            if one.numel():
                self._keep.held[one.untyped_storage().data_ptr()] = (self, place)

    def release(self) -> None:
        """Let the whole tensors go."""
        for one in self._wholes or ():
            self._keep.held.pop(one.untyped_storage().data_ptr(), None)
        self._wholes = None

    def wholes(self) -> tuple[torch.Tensor, ...]:
        """The whole tensors; they come together if they have gone.

        Raises: RuntimeError if parameters have been written since.
        """
        if self._wholes is None:
            if [one._block._version for one in self._parameters] != self._versions:
                raise RuntimeError(
                    "a weight that backward needs has been modified by an inplace operation since the forward; call "
                    "backward before optimizer.step()"
                )
            with torch.no_grad():
                self._wholes = self.gathering.gather([one._block for one in self._parameters])
        return self._wholes


class _Gather(Function):
    """From shares to the whole tensors on every worker."""

    @staticmethod
    def forward(
        ctx: Any, gathering: Gathering, gathered: Gathered | None, *blocks: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.gathering, ctx.gathered, ctx.device = gathering, gathered, blocks[0].device
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_NOTHING)  # so that checkpointing recomputes this node, on every worker alike
        return gathering.gather(blocks)

    @staticmethod
    def backward(ctx: Any, *parts: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        if torch.is_grad_enabled():
            return None, None, *_Scatter.apply(ctx.gathering, ctx.device, *parts)
        if ctx.gathered is not None:
            ctx.gathered.release()
        return None, None, *ctx.gathering.scatter(parts, ctx.device)


class _Scatter(Function):
    """The adjoint: from each worker's part of a gradient to shares of the sum."""

    @staticmethod
    def forward(
        ctx: Any, gathering: Gathering, device: torch.device, *parts: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.gathering, ctx.device, ctx.given = gathering, device, [part is not None for part in parts]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(_NOTHING)
        return tuple(None if one is None else one.clone() for one in gathering.scatter(parts, device))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        _ = ctx.saved_tensors
        gathering: Gathering = ctx.gathering
        blocks = [
            torch.zeros(layout.local, dtype=gathering.dtype, device=ctx.device) if one is None else one
            for one, layout in zip(cotangents, gathering.layouts, strict=True)
        ]
        found = _Gather.apply(gathering, None, *blocks)
        return None, None, *(one if given else None for one, given in zip(found, ctx.given, strict=True))


_NOTHING = torch.empty(0)


# -- what autograd keeps


class _Again(NamedTuple):
    """What is kept in the place of a tensor that lies in the memory of a gathered weight."""

    gathered: Gathered
    place: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int


class _Kept(NamedTuple):
    """A tensor that is kept, and how often it had been written by then: torch compares that only where it keeps."""

    tensor: torch.Tensor
    version: int


class _Keep:
    """What is kept of a tensor that autograd saves: of a gathered weight, only where to gather it again."""

    keeps_tensors = True

    def __init__(self) -> None:
        self.held: dict[int, tuple[Gathered, int]] = {}  # by the address of the memory

    def __call__(self, x: torch.Tensor) -> Any:
        if type(x) is GlobalTensor or x.layout is not torch.strided:
            return x
        found = self.held.get(x.untyped_storage().data_ptr()) if self.held else None
        if found is not None and x.dtype is found[0].gathering.dtype and not (x.is_conj() or x.is_neg()):
            return _Again(*found, x.size(), x.stride(), int(x.storage_offset()))
        return _Kept(x.detach(), x._version)


def _restore(kept: Any) -> torch.Tensor:
    if isinstance(kept, _Again):
        return kept.gathered.wholes()[kept.place].as_strided(kept.shape, kept.strides, kept.offset)
    if isinstance(kept, _Kept):
        if kept.tensor._version != kept.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor of shape {list(kept.tensor.shape)} is at version {kept.tensor._version}; expected version "
                f"{kept.version}"
            )
        return kept.tensor
    found: torch.Tensor = kept
    return found


def _gather_before(result: Any, gathered: list[Gathered]) -> None:
    """Gather weights again as soon as the gradient of a module's result is there: at the same point on every worker."""

    def gather(gradients: Any) -> None:
        for one in gathered:
            one.wholes()

    nodes: set[Any] = set()

    def note(one: torch.Tensor) -> None:
        block = one._block if type(one) is GlobalTensor else one._plain if type(one) is Replica else one
        if block.grad_fn is not None and block.grad_fn not in nodes:
            nodes.add(block.grad_fn)
            block.grad_fn.register_prehook(gather)

    map_tensors(result, note)


# -- what is saved, and copied


def _whole_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """In a state_dict stand whole tensors, as in that of the model on one worker."""
    for name in module._parameters:
        value = state.get(prefix + name)
        if type(value) is GlobalTensor:
            state[prefix + name] = full_tensor(GlobalTensor._of(value._block.detach(), value._layout))
