"""Lets torchvision be imported where its compiled operators cannot be loaded.

PyPI's wheel of torchvision is built for CUDA. Beside a torch without CUDA its library does not load, and then its
import fails: it registers shapes for two operators that nobody has declared. timm and segmentation-models-pytorch
import torchvision, but none of their models calls these operators, so it is enough to declare them.
"""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

import torch

_declared: list[torch.library.Library] = []  # a library's declarations go when it does


def declare_missing() -> None:
    """Declare the operators for which ``import torchvision`` needs a declaration, unless its own library loads."""
    spec = importlib.util.find_spec("torchvision")
    if _declared or spec is None or spec.origin is None or _loads(Path(spec.origin).parent):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)


def _loads(folder: Path) -> bool:
    try:
        for compiled in folder.glob("_C*.so"):
            ctypes.CDLL(str(compiled))
    except OSError:
        return False
    return True
