"""Functions that take functions: vmap and the transforms, flex_attention, derivatives at a point, torch.cond and loops.

Most ask no tensor whether it handles them, so what asks is put in their place, or into them.
"""

from importlib import import_module

from distdl.environment.importing import behind
from distdl.globals.higher_order import control_flow, linearizing, mapping, transforms


def install() -> None:
    """Let these functions look for global tensors."""
    for one in (transforms, mapping, linearizing, control_flow):
        one.install()
    # (with torch 2.14 it imports sympy, which takes as long as all of distdl)
    behind("torch.nn.attention.flex_attention", lambda: import_module("distdl.globals.higher_order.flex"))
