"""The back-ends. Each is one class, a communicator, in a module that is imported when its name is first used."""

from distdl.backends.job import Job, job
from distdl.backends.registry import BACKENDS, Backend, Work, find, names, register

__all__ = ["BACKENDS", "Backend", "Job", "Work", "find", "job", "names", "register"]
