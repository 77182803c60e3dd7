"""What a function has captured that torch calls for each element: weights, tables, tensors that are split.

Such a function (a ``score_mod`` of attention) runs inside of ``vmap``, on the elements of this worker's block, and may
read any cell of what it has captured. So each captured tensor comes whole to every worker, once, where the function
first uses it, and its gradient is the sum over all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch._functorch import apis
from torch._functorch import vmap as vmapping
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from distdl.globals.extras.mapping import torchs_flat_vmap
from distdl.globals.extras.transforms import leads_beyond
from distdl.globals.layouts.context import Context, other_world
from distdl.globals.moving.alignment import moved_block
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import composite, name_of
from distdl.globals.views.writes import memory_of, watched
from distdl.nn.module import COPIES
from distdl.tensors.function import TransformError
from distdl.tensors.levels import beneath, is_batched, mapping
from distdl.tensors.memory import without_memory

# (ours would take one element after another where a function cannot be mapped: of each block, as many as it has)
_vmap = composite(apis.vmap, vmap_impl=composite(vmapping.vmap_impl, _flat_vmap=torchs_flat_vmap))
# (places of samples, heads, queries and keys; as in torch's own, the last of them is mapped first)
_PLACES = (None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)


class Captured(TorchFunctionMode):
    """In which functions of torch get plain tensors in the place of captured ones.

    Args:
        name: of what the function is given to, for errors.
        context: that of the inputs; None if they are in no world.
        curved: whether captured tensors have gradients.
        imagined: whether the elements have no memory, as in a rehearsal: then nothing captured has, either.
    """

    def __init__(self, name: str, context: Context | None = None, curved: bool = False, imagined: bool = False) -> None:
        self._name, self._context, self._curved, self._imagined = name, context, curved, imagined
        self._grads = curved and torch.is_grad_enabled()  # (the function may use some without them first)
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the captured tensor, so that it stays
        self._made: dict[int, torch.Tensor] = {}  # what the function has computed itself, of captured ones alone
        self._memories: set[int] = set()  # where the plain tensors lie

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, named = map_tensors((args, kwargs or {}), self._own)
        called = _item if func is torch.Tensor.__getitem__ else func
        y, is_written = watched(called, given, named, self._memories)
        if is_written:
            raise RuntimeError(
                f"{self._name} of global tensors needs functions of elements that write into no captured tensor that "
                f"is split, is a weight or has a gradient; here {name_of(func)} does. Write in front of it"
            )
        for one in tensors_in(y):
            if one.requires_grad and not is_batched(one):
                self._made[id(one)] = one
        return y

    def _own(self, x: torch.Tensor) -> torch.Tensor:
        found = self._known.get(id(x))
        if found is not None:
            return found[1]
        if isinstance(x, (GlobalTensor, Replica)):
            split = True
            self._check_world(x._context)
        else:
            if is_batched(x):
                return x
            split = self._curved and x.requires_grad and torch.is_grad_enabled() and id(x) not in self._made
        own = self._entered(x) if split else x
        if self._imagined and not own.is_meta:
            own = without_memory(own)
        if split or own is not x:
            self._known[id(x)] = x, own
            self._memories.add(memory_of(own))
        return own

    def _check_world(self, other: Context) -> None:
        """Raises: ValueError for another world than that of the inputs."""
        own = self._context
        if own is not None and other is not own and not own.comm.imagined:
            raise other_world(self._name, own, other)

    def _entered(self, x: torch.Tensor) -> torch.Tensor:
        # (messages are sent outside of vmap, and by code that takes no scalar for an index)
        with torch._C.DisableTorchFunction(), beneath(), torch.set_grad_enabled(self._grads):
            if type(x) is Replica:
                return plain_of(x)
            if type(x) is not GlobalTensor:
                assert self._context is not None  # (as for all that has gradients)
                return entered(x, self._context)
            layout, block = x._layout, block_of(x)
            owned = layout if layout.rulers else layout.lifted(1)
            everywhere = layout.context.everywhere(layout.extents or (1,))
            block = (block if self._curved else block.detach()).reshape(owned.local)
            own = moved_block(block, owned, everywhere, self._name).view(layout.extents)
            node: Any = own.grad_fn
            if node is not None:  # (what the function keeps of it for another call must not enter there)
                node.metadata[COPIES] = True
            return own

    def check(self, y: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Check that what has been computed follows from inputs and from captured tensors that have come here.

        Raises: RuntimeError, on every worker, if it follows from others: their gradients would not be added up.
        """
        ends = [*inputs, *(own for _, own in self._known.values())]
        if y.requires_grad and leads_beyond(y, ends=[one for one in ends if one.requires_grad]):
            raise RuntimeError(
                f"{self._name} of global tensors needs functions of scores that use captured tensors where we see it; "
                "here one was used unseen (as inside of torch._C.DisableTorchFunction), and its gradient would not be "
                "added up over the workers"
            )


def _item(x: torch.Tensor, index: Any) -> torch.Tensor:
    """x[index], without a look at the values of scalars, which differ from element to element."""
    each = tree_leaves(index)
    if not each or not all(isinstance(one, (torch.Tensor, int)) for one in each):
        return x[index]
    y: torch.Tensor = torch.ops.aten.index(
        x, [torch.tensor(one, dtype=torch.int64, device=x.device) if isinstance(one, int) else one for one in each]
    )
    return y


def mapped(function: Callable[..., Any], captured: Captured, prefix: tuple[int, ...] = ()) -> Callable[..., Any]:
    """A function of all elements, of what stands in front of their places and of these; given that of one element.

    Args:
        prefix: as torch has it: (0,) for scores in front of the places.
    """

    @wraps(function)
    def run(*args: Any) -> Any:
        with captured, mapping():
            return function(*args)

    def of_all(*args: Any) -> Any:
        of_some = run
        for dims in _PLACES:
            of_some = _vmap(of_some, in_dims=prefix + dims)
        try:
            return of_some(*args)
        except TransformError:
            raise RuntimeError(_REFUSED) from None

    return of_all


_REFUSED = (
    "flex_attention and create_mask need functions of elements that use what is split over workers by functions of "
    "torch, from tensors or modules that they have captured; here one sends messages for each element, as "
    "x.full_tensor() or a layer of distdl.nn does. Call that in front of it"
)


class _Found(Exception):
    """A tensor that is split, or follows from weights."""


class _Finding(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(type(one) in (GlobalTensor, Replica) for one in tensors_in((args, kwargs or {}))):
            raise _Found
        return func(*args, **(kwargs or {}))


def captures_split(function: Callable[..., Any], *element: torch.Tensor) -> bool:
    """Whether a function uses captured tensors that are split, or weights of a distributed model, for an element."""
    try:
        with _Finding():
            function(*element)
    except _Found:
        return True
    except Exception:  # (which comes again where all elements are computed)
        return False
    return False
