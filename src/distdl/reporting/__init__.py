"""One page that shows how a model is distributed: ``report``."""

from distdl.reporting.report import Report, report

__all__ = ["Report", "report"]
