"""Conversion of distributed models: ``model.float()``, ``load_state_dict``.

torch may swap parameters for new ones (``torch.__future__.set_swap_module_params_on_conversion(True)``). It refuses to
where something refers to a parameter, as a distributed model does, and a share lies elsewhere than a new tensor. So the
modules of a distributed model are converted as torch converts those of others without that: in place.
"""

from __future__ import annotations

import sys
from functools import wraps
from typing import Any

import torch

from distdl.globals.models.copies import Parameters


def install() -> None:
    """Let torch not swap the parameters of distributed models."""
    future: Any = torch.__future__
    asked = future.get_swap_module_params_on_conversion

    @wraps(asked)
    def swaps() -> bool:
        module = sys._getframe(1).f_locals.get("self")  # (which asks before it converts its own parameters)
        return bool(asked()) and not isinstance(getattr(module, "_parameters", None), Parameters)

    future.get_swap_module_params_on_conversion = swaps
