"""Plans: data movements as values, and the planners that make them."""

from distdl.plan.plan import Move, Plan, Shapes

__all__ = ["Move", "Plan", "Shapes"]
