"""Functions of lists of tensors, and fused steps of optimisers."""

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)


FUSED = {
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.1, fused=True),
    "Adam": lambda given: torch.optim.Adam(given, lr=torch.tensor(0.1), amsgrad=True, fused=True),
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, fused=True),
    "SGD with momentum": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, nesterov=True, fused=True),
    "Adagrad": lambda given: torch.optim.Adagrad(given, lr=0.1, fused=True),
}


def _steps(optimiser, loss):
    for _ in range(3):
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()


@pytest.mark.filterwarnings("error:.*has no op")
@pytest.mark.parametrize("make", FUSED.values(), ids=FUSED)
@on_workers
def test_fused_optimisers(make):
    """Of global leaves, one without dims and one whose blocks are not contiguous, and of a sharded model."""
    found = []
    for place in (split, torch.clone):
        leaves = [place(x35).requires_grad_(), place(x35)[0, 0].clone().requires_grad_()]
        leaves.append(place(x35).t().detach().requires_grad_())
        _steps(make(leaves), lambda leaves=leaves: (leaves[0] ** 2 * leaves[1] * leaves[2].t()).sum())
        model = torch.nn.Linear(5, 4).double()
        model.load_state_dict({"weight": noise(4, 5), "bias": noise(4)})
        if place is split:
            model = distdl.distribute(model, split(x35).layout.partition, weights="sharded")
        _steps(make(model.parameters()), lambda model=model, place=place: model(place(x35)).pow(2).sum())
        found.append([*leaves, *(whole.clone() for whole in model.state_dict().values())])
    assert len(found[0]) == 5 and all(type(leaf) is GlobalTensor for leaf in found[0][:3])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)
    assert not torch.equal(found[1][0], x35)


NUMBERS = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}


def _fused_sgd(x, dx, momentum, **given):
    torch._fused_sgd_([x], [dx], [momentum], **NUMBERS, is_first_step=False, **given)


@pytest.mark.parametrize("infinite", [0.0, 1.0])
@on_workers
def test_a_fused_step_unscales_gradients_that_lie_otherwise(infinite):
    found = []
    for place, other in ((split, lambda x: split(x, 1, 2)), (torch.clone, torch.clone)):
        x, dx, momentum = place(x35), other(noise(3, 5, seed=2)), other(noise(3, 5, seed=3))
        _fused_sgd(x, dx, momentum, grad_scale=torch.tensor(4.0), found_inf=torch.tensor(infinite))
        found.append((x, dx, momentum))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@on_workers
def test_what_a_fused_step_refuses():
    x = split(x35)
    with pytest.raises(TypeError, match=r"got a plain one beside a global parameter"):
        _fused_sgd(x, split(x35), x35.clone())
    with pytest.raises(TypeError, match=r"got a global one beside a plain parameter"):
        _fused_sgd(x35.clone(), split(x35), split(x35))
    with pytest.raises(RuntimeError, match=r"of the parameter's shape \(3, 5\); got \(5, 3\)"):
        _fused_sgd(x, split(x35.t().contiguous()), split(x35))
    with pytest.raises(RuntimeError, match=r"requires a gradient; call it in torch\.no_grad"):
        _fused_sgd(split(x35).requires_grad_(), split(x35), split(x35))
    assert_close(x, x35)


@on_workers
def test_a_list_that_torch_refuses_to_write_is_not_written():
    """Also where a block, of one column, has each of its elements in a place of its own."""
    x = split(x35, 1, 3)
    with torch.no_grad():
        y = x[:, :1].expand(3, 3)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single"):
            torch._foreach_mul_([y], 2.0)
    assert_close(x, x35)
    assert_close(torch.nn.functional.pad(y, (1, 1)), torch.nn.functional.pad(x35[:, :1].expand(3, 3), (1, 1)))
    torch._foreach_zero_([y])
    assert not y.full_tensor().any() and not x.full_tensor()[:, :1].any()


def test_lists_of_tensors_without_dims_are_written_in_one_graph():
    """One worker has such a tensor; the others take part in the backward of what is written into it."""

    def outcome(x, w):
        y = x[0, 0] * 1
        torch._foreach_mul_([y], [w * 2])
        torch._foreach_add_([y], 1.0)
        return y, *torch.autograd.grad(y * y, w)

    def work():
        w = distdl.distribute_tensor(torch.tensor(3.0).double(), distdl.world()[2:3], axes=()).requires_grad_()
        for ours, one in zip(outcome(split(x35), w), theirs, strict=True):
            assert_close(ours, one)

    theirs = outcome(x35, torch.tensor(3.0).double().requires_grad_())
    distdl.run_workers(work, 3)


@pytest.mark.parametrize("write", [torch._foreach_zero_, lambda given: torch._foreach_add_(given, 1.0)])
@on_workers
def test_lists_of_tensors_without_dims_are_refused_on_every_worker(write):
    leaf = split(x35).requires_grad_()
    with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
        write([leaf[2, 4]])
    with torch.inference_mode():
        y = leaf[2, 4].clone()
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        write([y])


row = noise(5, seed=2)


OPTIMISERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "momentum of lists": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam of lists": lambda p: torch.optim.Adam(p, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW of lists": lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "RMSprop of lists": lambda p: torch.optim.RMSprop(p, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adagrad of lists": lambda p: torch.optim.Adagrad(p, foreach=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
}


@pytest.mark.parametrize("name", OPTIMISERS)
@on_workers
def test_optimisers_of_global_tensors(name):
    ours = [split(x35).requires_grad_(), split(row).requires_grad_()]
    theirs = [x35.clone().requires_grad_(), row.clone().requires_grad_()]
    for leaves in (ours, theirs):
        optimiser = OPTIMISERS[name](leaves)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.5)
        for _ in range(3):
            optimiser.zero_grad()
            ((leaves[0].sin() * leaves[0]).sum() + (leaves[1] ** 3).sum()).backward()
            optimiser.step()
            schedule.step()
    for mine, own in zip(ours, theirs, strict=True):
        assert_close(mine, own)


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("foreach", [False, True])
@on_workers
def test_gradients_are_clipped(foreach):
    leaves = split(x35).requires_grad_(), x35.clone().requires_grad_()
    norms = []
    for leaf in leaves:
        (leaf**3).sum().backward()
        torch.nn.utils.clip_grad_value_([leaf], 2.5, foreach=foreach)
        norms.append(torch.nn.utils.clip_grad_norm_([leaf], 0.1, foreach=foreach))
    assert_close(*norms)
    assert_close(leaves[0].grad, leaves[1].grad)


@on_workers
def test_scaled_gradients():
    for bad in (False, True):
        leaf, plain = split(x35).requires_grad_(), row.clone().requires_grad_()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimiser = torch.optim.SGD([leaf, plain], lr=0.1)
        loss = (leaf**2).sum() + (leaf.detach() * plain).sum()
        scaler.scale(loss * (float("inf") if bad else 1.0)).backward()
        scaler.step(optimiser)
        scaler.update()
        assert scaler.get_scale() == (4.0 if bad else 8.0)
        assert_close(leaf, x35 * (1.0 if bad else 0.8))
        assert_close(plain, row if bad else row - 0.1 * x35.sum(0))


@on_workers
def test_a_list_with_a_leaf_is_not_written():
    x, leaf = split(x35), split(x35).requires_grad_()
    for given in ([x, leaf], [x35.clone(), leaf]):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            torch._foreach_add_(given, 1.0)
        assert_close(given[0], x35)


@on_workers
def test_second_derivatives_of_numbers_in_a_list():
    """Also on workers that do not have the number: backward goes the same way there."""
    found = []
    for whole in (True, False):
        one, other = (split(noise(1)).sum() if whole else noise(1).sum() for _ in range(2))
        xs = [one.detach().requires_grad_(), other.detach().requires_grad_()]
        ys = torch._foreach_mul(xs, 2.5)
        firsts = torch.autograd.grad(sum((y**3).sum() for y in ys), xs, create_graph=True)
        found.append([*firsts, *torch.autograd.grad(sum((dx**2).sum() for dx in firsts), xs)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)
