"""What a model will need: a rehearsal that runs nothing, a table for each module, and the best splits."""

from distdl.globals.summary.summary import suggest, summary

__all__ = ["suggest", "summary"]
