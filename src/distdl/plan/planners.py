"""The planners, for authors: they check their arguments (:mod:`distdl.plan.planning` trusts those who call it)."""

from distdl.partition.arguments import checks_arguments
from distdl.plan import planning

__all__ = ["all_sum", "broadcast", "copy"]

all_sum = checks_arguments(planning.all_sum)
broadcast = checks_arguments(planning.broadcast)
copy = checks_arguments(planning.copy)
