"""What workers agree on before they plan."""

from distdl.agreement.agreement import Agreement, Decision, can_be_read, fixed_shapes
from distdl.agreement.header import Headers

__all__ = ["Agreement", "Decision", "Headers", "can_be_read", "fixed_shapes"]
