"""Workers that make calls, or run a backward, in another order than the others: an error, and never a wrong number."""

import copy
import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.backends.threaded import ThreadCommunicator
from distdl.nn import AllSumReduce, Broadcast, DistributedBatchNorm, DistributedLinear, Repartition, SumReduce
from distdl.transport.communicator import CommunicationError, Communicator

WORKERS = 3


def told(work):
    """The text of the CommunicationError that each worker gets, which is one text."""
    texts = {}

    def main():
        P = distdl.world()
        with pytest.raises(CommunicationError) as error:
            work(P)
        texts[P.rank] = str(error.value)
        assert P.allgather_data(P.rank) == [0, 1, 2]  # all have raised it in the same place, so they may go on

    distdl.run_workers(main, WORKERS)
    assert len(texts) == WORKERS and len(set(texts.values())) == 1, texts
    return texts[0]


def linear(P):
    return DistributedLinear(P[:1].reshape(1, 1), P.reshape(1, 3), P.reshape(3, 1), 4, 6)


LAYERS = {
    "all-sum": (lambda P: AllSumReduce(P.reshape(3), [0]), lambda P: torch.ones(2)),
    "repartition": (lambda P: Repartition(P.reshape(3, 1), P.reshape(1, 3)), lambda P: torch.ones(1, 3)),
    "linear": (linear, lambda P: torch.ones(2, 4) if P.rank == 0 else torch.zeros(2, 0)),
    "batch norm": (lambda P: DistributedBatchNorm(P.reshape(3, 1), 2), lambda P: torch.ones(2, 2)),
}


@pytest.mark.fault("threads")
@pytest.mark.parametrize("kind", LAYERS)
def test_two_layers_of_one_kind_that_one_worker_calls_in_another_order(kind):
    make, give = LAYERS[kind]

    def work(P):
        network = torch.nn.ModuleDict({"first": make(P), "second": make(P)})
        distdl.name_layers(network)
        for name in ("second", "first") if P.rank == 1 else ("first", "second"):
            network[name](give(P))

    text = told(work)
    assert "workers make different calls together: first" in text and "second" in text
    assert "[layer 0" in text and "on 0, 2" in text and "[layer" in text.split("on 0, 2")[1], text


def test_copies_of_a_layer_are_told_from_it_and_from_each_other():
    def work(P, *, crossed):
        layer = AllSumReduce(P.reshape(3), [0])
        layer(torch.ones(2))
        network = torch.nn.ModuleList([copy.deepcopy(layer), copy.deepcopy(layer), layer])
        network.append(copy.deepcopy(network[0]))
        order = [0, 1, 2, 3] if P.rank != 2 or not crossed else [0, 3, 2, 1]
        return [network[place](torch.ones(2)).tolist() for place in order]

    text = told(lambda P: work(P, crossed=True))
    assert "[layer 0, copy 2] (exchange 2) on 0, 1" in text and "[layer 0, copy 3] (exchange 2) on 2" in text

    def right():
        assert work(distdl.world(), crossed=False) == [[3, 3]] * 4

    distdl.run_workers(right, WORKERS)


def test_a_copy_that_only_one_worker_keeps_disturbs_no_layer():
    def main():
        P = distdl.world()
        layer = AllSumReduce(P.reshape(3), [0])
        if P.rank == 0:
            copy.deepcopy(layer)
        later = AllSumReduce(P.reshape(3), [0])
        assert later(layer(torch.ones(1))).item() == 9

    distdl.run_workers(main, WORKERS)


def test_layers_of_one_kind_in_a_checkpoint_and_copied_with_their_network():
    def main():
        P = distdl.world()
        network = torch.nn.Sequential(*(AllSumReduce(P.reshape(3), [0]) for _ in range(2)))
        for model in (network, copy.deepcopy(network)):
            x = torch.full((2,), P.rank + 1.0, requires_grad=True)
            y = checkpoint(model, x, use_reentrant=False)
            y.square().sum().backward()
            assert y.tolist() == [18, 18] and x.grad.tolist() == [2 * 18 * 9] * 2

    distdl.run_workers(main, WORKERS)


DATA = {
    "operations": (lambda P: P.allreduce_data(1, "max"), lambda P: P.allreduce_data(1), "op='max'", "op='sum'"),
    "methods": (lambda P: P.allgather_data(1), lambda P: P.allreduce_data(1), "allgather_data", "allreduce_data"),
    "roots": (lambda P: P.broadcast_data(1, 1), lambda P: P.broadcast_data(1), "from worker 1", "from worker 0"),
    "partitions": (lambda P: P.reshape(3, 1).allgather_data(1), lambda P: P.allgather_data(1), "in 3x1", "in 3 "),
    "a layer": (
        lambda P: AllSumReduce(P.reshape(3), [0])(torch.ones(2)), lambda P: P.allgather_data(1), "AllSumReduce",
        "allgather_data",
    ),
}  # fmt: skip


@pytest.mark.fault("threads")
@pytest.mark.parametrize("what", DATA)
def test_data_calls_that_differ(what):
    other, expected, *words = DATA[what]
    text = told(lambda P: (other if P.rank == 1 else expected)(P))
    assert text.startswith("workers make different calls together: ") and all(word in text for word in words), text


def test_an_unknown_reduction_is_the_same_error_wherever_it_is_asked_for():
    def main():
        P = distdl.world()
        with pytest.raises(ValueError, match="a reduction is one of sum, prod, max, min; got 'mean'"):
            P.allreduce_data(1, "mean")
        with pytest.raises(CommunicationError, match=r"op='sum' .*on 0, 1; .*op='mean' .*on 2"):
            P.allreduce_data(1, "mean" if P.rank == 2 else "sum")

    distdl.run_workers(main, WORKERS)


# -- backward


def two_results(P, make, shared=False):
    first = make(P)
    second = first if shared else make(P)
    x, z = (torch.full((3,) if make is not repartition else (1, 3), n, requires_grad=True) for n in (1.0, 2.0))
    return first, [first(x), second(z)], (x, z)


def all_sum(P):
    return AllSumReduce(P.reshape(3), [0])


def broadcast(P):
    return Broadcast(P[:1].reshape(1), P.reshape(3))


def sum_reduce(P):
    return SumReduce(P.reshape(3), P[:1].reshape(1))


def repartition(P):
    return Repartition(P.reshape(3, 1), P.reshape(1, 3))


def backward(P, results):
    for place in (1, 0) if P.rank == 1 else (0, 1):
        (results[place].sum() * (place + 1)).backward()


@pytest.mark.fault("threads")
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("make", [all_sum, broadcast, sum_reduce, repartition])
def test_a_backward_in_another_order_is_an_error_at_once(make, shared):
    raised = {}

    def main():
        P = distdl.world()
        _, results, _ = two_results(P, make, shared)
        try:
            backward(P, results)
            P.allgather_data("all are through")
        except CommunicationError as error:
            raised[P.rank] = str(error)
            with pytest.raises(CommunicationError, match="out of step since an earlier error: every worker waits"):
                P.allgather_data(0)
            raise

    with pytest.raises(CommunicationError, match="every worker waits for another one"):
        distdl.run_workers(main, WORKERS)
    assert len(raised) == WORKERS and len(set(raised.values())) == 1
    assert "the backward of exchange 1" in raised[0] and "the backward of exchange 2" in raised[0], raised[0]


NODES = {
    "weights": torch.nn.Conv2d(4, 4, 1),
    "a convolution of windows": torch.nn.Conv2d(4, 4, 3, padding=1),
    "a convolution of blocks where they lie": torch.nn.Conv2d(4, 4, 3, padding=1),
    "batch norm": torch.nn.BatchNorm2d(4),
    "group norm": torch.nn.GroupNorm(2, 4),
}


@pytest.mark.fault("threads")
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("node", NODES)
def test_a_backward_in_another_order_is_an_error_where_a_node_exchanges_by_itself(node, create_graph):
    raised = {}

    def main():
        P = distdl.world()
        rows = P.reshape(1, 1, 3, 1)
        model = distdl.distribute(copy.deepcopy(NODES[node]).requires_grad_(node == "weights"), rows)
        inputs = [*model.parameters()] if node == "weights" else []
        block = torch.ones(2, 4, *((90, 90) if "lie" in node else (3, 9)), requires_grad=True)
        results = [model(distdl.GlobalTensor.from_local(block, rows)).to_local().square().sum() for _ in range(2)]
        try:
            for place in (1, 0) if P.rank == 1 else (0, 1):
                torch.autograd.grad(results[place], inputs or block, create_graph=create_graph)
            P.allgather_data("all are through")
        except CommunicationError as error:
            raised[P.rank] = str(error)
            raise

    with pytest.raises(
        CommunicationError, match=r"every worker waits for another one.*the backward of (exchange|recorded node) \d"
    ):
        distdl.run_workers(main, WORKERS)
    assert len(raised) == WORKERS and len(set(raised.values())) == 1


@pytest.fixture
def native(monkeypatch):
    """Threads whose collectives carry no tag, as those of transports."""
    for name in ("broadcast", "sum", "all_sum"):
        method = getattr(Communicator, name)
        monkeypatch.setattr(ThreadCommunicator, name, lambda self, *given, method=method: method(self, *given[:-1]))


AFTER = {
    "a layer": lambda P, layer: layer(torch.ones(3)),
    "data": lambda P, layer: P.allgather_data(1),
    "another layer": lambda P, layer: broadcast(P)(torch.ones(3)),
}


@pytest.mark.fault("threads")
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("make", [all_sum, broadcast, sum_reduce])
def test_a_backward_in_another_order_is_noticed_by_the_next_call_where_collectives_carry_no_tag(native, make, after):
    texts = {}

    def main():
        P = distdl.world()
        layer, results, _ = two_results(P, make)
        backward(P, results)
        with pytest.raises(CommunicationError) as error:
            AFTER[after](P, layer)
        texts[P.rank] = str(error.value)
        with distdl.ledger():
            for call in AFTER.values():
                with pytest.raises(CommunicationError, match=r"cannot go on in .*out of step since an earlier error"):
                    call(P, layer)
        with pytest.raises(CommunicationError, match="out of step"):
            P.comm.exchange([], [((P.rank + 1) % 3, torch.zeros(1))])

    distdl.run_workers(main, WORKERS)
    assert len(set(texts.values())) == 1
    assert "since exchange 3 of these workers, which was the backward of exchange 1" in texts[0], texts[0]
    assert "[layer 0] on 0, 2; the backward of exchange 2" in texts[0] and "[layer 1] on 1" in texts[0], texts[0]


@pytest.mark.fault("threads")
def test_fixed_shapes_leave_the_comparison_to_the_first_call_outside(native):
    def main():
        P = distdl.world()
        layers = [all_sum(P), all_sum(P)]
        for layer in layers:
            layer(torch.ones(2))
        with distdl.fixed_shapes():
            for layer in reversed(layers) if P.rank == 1 else layers:
                layer(torch.ones(2))
        with pytest.raises(CommunicationError, match=r"since exchange 3 .*\[layer 0\] on 0, 2; .*\[layer 1\] on 1"):
            P.allgather_data(0)

    distdl.run_workers(main, WORKERS)


@pytest.mark.fault("threads")
def test_a_backward_that_one_worker_leaves_out_is_named():
    def main():
        P = distdl.world()
        layer, results, _ = two_results(P, all_sum)
        results[0].sum().backward()
        if P.rank != 1:
            results[1].sum().backward()
        layer(torch.ones(3))

    words = (
        r"workers 0, 2 wait in the backward of exchange 2, AllSumReduce .*\(exchange 4\) at \S+test_order.py:\d+ for "
        r"worker 1; worker 1 waits in AllSumReduce"
    )
    with pytest.raises(CommunicationError, match=words):
        distdl.run_workers(main, WORKERS)


def test_an_error_that_all_have_agreed_on_leaves_the_world_usable():
    def main():
        P = distdl.world()
        layer = all_sum(P)
        for _ in range(2):
            with pytest.raises(ValueError, match="one shape"):
                layer(torch.ones(2 + P.rank))
            with pytest.raises(ValueError, match="worker 1: cannot send a value of type object"):
                P.allgather_data(object() if P.rank == 1 else 0)
            assert layer(torch.ones(1)).item() == 3
            assert P.allgather_data(P.rank) == [0, 1, 2]
        assert P.comm.failure is None

    distdl.run_workers(main, WORKERS)


@pytest.mark.fault("threads")
def test_a_layer_of_another_worker_is_an_error():
    layers = {}

    def main():
        P = distdl.world()
        layers[P.rank] = all_sum(P)
        P.allgather_data(0)
        layers[0 if P.rank == 1 else P.rank](torch.ones(2))

    with pytest.raises(CommunicationError, match=r"worker 1 called AllSumReduce .* of worker 0: each worker"):
        distdl.run_workers(main, WORKERS)


@pytest.mark.fault("threads")
def test_a_layer_of_a_world_that_has_ended_is_an_error():
    layers = {}

    def build():
        layers[distdl.world().rank] = all_sum(distdl.world())

    def main():
        with pytest.raises(CommunicationError, match="ended while others wait for it"):
            layers[distdl.world().rank](torch.ones(2))
        assert distdl.world().allgather_data(0) == [0] * WORKERS

    distdl.run_workers(build, WORKERS)
    distdl.run_workers(main, WORKERS)


# -- DISTDL_DEBUG


@pytest.mark.fault("threads")
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("make", [all_sum, repartition])
def test_under_debug_a_backward_in_another_order_is_an_error_before_it_is_sent(native, monkeypatch, make, fixed):
    monkeypatch.setenv("DISTDL_DEBUG", "1")
    texts = {}

    def main():
        P = distdl.world()
        layer, results, (x, z) = two_results(P, make)
        distdl.name_layers(torch.nn.ModuleDict({"inner": layer}))
        with pytest.raises(CommunicationError) as error:
            if fixed:
                with distdl.fixed_shapes():
                    backward(P, results)
            else:
                backward(P, results)
        texts[P.rank] = str(error.value)
        assert x.grad is z.grad is None

    distdl.run_workers(main, WORKERS)
    assert len(set(texts.values())) == 1
    assert (
        "workers differ before an exchange (DISTDL_DEBUG): worker 0 is in the backward of exchange 1, inner: "
        in texts[0]
    )
    assert "and worker 1 is in the backward of exchange 2" in texts[0], texts[0]


@pytest.mark.fault("threads")
def test_under_debug_a_call_of_one_worker_more_names_what_the_others_do(monkeypatch):
    monkeypatch.setenv("DISTDL_DEBUG", "1")
    texts = {}

    def main():
        P = distdl.world()
        layer = all_sum(P)
        y = layer(torch.ones(2, requires_grad=True))
        with pytest.raises(CommunicationError) as error:
            layer(torch.ones(2)) if P.rank == 1 else y.sum().backward()
        texts[P.rank] = str(error.value)

    distdl.run_workers(main, WORKERS)
    (text,) = set(texts.values())
    others = ", ".join(str(worker) for worker in range(WORKERS) if worker != 1)
    assert re.search(
        rf"together: the backward of exchange \d+, AllSumReduce .* on {others}; AllSumReduce .* on 1; called at ", text
    ), text
