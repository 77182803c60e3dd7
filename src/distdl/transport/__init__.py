"""What a back-end sees: the communicator, and the messages and memory that go through it."""

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
    as_bytes,
    begin_with,
    contiguous,
    deliver,
    empty,
    fold_into,
    name_workers,
    wait_all,
)
from distdl.transport.label import Label
from distdl.transport.recording import Call, Recording

__all__ = [
    "SMALL_SUM",
    "Addressed",
    "Call",
    "CommunicationError",
    "Communicator",
    "Group",
    "IntArray",
    "Label",
    "Message",
    "Pending",
    "Prepared",
    "Recording",
    "View",
    "as_bytes",
    "begin_with",
    "contiguous",
    "deliver",
    "empty",
    "fold_into",
    "name_workers",
    "wait_all",
]
