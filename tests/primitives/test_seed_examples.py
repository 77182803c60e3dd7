"""The numbered examples and the code examples of the founding documents."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

import distdl
from distdl.nn import Broadcast, DistributedMSELoss, SumReduce
from distdl.utilities.torch import zero_volume_tensor

SEEDS = Path(__file__).parents[3] / "shared" / "seeds"

# number: (shape of the smaller partition, shape of the larger, reverse the smaller, reverse the larger)
BROADCASTS = {
    1: ((1,), (4,), False, False),
    2: ((1,), (2, 3), False, False),
    3: ((3, 1), (3, 4), False, False),
    4: ((1, 1, 3), (4, 4, 3), False, False),
    7: ((1, 3), (3, 4), True, False),
    8: ((4, 1), (3, 4), False, True),
}
SUM_REDUCTIONS = {
    1: ((1,), (4,), False, False),
    2: ((1,), (2, 3), False, False),
    3: ((3, 1), (3, 4), False, False),
    4: ((1, 1, 3), (4, 4, 3), False, False),
    7: ((1, 3), (3, 4), False, True),
    8: ((4, 1), (3, 4), True, False),
}


def on_workers(main, workers):
    return distdl.run_workers(main, workers)


def partitions(small, large):
    """The larger on all workers; the smaller on the last ones, in reverse order."""
    P = distdl.world()
    count = int(np.prod(small))
    few = P.create_partition_inclusive(np.arange(P.size)[::-1][:count]).create_cartesian_topology_partition(small)
    return few, P.create_cartesian_topology_partition(large)


def source(few, many, turn_few, turn_many, worker):
    """The worker whose colour a worker of the larger partition has."""
    small = few.workers.T if turn_few else few.workers
    large = many.workers.T if turn_many else many.workers
    return int(np.broadcast_to(small, large.shape)[large == worker][0])


@pytest.mark.parametrize("number", BROADCASTS)
def test_broadcast_example(number):
    small, large, turn_few, turn_many = BROADCASTS[number]

    def main():
        few, many = partitions(small, large)
        layer = Broadcast(few, many, transpose_src=turn_few, transpose_dest=turn_many)
        me = distdl.world().rank
        x = torch.full((2, 3), float(me)) if few.active else zero_volume_tensor()
        x.requires_grad_()
        y = layer(x)
        fed_by = [source(few, many, turn_few, turn_many, w) for w in range(distdl.world().size)]
        assert torch.equal(y, torch.full((2, 3), float(fed_by[me])))
        y.backward(torch.full_like(y, float(me)))
        if few.active:
            assert torch.equal(x.grad, torch.full((2, 3), float(sum(w for w, s in enumerate(fed_by) if s == me))))

    on_workers(main, int(np.prod(large)))


@pytest.mark.parametrize("number", SUM_REDUCTIONS)
def test_sum_reduce_example(number):
    small, large, turn_few, turn_many = SUM_REDUCTIONS[number]

    def main():
        few, many = partitions(small, large)
        layer = SumReduce(many, few, transpose_src=turn_many, transpose_dest=turn_few)
        me = distdl.world().rank
        x = torch.full((2, 3), float(me), requires_grad=True)
        y = layer(x)
        adds_to = [source(few, many, turn_few, turn_many, w) for w in range(distdl.world().size)]
        if few.active:
            assert torch.equal(y, torch.full((2, 3), float(sum(w for w, t in enumerate(adds_to) if t == me))))
        else:
            assert y.shape == (2, 0)
        y.backward(torch.full_like(y, float(me)))
        assert torch.equal(x.grad, torch.full((2, 3), float(adds_to[me])))

    on_workers(main, int(np.prod(large)))


@pytest.mark.parametrize(("small", "large"), [((1, 1, 3), (3, 3, 2)), ((1, 3), (3, 1))])
def test_examples_5_and_6_are_refused_on_every_worker(small, large):
    def main():
        few, many = partitions(small, large)
        texts = []
        for make in (lambda: Broadcast(few, many), lambda: SumReduce(many, few)):
            with pytest.raises(ValueError, match="to be 1 or to equal") as error:
                make()
            texts.append(str(error.value))
        return texts

    results = on_workers(main, int(np.prod(large)))
    assert all(texts == results[0] for texts in results)


@pytest.mark.parametrize("turn", [(True, False), (False, True)])
def test_example_6_works_transposed_and_still_moves_data(turn):
    def main():
        P = distdl.world()
        row, column = P.reshape(1, 3), P.create_partition_inclusive([1, 2, 0]).reshape(3, 1)
        x = torch.full((2,), float(P.rank))
        y = Broadcast(row, column, transpose_src=turn[0], transpose_dest=turn[1])(x)
        z = SumReduce(row, column, transpose_src=turn[0], transpose_dest=turn[1])(x)
        return y[0].item(), z[0].item()

    assert on_workers(main, 3) == [(2, 2), (0, 0), (1, 1)]


# The code examples: (document, workers, what the names are then checked for)
def check_broadcast(names):
    me, P_x = distdl.world().rank, names["P_x"]
    xs = distdl.world().allgather_data(names["x"])
    assert names["y"].shape == (7, 5) and torch.equal(names["y"], xs[me % 3]) and P_x.active == (me < 3)


def check_sum_reduce(names):
    me = distdl.world().rank
    xs = distdl.world().allgather_data(names["x"])
    expected = sum(xs[column] for column in range(me, 12, 3)) if me < 3 else torch.zeros(0)
    assert torch.allclose(names["y"], expected) and names["y"].shape == expected.shape


def check_loss(names):
    gathered = distdl.world().allgather_data((names["x"], names["y"], names["loss"].detach()))
    x, y = (torch.cat([one[k] for one in gathered], dim=1) for k in (0, 1))
    expected = [torch.nn.functional.mse_loss(x, y), *[torch.tensor(0.0)] * 3]
    assert all(torch.allclose(one[2], value) for one, value in zip(gathered, expected, strict=True))


CODE = {
    "broadcast": (12, check_broadcast, """
        P_x = P_world.create_partition_inclusive(np.arange(0, 3)).create_cartesian_topology_partition([1, 3])
        P_y = P_world.create_partition_inclusive(np.arange(0, 12)).create_cartesian_topology_partition([4, 3])
        layer = Broadcast(P_x, P_y, preserve_batch=False)
        x = torch.rand(*np.array([7, 5])) if P_x.active else zero_volume_tensor()
        y = layer(x)
    """),
    "sum_reduce": (12, check_sum_reduce, """
        P_x = P_world.create_partition_inclusive(np.arange(0, 12)).create_cartesian_topology_partition([4, 3])
        P_y = P_world.create_partition_inclusive(np.arange(0, 3)).create_cartesian_topology_partition([1, 3])
        layer = SumReduce(P_x, P_y, preserve_batch=False)
        x = torch.rand(*np.array([7, 5])) if P_x.active else zero_volume_tensor()
        y = layer(x)
    """),
    "loss": (4, check_loss, """
        P_x = P_world.create_partition_inclusive(np.arange(0, 4)).create_cartesian_topology_partition([1, 4])
        criterion = DistributedMSELoss(P_x, reduction="mean")
        x, y = (torch.rand(*np.array([1, 40])) if P_x.active else zero_volume_tensor() for _ in range(2))
        loss = criterion(x, y)
        loss.backward()
    """),
}  # fmt: skip


def run_code(code, check, workers):
    def main():
        names = {
            "P_world": distdl.world(), "np": np, "torch": torch, "zero_volume_tensor": zero_volume_tensor,
            "Broadcast": Broadcast, "SumReduce": SumReduce, "DistributedMSELoss": DistributedMSELoss,
        }  # fmt: skip
        exec(code, names)
        check(names)

    on_workers(main, workers)


@pytest.mark.parametrize("document", CODE)
def test_code_example(document):
    workers, check, code = CODE[document]
    run_code("\n".join(line.strip() for line in code.splitlines()), check, workers)


def prompts(text):
    """The lines behind '>>>', with the indentation that some of the documents have lost."""
    lines = [line.strip() for line in re.split(r">>> ?", text[text.index(">>>") :])[1:]]
    lines[-1] = lines[-1].split(" API ")[0].split(" Here, ")[0].split("\n")[0]
    inside, code = False, []
    for line in lines:
        inside = inside and bool(line)
        code.append(f"    {line}" if inside else line)
        inside = inside or line.endswith(":")
    return "\n".join(code)


@pytest.mark.skipif(not SEEDS.exists(), reason="the founding documents lie beside the project, and not everywhere")
@pytest.mark.parametrize("document", CODE)
def test_code_example_as_it_stands_in_the_document(document):
    workers, check, _ = CODE[document]
    code = prompts((SEEDS / f"{document}.txt").read_text())
    assert "P_world.create_partition_inclusive" in code
    run_code(code, check, workers)
