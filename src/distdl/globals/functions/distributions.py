"""Distributions: each function maps uniform numbers in [0, 1) to random numbers, and checks its parameters as torch."""

from __future__ import annotations

import math

import torch

from distdl.tensors.uniform import Value


def _bits(dtype: torch.dtype) -> int:
    """The number of bits that a fraction may have without being rounded to 1 in a dtype."""
    return {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype, 53)


def between(low: float, high: float, dtype: torch.dtype) -> Value:
    """Uniform numbers in [low, high).

    Raises: RuntimeError if high is less than low.
    """
    if low > high:
        raise RuntimeError(f"uniform_ expects to return a [from, to) range, but found from={low} > to={high}")
    steps = 2.0 ** _bits(dtype)
    return lambda u: (u * steps).floor_() / steps * (high - low) + low


def normal(mean: float = 0.0, std: float = 1.0) -> Value:
    """Normally distributed numbers.

    Raises: RuntimeError for a negative deviation.
    """
    if std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    # half a step is added to 2u - 1, because erfinv is infinite at -1
    return lambda u: torch.erfinv(2 * u - 1 + 2.0**-53) * (math.sqrt(2) * std) + mean


def exponential(rate: float = 1.0) -> Value:
    """Exponentially distributed numbers, none of them 0.

    Raises: RuntimeError for a rate that is not positive.
    """
    _check_positive("exponential_", "lambda", rate)
    return lambda u: -torch.log1p(-(u + 2.0**-54)) / rate


def log_normal(mean: float = 1.0, std: float = 2.0) -> Value:
    _check_positive("log_normal_", "std", std)
    return lambda u: normal(mean, std)(u).exp()


def cauchy(median: float = 0.0, sigma: float = 1.0) -> Value:
    _check_positive("cauchy_", "sigma", sigma)
    return lambda u: torch.tan(math.pi * (u + 2.0**-54 - 0.5)) * sigma + median


def _check_positive(function: str, name: str, value: float) -> None:
    if not value > 0:
        raise RuntimeError(f"{function} expects {name} > 0.0, but found {name}={value}")


def integers(*ends: int) -> Value:
    """Integers in [low, high), given as ``integers(high)`` from 0 on, or as ``integers(low, high)``.

    Raises: RuntimeError if there are none.
    """
    low, high = (0, *ends)[-2:]
    if low >= high:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    low, high = int(low), int(high)
    return lambda u: (u * (high - low)).floor_() + low


def integers_of(dtype: torch.dtype, low: int | None = None, to: int | None = None) -> Value:
    """The integers of ``x.random_(low, to)``: from 0 if one number is given, and all that the dtype has if none is."""
    if low is not None and to is None:
        low, to = 0, low
    if to is None:
        to = 2 ** _bits(dtype) if dtype.is_floating_point else min(torch.iinfo(dtype).max, 2**53)
    return integers(low or 0, to)


def geometric(p: float) -> Value:
    """The number of trials up to the first success, each of probability p.

    Raises: RuntimeError unless p is between 0 and 1.
    """
    if not 0 < p < 1:
        raise RuntimeError(f"geometric_ expects p to be in (0, 1), but got p={p}")
    return lambda u: (torch.log1p(-(u + 2.0**-54)) / math.log1p(-p)).ceil_().clamp_(min=1)
