"""Functions of torch that take functions: transforms of ``torch.func``, control flow, and ``flex_attention``'s own.

Most ask no tensor whether it handles them, so what asks is put in their place, or into them.
"""

from distdl.globals.higher_order import control_flow, flexing, linearizing, mapping, transforms


def install() -> None:
    """Let these functions look for global tensors."""
    for one in (transforms, mapping, flexing, linearizing, control_flow):
        one.install()
