"""Post: a back-end of your own. A message is an entry of a store that all workers share.

Run it: python post.py, or: distdl run -n 4 --backend post SCRIPT
"""

from collections import Counter
from datetime import timedelta

import torch
from torch.distributed import DistStoreError, Store

import distdl
from distdl.backends import job, register
from distdl.nn import AllSumReduce
from distdl.transport import Communicator, Message, Pending, as_bytes

PIECE = 1 << 22  # bytes; the store takes no longer entries than 8 MiB


# [backend]
class PostCommunicator(Communicator):
    """A worker's link to the others, over a store.

    Args:
        rank, size: this worker's number, and how many there are.
        store: maps strings to bytes; all workers share it.
    """

    def __init__(self, rank: int, size: int, store: Store) -> None:
        super().__init__()
        self.rank = rank
        self.size = size
        self._store = store
        self._numbers: Counter[tuple[int, int, int]] = Counter()

    def exchange(self, sends: list[Message], receives: list[Message], tag: int = 0) -> Pending:
        for target, tensor in sends:
            content = as_bytes(tensor.detach().contiguous()).numpy().tobytes()
            for key, start in self._entries(self.rank, target, tag, tensor):
                self._store.set(key, content[start : start + PIECE])
        arrivals = [(tensor, source, self._entries(source, self.rank, tag, tensor)) for source, tensor in receives]

        def finish() -> None:
            for tensor, source, entries in arrivals:
                content = b"".join(self._take(key, source) for key, _ in entries)
                with torch.no_grad():
                    tensor.copy_(torch.frombuffer(bytearray(content), dtype=tensor.dtype).reshape(tensor.shape))

        return Pending(finish)

    def _entries(self, source: int, target: int, tag: int, tensor: torch.Tensor) -> list[tuple[str, int]]:
        """The entries of the next message with this label: where its pieces lie, and where each begins."""
        self._numbers[source, target, tag] += 1
        label = f"{source}/{target}/{tag}/{self._numbers[source, target, tag]}"
        return [(f"{label}/{start}", start) for start in range(0, tensor.nbytes, PIECE)]

    def _take(self, key: str, source: int) -> bytes:
        try:
            self._store.wait([key], timedelta(seconds=self.timeout))
        except DistStoreError:
            raise self.overdue([source]) from None
        content = self._store.get(key)
        self._store.delete_key(key)
        return content


# [register]
def open_post() -> PostCommunicator:
    """The communicator over all workers of the job in which this process was started."""
    here = job("post")
    return PostCommunicator(here.rank, here.size, here.store)


register("post", open_post)


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
    distdl.run_workers(main, workers=4, backend="post")
