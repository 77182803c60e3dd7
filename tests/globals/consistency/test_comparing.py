"""Plain tensors that every worker has whole, and that differ: an error, and the same on all workers."""

import functools

import pytest
import torch
from nets import network, partition, run
from same import noise
from torch import nn

import distdl
from distdl.globals.consistency.comparing import differ
from distdl.globals.layouts.context import Context


def _input(model, rank):
    return model(noise(6, 3, seed=rank)).square().mean()


def _target(model, rank):
    return nn.functional.mse_loss(model(noise(6, 3)), noise(6, 2, seed=rank))


def _classes(model, rank):
    return nn.functional.cross_entropy(model(noise(6, 3)), torch.arange(6).eq(rank).long())


def _added(model, rank):
    return (model(noise(6, 3)) + noise(6, 2, seed=rank).T.contiguous().T).square().mean()


def _learned(model, rank):
    """A parameter of the user's beside the model."""
    return (model(noise(6, 3)) * nn.Parameter(noise(2, seed=rank))).square().mean()


@pytest.mark.parametrize("loss", [_input, _target, _classes, _added, _learned])
def test_plain_tensors_that_differ(loss):
    texts = {}

    def work():
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))
        for _ in range(2):
            loss(model, 0).backward()
        with pytest.raises(
            ValueError, match=r"a plain tensor .* is the same on every worker.*on worker [1-3]"
        ) as raised:
            for _ in range(8):
                loss(model, distdl.world().rank).backward()
        texts[distdl.world().rank] = str(raised.value)

    run(work)
    assert len(texts) == 4 and len(set(texts.values())) == 1


@pytest.mark.parametrize(
    ("forwards", "differs"), [(1, 0), (2, 1), (3, 0), (4, 0), (4, 1), (4, 2), (4, 3), (5, 1), (6, 5), (10, 7)]
)
def test_a_plain_tensor_in_one_of_several_forwards(forwards, differs):
    """However many forwards a step has, and whichever of them it is."""

    def work():
        rank = distdl.world().rank
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))

        def step(seed):
            for place in range(forwards):
                _target(model, seed if place == differs else 0).backward()

        with pytest.raises(ValueError, match=r"a plain tensor .* is the same on every worker"):
            for _ in range(2):
                step(rank)

    run(work)


@pytest.mark.parametrize(
    ("behind", "more", "when"),
    [
        (False, 1, [1]), (True, 9, [1]), (False, 9, range(100)), (True, 1, range(100)), (False, 1, range(0, 100, 7)),
        (True, 9, range(0, 100, 7)),
    ],
    ids=str,
)  # fmt: skip
def test_what_one_worker_computes_to_print_it_is_no_difference(behind, more, when):
    """Samples of other tensors would be compared, in that step and in later ones."""

    def work():
        rank = distdl.world().rank
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))

        def step(number, seed=0):
            y = model(noise(6, 3, seed=number))
            shown = range(more) if rank == 0 and number in when else []
            found = [] if behind else [(y.detach() * (noise(6, 2) + n)).to_local() for n in shown]
            loss = sum((y - noise(6, 2, seed=n + number + seed)).square().mean() for n in range(7))
            found += [(y.detach() * (noise(6, 2) + n)).to_local() for n in shown] if behind else []
            loss.backward()

        for number in range(8 if when == [1] else 60):
            step(number)
        if when == [1]:
            with pytest.raises(ValueError, match=r"a plain tensor .* is the same on every worker"):
                for number in range(8, 16):
                    step(number, rank)

    run(work)


def test_the_last_of_many_plain_tensors():
    def work():
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))

        def step(seed):
            y = model(noise(6, 3))
            return sum((y - noise(6, 2, seed=n + 1 + (seed if n == 10 else 0))).square().mean() for n in range(11))

        for _ in range(4):
            step(0).backward()
        with pytest.raises(ValueError, match=r"a plain tensor .* is the same on every worker"):
            for _ in range(2):
                step(distdl.world().rank).backward()

    run(work)


@pytest.mark.parametrize("make", [lambda: nn.Conv1d(3, 6, 3), lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 2))])
def test_weights_of_a_model_that_nobody_has_distributed(make):
    """Workers may build them otherwise, and then each computes its block with weights of its own."""
    told = []

    def work(differs):
        P = distdl.world()[:2].reshape(2, 1, 1)
        model = make().double()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(noise(*one.shape, seed=int(differs and distdl.world().rank == 1)))
        x = distdl.distribute_tensor(noise(4, 3, 4), P)
        for _ in range(2):
            try:
                model(x).square().sum().backward()
            except ValueError as error:
                told.append(str(error))
                return None
        return model(x).square().sum().item()

    alike = distdl.run_workers(functools.partial(work, False), 3)
    assert len(set(alike)) == 1 and not told
    distdl.run_workers(functools.partial(work, True), 3)
    assert len(told) == 3 and len(set(told)) == 1
    assert "on worker 0 differs by" in told[0] and "on worker 1" in told[0]
    assert "distdl.distribute(model, P) gives all workers the weights of worker 0" in told[0]


def test_weights_of_such_a_model_may_be_set_anew_on_one_worker():
    def work():
        x = distdl.distribute_tensor(noise(4, 3), distdl.world()[:2].reshape(2, 1))
        model = nn.Linear(3, 2).double()
        state = {name: noise(*one.shape) for name, one in model.state_dict().items()}
        found = []
        for assign in (False, distdl.world().rank == 0, False):
            model.load_state_dict(state, assign=assign)
            model.requires_grad_()
            y = model(x).square().sum()
            y.backward()
            found.append(y.item())
        return found

    for found in distdl.run_workers(work, 3):
        assert len(set(found)) == 1


def _after_forwards_alone(model, x):
    for _ in range(5):
        model(x)
    model(x).square().sum().backward()


def _after_gradients_of_the_input(model, x):
    for _ in range(5):
        torch.autograd.grad(model(x).square().sum(), x)
    model(x).square().sum().backward()


def _twice(model, x):
    torch.autograd.grad(model(x).square().sum(), list(model.parameters()), create_graph=True)


def _two_backwards(model, x):
    for _ in range(2):
        model(x).square().sum().backward()


@pytest.mark.parametrize("use", [_after_forwards_alone, _after_gradients_of_the_input, _twice, _two_backwards])
@pytest.mark.parametrize("share", [1.0, 1e-4])
def test_such_a_model_is_looked_at_in_its_first_backwards(use, share):
    """One row of a weight differs on a worker, and not by much."""

    def work():
        size = 1700 if use is _two_backwards else 400
        model = nn.Linear(size, 3).double()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(noise(*one.shape))
            model.weight[2] *= 1 + share * (distdl.world().rank == 1)
        x = distdl.distribute_tensor(noise(4, size), distdl.world()[:2].reshape(2, 1)).requires_grad_()
        with pytest.raises(ValueError, match=rf"same on every worker.*of 3x{size} torch.float64 on worker 0 differs"):
            use(model, x)

    distdl.run_workers(work, 3)


def test_what_is_a_parameter_on_one_worker_only():
    def work():
        x = distdl.distribute_tensor(noise(5, 4), distdl.world()[:2].reshape(2, 1))
        w = noise(4).requires_grad_()
        w = nn.Parameter(w.detach()) if distdl.world().rank else w
        (x * w).sum().backward()
        torch.testing.assert_close(w.grad, noise(5, 4).sum(0))

    distdl.run_workers(work, 3)


def test_a_parameter_of_no_distributed_model_may_be_swapped():
    def work():
        model = nn.Linear(4, 3).double()
        with torch.no_grad():
            for one in model.parameters():
                one.copy_(noise(*one.shape))
        x = distdl.distribute_tensor(noise(5, 4), distdl.world()[:2].reshape(2, 1))
        model(x).sum().backward()
        model.zero_grad()
        return model.float().weight.dtype

    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        assert distdl.run_workers(work, 2) == [torch.float32] * 2
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_plain_tensors_that_are_rounded_otherwise_are_no_error():
    def work():
        model = distdl.distribute(network(lambda: nn.Linear(3, 2)), partition((3, 1)))
        for step in range(4):
            model(noise(6, 3, seed=step) * (1 + distdl.world().rank * 1e-15)).square().mean().backward()
        noted = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0, 2.0, 3.0], dtype=torch.float64)
        (model(noise(6, 3)) + noted[:, None]).square().mean().backward()

    run(work)


@pytest.mark.parametrize(("dtype", "near"), [(torch.bfloat16, 1 + 2**-7), (torch.float64, 1 + 1e-6)])
def test_rounding_of_plain_tensors_is_no_difference(dtype, near):
    def work():
        model = distdl.distribute(nn.Linear(3, 2).to(dtype), partition((3, 1)))
        model(noise(6, 3).to(dtype) * (near if distdl.world().rank else 1))

    run(work)


def test_plain_tensors_that_idle_workers_do_not_read_are_no_difference():
    """Every worker takes note of the same ones, also one without cells."""

    def work():
        P = partition((2, 1))
        model = distdl.distribute(network(lambda: nn.Linear(3, 3)), P)
        index, factor = torch.tensor([[0, 2, 1]]).expand(6, 3), noise(6, 3, seed=4)
        for _ in range(6):
            y = model(distdl.distribute_tensor(noise(6, 3), P))
            z = torch.cat([y.gather(1, index), factor[:2]])
            z[z < 0.1] = 0.5
            (z.index_add(0, torch.tensor([1, 0]), factor[:2]).mean() + (y * factor).sum()).backward()

    run(work)


@pytest.mark.parametrize("what", ["plain", "weight"])
@pytest.mark.parametrize("dead", ["before", "behind"])
def test_a_forward_without_a_backward_hides_nothing(what, dead):
    """As the one of a generator for its discriminator: fake = G(z).detach()."""

    def work():
        P = distdl.world().reshape(2, 1)
        model = distdl.distribute(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 4)), P)
        optimiser = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(20):
            optimiser.zero_grad()
            x = distdl.distribute_tensor(noise(4, 6, seed=step).float(), P)
            if dead == "before":
                model(x).detach()
            y = model(x)
            if dead == "behind":
                model(x).detach()
            (y * torch.full((4,), 1.0 + (what == "plain") * P.rank)).square().mean().backward()
            optimiser.step()
            if what == "weight" and step == 9 and P.rank == 1:
                for one in model.parameters():
                    one.data.add_(one is model[0].weight or one is model[1].weight)  # (every other one)
        return step

    with pytest.raises(ValueError, match=r"the same (weights )?on every worker"):
        distdl.run_workers(work, 2)


def test_sums_that_no_bits_of_all_workers_have_are_differences():
    def work():
        context = Context.of(distdl.world().comm)
        assert not differ(torch.tensor([0.0, 3.0, 0.0]), context)
        for wrong in (1.0, 7e-45, -3.0, 1e30, float("nan")):
            assert differ(torch.tensor([0.0, 3.0, wrong]), context)

    distdl.run_workers(work, 3, "threads")


def test_a_parameter_of_no_model_that_differs_in_one_row_is_found_in_time():
    def work():
        P = distdl.world()
        p = nn.Parameter(noise(300, 4) + P.rank * (torch.arange(300) == 7)[:, None])
        x = distdl.distribute_tensor(noise(4, 300), P.reshape(2, 1))
        with pytest.raises(ValueError, match="a plain tensor beside a global one"):
            for _ in range(16):
                (x @ p).sum().backward()

    distdl.run_workers(work, 2)
