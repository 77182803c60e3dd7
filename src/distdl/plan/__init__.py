"""Plans: data movements as values, and the planners that make them."""

from distdl.plan.plan import Move, Pattern, Plan, Role, Schedule, Shapes, Team

__all__ = ["Move", "Pattern", "Plan", "Role", "Schedule", "Shapes", "Team"]
