"""What a back-end sees: the communicator, and the messages and memory that go through it.

The functions that are handed on here check their arguments; the modules themselves trust those who call them.
"""

from distdl.environment.arguments import checks_arguments
from distdl.transport import communicator
from distdl.transport.communicator import (
    SMALL_SUM,
    Addressed,
    CommunicationError,
    Communicator,
    Group,
    IntArray,
    Message,
    Pending,
    Prepared,
    View,
)
from distdl.transport.label import Label
from distdl.transport.recording import Recording as Recording

__all__ = [
    "SMALL_SUM",
    "Addressed",
    "CommunicationError",
    "Communicator",
    "Group",
    "IntArray",
    "Label",
    "Message",
    "Pending",
    "Prepared",
    "View",
    "as_bytes",
]

as_bytes = checks_arguments(communicator.as_bytes)
