"""Commands of the command line that look at a model."""

from distdl.commands.models import UsageError, add_suggest, add_summary, add_verify

__all__ = ["UsageError", "add_suggest", "add_summary", "add_verify"]
