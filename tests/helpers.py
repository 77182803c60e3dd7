"""Small things that several tests need."""

from distdl.comm import Communicator


class Silent(Communicator):
    """One of many workers, for what needs no message; any message is an error."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size = rank, size

    def exchange(self, sends, receives, tag=0):
        raise AssertionError("a message was sent")
