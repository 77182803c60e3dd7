"""Models that compute with global tensors: how they are distributed, and what they will need."""

from distdl.globals.models.distribute import distribute
from distdl.globals.models.optimisers import load_optimizer_state_dict, optimizer_state_dict
from distdl.globals.models.summary import suggest, summary

__all__ = ["distribute", "load_optimizer_state_dict", "optimizer_state_dict", "suggest", "summary"]
