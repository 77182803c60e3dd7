"""Recurrent networks of global tensors. Samples are split; each worker computes all steps and features of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.layouts.spreading import pencils
from distdl.globals.moving.alignment import block_in, gather_global, local_block
from distdl.globals.rules.applying import as_global
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import check_on_meta
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.gradient_sums import enter
from distdl.globals.tensor.provenance import check_origin
from distdl.globals.tensor.replicas import Replica, plain_of
from distdl.globals.tensor.table import handles
from distdl.tensors.connection import zeros_on


@handles("lstm gru rnn_tanh rnn_relu", "torch")
def layers(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Recurrent layers over all steps. Packed sequences, whose lengths differ, fall back."""
    if len(args) != 9 or type(args[0]) is not GlobalTensor or args[0].dim() != 3 or not args[0].numel():
        return fall_back(func, args, kwargs)
    input, hx, weights, *options = args
    count, dropout, train, batch_first = options[1], options[2], options[3], options[5]
    states = hx if isinstance(hx, (tuple, list)) else (hx,)

    def check() -> bool:
        shape = [1 if dim == (1 if batch_first else 0) else n for dim, n in enumerate(input.shape)]  # of one step
        return check_on_meta(func, (torch.empty(shape, dtype=input.dtype, device="meta"), *args[1:]), kwargs)

    input._context.keep(("states", func, batch_first, input.shape, *(one.shape for one in states)), check)
    if dropout and train and count > 1:
        return _with_dropout(func, input, states, weights, options)

    def call(block: Any, states: Sequence[Any], weights: Sequence[Any]) -> Any:
        return func(block, tuple(states) if len(states) > 1 else states[0], list(weights), *options)

    return _over_samples(call, input, 0 if batch_first else 1, states, 1, weights, func.__name__)


def _with_dropout(
    func: Callable[..., Any], input: Any, states: Sequence[Any], weights: Sequence[Any], options: Sequence[Any]
) -> Any:
    """Apply layer by layer, with our dropout between them, because torch's would depend on the partition."""
    biases, count, dropout, train, both, batch_first = options
    rows, of_layer = 2 if both else 1, len(weights) // count
    y, last = input, []
    for layer in range(count):
        begin = [one[layer * rows : (layer + 1) * rows] for one in states]
        own = weights[layer * of_layer : (layer + 1) * of_layer]
        y = functional.dropout(y, dropout) if layer else y
        hx = tuple(begin) if len(begin) > 1 else begin[0]
        y, *end = func(y, hx, own, biases, 1, 0.0, train, both, batch_first)
        last.append(end)
    return (y, *(torch.cat(each) for each in zip(*last, strict=True)))


@handles("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell", "torch")
def cell(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One step of a recurrent layer."""
    if kwargs or type(args[0]) is not GlobalTensor or args[0].dim() != 2 or not args[0].numel():
        return fall_back(func, args, kwargs)
    input, hx, *weights = args
    states = hx if isinstance(hx, (tuple, list)) else (hx,)
    key = ("states", func, input.shape, *(one.shape for one in states))
    input._context.keep(key, lambda: check_on_meta(func, args, kwargs))

    def call(block: Any, states: Sequence[Any], weights: Sequence[Any]) -> Any:
        y = func(block, tuple(states) if len(states) > 1 else states[0], *weights)
        return y if isinstance(y, tuple) else (y,)

    y = _over_samples(call, input, 0, states, 0, weights, func.__name__)
    return y if len(y) > 1 else y[0]


def _over_samples(
    call: Callable[..., Any],
    input: GlobalTensor,
    batch: int,
    states: Sequence[Any],
    states_batch: int,
    weights: Sequence[Any],
    name: str,
) -> tuple[Any, ...]:
    """Call a function with the samples of this worker, and return its results as global tensors.

    Args:
        call: takes input, states and weights; returns a tuple. Its first tensor has the dims of the input, if there are
            more results than states; all others have the dims of states.
        batch, states_batch: the dim of samples of the input, and of the states.
    """
    context = input._context
    layout = pencils(input._layout, [dim for dim in range(input.dim()) if dim != batch])

    def split(extents: Sequence[int], dim: int) -> KnownLayout:
        """The layout of a tensor of these extents whose samples, along a dim, are split as those of the input."""
        workers = layout.partition.workers.reshape([-1 if one == dim else 1 for one in range(len(extents))])
        return context.layout(
            workers, [layout.intervals[batch] if one == dim else ((0, n),) for one, n in enumerate(extents)]
        )

    block = block_in(input, layout, name)
    local_states = [local_block(one, split(one.shape, states_batch), name) for one in states]
    own = _enter_together(weights, context)
    local_states = [one.contiguous() for one in local_states]  # cuDNN takes no other states
    if block.numel():
        found = call(block, local_states, own)
    else:  # the same operators as on the other workers, on one sample of zeros
        shape = [1 if dim == batch else n for dim, n in enumerate(input.shape)]
        least = [[1 if dim == states_batch else n for dim, n in enumerate(one.shape)] for one in states]
        found = call(zeros_on(block, shape), [zeros_on(*pair) for pair in zip(local_states, least, strict=True)], own)
    results = []
    for place, one in enumerate(found):
        dim = batch if place == 0 and len(states) < len(found) else states_batch
        extents = [input.shape[batch] if at == dim else n for at, n in enumerate(one.shape)]
        target = split(extents, dim)
        results.append(as_global(one if block.numel() else zeros_on(one, target.local), target))
    return tuple(results)


def _enter_together(weights: Sequence[Any], context: Context) -> list[Any]:
    """This worker's own weights. The gradients of those that are no replicas of a model are added up in one message.

    A layer without biases has None in their places, which stays.
    """
    plain = [gather_global(one) for one in weights]
    recorded = torch.is_grad_enabled()
    enters = [one is not None and one.requires_grad and recorded and type(one) is not Replica for one in plain]
    entering = [one for one, does in zip(plain, enters, strict=True) if does]
    for one in entering:
        check_origin(one, context)
    entered = iter(enter(context, entering)) if entering else iter(())
    return [next(entered) if does else plain_of(one) for one, does in zip(plain, enters, strict=True)]
