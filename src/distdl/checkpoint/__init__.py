"""Checkpoints: saved on one number of workers, partition and back-end, loaded on any other."""

from distdl.checkpoint.exporting import export_state, import_state
from distdl.checkpoint.loading import load
from distdl.checkpoint.saving import finish_saving, save

__all__ = ["export_state", "finish_saving", "import_state", "load", "save"]
