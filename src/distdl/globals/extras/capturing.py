"""Captured tensors of functions that torch calls for each element, as a ``score_mod`` of attention.

Such a function runs inside of ``vmap``, on the elements of this worker's block, and may read any cell of a weight, a
table or a global tensor that it has captured. So each captured tensor is gathered on every worker, once, where the
function first uses it, and its gradient is the sum over all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from distdl.globals.extras.mapping import torchs_flat_vmap
from distdl.globals.extras.transforms import leads_beyond
from distdl.globals.layouts.context import Context, other_world
from distdl.globals.moving.alignment import redistribute_block
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import composite, name_of
from distdl.globals.views.writes import call_watched, storage_of
from distdl.nn.module import COPIES
from distdl.tensors.function import TransformError
from distdl.tensors.levels import beneath, is_batched, mapping
from distdl.tensors.memory import without_memory
from distdl.tensors.private_torch import DisableTorchFunction
from distdl.tensors.private_transforms import tree_leaves, vmap_impl

# torch's vmap, as ours might call the function for one element after another, a different number on each worker
_torchs_vmap = composite(torch.vmap, vmap_impl=composite(vmap_impl, _flat_vmap=torchs_flat_vmap))
# the in_dims of places of samples, heads, queries and keys, of which the last is mapped first, as in torch
_PLACES = (None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None)


class Captured(TorchFunctionMode):
    """A mode in which torch's functions get gathered tensors in the place of captured ones.

    Args:
        name: of the function of torch, for errors.
        context: of the inputs; None if no input is global.
        trained: whether captured tensors get gradients.
        imagined: whether the elements are meta tensors, as in a rehearsal: then captured tensors become meta tensors.
    """

    def __init__(
        self, name: str, context: Context | None = None, trained: bool = False, imagined: bool = False
    ) -> None:
        self._name, self._context, self._trained, self._imagined = name, context, trained, imagined
        self._grads = trained and torch.is_grad_enabled()  # now, as the function may first use one without gradients
        # by the id of a captured tensor: itself, so that it stays alive, and the gathered tensor
        self._gathered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._computed: dict[int, torch.Tensor] = {}  # what the function has computed from captured tensors alone
        self._memories: set[int] = set()  # of the gathered tensors

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, named = map_tensors((args, kwargs or {}), self._replaced)
        called = _getitem if func is torch.Tensor.__getitem__ else func
        y, is_written = call_watched(called, given, named, self._memories)
        if is_written:
            raise RuntimeError(
                f"{self._name} of global tensors needs functions of elements that write into no captured tensor that "
                f"is split, is a weight or has a gradient; here {name_of(func)} does. Write in front of it"
            )
        for one in tensors_in(y):
            if one.requires_grad and not is_batched(one):
                self._computed[id(one)] = one
        return y

    def _replaced(self, x: torch.Tensor) -> torch.Tensor:
        """The gathered tensor for a captured one: global, a replica, or plain with a gradient. Others as they are.

        Raises: ValueError for a captured tensor of another world than the inputs.
        """
        found = self._gathered.get(id(x))
        if found is not None:
            return found[1]
        if isinstance(x, (GlobalTensor, Replica)):
            own, other = self._context, x._context
            if own is not None and other is not own and not own.comm.imagined:
                raise other_world(self._name, own, other)
            is_captured = True
        else:
            if is_batched(x):
                return x
            is_captured = self._trained and x.requires_grad and torch.is_grad_enabled() and id(x) not in self._computed
        plain = self._gather(x) if is_captured else x
        if self._imagined and not plain.is_meta:
            plain = without_memory(plain)
        if is_captured or plain is not x:
            self._gathered[id(x)] = x, plain
            self._memories.add(storage_of(plain))
        return plain

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """A captured tensor whole on this worker, with a gradient that adds up over all workers.

        It is made beneath the levels of vmap, as it may send messages, and without this mode.
        """
        with DisableTorchFunction(), beneath(), torch.set_grad_enabled(self._grads):
            if type(x) is Replica:
                return plain_of(x)
            if type(x) is not GlobalTensor:
                assert self._context is not None  # only inputs in a world give captured tensors gradients
                return entered(x, self._context)
            layout, block = x._layout, block_of(x)
            owned = layout if layout.rulers else layout.lifted(1)
            everywhere = layout.context.everywhere(layout.extents or (1,))
            block = (block if self._trained else block.detach()).reshape(owned.local)
            gathered = redistribute_block(block, owned, everywhere, self._name).view(layout.extents)
            node: Any = gathered.grad_fn
            if node is not None:  # the function may keep a result for another call, where it must not enter again
                node.metadata[COPIES] = True
            return gathered

    def check(self, y: torch.Tensor, *inputs: torch.Tensor) -> None:
        """Check that y depends only on the inputs and on tensors that were gathered here.

        Raises: RuntimeError, on every worker, if it depends on others: their gradients would not be added up.
        """
        ends = [*inputs, *(gathered for _, gathered in self._gathered.values())]
        if y.requires_grad and leads_beyond(y, ends=[one for one in ends if one.requires_grad]):
            raise RuntimeError(
                f"{self._name} of global tensors needs functions of scores that use captured tensors where we see it; "
                "here one was used unseen (as inside of torch._C.DisableTorchFunction), and its gradient would not be "
                "added up over the workers"
            )


def _getitem(x: torch.Tensor, index: Any) -> torch.Tensor:
    """``x[index]`` that reads no value of a scalar index, as that differs from element to element inside of vmap."""
    each = tree_leaves(index)
    if not each or not all(isinstance(one, (torch.Tensor, int)) for one in each):
        return x[index]
    y: torch.Tensor = torch.ops.aten.index(
        x, [torch.tensor(one, dtype=torch.int64, device=x.device) if isinstance(one, int) else one for one in each]
    )
    return y


def mapped(function: Callable[..., Any], captured: Captured, prefix: tuple[int, ...] = ()) -> Callable[..., Any]:
    """A function of one element as a function of all elements: of scores, if any, and of their four places.

    Args:
        captured: the mode in which the function runs.
        prefix: the in_dims in front of those of the places, as in torch: (0,) for scores.
    Returns: a function that raises RuntimeError if the given one sends messages for each element.
    """

    @wraps(function)
    def run(*args: Any) -> Any:
        with captured, mapping():
            return function(*args)

    def of_all(*args: Any) -> Any:
        of_more = run
        for dims in _PLACES:
            of_more = _torchs_vmap(of_more, in_dims=prefix + dims)
        try:
            return of_more(*args)
        except TransformError:
            raise RuntimeError(_REFUSED) from None

    return of_all


_REFUSED = (
    "flex_attention and create_mask need functions of elements that use what is split over workers by functions of "
    "torch, from tensors or modules that they have captured; here one sends messages for each element, as "
    "x.full_tensor() or a layer of distdl.nn does. Call that in front of it"
)


class _Found(Exception):
    """Raised where a function of torch gets a global tensor or a replica."""


class _Finding(TorchFunctionMode):
    """A mode that raises :class:`_Found`."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(type(one) in (GlobalTensor, Replica) for one in tensors_in((args, kwargs or {}))):
            raise _Found
        return func(*args, **(kwargs or {}))


def captures_split(function: Callable[..., Any], *element: torch.Tensor) -> bool:
    """Whether a function, tried with this element, uses captured global tensors or weights of a distributed model.

    An error of the function counts as no; it comes again where all elements are computed.
    """
    try:
        with _Finding():
            function(*element)
    except _Found:
        return True
    except Exception:
        return False
    return False
