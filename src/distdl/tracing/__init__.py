"""What every worker did and waited for, as a file that trace viewers open, and as a table."""

from distdl.tracing.trace import Trace, trace

__all__ = ["Trace", "trace"]
