"""Functions of torch whose results lie in memory as their arguments do.

Their handlers say nothing of that. What the functions of elements in ``functions/pointwise.py`` make, and views, is
noted there. Of all others, as of convolutions and transforms, torch's choice differs between devices: they are taken to
be contiguous.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from distdl.globals.strides import note_result
from distdl.globals.table import TABLE, Handler, named
from distdl.globals.tensor import GlobalTensor

_AS_GIVEN = """
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout rand_like randn_like
    randint_like flip fliplr flipud rot90 sort argsort msort index_put put select_scatter slice_scatter diagonal_scatter
    diag_embed addr repeat_interleave cat concat concatenate stack pixel_shuffle pixel_unshuffle
"""


def _following(handler: Handler) -> Handler:
    """A handler that takes note of the strides of its results, where those of an argument are not the usual ones."""

    @wraps(handler)
    def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        y = handler(func, args, kwargs)
        for one in args[0] if args and isinstance(args[0], (tuple, list)) else args:
            if type(one) is GlobalTensor and "_strides" in one.__dict__:
                note_result(func, args, kwargs, y)
                break
        return y

    return run


def install() -> None:
    """Let the handlers of these functions take note of strides."""
    for function in set(named(_AS_GIVEN)):
        if function in TABLE:
            TABLE[function] = _following(TABLE[function])
