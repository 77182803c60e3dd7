"""What workers agree on before they plan."""

from distdl.agreement.agreement import Agreement as Agreement
from distdl.agreement.agreement import can_be_read as can_be_read
from distdl.agreement.agreement import fixed_shapes
from distdl.agreement.header import Headers

__all__ = ["Headers", "fixed_shapes"]
