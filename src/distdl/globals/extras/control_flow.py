"""Control flow by torch's functions on global tensors: ``torch.cond``, ``while_loop``, ``scan``, ``map``.

torch compiles the functions that these are given. Functions of global tensors cannot be compiled, as workers exchange
messages in them. So they are called as Python would call them: one branch, or the body again and again. A condition
has the same value on every worker, so all workers take the same way. Derivatives are those of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import getclosurevars
from typing import Any

import torch

from distdl.globals.extras.transforms import is_split
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.running import is_running
from distdl.globals.tensor.table import composite
from distdl.nn.compiling import REASON
from distdl.tensors.private_transforms import generic_associative_scan, stack_pytree, tree_leaves, tree_unflatten
from distdl.workers.worlds import launched


def _cond(pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: Sequence[Any]) -> Any:
    return (true_fn if pred else false_fn)(*operands)


def _while_loop(cond_fn: Any, body_fn: Any, carried: Sequence[Any], additional: Sequence[Any]) -> Any:
    """``while_loop``: the functions take the carried tensors as a flat list, and the body returns their structure.

    Raises: RuntimeError if the condition is no bool, or if the body returns other shapes or dtypes than it was given.
    """
    found, _ = tree_unflatten([*carried, *additional], getclosurevars(body_fn).nonlocals["in_spec"])
    first = carried = [one.clone() if isinstance(one, torch.Tensor) else one for one in carried]
    while _is_true(cond_fn(*carried, *additional)):
        found = body_fn(*carried, *additional)
        carried = tree_leaves(found)
        _check_carried("while_loop", "body_fn", first, carried)
    return found


def _is_true(value: Any) -> bool:
    if isinstance(value, bool) or (isinstance(value, torch.Tensor) and not value.dim() and value.dtype is torch.bool):
        return bool(value)
    raise RuntimeError(
        f"cond_fn of torch.while_loop needs to return True, False or a tensor of one of these; got {value}"
    )


def _scan(combine_fn: Callable[..., Any], init: Sequence[Any], xs: Sequence[Any], additional_inputs: Any) -> Any:
    carry: Any = init
    each = []
    for place in range(xs[0].shape[0]):
        carry, y = combine_fn(*tree_leaves(carry), *[x.select(0, place) for x in xs])
        _check_carried("scan", "combine_fn", init, tree_leaves(carry))
        each.append(y)
    return carry, stack_pytree(each)


def _map(f: Callable[..., Any], xs: Sequence[Any], args: Sequence[Any]) -> Any:
    return stack_pytree([f(*[x.select(0, place) for x in xs], *args) for place in range(xs[0].shape[0])])


def _associative_scan(combine_fn: Callable[..., Any], xs: Sequence[Any], additional_inputs: Any) -> Any:
    return generic_associative_scan(combine_fn, xs)


def _check_carried(name: str, function: str, first: Sequence[Any], now: Sequence[Any]) -> None:
    """Raises: RuntimeError if carried values have other shapes, dtypes or types now than at first."""
    given, returned = [
        [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in xs] for xs in (first, now)
    ]
    if given != returned:
        raise RuntimeError(
            f"{function} of torch's {name} needs to return what it is given to carry on; got {returned} for {given}"
        )


_EAGER: dict[str, Callable[..., Any]] = {
    "cond_op": _cond, "while_loop_op": _while_loop, "scan_op": _scan, "map_impl": _map,
    "associative_scan_op": _associative_scan,
}  # fmt: skip


# what errors of the compiler contain if a function that it compiles uses a global tensor
_SPLIT = REASON, GlobalTensor.__name__, Replica.__name__


def called(compiled: Any, fn: Any, args: Any, kwargs: Any = None) -> Any:
    """Call what torch would compile. That of plain tensors stays torch's.

    Args:
        compiled: torch's own function, which compiles and calls.
    """
    # one thread at a time may compile
    if not (is_split((args, kwargs)) or is_running() or launched() == "threads"):
        try:
            return compiled(fn, args, kwargs)
        except Exception as error:  # to import the compiler's own errors takes seconds
            if not any(sign in str(error) for sign in _SPLIT):
                raise
    return composite(fn, **_EAGER)(*args, **(kwargs or {}))
