"""Gradients of tensors that every worker has whole: each worker has a part, and code of a user's sees their sum."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from distdl.globals.entering import enter
from distdl.globals.nested import map_tensors, tensors_in
from distdl.globals.parts import apply_to_variables, part_of_all, summed
from distdl.globals.replicas import Replica, parameter_of, plain_of
from distdl.globals.running import is_on_blocks
from distdl.globals.table import OPERATOR, REPLICATED, by_name
from distdl.tensors.modes import unobserved


@by_name
def register_hook(func: Any, self: Replica, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> Any:
    """A hook gets the gradient, and not this worker's part of it; what it returns counts once."""
    of, parameter = _of_graph(self), parameter_of(self)
    if parameter is not self:
        return parameter.register_hook(hook)
    with unobserved():  # (a node that knew the tensor itself would keep it, and so itself, for ever)
        alike = Replica._of(torch.empty((), dtype=of.dtype, device=of.device).expand(of.shape), self._context)

    def on_part(part: torch.Tensor) -> torch.Tensor | None:
        (whole,) = summed([alike], [part])
        changed = hook(part if whole is None else whole)
        return None if changed is None else part_of_all(plain_of(changed), alike._context)

    with torch._C.DisableTorchFunctionSubclass():
        registered = func(of, on_part)
    kept = of.__dict__.pop("_keeps", None)
    if kept is not None:  # (what is kept is what all hooks leave)
        kept.remove()
        retain_grad(torch.Tensor.retain_grad, (self,), {})
    return registered


def register_post_accumulate_grad_hook(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of a parameter, which has its whole gradient there; torch refuses what is no leaf."""
    replica, *rest = args
    return func(plain_of(parameter_of(replica)), *rest, **kwargs)


def retain_grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    (replica,) = args
    of = _of_graph(replica)
    if parameter_of(replica) is replica and "_keeps" not in of.__dict__:  # (a parameter has its gradient anyway)
        wanting = weakref.ref(of)

        def keep(gradient: torch.Tensor) -> None:
            found = wanting()
            if found is not None:
                with torch._C.DisableTorchFunctionSubclass():
                    found.grad = gradient.detach()

        keeps = replica.register_hook(keep)
        of.__dict__["_keeps"] = keeps


def gradient(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What reads, sets or deletes ``.grad``: that of a parameter is not kept with its copy."""
    replica, *rest = args
    parameter = parameter_of(replica)
    if parameter is not replica:
        return func(parameter, *map_tensors(rest, plain_of))
    with torch._C.DisableTorchFunctionSubclass():
        return func(_of_graph(replica), *map_tensors(rest, plain_of))


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

    def call(*variables: torch.Tensor) -> Any:
        rest = iter(variables)
        given, named = map_tensors((args, kwargs), lambda one: next(rest))
        return func(*given, **named)

    return apply_to_variables(call, tuple(tensors_in((args, kwargs))), {}, f"the operator {func}")


def _of_graph(replica: Any) -> torch.Tensor:
    """The tensor that what follows from a replica follows from: its plain one, or itself where it has become one."""
    own: torch.Tensor = plain_of(replica) if "_plain" in replica.__dict__ else replica
    return own


_attribute: Any = torch.Tensor.grad  # (one that is computed, whose type says what it gives)
REPLICATED.update(
    {
        torch.Tensor.register_hook: register_hook,
        torch.Tensor.register_post_accumulate_grad_hook: register_post_accumulate_grad_hook,
        torch.Tensor.retain_grad: retain_grad,
        torch.Tensor.requires_grad_: requires_grad_,
    }
    | {OPERATOR: operator}
    | {getattr(torch.Tensor, name).__get__: of_leaf for name in ("is_leaf", "retains_grad", "_version")}
    | dict.fromkeys((_attribute.__get__, _attribute.__set__, _attribute.__delete__), gradient)
)
