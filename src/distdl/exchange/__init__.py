"""Operators: plans that workers execute, and the transfers by which they do."""

from distdl.exchange.composition import Chain, Together
from distdl.exchange.operator import Operator

__all__ = ["Chain", "Operator", "Together"]
