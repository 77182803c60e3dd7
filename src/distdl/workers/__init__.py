"""Worlds of workers: opening them, launching them, and recording what they exchange."""

from distdl.workers.launch import run_workers
from distdl.workers.ledger import ledger, name_layers
from distdl.workers.worlds import world

__all__ = ["ledger", "name_layers", "run_workers", "world"]
