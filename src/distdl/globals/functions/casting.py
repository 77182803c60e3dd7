"""Functions that torch's autocast computes in float32, as its lists say, for each type of device.

Where torch's own function computes on blocks, it casts them. Where we make a function of others, or where a worker has
no cells to compute with, the result would be of half precision. So what these functions get is cast before they run.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import wraps
from typing import Any

import torch

from distdl.globals.functions.applying import widened
from distdl.globals.nested import map_tensors
from distdl.globals.table import TABLE, Handler, name_of

_ALWAYS = "cdist cosine_embedding_loss multi_margin_loss multilabel_margin_loss prod triplet_margin_loss"
_ON = {  # (of its other functions, torch's own or our ops give the dtype: elements, their losses, sums, softmax)
    "cpu": "adaptive_avg_pool3d adaptive_max_pool3d adaptive_max_pool3d_with_indices avg_pool3d cholesky "
    "cholesky_inverse cholesky_solve fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft "
    "fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn geqrf grid_sample "
    "inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh "
    "linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_qr linalg_solve "
    "linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve "
    "max_unpool1d max_unpool2d max_unpool3d nanquantile orgqr ormqr pinverse qr quantile stft svd trace "
    "triangular_solve view_as_complex",
    "cuda": "cosine_similarity cumprod cumsum dist group_norm layer_norm linalg_matrix_norm linalg_norm logsumexp "
    "pdist renorm rms_norm special_logsumexp",
}


def _wide(handler: Handler, devices: Collection[str]) -> Handler:
    @wraps(handler)
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch._C._is_any_autocast_enabled():
            args, kwargs = map_tensors((args, kwargs), lambda one: widened(one, devices))
        return handler(func, args, kwargs)

    return run


def install() -> None:
    """Let the handlers of these functions get wide tensors."""
    devices: dict[str, list[str]] = {}
    for device, names in _ON.items():
        for name in (_ALWAYS + " " + names).split():
            devices.setdefault(name, []).append(device)
    for function, handler in TABLE.items():
        found = devices.get(name_of(function)) if function is not None else None
        if found is not None:
            TABLE[function] = _wide(handler, found)
