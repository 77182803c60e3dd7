"""Functions that torch's autocast computes in another dtype, as its lists say, for each type of device.

Where torch's own function computes on blocks, it casts them. Where we make a function of others, or where a worker has
no cells to compute with, the result would be of another dtype. So what these functions get is cast before they run: to
float32, or to the widest of their dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch

from distdl.globals.rules.applying import widened
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import TABLE, Handler, name_of

_ALWAYS = " cdist prod triplet_margin_loss"
_WIDE = {  # (of its other functions, torch's own or our ops give the dtype: elements, their losses, sums, softmax)
    "cpu": "adaptive_avg_pool3d adaptive_max_pool3d adaptive_max_pool3d_with_indices avg_pool3d cholesky "
    "cholesky_solve fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn "
    "fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn grid_sample inverse linalg_cholesky "
    "linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex "
    "linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals max_unpool1d max_unpool2d max_unpool3d "
    "nanquantile pinverse qr quantile stft svd trace triangular_solve view_as_complex" + _ALWAYS,
    "cuda": "cosine_similarity cumprod cumsum dist group_norm layer_norm linalg_matrix_norm linalg_norm logsumexp "
    "rms_norm special_logsumexp" + _ALWAYS,
}
_ALIKE = {"cpu": "index_copy", "cuda": "bilinear cross dot grid_sample index_put scatter_add tensordot vdot"}

Cast = Callable[[torch.Tensor], torch.Tensor]


def _to_wide(devices: Collection[str], args: Any) -> Cast:
    return lambda one: widened(one, devices)


def _to_widest(devices: Collection[str], args: Any) -> Cast:
    return _to_wide(devices, args) if any(one.dtype is torch.float32 for one in tensors_in(args)) else lambda one: one


def _casting(handler: Handler, cast: Callable[[Collection[str], Any], Cast], devices: Collection[str]) -> Handler:
    @wraps(handler)
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._is_any_autocast_enabled():
            args, kwargs = map_tensors((args, kwargs), cast(devices, (args, kwargs)))
        return handler(func, args, kwargs)

    return run


def install() -> None:
    """Let the handlers of these functions get tensors of the dtype in which torch computes."""
    for cast, lists in ((_to_wide, _WIDE), (_to_widest, _ALIKE)):
        devices: dict[str, list[str]] = {}
        for device, names in lists.items():
            for name in names.split():
                devices.setdefault(name, []).append(device)
        for function, handler in TABLE.items():
            found = devices.get(name_of(function)) if function is not None else None
            if found is not None:
                TABLE[function] = _casting(handler, cast, found)
