"""Post: a back-end of one's own. Every worker has an inbox, a queue; a message is its bytes with a label.

Run it: python post.py
"""

import multiprocessing
import queue
import time
from collections import defaultdict, deque
from typing import Any

import torch

import distdl
from distdl.comm import Communicator, Message, Pending, as_bytes
from distdl.nn import AllSumReduce
from distdl.worlds import enter


# [backend]
class PostCommunicator(Communicator):
    """A worker's link to the others, over a queue for each worker.

    Args:
        rank: this worker's number.
        inboxes: the queues of all workers; each is written by all and read by one.
    """

    def __init__(self, rank: int, inboxes: list[Any]) -> None:
        super().__init__()
        self.rank = rank
        self.size = len(inboxes)
        self._inboxes = inboxes
        self._arrived: defaultdict[tuple[int, int], deque[bytes]] = defaultdict(deque)

    def exchange(self, sends: list[Message], receives: list[Message], tag: int = 0) -> Pending:
        for target, tensor in sends:
            content = as_bytes(tensor.detach().contiguous()).numpy().tobytes()
            self._inboxes[target].put((self.rank, tag, content))

        def finish() -> None:
            for source, tensor in receives:
                content = torch.frombuffer(bytearray(self._take(source, tag)), dtype=tensor.dtype)
                with torch.no_grad():
                    tensor.copy_(content.reshape(tensor.shape))

        return Pending(finish)

    def _take(self, source: int, tag: int) -> bytes:
        """The next message with this label. What arrives before it waits its turn."""
        deadline = self.deadline()
        while not self._arrived[source, tag]:
            try:
                sender, label, content = self._inboxes[self.rank].get(timeout=max(deadline - time.monotonic(), 0))
            except queue.Empty:
                raise self.overdue([source]) from None
            self._arrived[sender, label].append(content)
        return self._arrived[source, tag].popleft()


# [world]
def work(rank: int, inboxes: list[Any], function: Any) -> None:
    """Make this process a worker, whose ``distdl.world()`` is that of the queues, and run a function in it."""
    torch.set_num_threads(1)
    enter(PostCommunicator(rank, inboxes), "threads")
    function()


def run(function: Any, workers: int = 4) -> None:
    """Run a function on so many processes. Raises RuntimeError if one of them fails."""
    context = multiprocessing.get_context("spawn")
    inboxes = [context.Queue() for _ in range(workers)]
    team = [context.Process(target=work, args=(rank, inboxes, function)) for rank in range(workers)]
    for process in team:
        process.start()
    for process in team:
        process.join()
    if any(process.exitcode for process in team):
        raise RuntimeError(f"exit codes {[process.exitcode for process in team]}")


# [use]
def main() -> None:
    P = distdl.world()
    x = torch.full((2,), P.rank + 1.0, requires_grad=True)
    y = AllSumReduce(P.reshape(2, 2), axes_reduce=[1])(x)
    y.sum().backward()
    P.print_sequential(f"worker {P.rank}: y = {y.tolist()}, gradient of x = {x.grad.tolist()}")
    #: worker 0: y = [3.0, 3.0], gradient of x = [2.0, 2.0]
    #: worker 1: y = [3.0, 3.0], gradient of x = [2.0, 2.0]
    #: worker 2: y = [7.0, 7.0], gradient of x = [2.0, 2.0]
    #: worker 3: y = [7.0, 7.0], gradient of x = [2.0, 2.0]


if __name__ == "__main__":
    run(main)
