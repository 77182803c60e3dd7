"""Functions whose arguments torch's autocast casts, by its own lists for each type of device.

torch casts the blocks itself where its function runs on them. Where a handler calls other functions, or a worker has no
cells, the result would have another dtype. So the arguments of these functions are cast before the handler runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch

from distdl.globals.rules.applying import widened
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.globals.tensor.table import TABLE, Handler, name_of
from distdl.tensors.private_torch import is_any_autocast_enabled

_ALWAYS = " cdist prod triplet_margin_loss"
# Functions that torch computes in float32. Left out are those for which torch or an op of distdl gives the right dtype:
# element by element, their losses, sums, softmax.
_IN_FLOAT32 = {
    "cpu": "adaptive_avg_pool3d adaptive_max_pool3d adaptive_max_pool3d_with_indices avg_pool3d cholesky "
    "cholesky_solve fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn "
    "fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn grid_sample inverse linalg_cholesky "
    "linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex "
    "linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals max_unpool1d max_unpool2d max_unpool3d "
    "nanquantile pinverse qr quantile stft svd trace triangular_solve view_as_complex" + _ALWAYS,
    "cuda": "cosine_similarity cumprod cumsum dist group_norm layer_norm linalg_matrix_norm linalg_norm logsumexp "
    "rms_norm special_logsumexp" + _ALWAYS,
}
# Functions that torch computes in the widest dtype of their arguments.
_IN_WIDEST = {"cpu": "index_copy", "cuda": "bilinear cross dot grid_sample index_put scatter_add tensordot vdot"}

Cast = Callable[[torch.Tensor], torch.Tensor]


def _to_float32(devices: Collection[str], args: Any) -> Cast:
    return lambda one: widened(one, devices)


def _to_widest(devices: Collection[str], args: Any) -> Cast:
    has_float32 = any(one.dtype is torch.float32 for one in tensors_in(args))
    return _to_float32(devices, args) if has_float32 else lambda one: one


def _casting(handler: Handler, cast: Callable[[Collection[str], Any], Cast], devices: Collection[str]) -> Handler:
    @wraps(handler)
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_any_autocast_enabled():
            args, kwargs = map_tensors((args, kwargs), cast(devices, (args, kwargs)))
        return handler(func, args, kwargs)

    return run


def install() -> None:
    """Wrap the handlers of these functions, so that under autocast they get tensors of the dtype torch computes in."""
    for cast, lists in ((_to_float32, _IN_FLOAT32), (_to_widest, _IN_WIDEST)):
        devices: dict[str, list[str]] = {}
        for device, names in lists.items():
            for name in names.split():
                devices.setdefault(name, []).append(device)
        for function, handler in TABLE.items():
            found = devices.get(name_of(function)) if function is not None else None
            if found is not None:
                TABLE[function] = _casting(handler, cast, found)
