"""Where tensors become global, and plain again."""

import numpy as np
import pytest
import torch
from launched import Calling, assert_close, on_workers, split
from launchers import forked
from same import noise

import distdl
from distdl import GlobalTensor
from distdl.nn import DistributedConv2d
from distdl.partition import Layout
from distdl.testing import Counting, assert_adjoint, assert_matches_sequential

x35 = noise(3, 5)
square = noise(2, 2)


def grid(*extents, first=0):
    P = distdl.world().create_partition_inclusive(range(first, first + torch.Size(extents).numel()))
    return P.create_cartesian_topology_partition(extents)


def me():
    return distdl.world().comm.rank


@on_workers
def test_a_tensor_that_one_worker_has():
    for source in (0, 2):
        for x in (x35, torch.arange(15).reshape(3, 5), x35.bool(), x35.bfloat16(), x35 + 1j, noise(2, 3, 4, 5)):
            found = distdl.distribute_tensor(x if me() == source else None, grid(2, 1), src=source)
            assert found.dtype == x.dtype and found.shape == x.shape
            assert torch.equal(found.full_tensor(), x)
            on_one = found.full_tensor(on=1)
            assert torch.equal(on_one, x) if me() == 1 else on_one.numel() == 0
    leaf = x35.clone().requires_grad_(me() == 1)
    y = distdl.distribute_tensor(leaf, grid(1, 2), src=1)
    assert y.requires_grad
    (y * y).sum().backward()
    if me() == 1:
        assert_close(leaf.grad, 2 * x35)


TAKES_A_SPLIT = {
    "distribute_tensor": lambda P: distdl.distribute_tensor(x35, P).layout,
    "from_local": lambda P: GlobalTensor.from_local(square, P).layout,
    "redistribute": lambda P: distdl.distribute_tensor(x35, grid(2, 1)).redistribute(P).layout,
    "distribute": lambda P: distdl.distribute(torch.nn.ReLU(), P)(x35).layout,
    "summary": lambda P: distdl.summary(torch.nn.Linear(5, 5), P, (3, 5)),
    "suggest": lambda P: distdl.suggest(torch.nn.Linear(5, 5), P, (3, 5)),
    "BlockDataset": lambda P: distdl.data.BlockDataset(np.ones((3, 5)), P).P,
    "collate": lambda P: distdl.data.collate(P).P,
    "as_global": lambda P: distdl.data.Blocks(torch.ones(2 - me() // 2, 3 - me() % 2), (3, 5)).as_global(P).layout,
}


@pytest.mark.parametrize("takes", TAKES_A_SPLIT.values(), ids=TAKES_A_SPLIT)
def test_a_shape_in_the_place_of_a_partition_has_all_workers(takes):
    def work():
        expected = str(takes(distdl.world().reshape(2, 2)))
        for shape in ((2, 2), [2, 2], torch.Size([2, 2]), np.array([2, 2]), (np.int64(2), 2)):
            assert str(takes(shape)) == expected

    distdl.run_workers(work, 4)


@pytest.mark.parametrize("takes", TAKES_A_SPLIT.values(), ids=TAKES_A_SPLIT)
def test_what_is_no_partition_and_no_shape(takes):
    def work():
        for wrong in ("2x2", None, (2, 1.5), x35, {2: 2}):
            with pytest.raises(TypeError, match=r"Write distdl\.world\(\)\.reshape\(1, 1, 2, 2\), or its shape"):
                takes(wrong)

    distdl.run_workers(work, 4)


@pytest.mark.parametrize("name", sorted({*TAKES_A_SPLIT} - {"summary", "suggest"}))
def test_a_shape_of_another_number_of_workers(name):
    def work():
        with pytest.raises(ValueError, match="2x1 has 2 places, and there are 4 workers"):
            TAKES_A_SPLIT[name]((2, 1))

    distdl.run_workers(work, 4)


def test_a_summary_of_another_number_of_workers_is_of_workers_that_are_not_there():
    for wrong in ((0, 2), ()):
        with pytest.raises(ValueError, match="a grid of workers needs at least 1 along each axis"):
            TAKES_A_SPLIT["summary"](wrong)
    assert TAKES_A_SPLIT["summary"]((3, 1)).grid == (3, 1)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("source", [0, 2])
@on_workers
def test_what_one_worker_computes_between_two_models(source, weights):
    """The others have no cells of it, and take part in the backward."""

    def run(first, second, x, between):
        y = second(between(first(x)))
        y.sin().sum().backward()
        return [p.grad for model in (first, second) for p in model.parameters()]

    def between(y):
        return distdl.distribute_tensor(torch.tanh(y.full_tensor(on=source)) * 2, grid(1, 3), src=source)

    def models():
        found = [torch.nn.Linear(5, 5, dtype=torch.float64) for _ in range(2)]
        for seed, p in enumerate(p for model in found for p in model.parameters()):
            torch.nn.init.constant_(p, 0.1 + 0.2 * seed)
        return found

    ours = run(*(distdl.distribute(model, grid(2, 1), weights) for model in models()), split(x35), between)
    theirs = run(*models(), x35, lambda y: torch.tanh(y) * 2)
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.stack([x.sum(), x.square().sum()]),
        lambda x: torch.nn.functional.pad(x, (1, 1, 1, 1)),
        lambda x: x.sin().sum(),
    ],
)
@on_workers
def test_what_one_worker_computes_that_has_cells_elsewhere(function):
    """Sums of no cells, and what is put around them: the others take part in the backward, with zeros."""
    x = split(x35).requires_grad_()
    y = function((x * 2).full_tensor(on=0))
    z = distdl.distribute_tensor(y, grid(2, 1) if y.dim() == 2 else distdl.world()[:2], axes=[*range(y.dim())])
    found = torch.autograd.grad(z.square().sum(), x)[0]
    whole = x35.clone().requires_grad_()
    assert_close(found, torch.autograd.grad(function(whole * 2).square().sum(), whole)[0])


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("source", [0, 2])
@on_workers
def test_what_is_computed_from_a_weight_within_a_model(source, weights):
    """One worker's is split, and the others take part in the backward."""

    class Scaled(torch.nn.Linear):
        def forward(self, x):
            scale = self.weight.sin()[:3]
            if type(x) is GlobalTensor:
                unsplit = distdl.distribute_tensor(scale, grid(1, 1), src=source)
                assert type(unsplit._block) is torch.Tensor  # (no copy of a weight, on any worker)
                scale = distdl.distribute_tensor(scale, grid(1, 2), src=source) + unsplit * 0
            return x * scale

    found = []
    for x in (split(x35), x35):
        model = Scaled(5, 5, dtype=torch.float64)
        torch.nn.init.constant_(model.weight, 0.3)
        model = model if x is x35 else distdl.distribute(model, grid(2, 1), weights)
        model(x).square().sum().backward()
        found.append(model.weight.grad)
    assert_close(*found)


@on_workers
def test_blocks_of_any_sizes():
    """Worker 2 has no part; what it passes is not read."""
    block = noise(2 + me(), 3, seed=me()).requires_grad_() if me() < 2 else None
    x = GlobalTensor.from_local(block, grid(2, 1))
    whole = torch.cat([noise(2, 3), noise(3, 3, seed=1)])
    assert x.shape == (5, 3) and x.layout.intervals == (((0, 2), (2, 5)), ((0, 3),))
    assert_close(x, whole)
    assert x.to_local() is block or me() == 2
    (x * x).sum().backward()
    x.full_tensor().pow(2).sum().backward()  # on each worker the same number: not added up
    if me() < 2:
        assert_close(block.grad, 4 * block)


@on_workers
def test_redistribution():
    x = split(x35).requires_grad_()
    for P in (grid(1, 3), grid(1, 1, first=2), grid(2, 1, first=1), grid(3, 1)):
        y = x.redistribute(P)
        assert y.layout.partition.workers.tolist() == P.workers.tolist()
        assert_close(y, x35)
        (dx,) = torch.autograd.grad((y * x35).sum(), x)
        assert_close(dx, x35)
    assert x.redistribute(x.layout) is x
    total = split(x35).sum()
    assert_close(total.redistribute(total.layout), x35.sum())


AXES = {  # of a grid of 2x2x1, and the workers that hold the tensor
    (0, 2): [[0], [2]],
    (None, 2): [[0]],
    (1, 0): [[0, 2], [1, 3]],
    (-2, None): [[0], [1]],
}


@pytest.mark.parametrize(("axes", "holders"), AXES.items(), ids=map(str, AXES))
def test_fewer_dims_than_axes(axes, holders):
    """Each dim goes along the axis that is named for it; the last of five workers is in no partition."""

    def work():
        P, world = grid(2, 2, 1), distdl.world()
        leaf = x35.clone().requires_grad_(me() == 0)
        x = distdl.distribute_tensor(leaf if me() == 0 else None, P, axes=axes)
        assert x.layout.partition.workers.tolist() == holders
        assert_close(x, x35)
        (x * x).sum().backward()
        if me() == 0:
            assert_close(leaf.grad, 2 * x35)
        again = GlobalTensor.from_local(x.to_local().detach(), P, axes=axes)
        assert again.layout is x.layout
        assert_close(again, x35)
        moved = distdl.distribute_tensor(x35, world.create_partition_inclusive([4])).redistribute(P, axes=axes)
        assert moved.layout is x.layout
        assert_close(moved, x35)
        total = distdl.distribute_tensor(torch.tensor(2.5), P, axes=())
        assert total.item() == 2.5 and int(total.layout.partition.workers) == 0

    distdl.run_workers(work, 5)


def test_a_mask_lies_with_the_image_that_it_labels():
    def work():
        P = grid(2, 1, 1, 2)
        image, mask = noise(3, 2, 4, 5), (noise(3, 4, 5) > 0).long()
        x, y = distdl.distribute_tensor(image, P), distdl.distribute_tensor(mask, P, axes=(0, 2, 3))
        assert x[:, 0].layout is y.layout
        found = torch.nn.functional.cross_entropy(x, y)
        assert_close(found, torch.nn.functional.cross_entropy(image, mask))

    distdl.run_workers(work, 5)


def quantised(x):
    return torch.quantize_per_tensor(x.float(), 0.1, 0, torch.quint8)


def rows(P, *intervals):
    """A layout of a tensor of 3 x 5 by its rows."""
    return Layout.of(P, [intervals, [(0, 5)]])


def another(P):
    """The same partition of another world."""
    return distdl.Partition(Counting(P.comm)).create_partition_inclusive([0, 1]).reshape(2, 1)


WRONG = {
    "no tensor": lambda P: distdl.distribute_tensor(None, P),
    "fewer dims than axes": lambda P: distdl.distribute_tensor(noise(3), P),
    "no dims": lambda P: distdl.distribute_tensor(x35[0, 0], P),
    "no such worker": lambda P: distdl.distribute_tensor(x35, P, src=7),
    "no partition": lambda P: distdl.distribute_tensor(x35, None),
    "no grid": lambda P: GlobalTensor.from_local(noise(me() + 1, 3 + me()), P),
    "dtypes": lambda P: GlobalTensor.from_local(x35.float() if me() else x35, P),
    "ranks": lambda P: GlobalTensor.from_local(x35[0] if me() else x35, P),
    "one without tensor": lambda P: GlobalTensor.from_local(None if me() == 1 else x35, P),
    "a sparse block": lambda P: GlobalTensor.from_local(x35 if me() else x35.to_sparse(), P),
    "a sparse tensor": lambda P: distdl.distribute_tensor(x35.to_sparse(), P),
    "a layout of another shape": lambda P: split(x35).redistribute(split(noise(3, 4)).layout),
    "a layout whose boxes overlap": lambda P: split(x35).redistribute(rows(P, (0, 2), (1, 3))),
    "a layout that leaves cells out": lambda P: split(x35).redistribute(rows(P, (0, 1), (2, 3))),
    "a layout that begins later": lambda P: split(x35).redistribute(rows(P, (1, 2), (2, 3))),
    "a layout that begins before the tensor": lambda P: split(x35).redistribute(rows(P, (-1, 2), (2, 3))),
    "a layout in another order": lambda P: split(x35).redistribute(rows(P, (2, 3), (0, 2))),
    "a layout of copies": lambda P: split(x35).redistribute(Layout.everywhere(distdl.world(), (3, 5))),
    "a layout of another world": lambda P: split(x35).redistribute(rows(another(P), (0, 2), (2, 3))),
    "results in a layout whose boxes overlap": lambda P: distdl.local_map(torch.exp, rows(P, (0, 2), (0, 3)))(
        split(x35)
    ),
    "results over a partition of another world": lambda P: distdl.local_map(torch.exp, another(P))(split(x35)),
    "a number": lambda P: split(x35).redistribute(3),
    "too many axes": lambda P: split(x35).redistribute(grid(1, 1, 2)),
    "an axis for another number of dims": lambda P: distdl.distribute_tensor(x35, P, axes=(0,)),
    "an axis that is not there": lambda P: distdl.distribute_tensor(x35, P, axes=(0, 2)),
    "an axis for two dims": lambda P: GlobalTensor.from_local(x35, P, axes=(0, -2)),
    "axes of a layout": lambda P: split(x35).redistribute(split(x35).layout, axes=(0, 1)),
    "not there": lambda P: split(x35).full_tensor(on=9),
    "True for a source": lambda P: distdl.distribute_tensor(x35, P, src=True),
    "True for a worker": lambda P: split(x35).full_tensor(on=True),
    "placements": lambda P: distdl.distribute_tensor(x35, P, ["Shard(0)"]),
    "what every worker has of a global tensor": lambda P: distdl.distribute_tensor(
        split(x35).requires_grad_().full_tensor().sin(), P
    ),
    "a quantised tensor": lambda P: distdl.distribute_tensor(quantised(x35), P),
    "a quantised block": lambda P: GlobalTensor.from_local(quantised(x35) if me() == 1 else x35, P),
}
NAMED = {
    "no such worker": "distribute_tensor needs src to be a worker's number, from 0 to 2; got 7",
    "not there": "full_tensor needs on to be a worker's number, from 0 to 2; got 9",
    "True for a source": "distribute_tensor needs src to be a worker's number, from 0 to 2; got True",
    "True for a worker": "full_tensor needs on to be a worker's number, from 0 to 2; got True",
    "a layout whose boxes overlap": "redistribute needs a layout whose boxes tile the tensor: along each dim, the "
    "first begins at 0, and each where the one before it ends; those of dim 0 are [(0, 2), (1, 3)]",
    "a layout of another world": "redistribute needs a layout of the tensor's world; got one over 2x1 on workers 0, 1 "
    "of another",
    "placements": "distribute_tensor needs src to be a worker's number, from 0 to 2; got ['Shard(0)']",
    "no dims": "distribute_tensor needs a partition with at most as many axes as the tensor has dims; the tensor is "
    "0-d and the partition 2x1 on workers 0, 1. Say with axes= along which axis of the partition each dim is split",
    "what every worker has of a global tensor": "distribute_tensor needs a tensor on worker 0; it has a value of type "
    "Tensor that follows from full_tensor() of every worker; full_tensor(on=0) gives one to that worker alone, and "
    "redistribute splits a global tensor over other workers",
    "a sparse tensor": "distribute_tensor needs a tensor on worker 0; it has a value of type Tensor that is "
    "torch.sparse_coo",
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # (the filters are those of all threads)
@pytest.mark.parametrize("what", WRONG)
def test_errors_are_the_same_on_every_worker(what):
    told = {}

    def work():
        with pytest.raises((ValueError, TypeError)) as error:
            WRONG[what](grid(2, 1))
        told[me()] = str(error.value)

    distdl.run_workers(work, 3)
    assert told[0] == told[1] == told[2] == NAMED.get(what, told[0])


@on_workers
def test_a_worker_whose_number_stands_in_a_tensor():
    x = distdl.distribute_tensor(x35, grid(2, 1), src=torch.tensor(1))
    assert_close(x, x35)
    assert x.full_tensor(on=torch.tensor(2)).shape == ((3, 5) if me() == 2 else (0, 0))


@on_workers
def test_layouts_with_empty_boxes():
    P = distdl.world().reshape(3, 1)
    for intervals in (((0, 0), (0, 3), (3, 3)), ((0, 3), (3, 3), (3, 3)), ((0, 1), (1, 1), (1, 3))):
        assert_close(split(x35).redistribute(rows(P, *intervals)).cos(), x35.cos())


SPLIT_OTHERWISE = {
    "another grid": lambda P, first: distdl.distribute_tensor(square, P.T if first else P),
    "other workers": lambda P, first: distdl.distribute_tensor(square, P[:1] if first else P),
    "another order": lambda P, first: distdl.distribute_tensor(square, P[::-1] if first else P),
    "another source": lambda P, first: distdl.distribute_tensor(square, P, src=int(first)),
    "other axes": lambda P, first: distdl.distribute_tensor(square, P, axes=(1, 0) if first else (0, 1)),
    "axes of the wrong number": lambda P, first: distdl.distribute_tensor(square, P, axes=(0,) if first else None),
    "blocks in another grid": lambda P, first: GlobalTensor.from_local(square, P.T if first else P),
    "blocks along other axes": lambda P, first: GlobalTensor.from_local(square, P, axes=(1, 0) if first else (0, 1)),
    "blocks along no axis": lambda P, first: GlobalTensor.from_local(square, P, axes=(0, 7) if first else (0, 1)),
}


@pytest.mark.fault("threads")
@pytest.mark.parametrize("what", SPLIT_OTHERWISE)
def test_a_worker_that_splits_otherwise_is_told_at_once(what):
    """The same error on every worker, before anything has moved; and the world stays usable."""

    def work():
        P = grid(2, 1)
        with pytest.raises(distdl.CommunicationError, match="workers make different calls together") as error:
            SPLIT_OTHERWISE[what](P, me() == 0)
        assert torch.equal(distdl.distribute_tensor(square, P).full_tensor(), square)
        return str(error.value)

    assert len(set(distdl.run_workers(work, 2))) == 1


def test_what_one_worker_has_on_a_device_lies_there_on_all():
    def main():
        P = distdl.world().reshape(3, 1)
        x = torch.empty(5, 2, device="meta") if P.rank == 0 else None
        found = distdl.distribute_tensor(x, P).to_local().device.type
        # (what another worker passes is not read)
        theirs = torch.empty(1) if P.rank else torch.empty(5, 2, device="meta")
        return found, distdl.distribute_tensor(theirs, P).device.type

    assert distdl.run_workers(main, 3) == [("meta", "meta")] * 3


@pytest.mark.parametrize("requires", [False, True])
def test_what_a_worker_without_cells_passes_comes_to_the_device_of_the_others(requires):
    def main():
        P = distdl.world()
        block = torch.empty(2, 3, device="cpu" if P.rank else "meta", requires_grad=requires)
        return (GlobalTensor.from_local(block, P[:1].reshape(1, 1)) * 2).to_local().device.type

    assert distdl.run_workers(main, 2) == ["meta"] * 2


def test_blocks_on_devices_of_two_kinds_are_refused_by_every_worker():
    def main():
        P = distdl.world().reshape(2, 1)
        block = torch.empty(2, 2, device="meta" if P.rank else "cpu")
        with pytest.raises(ValueError, match="on one type of device") as error:
            GlobalTensor.from_local(block, P)
        return str(error.value)

    first, second = distdl.run_workers(main, 2)
    assert first == second and "worker 1: 2x2 torch.float32 (meta)" in first


def with_another_default_device():
    """What workers tell each other lies on the host, wherever a program makes its tensors."""
    x = noise(1, 1, 6, 4)
    P, options = distdl.world(), {"in_channels": 1, "out_channels": 1, "kernel_size": 3, "padding": 1, "bias": False}
    layer = DistributedConv2d(P.reshape(1, 1, 2, 1), **options).double()
    sequential = torch.nn.Conv2d(**options).double()
    sequential.weight.data = noise(1, 1, 3, 3)
    torch.set_default_device("meta")
    try:
        assert_adjoint(layer, x[:, :, 3 * P.rank : 3 * P.rank + 3])
        assert_matches_sequential(layer, sequential, x)
        y = distdl.distribute_tensor(x, P.reshape(1, 1, 2, 1))
        assert torch.equal((y * 2).redistribute(P.reshape(1, 1, 1, 2)).full_tensor(), x * 2)
        P.broadcast_data(1) if P.rank else P.allreduce_data(torch.ones(1, device="cpu"))
    except distdl.CommunicationError as error:
        return str(error)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("run", [distdl.run_workers, forked], ids=["threads", "gloo"])
def test_workers_with_another_default_device(run):
    first, second = run(with_another_default_device, 2)
    assert first == second and "workers make different calls together" in first


def test_a_leaf_of_one_worker_beside_what_others_have_moved():
    """Only where that of worker src follows from a movement do the others take part in its backward."""

    def work():
        world = distdl.world()
        rows, columns = world.reshape(world.size, 1), world.reshape(1, world.size)
        x = distdl.distribute_tensor(torch.arange(12.0).reshape(4, 3), rows).requires_grad_()
        moved = x.redistribute(columns).to_local() * 1
        leaf = torch.ones(4, 3, requires_grad=True)
        y = distdl.distribute_tensor(leaf if world.rank == 0 else moved, columns)
        (y * 3).sum().backward()
        assert x.grad is None
        assert world.rank or torch.equal(leaf.grad, torch.full((4, 3), 3.0))

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("function", [lambda x: x, lambda x: x * 2, lambda x: x.sum().expand(4, 3)])
def test_what_follows_from_a_tensor_that_lies_on_one_worker_already(function):
    """Nothing has moved, and all workers take part in its backward as if it had."""

    def work():
        world = distdl.world()
        x = distdl.distribute_tensor(torch.arange(12.0).reshape(4, 3), world[1:2].reshape(1, 1)).requires_grad_()
        y = distdl.distribute_tensor(function(x.full_tensor(on=1)), world.reshape(world.size, 1), src=1)
        (dx,) = torch.autograd.grad(y.sum(), x)
        expected = torch.ones(4, 3, requires_grad=True)
        function(expected).sum().backward()
        assert torch.equal(dx.full_tensor(), expected.grad)

    distdl.run_workers(work, 3)


@on_workers
def test_what_is_written_into_a_whole_tensor_reaches_no_block():
    x = distdl.distribute_tensor(torch.arange(12.0).reshape(4, 3), distdl.world()[:1].reshape(1, 1))
    x.full_tensor(on=0).zero_()
    assert torch.equal(x.full_tensor(), torch.arange(12.0).reshape(4, 3))


@pytest.mark.parametrize("worker", [0, 1, 2])
@on_workers
def test_what_one_worker_alone_has_is_refused_beside_weights(worker):
    """It is a block in a forward: others have none of it."""
    model = distdl.distribute(Calling(lambda model, x: x.full_tensor(on=worker) * model.w), grid(2, 1))
    with pytest.raises(RuntimeError, match=r"mul got a block of this worker.* beside a weight.* by distdl.local_map"):
        model(split(x35))


@pytest.mark.parametrize("worker", [0, 1, 2])
@on_workers
def test_a_loss_of_what_one_worker_alone_has_counts_beside_a_global_loss(worker):
    found = []
    for given in (split(x35).requires_grad_(), x35.clone().requires_grad_()):
        whole = given.full_tensor(on=worker) if type(given) is GlobalTensor else given
        (given.square().sum() + whole.sin().sum()).backward()
        found.append(given.grad)
    assert_close(*found)
