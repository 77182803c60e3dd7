"""Normalisations of global tensors, by statistics of the whole tensor and weights that every worker has whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.functions import batch_norm_node
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.moving.conversion import full_tensor
from distdl.globals.rules.applying import execute, replicated_weight, set_up
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import check_dtypes, check_on_meta, check_once
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import Handler, by_name, handles
from distdl.ops import Op
from distdl.ops.normalisation import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm

_Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""A function of torch and its arguments."""


@cache
def _no_batches(device: torch.device) -> torch.Tensor:
    """A count of batches for ops that want one, because the functions of torch have none."""
    return torch.zeros((), device=device)


def _normalised(
    op: Callable[[], Op],
    key: Any,
    x: GlobalTensor,
    name: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running: Sequence[torch.Tensor] = (),
) -> Any:
    """Apply a normalisation to a global tensor.

    Args:
        op: makes the op; called once for each key and each signature of the tensors.
        running: mean, variance and count of batches, if the op keeps them. It writes them in place.
    """
    weight, bias = _own_weights(x._context, weight, bias)
    return _apply_to_block(op, key, x._layout, block_of(x), name, weight, bias, running)


def _own_weights(context: Context, *weights: torch.Tensor | None) -> list[torch.Tensor | None]:
    """This worker's own weights, whose gradients are added up over all workers."""
    return [None if one is None else replicated_weight(one, context) for one in weights]


def _apply_to_block(
    op: Callable[[], Op],
    key: Any,
    layout: KnownLayout,
    block: torch.Tensor,
    name: str,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running: Sequence[torch.Tensor] = (),
) -> Any:
    """The same for a block in a layout, and weights that are this worker's own."""
    if weight is None and bias is not None:
        weight = torch.ones_like(bias, requires_grad=False)
    weights = [one for one in (weight, bias) if one is not None]
    known = (layout, block), *((None, one) for one in weights)
    made = set_up(layout.context, key, lambda: (op(), layout.partition), name, *known)
    return execute(made, block, *weights, *running)


# -- batch and instance norm, which keep running statistics


def _in_functional_order(handler: Callable[..., Any]) -> Handler:
    """A handler that gets the call, and its arguments one by one in the order of ``torch.nn.functional``.

    The operators ``torch.batch_norm`` and ``torch.instance_norm`` take the weights before the statistics. Where the
    handler returns NotImplemented, the function falls back.
    """

    @wraps(handler)
    def run_handler(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        listed = args
        if func in (torch.batch_norm, torch.instance_norm):
            x, weight, bias, mean, variance, training, momentum, eps, *_ = args
            listed = x, mean, variance, weight, bias, training, momentum, eps
        y = handler((func, args, kwargs), *listed, **kwargs)
        return fall_back(func, args, kwargs) if y is NotImplemented else y

    return run_handler


def _check_running(mean: Any, variance: Any) -> None:
    for name, one in (("running_mean", mean), ("running_var", variance)):
        if one is not None and not isinstance(one, torch.Tensor):
            raise TypeError(f"a normalisation needs {name} to be a tensor or None; got a {type(one).__name__}")


def _check_constant(**running: torch.Tensor | None) -> None:
    """Raises: RuntimeError, as torch does, for running statistics that require a gradient."""
    for name, one in running.items():
        if one is not None and one.requires_grad and torch.is_grad_enabled():
            raise RuntimeError(
                f"The function 'native_batch_norm' is not differentiable with respect to argument '{name}'. This "
                "input cannot have requires_grad True."
            )


def _with_gathered(normalise: Callable[..., Any], statistics: Sequence[Any], *rest: Any, updates: bool) -> Any:
    """Normalise with running statistics that are global tensors: every worker gathers them and computes with all.

    Args:
        normalise: takes the statistics and the rest; writes the statistics in place, if it updates them.
        updates: whether the new statistics are written back to the global tensors.
    """
    gathered = [full_tensor(one).detach() if type(one) is GlobalTensor else one for one in statistics]
    y = normalise(*gathered, *rest)
    if updates:
        with torch.no_grad():
            for one, new in zip(statistics, gathered, strict=True):
                if type(one) is GlobalTensor:
                    one.copy_(new)
    return y


def _flat(weight: torch.Tensor | None) -> torch.Tensor | None:
    """A weight as a vector: torch's batch norm takes one of any dims that has an element for each channel."""
    return weight if weight is None or weight.dim() == 1 else weight.reshape(-1)


def _sizes(*weights: Any) -> tuple[Any, ...]:
    """Sizes and dtypes of tensors, some of which may be None, as a key."""
    return tuple([one if one is None else (one.shape, one.dtype) for one in weights])


def _running(mean: torch.Tensor | None, variance: torch.Tensor | None) -> list[torch.Tensor]:
    """The running statistics as the ops take them; none unless both are given."""
    return [] if mean is None or variance is None else [mean, variance, _no_batches(mean.device)]


@handles("batch_norm", "torch functional")
@_in_functional_order
def batch_norm(
    call: _Call,
    input: Any,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float | None = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise over batch and space. The running statistics stay equal on every worker, to the last bit."""
    if type(input) is not GlobalTensor or input.dim() < 2:
        return NotImplemented
    _check_running(running_mean, running_var)
    if GlobalTensor in (type(running_mean), type(running_var)):
        of_input = partial(functional.batch_norm, input)
        rest = weight, bias, training, momentum, eps
        return _with_gathered(of_input, (running_mean, running_var), *rest, updates=training)
    _check_constant(running_mean=running_mean, running_var=running_var)
    momentum = None if momentum is None else float(momentum)  # torch takes True for 1
    weight, bias = _flat(weight), _flat(bias)
    check = partial(_check_by, torch.batch_norm, training, call, input, weight, bias, running_mean, running_var)
    running = _running(running_mean, running_var)
    if training and momentum is not None and batch_norm_node.fits(input._block, weight, bias):
        statistics = _statistics(input, check, _sizes(running_mean, running_var, weight, bias))
        if statistics.shared:
            kept = (running[0], running[1]) if running else None
            steps = partial(_in_steps, input._layout, eps)
            options = batch_norm_node.Options(statistics, eps, kept, momentum, steps)
            weight, bias = _own_weights(input._context, weight, bias)
            y = batch_norm_node.normalised(block_of(input), weight, bias, options)
            return GlobalTensor._of(y, input._layout)

    def op() -> BatchNorm:
        check()
        return BatchNorm(input.shape[1], eps, momentum, bool(running), training, everywhere=True)

    key = (momentum, eps, training, *_sizes(running_mean, running_var))
    return _normalised(op, key, input, "batch_norm", weight, bias, running)


def _statistics(x: GlobalTensor, check: Callable[[], None], sizes: Any) -> batch_norm_node.BatchStatistics:
    """How the workers merge the statistics of a batch; checked and set up once for each layout, dtype and sizes."""
    layout, dtype = x._layout, x.dtype

    def make() -> batch_norm_node.BatchStatistics:
        check()
        return batch_norm_node.BatchStatistics.of(layout, dtype)

    return layout.context.keep(("statistics", layout, dtype, *sizes), make)


def _in_steps(
    layout: KnownLayout, eps: float, block: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """Batch norm of a block in steps that are differentiable any number of times. The weights are this worker's own."""
    op = BatchNorm(layout.extents[1], eps, 0.0, False, True, everywhere=True)
    return block_of(_apply_to_block(lambda: op, (eps, "in steps"), layout, block, "batch_norm", weight, bias))


@handles("instance_norm", "torch functional")
@_in_functional_order
def instance_norm(
    call: _Call,
    input: Any,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Normalise each channel of each sample over space."""
    if type(input) is not GlobalTensor:
        return NotImplemented
    _check_running(running_mean, running_var)
    if GlobalTensor in (type(running_mean), type(running_var)):
        of_input = partial(functional.instance_norm, input)
        rest = weight, bias, use_input_stats, momentum, eps
        return _with_gathered(of_input, (running_mean, running_var), *rest, updates=use_input_stats)
    running, own = _running(running_mean, running_var), bool(use_input_stats)
    updated = running[:2] if own else []
    running[: len(updated)] = [one.detach().clone() for one in updated]

    def op() -> InstanceNorm:
        _check_by(torch.instance_norm, own, call, input, weight, bias, running_mean, running_var)
        return InstanceNorm(input.shape[1], eps, momentum, bool(running), own, everywhere=True)

    key = (momentum, eps, own, *_sizes(running_mean, running_var))
    y = _normalised(op, key, input, "instance_norm", weight, bias, running)
    with torch.no_grad():  # as late as in torch: a checkpoint stops before this if nothing behind it is saved
        for one, new in zip(updated, running, strict=False):
            one.copy_(new)
    return y


def _check_by(norm: Any, own: bool, call: _Call, *tensors: Any) -> None:
    """Let torch check sizes and dtypes; its kernels would read beyond a weight that has too few elements.

    Args:
        norm: torch's operator.
        own: whether it normalises by the statistics of the input.
        tensors: input, weight, bias, running mean and running variance.
    """
    check_once(*call, tensors[0], (1,))
    check_dtypes(lambda x, w, b, mean, var: norm(x, w, b, mean, var, own, 0.1, 1e-5, False), *tensors)


# -- group, layer and RMS norm


@handles("group_norm", "torch functional")
@by_name
def group_norm(
    func: Any,
    input: Any,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    """Normalise each group of channels of each sample."""
    call: _Call = func, (input, num_groups, weight, bias, eps), {}
    if type(input) is GlobalTensor and input.dim() < 2:
        check_on_meta(*call)
    if type(input) is not GlobalTensor or not input.shape[1]:
        return NotImplemented
    channels = input.shape[1]

    def op() -> GroupNorm:
        check_once(*call, input, (1,))
        check_dtypes(lambda x, *weights: torch.group_norm(x, 1, *weights), input, weight, bias)
        made = GroupNorm(num_groups, channels, eps)
        made.check("group_norm")
        return made

    return _normalised(op, (num_groups, eps), input, "group_norm", weight, bias)


@handles("layer_norm", "torch functional")
@by_name
def layer_norm(
    func: Any,
    input: Any,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    """Normalise over the last dims."""
    if type(input) is not GlobalTensor:
        return NotImplemented
    last = _last_dims(input, normalized_shape)

    def op() -> LayerNorm:
        check_on_meta(func, (input, normalized_shape, weight, bias, eps), {})
        small = [min(max(extent, 1), 2) for _, extent in last]
        check_dtypes(lambda x, *weights: torch.layer_norm(x, small, *weights), input, weight, bias)
        return LayerNorm(last, eps)

    return _normalised(op, (last, eps), input, "layer_norm", weight, bias)


@handles("rms_norm", "torch functional")
@by_name
def rms_norm(
    func: Any,
    input: Any,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Divide by the root mean square over the last dims."""
    if type(input) is not GlobalTensor:
        return NotImplemented
    last = _last_dims(input, normalized_shape)
    call: _Call = func, (input, normalized_shape, weight, eps), {}
    if not _has_kernel(input.dtype, weight):
        check_once(*call)
        return _rms_norm_in_steps(input, [dim for dim, _ in last], weight, eps)

    def op() -> RMSNorm:
        check_on_meta(*call)
        return RMSNorm(last, eps)

    return _normalised(op, (last, eps), input, "rms_norm", weight, None)


def _has_kernel(dtype: torch.dtype, weight: torch.Tensor | None) -> bool:
    """Whether torch has a kernel for RMS norm of these dtypes; it computes others in steps."""
    return dtype.is_floating_point and (
        weight is None or weight.dtype is dtype or (weight.dtype is torch.float32 and dtype.itemsize < 4)
    )


def _rms_norm_in_steps(x: Any, dims: list[int], weight: torch.Tensor | None, eps: float | None) -> Any:
    """RMS norm in torch's steps, also of complex numbers, whose squares torch does not conjugate. Keeps the dtype."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    means = (wide * wide).mean(dims, keepdim=True)
    y = wide * (means + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    return (y if weight is None else y * weight).to(x.dtype)


def _last_dims(x: GlobalTensor, normalized_shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The last dims that have this shape, each with its extent."""
    extents = tuple(normalized_shape)
    return tuple(enumerate(extents, x.dim() - len(extents)))
