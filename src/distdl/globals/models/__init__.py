"""Models that compute with global tensors: how they are distributed, and where their weights lie."""

from distdl.globals.models.distribute import distribute
from distdl.globals.models.optimisers import load_optimizer_state_dict, optimizer_state_dict

__all__ = ["distribute", "load_optimizer_state_dict", "optimizer_state_dict"]
