"""Functions that take functions, of global tensors. The first call of one imports this (see ``extras.late``)."""

from distdl.globals.extras import control_flow, linearizing, mapping, transforms


def install() -> None:
    """Let these functions look for global tensors."""
    for one in (transforms, mapping, linearizing, control_flow):
        one.install()
