"""What a model computes in some steps of training, recorded by hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.structures import map_tensors, opaque_in, tensors_in
from distdl.verification.quantities import Quantity

Loss = Callable[[Any], torch.Tensor]
Optimizer = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Record:
    """What a model has computed.

    Attributes:
        found: all tensors, in the order of computing.
        partial: gradients that a worker has only in part, so that they cannot be compared.
        opaque: modules that gave something in which no tensors are looked for, and its type.
    """

    found: dict[Quantity, torch.Tensor] = field(default_factory=dict)
    partial: list[Quantity] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)


def default_loss(output: Any) -> torch.Tensor:
    """A loss to which each element of each output contributes by another weight.

    Raises: ValueError if no output is a floating-point tensor.
    """
    terms = [_weighted(one) for one in tensors_in(output) if one.dtype.is_floating_point or one.dtype.is_complex]
    if not terms:
        raise ValueError("verify needs a loss= for a model whose output has no floating-point tensor")
    return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def _weighted(output: torch.Tensor) -> torch.Tensor:
    value = torch.view_as_real(output) if output.dtype.is_complex else output
    for dim, extent in enumerate(value.shape):
        weights = torch.cos(torch.arange(1, extent + 1, dtype=value.dtype, device=value.device))
        value = value * (1 + 0.5 * weights).reshape(-1, *[1] * (value.ndim - dim - 1))
    return value.mean()


def default_optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum: its steps follow the gradients, however small they are."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def record(
    model: torch.nn.Module,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    loss: Loss,
    optimizer: Optimizer,
    steps: int,
) -> Record:
    """Train a model for some steps; returns what it computes.

    These are the outputs of all modules, the loss, the gradients of the outputs as backward reaches them, the gradients
    of inputs and weights, and weights and buffers behind the optimiser's step.

    Args:
        inputs: the arguments of the model's forward, by position and by name. Each step takes the same.
    """
    record = Record()
    found = record.found
    calls: Counter[str] = Counter()
    step = 0

    def hook(name: str) -> Callable[[torch.nn.Module, Any, Any], None]:
        def on_output(_module: torch.nn.Module, _args: Any, output: Any) -> None:
            calls[name] += 1
            opaque = opaque_in(output)
            if opaque is not None:
                record.opaque[name] = type(opaque).__name__
            for part, tensor in enumerate(tensors_in(output)):
                found[Quantity(step, "output", name, calls[name], part)] = tensor.detach().clone()
                if tensor.requires_grad:
                    key = Quantity(step, "gradient of the output", name, calls[name], part)
                    if isinstance(tensor, Replica) and not tensor.is_leaf:
                        record.partial.append(key)
                        continue
                    tensor.register_hook(lambda gradient, key=key: found.__setitem__(key, gradient.detach().clone()))

        return on_output

    handles = [module.register_forward_hook(hook(name or "the model")) for name, module in model.named_modules()]
    parameters = [one for one in model.parameters() if one.requires_grad]
    steps_of = optimizer(parameters) if parameters else None
    try:
        for step in range(1, steps + 1):
            calls.clear()
            _train_once(model, inputs, loss, steps_of, step, found)
    finally:
        for handle in handles:
            handle.remove()
    return record


def _train_once(
    model: torch.nn.Module,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    loss: Loss,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    found: dict[Quantity, torch.Tensor],
) -> None:
    args, kwargs = map_tensors(inputs, _as_leaf)
    model.zero_grad()
    value = loss(model(*args, **kwargs))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        given = f"one of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"verify needs a loss that gives a tensor of one element; it gave {given}")
    found[Quantity(step, "loss", "")] = value.detach().clone()
    if value.requires_grad:
        value.backward()
    for number, tensor in enumerate(tensors_in((args, kwargs))):
        if tensor.grad is not None:
            found[Quantity(step, "gradient of input", str(number))] = tensor.grad.detach().clone()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[Quantity(step, "gradient of weight", name)] = parameter.grad.detach().clone()
    if optimizer is not None:
        optimizer.step()
    for kind, tensors in (("weight", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            found[Quantity(step, kind, name)] = tensor.detach().clone()


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    leaf = tensor.detach().clone()
    return leaf.requires_grad_() if leaf.dtype.is_floating_point or leaf.dtype.is_complex else leaf
