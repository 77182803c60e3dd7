"""What the checks have in common."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import distdl
from distdl.nn import Repartition


def raises(kind, call, *words):
    """What a call raises, on every worker; checked to be the same text on all of them."""
    try:
        call()
    except kind as error:
        text = str(error)
    else:
        raise AssertionError(f"{kind.__name__} was not raised")
    assert all(word in text for word in words), text
    return text


def on_threads(function, workers):
    """What a function returns on threads of worker 0's process, outside of this world, which may be one of threads."""
    P, found = distdl.world(), None
    if P.rank == 0:
        with ThreadPoolExecutor(1) as outside:
            found = outside.submit(distdl.run_workers, function, workers, "threads").result()
    return P.broadcast_data(found)


def same_everywhere(P, value):
    values = P.allgather_data(value)
    assert all(one == values[0] for one in values), values


def pair(P):
    """Two partitions of which the first is copied to the second; with four workers, worker 0 is in neither."""
    if P.size == 1:
        return P.reshape(1, 1), P.reshape(1, 1)
    return P.create_partition_inclusive([2]).reshape(1, 1), P.create_partition_inclusive([3, 1]).reshape(2, 1)


def repartition_rows_to_columns(P):
    return Repartition(P.reshape(P.size, 1), P.reshape(1, P.size))


def expect_repartition(P, layer, rows, columns, dtype=torch.float64):
    """Rows of the given heights, of a tensor with the given number of columns, repartitioned to columns."""
    whole = torch.arange(float(sum(rows) * columns)).reshape(sum(rows), columns).to(dtype)
    start = sum(rows[: P.rank])
    y = layer(whole[start : start + rows[P.rank]])
    stops = np.cumsum([0, *(columns // P.size + (w < columns % P.size) for w in range(P.size))])
    assert torch.equal(y, whole[:, stops[P.rank] : stops[P.rank + 1]]) and y.dtype == dtype
