"""Gradients and hooks of replicas: each worker has a partial gradient, and users' code sees the sum."""

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
    """Register a hook, or retain the gradient, of the parameter of a replica; in a function on blocks, of any replica.

    Raises: RuntimeError elsewhere for a replica that was computed from weights: its gradient is a partial one.
    """
    replica, *rest = args
    parameter = parameter_of(replica)
    if parameter is not replica:
        return func(parameter, *rest, **kwargs)
    if not is_on_blocks():
        raise RuntimeError(
            f"{func.__name__} of a tensor computed from weights of a distributed model would see this worker's part of "
            "its gradient; ask for that of the parameter, or of the global tensor in which it is used"
        )
    return func(plain_of(replica), *rest, **kwargs)


def of_parameter(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Read or set an attribute of the parameter of a replica, as ``.grad`` and ``.is_leaf``, or register its hook."""
    replica, *rest = args
    return func(plain_of(parameter_of(replica)), *map_tensors(rest, plain_of), **kwargs)


def requires_grad_(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``self.w.requires_grad_()`` of a replica of a parameter: the parameter requires a gradient from then on, or none.

    A leaf that was computed from a parameter, as ``self.w.detach().requires_grad_()``, becomes a variable of its own:
    its gradient is added up over all workers. In a function on blocks, it is this worker's.
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


def operator(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a user's operator of ``torch.library``, whose derivative need not be linear in the gradient."""
    every = tensors_in((args, kwargs))
    context = next(one._context for one in every if type(one) is Replica)
    for one in every:
        if type(one) is torch.Tensor:
            check_origin(one, context)
    given, named = map_tensors((args, kwargs), variable_of)
    return enter_results(func(*given, **named), context)


_attribute: Any = torch.Tensor.grad
REPLICATED.update(
    {
        torch.Tensor.register_hook: hook,
        torch.Tensor.register_post_accumulate_grad_hook: of_parameter,
        torch.Tensor.retain_grad: hook,
        torch.Tensor.requires_grad_: requires_grad_,
        OPERATOR: operator,
    }
    | {getattr(torch.Tensor, name).__get__: of_parameter for name in ("is_leaf", "retains_grad", "_version")}
    | dict.fromkeys((_attribute.__get__, _attribute.__set__, _attribute.__delete__), of_parameter)
)
