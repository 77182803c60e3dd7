"""Boxes, and windows of convolution, pooling and interpolation: integers, and nothing else.

What is handed on here checks its arguments; the modules themselves trust those who call them.
"""

from distdl.environment.arguments import checks_arguments
from distdl.geometry import boxes

__all__ = ["runs"]

runs = checks_arguments(boxes.runs)
