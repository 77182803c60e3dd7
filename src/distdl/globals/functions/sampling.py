"""Draws from distributions whose parameters are tensors, composed of functions that draw uniform numbers."""

from __future__ import annotations

from math import inf, sqrt
from typing import Any

import torch

from distdl.globals.functions.random import takes_generator
from distdl.globals.rules.applying import zeroed
from distdl.globals.rules.meta_checks import check_once
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import by_name, handles


@handles("normal", "torch")
@takes_generator
@by_name
def normal(func: Any, mean: Any, std: Any = 1.0) -> Any:
    """Normal numbers, with a mean and a standard deviation for each element.

    Raises: RuntimeError, as torch does, for a negative deviation; NotImplementedError for means that are integers.
    """
    check_once(func, (mean, std), {})
    if isinstance(mean, torch.Tensor) and not mean.is_floating_point() and not mean.is_complex():
        raise NotImplementedError(f"normal draws fractions and complex numbers; mean has the dtype {mean.dtype}")
    sizes: Any = std.detach() if isinstance(std, torch.Tensor) else std
    imagined = type(sizes) is GlobalTensor and sizes._context.comm.imagined
    if isinstance(sizes, torch.Tensor) and not imagined and not (sizes >= 0).all():
        raise RuntimeError("normal expects all elements of std >= 0.0")
    centre = _zeros_of(mean) + _zeros_of(std) + (mean.detach() if isinstance(mean, torch.Tensor) else mean)
    y = torch.randn_like(centre.detach()) * sizes + centre
    return y.to(mean.dtype) if isinstance(mean, torch.Tensor) else y


def _zeros_of(x: Any) -> Any:
    """Zeros in the shape of a tensor, which give it gradients of zeros, as draws do; of a number, zero."""
    return zeroed(x) if isinstance(x, torch.Tensor) else 0


@handles("poisson", "torch")
@takes_generator
@by_name
def poisson(func: Any, input: Any) -> Any:
    """Poisson numbers with a rate for each element: the inverse of the distribution at a uniform number, by bisection.

    Raises: RuntimeError for a negative rate, as torch does, and for an infinite one.
    """
    func(torch.zeros(1, dtype=input.dtype))  # raises torch's error
    rates, known = input.detach().double(), input.numel() and not input._context.comm.imagined
    if known and not rates.amin() >= 0:
        raise RuntimeError("invalid Poisson rate, expected rate to be non-negative")
    most = float(rates.amax()) if known else 0.0
    if most == inf:
        raise RuntimeError("poisson of a global tensor needs rates that are finite")
    odds, low, high = torch.rand_like(rates), rates * 0 - 1, (rates + 12 * rates.sqrt() + 40).floor()
    for _ in range(int(most + 12 * sqrt(most) + 42).bit_length()):
        middle = ((low + high) / 2).floor()
        enough = torch.special.gammaincc(middle + 1, rates) >= odds
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    return high.to(input.dtype) + zeroed(input)


@handles("multinomial", "torch Tensor")
@takes_generator
@by_name
def multinomial(func: Any, input: Any, num_samples: int, replacement: bool = False) -> Any:
    """Indices drawn by the weights in each row: those with the largest ratios of weight to an exponential number.

    Raises: RuntimeError, as torch does, for weights that are no probabilities.
    """
    check_once(func, (input, num_samples, replacement), {})
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if not input.is_floating_point():
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {input.dtype}")
    odds = input.detach()
    wrong, none = ~((odds >= 0) & odds.isfinite()), odds.sum(-1) <= 0
    problem = 0 if odds._context.comm.imagined else int(2 * wrong.any() + none.any())
    if problem:
        told = "probability tensor contains either `inf`, `nan` or element < 0"
        raise RuntimeError(told if problem > 1 else "invalid multinomial distribution (sum of probabilities <= 0)")
    if replacement:
        odds = odds.unsqueeze(-2).expand(*odds.shape[:-1], num_samples, odds.shape[-1])
    ratios = odds / torch.empty_like(odds).exponential_()
    return ratios.argmax(-1) if replacement else ratios.topk(num_samples).indices
