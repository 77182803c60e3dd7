"""The published place of the partition class: ``distdl.backend.backend.Partition``."""

from distdl.backend import backend

__all__ = ["backend"]
