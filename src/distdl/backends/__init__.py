"""The back-ends. Each is one class, in a module that is imported only when a world of its kind is opened."""

from distdl.worlds import BACKENDS, world

__all__ = ["BACKENDS", "world"]
