"""Fourier transforms of global tensors. A dim is whole while it is transformed, and other dims are split instead."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.rules.meta_checks import check_on_meta, check_once
from distdl.globals.rules.whole_dims import along_whole
from distdl.globals.rules.work import check_shapes
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.table import SPACES, TABLE, by_name, handles

# for a transform of several dims: that of the last dim, whether it comes before the others, and that of the others
_SEVERAL = {
    "fft": ("fft", True, "fft"), "ifft": ("ifft", True, "ifft"), "rfft": ("rfft", True, "fft"),
    "irfft": ("irfft", False, "ifft"), "hfft": ("hfft", False, "fft"), "ihfft": ("ihfft", True, "ifft"),
}  # fmt: skip


def _along_one(x: Any, kind: str, n: int | None, dim: int, norm: str | None) -> Any:
    """The transform of a kind, such as "rfft", along one dim."""
    transform = getattr(torch.fft, kind)
    return along_whole(lambda block: transform(block, n, dim, norm), x, [dim], kind)


def _along_several(x: Any, kind: str, s: Any, dims: Sequence[int], norm: str | None) -> GlobalTensor:
    """The transform of a kind along several dims. Where their order is free, dims that are not split come first."""
    of_last, is_first, of_others = _SEVERAL[kind]
    lengths = [None if one == -1 else one for one in (s if s is not None else [None] * len(dims))]
    steps = list(zip(dims, lengths, strict=True))
    last = [(*steps[-1], of_last)]
    others = [(*step, of_others) for step in steps[:-1]]
    y: GlobalTensor = x
    for todo in (last, others) if is_first else (others, last):
        while todo:
            places = y._layout.partition.workers.shape
            step = next((one for one in todo if places[one[0]] == 1), todo[0])
            todo.remove(step)
            dim, n, transform = step
            y = _along_one(y, transform, n, dim, norm)
    return y


def fast_transform(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The handler of all transforms of ``torch.fft``."""
    name = func.__name__.removeprefix("fft_")
    kind = name.rstrip("2n") if name[-1] in "2n" else name

    def along_one(input: Any, n: int | None = None, dim: int = -1, norm: str | None = None) -> Any:
        check_shapes(func, [input], n, dim, norm)
        return _along_one(input, kind, n, dim % input.dim(), norm)

    def along_several(input: Any, s: Any = None, dim: Any = None, norm: str | None = None) -> Any:
        dim = (-2, -1) if dim is None and name.endswith("2") else dim
        if dim is None:
            dim = range(-len(s) if s is not None else -input.dim(), 0)
        dim = [dim] if isinstance(dim, int) else list(dim)
        s = (s,) if isinstance(s, int) else None if s is None else tuple(s)
        check_shapes(func, [input], s, tuple(dim), norm)
        dims = [one % input.dim() for one in dim]
        return _along_several(input, kind, s, dims, norm) if dims else input + 0

    run = along_one if kind == name else along_several
    return run(*args, **kwargs)


@by_name
def _shift(func: Any, input: Any, dim: Any = None) -> Any:
    """``fftshift`` and ``ifftshift``, one dim after the other."""
    dims = range(input.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    y = input
    for one in dims:
        y = along_whole(partial(func, dim=one), y, [one % input.dim()], func.__name__)
    return y


for _kind in _SEVERAL:
    for _end in ("", "2", "n"):
        TABLE[getattr(SPACES["fft"], _kind + _end)] = fast_transform
TABLE[torch.fft.fftshift] = TABLE[torch.fft.ifftshift] = _shift


@handles("stft", "torch Tensor")
@by_name
def stft(
    func: Any,
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    **options: Any,
) -> Any:
    """Short-time Fourier transforms: a worker has some of the overlapping pieces of the signals, each whole.

    Real results, global windows and ``align_to_window`` fall back.
    """
    if not return_complex or type(window) is GlobalTensor or options.get("align_to_window"):
        return NotImplemented
    length, step = win_length or n_fft, n_fft // 4 if hop_length is None else hop_length
    weights = torch.ones(max(length, 0), device=input.device) if window is None else window
    choices = (center, pad_mode, normalized, onesided, return_complex)
    check_on_meta(torch.stft, (input, n_fft, hop_length, win_length, weights, *choices), {})
    weights = _centred(weights, n_fft)
    signals = input if input.dim() > 1 else input.unsqueeze(0)
    if center:
        signals = functional.pad(signals.unsqueeze(1), (n_fft // 2, n_fft // 2), pad_mode).squeeze(1)
    pieces = signals.unfold(-1, n_fft, step) * weights.to(input.dtype.to_real() if window is None else window.dtype)
    half = not (pieces.is_complex()) if onesided is None else onesided
    y: Any = (torch.fft.rfft if half else torch.fft.fft)(pieces, dim=-1, norm="ortho" if normalized else None)
    y = y.transpose(-1, -2)
    return y if input.dim() > 1 else y.squeeze(0)


@handles("istft", "torch Tensor")
@by_name
def istft(
    func: Any,
    input: Any,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Any:
    """The inverse of stft: pieces add up where they overlap, and are divided by the sum of the squared windows.

    A worker has some of the pieces, each whole. Global windows fall back.
    """
    if type(input) is not GlobalTensor or type(window) is GlobalTensor:
        return NotImplemented
    options = (center, normalized, onesided, length, return_complex)
    _check_inverse(input, n_fft, hop_length, win_length, window, *options)
    width, step = win_length or n_fft, hop_length or n_fft // 4
    weights = torch.ones(width, dtype=input.dtype.to_real(), device=input.device) if window is None else window
    weights = _centred(weights, n_fft)
    modes: Any = (input if input.dim() > 2 else input.unsqueeze(0)).mT
    if return_complex:
        pieces = torch.fft.ifft(modes, dim=-1, norm="ortho" if normalized else None)
    else:
        kept = modes.narrow(-1, 0, n_fft // 2 + 1)
        pieces = torch.fft.irfft(kept, n_fft, dim=-1, norm="ortho" if normalized else None)
    count = pieces.shape[-2]
    known = n_fft + step * (count - 1)
    start = n_fft // 2 if center else 0
    stop = start + length if length is not None else known - start
    cells = slice(start, min(stop, known))
    scale = _overlap_add(weights.square().expand(count, n_fft), step)[cells]
    if not len(scale) or (not scale.is_meta and (scale.detach().abs() < 1e-11).any()):
        blank = torch.zeros(input.shape, dtype=input.dtype)
        func(blank, n_fft, hop_length, win_length, window, *options)  # raises torch's error
    y = _overlap_add(pieces * weights, step)[:, cells] / scale
    y = y if input.dim() > 2 else y.squeeze(0)
    return functional.pad(y, (0, stop - known)) if stop > known else y


def _check_inverse(input: Any, n_fft: int, hop_length: Any, win_length: Any, window: Any, *options: Any) -> None:
    """Let torch check the arguments of istft, as far as it can before it reads the values of the window."""
    with suppress(NotImplementedError):
        check_once(torch.istft, (input, n_fft, hop_length, win_length, window, *options), {})


def _centred(window: torch.Tensor, n_fft: int) -> torch.Tensor:
    """A window with zeros on both sides, as long as a piece."""
    missing = n_fft - len(window)
    return functional.pad(window, (missing // 2, missing - missing // 2))


def _overlap_add(pieces: Any, step: int) -> Any:
    """Add up pieces, (..., pieces, cells), each of which begins a step after the one before it."""
    count = -(-pieces.shape[-1] // step)
    parts = functional.pad(pieces, (0, count * step - pieces.shape[-1])).unflatten(-1, (count, step))
    rows: Any = sum(functional.pad(parts.select(-2, at), (0, 0, at, count - 1 - at)) for at in range(count))
    return rows.flatten(-2)
