"""Normalisations of global tensors: statistics of the whole tensor, weights that every worker has whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.functions import batch_norm_node
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.conversion import full_tensor
from distdl.globals.rules.applying import ready, run, weight_of
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import judge, judge_dtypes, judged
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.table import by_name, handles
from distdl.ops import Op
from distdl.ops.normalisation import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, RMSNorm


@cache
def _no_batches(device: torch.device) -> torch.Tensor:
    """Stands for a count of batches, which the functional form does not have; on a tensor's device."""
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
    context, layout, block = x._context, x._layout, block_of(x)
    if weight is None and bias is not None:
        weight = torch.ones_like(bias, requires_grad=False)
    weights = [weight_of(one, context) for one in (weight, bias) if one is not None]
    known = (layout, block), *((None, one) for one in weights)
    return run(ready(context, key, lambda: (op(), layout.partition), name, *known), block, *weights, *running)


def _check_running(mean: Any, variance: Any) -> None:
    for name, one in (("running_mean", mean), ("running_var", variance)):
        if one is not None and not isinstance(one, torch.Tensor):
            raise TypeError(f"a normalisation needs {name} to be a tensor or None; got a {type(one).__name__}")


def _with_plain(normalise: Callable[..., Any], statistics: Sequence[Any], *rest: Any, updates: bool) -> Any:
    """Normalise by running statistics that are global tensors: every worker computes with the whole of them."""
    whole = [full_tensor(one).detach() if type(one) is GlobalTensor else one for one in statistics]
    y = normalise(*whole, *rest)
    if updates:
        with torch.no_grad():
            for one, new in zip(statistics, whole, strict=True):
                if type(one) is GlobalTensor:
                    one.copy_(new)
    return y


def _flat(weight: torch.Tensor | None) -> torch.Tensor | None:
    """A weight of channels, of which torch's batch norm counts the elements, whatever its dims."""
    return weight if weight is None or weight.dim() == 1 else weight.reshape(-1)


def _sizes(*weights: Any) -> tuple[Any, ...]:
    """Sizes and dtypes of tensors, some of which may be None, as a key."""
    return tuple([one if one is None else (one.shape, one.dtype) for one in weights])


def _running(mean: torch.Tensor | None, variance: torch.Tensor | None) -> list[torch.Tensor]:
    return [] if mean is None or variance is None else [mean, variance, _no_batches(mean.device)]


def _in_one(
    x: GlobalTensor, weight: torch.Tensor | None, bias: torch.Tensor | None, options: batch_norm_node.Options
) -> GlobalTensor:
    """Batch normalisation as one node."""
    context = x._context
    weight = None if weight is None else weight_of(weight, context)
    bias = None if bias is None else weight_of(bias, context)
    return GlobalTensor._of(batch_norm_node.normalised(block_of(x), weight, bias, options), x._layout)


def _in_steps(
    layout: KnownLayout, eps: float, block: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The same of a block, in steps that are differentiable any number of times. The weights have entered."""
    context = layout.context
    if weight is None and bias is not None:
        weight = torch.ones_like(bias, requires_grad=False)
    weights = [one for one in (weight, bias) if one is not None]
    op = BatchNorm(layout.extents[1], eps, 0.0, False, True, everywhere=True)
    known = (layout, block), *((None, one) for one in weights)
    made = ready(context, (eps, "in steps"), lambda: (op, layout.partition), "batch_norm", *known)
    return block_of(run(made, block, *weights))


@handles("batch_norm", "torch functional")
def batch_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch and space together; running statistics stay equal on every worker, to the last bit."""

    def run_(
        input: Any,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if type(input) is not GlobalTensor or input.dim() < 2:
            return fall_back(func, args, kwargs)
        _check_running(running_mean, running_var)
        if GlobalTensor in (type(running_mean), type(running_var)):
            rest = weight, bias, training, momentum, eps
            of_input = partial(functional.batch_norm, input)
            return _with_plain(of_input, (running_mean, running_var), *rest, updates=training)
        for name, one in (("running_mean", running_mean), ("running_var", running_var)):
            if one is not None and one.requires_grad and torch.is_grad_enabled():
                raise RuntimeError(
                    f"The function 'native_batch_norm' is not differentiable with respect to argument '{name}'. This "
                    "input cannot have requires_grad True."
                )
        momentum = momentum if momentum is None else float(momentum)  # (torch takes True for 1)
        layout, dtype, own = input._layout, input.dtype, training
        weight, bias = _flat(weight), _flat(bias)

        given = input, weight, bias, running_mean, running_var
        check = partial(_check_by, torch.batch_norm, own, (func, args, kwargs), *given)

        def statistics_of() -> batch_norm_node.BatchStatistics:
            check()
            return batch_norm_node.BatchStatistics.of(layout, dtype)

        if training and momentum is not None and batch_norm_node.fits(input._block, weight, bias):
            sizes = _sizes(running_mean, running_var, weight, bias)
            statistics = layout.context.keep(("statistics", layout, dtype, *sizes), statistics_of)
            if statistics.shared:
                kept = None if running_mean is None or running_var is None else (running_mean, running_var)
                steps = partial(_in_steps, layout, eps)
                return _in_one(input, weight, bias, batch_norm_node.Options(statistics, eps, kept, momentum, steps))
        running = _running(running_mean, running_var)

        def op() -> BatchNorm:
            check()
            return BatchNorm(layout.extents[1], eps, momentum, bool(running), own, everywhere=True)

        key = (momentum, eps, training, *_sizes(running_mean, running_var))
        return _normalised(op, key, input, "batch_norm", weight, bias, running)

    if func is torch.batch_norm:
        x, weight, bias, mean, variance, training, momentum, eps, *_ = args
        return run_(x, mean, variance, weight, bias, training, momentum, eps)
    return run_(*args, **kwargs)


@handles("instance_norm", "torch functional")
def instance_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run_(
        input: Any,
        running_mean: torch.Tensor | None = None,
        running_var: torch.Tensor | None = None,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if type(input) is not GlobalTensor:
            return fall_back(func, args, kwargs)
        _check_running(running_mean, running_var)
        if GlobalTensor in (type(running_mean), type(running_var)):
            rest = weight, bias, use_input_stats, momentum, eps
            of_input = partial(functional.instance_norm, input)
            return _with_plain(of_input, (running_mean, running_var), *rest, updates=use_input_stats)
        running, own = _running(running_mean, running_var), bool(use_input_stats)
        kept = running[:2] if own else []
        running[: len(kept)] = [one.detach().clone() for one in kept]

        def op() -> InstanceNorm:
            given = input, weight, bias, running_mean, running_var
            _check_by(torch.instance_norm, own, (func, args, kwargs), *given)
            return InstanceNorm(input.shape[1], eps, momentum, bool(running), own, everywhere=True)

        key = (momentum, eps, own, *_sizes(running_mean, running_var))
        y = _normalised(op, key, input, "instance_norm", weight, bias, running)
        with torch.no_grad():  # (as late as in torch: a checkpoint stops in front of it, if nothing is saved behind)
            for one, new in zip(kept, running, strict=False):
                one.copy_(new)
        return y

    if func is torch.instance_norm:
        x, weight, bias, mean, variance, stats, momentum, eps, *_ = args
        return run_(x, mean, variance, weight, bias, stats, momentum, eps)
    return run_(*args, **kwargs)


def _check_by(norm: Any, own: bool, call: tuple[Any, tuple[Any, ...], dict[str, Any]], *tensors: Any) -> None:
    """Let torch check sizes and dtypes. (Its kernels read as many cells of a weight as there are channels.)"""
    judged(*call, tensors[0], (1,))
    judge_dtypes(lambda x, w, b, mean, var: norm(x, w, b, mean, var, own, 0.1, 1e-5, False), *tensors)


@handles("group_norm", "torch functional")
def group_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run_(
        input: Any,
        num_groups: int,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enabled: bool = True,
    ) -> Any:
        if type(input) is GlobalTensor and input.dim() < 2:
            judge(func, args, kwargs)
        if type(input) is not GlobalTensor or not input.shape[1]:
            return fall_back(func, args, kwargs)
        channels = input.shape[1]

        def op() -> GroupNorm:
            judged(func, args, kwargs, input, (1,))
            judge_dtypes(lambda x, *weights: torch.group_norm(x, 1, *weights), input, weight, bias)
            made = GroupNorm(num_groups, channels, eps)
            made.check("group_norm")
            return made

        return _normalised(op, (num_groups, eps), input, "group_norm", weight, bias)

    return run_(*args, **kwargs)


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
    if type(input) is not GlobalTensor:
        return NotImplemented
    last = _last(input, normalized_shape)

    def op() -> LayerNorm:
        judge(func, (input, normalized_shape, weight, bias, eps), {})
        small = [min(max(extent, 1), 2) for _, extent in last]
        judge_dtypes(lambda x, *weights: torch.layer_norm(x, small, *weights), input, weight, bias)
        return LayerNorm(last, eps)

    return _normalised(op, (last, eps), input, "layer_norm", weight, bias)


@handles("rms_norm", "torch functional")
def rms_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def run_(
        input: Any, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
    ) -> Any:
        if type(input) is not GlobalTensor:
            return fall_back(func, args, kwargs)
        last = _last(input, normalized_shape)
        if not _has_kernel(input.dtype, weight):
            judged(func, args, kwargs)
            return _by_squares(input, [dim for dim, _ in last], weight, eps)

        def op() -> RMSNorm:
            judge(func, args, kwargs)
            return RMSNorm(last, eps)

        return _normalised(op, (last, eps), input, "rms_norm", weight, None)

    return run_(*args, **kwargs)


def _has_kernel(dtype: torch.dtype, weight: torch.Tensor | None) -> bool:
    """Whether torch computes RMS norm of these dtypes by its kernel, and not in steps."""
    return dtype.is_floating_point and (
        weight is None or weight.dtype is dtype or (weight.dtype is torch.float32 and dtype.itemsize < 4)
    )


def _by_squares(x: Any, dims: list[int], weight: torch.Tensor | None, eps: float | None) -> Any:
    """RMS norm in torch's steps. The result has the dtype of x, of which squares of complex numbers may be negative."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    means = (wide * wide).mean(dims, keepdim=True)
    y = wide * (means + (torch.finfo(wide.dtype).eps if eps is None else eps)).rsqrt()
    return (y if weight is None else y * weight).to(x.dtype)


def _last(x: GlobalTensor, normalized_shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The last dims and their extents."""
    extents = tuple(normalized_shape)
    return tuple(enumerate(extents, x.dim() - len(extents)))
