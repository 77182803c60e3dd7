"""What a distributed model will need, from a rehearsal without memory or messages: ``summary`` and ``suggest``."""

from distdl.globals.summary.summary import suggest, summary

__all__ = ["suggest", "summary"]
