"""Jobs in which a worker fails, for ``test_failures``: ``scenarios.py NAME [BACKEND]``."""

import json
import os
import sys
import threading
import time

import torch

import distdl
from distdl.nn import AllSumReduce, Broadcast, Repartition
from distdl.transport.communicator import CommunicationError


def dies():
    """Worker 1 ends without a word."""
    P = distdl.world()
    layer = AllSumReduce(P.reshape(4), [0])
    layer(torch.ones(2))
    if P.rank == 1:
        os._exit(3)
    layer(torch.ones(2))


def is_absent():
    """Worker 2 is busy with something else for longer than workers 1 and 3 wait. Worker 0 would wait for ever."""
    P = distdl.world()
    layer = AllSumReduce(P.reshape(4), [0])
    layer(torch.ones(2))
    P.comm.timeout = 3.0 if P.rank else 300.0  # (the start takes longer on a busy machine)
    if P.rank == 2:
        time.sleep(60)
    print(f"told {json.dumps([raised(lambda: layer(torch.ones(2)))])}", flush=True)
    time.sleep(2)
    raise RuntimeError("somebody was absent")


def raised(call):
    """The text of the CommunicationError of a call."""
    try:
        call()
    except CommunicationError as error:
        return str(error)
    raise AssertionError("the call should have raised a CommunicationError")


def differs():
    """Worker 1 calls two layers, data calls and backwards in another order; then the world refuses every call."""
    P = distdl.world()
    first, second = (AllSumReduce(P.reshape(4), [0]) for _ in range(2))
    order = (second, first) if P.rank == 1 else (first, second)
    texts = [raised(lambda: order[0](torch.ones(2)))]
    texts.append(raised(lambda: P.allreduce_data(P.rank, "max" if P.rank == 1 else "sum")))
    texts.append(raised(lambda: P.allgather_data(1) if P.rank == 1 else P.allreduce_data(1)))
    try:
        first(torch.ones(2 + P.rank))
    except ValueError as error:
        texts.append(str(error))
    assert P.allgather_data(P.rank) == [0, 1, 2, 3]
    results = [layer(torch.ones(2, requires_grad=True)) for layer in (first, second)]

    def backwards_and_a_call():
        for place in (1, 0) if P.rank == 1 else (0, 1):
            results[place].sum().backward()
        first(torch.ones(2))

    texts.append(raised(backwards_and_a_call))
    for call in (lambda: P.allgather_data(P.rank), lambda: second(torch.ones(2)), lambda: P.comm.exchange([], [])):
        assert f"out of step since an earlier error: {texts[-1]}" in raised(call)
    print(f"told {json.dumps(texts)}", flush=True)
    time.sleep(2)  # (what ends the job under MPI is that it cannot gather the results of its workers)


def differs_in_moves():
    """In the backward of moves, worker 1 takes another order."""
    P = distdl.world()
    layer = Repartition(P.reshape(4, 1), P.reshape(1, 4))
    backwards([layer(torch.ones(1, 4, requires_grad=True)) for _ in range(2)])


def differs_in_shapes():
    """In the backward of sums of two shapes, worker 1 takes another order, so that tensors of both shapes meet."""
    P = distdl.world()
    layers = [AllSumReduce(P.reshape(4), [0]) for _ in range(2)]
    backwards([layers[place](torch.ones(2 + place, requires_grad=True)) for place in range(2)])


def drops():
    """Worker 1 does not use one of two results in its backward, and goes on to the next call."""
    P = distdl.world()
    layer = AllSumReduce(P.reshape(4), [0])
    results = [layer(torch.ones(2, requires_grad=True)) for _ in range(2)]
    try:
        sum(results[: 2 - (P.rank == 1)]).sum().backward()
        layer(torch.ones(2))
    except CommunicationError as error:
        print(f"told {json.dumps([str(error)])}", flush=True)
        raise


class Shows(torch.nn.Module):
    """Worker 0 alone asks for a value, within a model."""

    def forward(self, x):
        loss = x.square().mean()
        if distdl.world().rank == 0:
            print(loss.item())
        return loss


def asks_alone():
    """Worker 0 alone asks for the value of a loss, and the others go on to the next batch."""
    P = distdl.world()
    x = torch.arange(8.0).reshape(8, 1)
    model = distdl.distribute(torch.nn.Sequential(torch.nn.Identity(), Shows()), P.reshape(P.size, 1))
    batch = distdl.distribute_tensor(x, P.reshape(P.size, 1))
    try:
        model(batch)
        distdl.distribute_tensor(x, P.reshape(P.size, 1))  # behind it
    except CommunicationError as error:
        print(f"told {json.dumps([str(error)])}", flush=True)
        raise


def differentiates_alone():
    """Worker 1 leaves a backward out, and goes on to the next batch."""
    P = distdl.world()
    x = torch.arange(8.0).reshape(8, 1)
    model = distdl.distribute(torch.nn.Linear(1, 1), P.reshape(P.size, 1))
    loss = model(distdl.distribute_tensor(x, P.reshape(P.size, 1))).square().mean()
    try:
        if P.rank != 1:
            loss.backward()
        distdl.distribute_tensor(x, P.reshape(P.size, 1))
    except CommunicationError as error:
        print(f"told {json.dumps([str(error)])}", flush=True)
        raise


def sends_pieces_late():
    """Worker 1 is late by longer than a wait looks for circles after, and messages go in pieces."""
    from distdl.backends.mpi import messages

    P, messages.PIECE_BYTES = distdl.world(), 64
    given, found = torch.arange(100.0), torch.empty(100)
    if P.rank == 1:
        time.sleep(2)
    if P.rank < 2:
        P.comm.exchange([(1 - P.rank, given)], [(1 - P.rank, found)]).wait()
        assert torch.equal(given, found)
    print("came in pieces", flush=True)


def gathers_between_calls():
    """Workers 0 to 2 gather by themselves between broadcasts that need nobody; worker 2 is late."""
    P = distdl.world()
    members = [P[:2] | P[3:], P[:2]]
    broadcasts = [
        Broadcast(P[root : root + 1].reshape(1), team.reshape(team.size)) for root, team in enumerate(members)
    ]

    def call(root):
        if P.rank in members[root].workers:
            broadcasts[root](torch.ones(3) if P.rank == root else torch.zeros(0))

    call(0)
    call(1)
    with distdl.fixed_shapes():
        if P.rank < 2:
            call(P.rank)
        if P.rank == 2:
            time.sleep(4)
        if P.rank < 3:
            gathered = P.comm.all_gather((0, 1, 2), torch.full((1,), float(P.rank)))
            assert gathered.flatten().tolist() == [0, 1, 2]
        if P.rank < 2:
            call(1 - P.rank)
        if P.rank == 3:
            call(0)
    print("gathered between", flush=True)


def leaves_out():
    """Worker 3 does not call a layer of two workers, and goes on to one of all of them."""
    P = distdl.world()
    pair, every = AllSumReduce(P[2:].reshape(2), [0]), AllSumReduce(P.reshape(4), [0])
    _end_by([pair, every] if P.rank == 2 else [every])


def goes_around():
    """Three workers call layers of two of them, each in another order."""
    P = distdl.world()
    pairs = [AllSumReduce((P[n : n + 1] | P[m : m + 1]).reshape(2), [0]) for n, m in ((0, 1), (1, 2), (2, 0))]
    every = AllSumReduce(P.reshape(4), [0])
    _end_by([pairs[P.rank], pairs[P.rank - 1], every] if P.rank < 3 else [every])


def _end_by(layers):
    try:
        for layer in layers:
            layer(torch.ones(2))
    except CommunicationError as error:
        print(f"told {json.dumps([str(error)])}", flush=True)
        raise


def freezes():
    """Worker 1 alone has frozen a layer, so that gradients of other lengths would meet."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(distdl.world().rank != 1)
    frozen(model, torch.ones(8, 3))


def freezes_others():
    """Worker 1 has frozen another layer than the others, so that gradients of equal length would meet."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[int(distdl.world().rank == 1)].requires_grad_(False)
    frozen(model, torch.ones(8, 3))


def frozen(model, x):
    """Train a model that workers have frozen differently; print the error, and end by it."""
    P = distdl.world()
    model = distdl.distribute(model, P.reshape(P.size, 1))
    try:
        model(x).sum().backward()
        P.allgather_data("all are through")
    except CommunicationError as error:
        print(f"told {json.dumps([str(error)])}", flush=True)
        raise


def backwards(results):
    """Run the backward of two results, on worker 1 in another order; print the error, and end by it."""
    try:
        for place in (1, 0) if distdl.world().rank == 1 else (0, 1):
            results[place].sum().backward()
        distdl.world().allgather_data("all are through")
    except CommunicationError as error:
        print(f"told {json.dumps([str(error)])}", flush=True)
        raise


def shares_its_calls():
    """On worker 0 a second thread calls a layer while the first waits in another one, in which worker 1 then joins."""
    P = distdl.world()
    first, second = (AllSumReduce(P.reshape(2), [0]) for _ in range(2))
    for layer in (first, second):
        layer(torch.ones(2))
    texts = []

    def share():
        while P.comm.waiting is None:
            time.sleep(0.01)
        texts.append(raised(lambda: second(torch.ones(2))))

    thread = threading.Thread(target=share, name="of the user")
    if P.rank == 0:
        thread.start()
    else:
        time.sleep(0.7)
    ended = raised(lambda: first(torch.ones(2)))
    if P.rank == 0:
        thread.join()
    print(f"told {json.dumps([ended, raised(lambda: P.allgather_data(P.rank)), *texts])}", flush=True)
    time.sleep(3)  # (what ends the job under MPI is that it cannot gather the results of its workers)


def outlives():
    """Worker 1 dies; the others catch that, and ask again."""
    P = distdl.world()
    layer = AllSumReduce(P.reshape(4), [0])
    layer(torch.ones(2))
    if P.rank == 1:
        os._exit(3)
    texts = [raised(lambda: layer(torch.ones(2)))]
    texts += [raised(lambda: P.comm.exchange([(1, torch.ones(2))], []).wait()), raised(lambda: P.allgather_data(0))]
    print(f"told {json.dumps(texts)}", flush=True)


if __name__ == "__main__":
    workers = int(os.environ.get("SCENARIO_WORKERS", "4"))
    distdl.run_workers(globals()[sys.argv[1]], workers, sys.argv[2] if len(sys.argv) > 2 else None)
