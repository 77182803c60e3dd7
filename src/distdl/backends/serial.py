"""The serial back-end: a world of one worker, with nobody to talk to."""

from collections.abc import Sequence
from typing import Any

from distdl.backends import Work, register
from distdl.transport.communicator import Communicator, Message, Pending


class SerialCommunicator(Communicator):
    """The only worker of its world."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0
        self.size = 1

    def exchange(self, sends: Sequence[Message], receives: Sequence[Message], tag: int = 0) -> Pending:
        if sends or receives:
            raise ValueError("a world of one worker has nobody to exchange messages with")
        return Pending()


def _start(work: Work, workers: int) -> list[Any]:
    if workers != 1:
        raise ValueError(f"the serial back-end has one worker (distdl run -n 1); got {workers}")
    return [work(SerialCommunicator())]


register("serial", SerialCommunicator, start=_start)
