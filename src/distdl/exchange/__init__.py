"""Operators: plans that workers execute, and the programs by which they do."""

from distdl.exchange.operator import Operator, move_together

__all__ = ["Operator", "move_together"]
