"""Worlds of workers: opening them, launching them, and recording what they exchange."""

from distdl.workers.launch import run_workers
from distdl.workers.ledger import ledger, name_layers
from distdl.workers.termination import on_terminate
from distdl.workers.worlds import world

__all__ = ["ledger", "name_layers", "on_terminate", "run_workers", "world"]
