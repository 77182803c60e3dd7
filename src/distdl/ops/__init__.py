"""Operations: what the layers compute, as values."""

from distdl.ops.setup import Op, Setup, Site

__all__ = ["Op", "Setup", "Site"]
