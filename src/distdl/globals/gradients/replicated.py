"""Gradients of tensors that every worker has whole: each worker has a part, and code of a user's sees their sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.gradients.parts import enter_results, variable_of
from distdl.globals.tensor.gradient_sums import enter
from distdl.globals.tensor.provenance import check_origin
from distdl.globals.tensor.replicas import Replica, parameter_of, plain_of
from distdl.globals.tensor.running import is_on_blocks
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import OPERATOR, REPLICATED


def hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A hook of a parameter gets its gradient; that of what is computed from weights would get this worker's part.

    Raises: RuntimeError for the latter, but in a function on blocks.
    """
    replica, *rest = args
    parameter = parameter_of(replica)
    if parameter is not replica:
        return func(parameter, *rest, **kwargs)
    if not is_on_blocks():
        raise RuntimeError(
            f"{func.__name__} of what is computed from weights of a distributed model would see this worker's part of "
            "its gradient; ask for that of the parameter, or of the global tensor in which it is used"
        )
    return func(plain_of(replica), *rest, **kwargs)


def register_post_accumulate_grad_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a parameter, which has its whole gradient there; torch refuses what is no leaf."""
    replica, *rest = args
    return func(plain_of(parameter_of(replica)), *rest, **kwargs)


def gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What reads, sets or deletes ``.grad``: that of a parameter is not kept with its copy."""
    replica, *rest = args
    return func(plain_of(parameter_of(replica)), *map_tensors(rest, plain_of))


def requires_grad_(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``self.w.requires_grad_()``: the parameter requires a gradient from then on, or none. A copy has its history.

    What is made of a parameter and begins a history of its own (``self.w.detach().requires_grad_()``) is a variable,
    too, and enters, so its gradient is that of all workers; in a function of blocks, it is this worker's.
    """
    replica, rest = args[0], args[1:]
    parameter: Any = parameter_of(replica)
    if parameter is not replica:
        return func(parameter, *rest, **kwargs)
    leaf = plain_of(parameter)
    func(leaf, *rest, **kwargs)
    if leaf.requires_grad and leaf.is_leaf and not is_on_blocks():
        with torch.enable_grad():
            (replica._plain,) = enter(replica._context, [leaf])
        replica._variable = leaf
    return replica


def of_leaf(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a parameter says of itself: it is a leaf, which its copy is not, and has been written so often."""
    (replica,) = args
    parameter = parameter_of(replica)
    return func(plain_of(replica) if parameter is replica else parameter)


def operator(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator of a user's (``torch.library``), whose derivative need not be linear in the gradient."""

    every = tensors_in((args, kwargs))
    context = next(one._context for one in every if type(one) is Replica)
    for one in every:
        if type(one) is torch.Tensor:
            check_origin(one, context)
    given, named = map_tensors((args, kwargs), variable_of)
    return enter_results(func(*given, **named), context)


_attribute: Any = torch.Tensor.grad  # (one that is computed, whose type says what it gives)
REPLICATED.update(
    {
        torch.Tensor.register_hook: hook,
        torch.Tensor.register_post_accumulate_grad_hook: register_post_accumulate_grad_hook,
        torch.Tensor.retain_grad: hook,
        torch.Tensor.requires_grad_: requires_grad_,
    }
    | {OPERATOR: operator}
    | {getattr(torch.Tensor, name).__get__: of_leaf for name in ("is_leaf", "retains_grad", "_version")}
    | dict.fromkeys((_attribute.__get__, _attribute.__set__, _attribute.__delete__), gradient)
)
