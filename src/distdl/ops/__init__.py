"""Operations: what the layers compute, as values."""

from distdl.ops.setup import Op, Setup, Work

__all__ = ["Op", "Setup", "Work"]
