"""Programs: a step that is recorded once and replayed, as a line of torch's operators and of messages."""

from distdl.programs.step import CompiledStep, compile

__all__ = ["CompiledStep", "compile"]
