"""Differentiation of global tensors, as of torch's: what is asked of a tensor, of a graph and of an optimiser."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from launched import assert_close, assert_told_apart, on_workers, split
from same import Global, assert_raises_the_same, assert_same, noise
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor

x35, y35, row = noise(3, 5), noise(3, 5, seed=1), noise(5, seed=2)


@on_workers
def test_backward_of_several_tensors():
    x = split(x35).requires_grad_()
    y, z = x * x, x * 3
    torch.autograd.backward(y.sum(), retain_graph=True)
    assert_close(x.grad, 2 * x35)
    x.grad = None
    torch.autograd.backward([y, z], [torch.ones_like(x35), split(y35, 1, 2)], retain_graph=True)
    assert_close(x.grad, 2 * x35 + 3 * y35)
    x.grad = None
    torch.autograd.backward((y, z), (x35, x35), inputs=[x])
    assert_close(x.grad, 2 * x35 * x35 + 3 * x35)


class Halves(torch.nn.Module):
    """A backbone and a head, of which the results of both are given."""

    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Tanh(), torch.nn.Linear(5, 5))
        self.head = torch.nn.Linear(5, 2)

    def forward(self, x):
        features = self.backbone(x)
        return features, self.head(features.tanh())


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_gradients_by_some_of_the_weights_leave_the_rest_of_the_graph(weights):
    """The weights of a model come to its forward together, and torch frees what a backward has gone through."""
    torch.manual_seed(0)
    made = Halves().double()

    def each(model, x):
        found = []
        for _ in range(3):
            model.zero_grad()
            features, y = model(x)
            down, *of_head = torch.autograd.grad(y.square().sum(), [features, *model.head.parameters()])
            features.backward(down)
            found += [*of_head, *(one.grad for one in model.backbone.parameters()), model.head.weight.grad]
            model.zero_grad()
            features, y = model(x)
            y.square().sum().backward(inputs=[model.head.bias])
            found += [model.head.bias.grad, model.head.weight.grad, model.backbone[0].weight.grad]
            features.sum().backward()
            found += [one.grad for one in model.backbone.parameters()]
        return found

    def main():
        alone, P = copy.deepcopy(made), distdl.world().reshape(-1, 1)
        ours = distdl.distribute(copy.deepcopy(made), P, weights=weights)
        for mine, theirs in zip(each(ours, distdl.distribute_tensor(x35, P)), each(alone, x35), strict=True):
            assert (mine is None) == (theirs is None)
            assert mine is None or assert_close(mine, theirs) is None
        loss = ours(x35)[1].sum()
        torch.autograd.grad(loss, [one for one in ours.parameters() if one.requires_grad])
        with pytest.raises(RuntimeError, match="second time"):  # (all of the weights: as in torch)
            loss.backward()

    distdl.run_workers(main, 2)


@on_workers
def test_a_gradient_has_the_shape_of_its_tensor():
    y = split(x35).requires_grad_() * 2
    for wrong in (torch.ones(3, 4), split(noise(5, 3)), None):
        with pytest.raises(RuntimeError, match=r"shape|scalar outputs"):
            y.backward(wrong)
    with pytest.raises(RuntimeError, match="does not require grad"):
        split(x35).sum().backward()


@pytest.mark.parametrize("function", [
    lambda x: (x.requires_grad_() * 1j).sum().backward(),
    lambda x: torch.autograd.grad((x.requires_grad_() * 1j).sum(), x),
    lambda x: torch.func.grad(lambda a: (a * 1j).sum())(x),
    lambda x: torch.autograd.grad(x.requires_grad_() * 1j, x),
])  # fmt: skip
def test_gradients_of_complex_numbers_are_not_implicit(function):
    assert_raises_the_same(function, x35.clone(), text=True)


@on_workers
def test_second_derivatives_by_plain_tensors():
    x, v, w = split(x35).requires_grad_(), y35.clone().requires_grad_(), row.clone().requires_grad_()
    (dx,) = torch.autograd.grad(x**3, x, v, create_graph=True)
    (dv,) = torch.autograd.grad(dx.sum(), v)
    assert_close(dv, 3 * x35**2)
    (dw,) = torch.autograd.grad((x.detach() * w).pow(3).sum(), w, create_graph=True)
    (ddw,) = torch.autograd.grad(dw.pow(2).sum(), w)
    cubes = (x35**3).sum(0)
    assert_close(dw, 3 * cubes * row**2)
    assert_close(ddw, 36 * cubes**2 * row**3)


@on_workers
def test_the_gradient_is_an_attribute():
    x = split(x35).requires_grad_()
    assert x.grad is None and x.is_leaf and x.requires_grad
    (x * 2).sum().backward()
    x.grad.zero_()
    assert_close(x.grad, torch.zeros_like(x35))
    x.grad = y35
    assert_close(x.grad, y35)
    x.grad = split(x35, 1, 2)
    assert_close(x.grad, x35)
    for wrong, kind in ((noise(2, 5), RuntimeError), (x35.float(), RuntimeError), (3, TypeError)):
        with pytest.raises(kind, match="assigned grad"):
            x.grad = wrong
    del x.grad
    assert x.grad is None


@on_workers
def test_detached():
    x = split(x35).requires_grad_()
    y = x * 2
    assert not y.detach().requires_grad
    with pytest.raises(RuntimeError, match="leaf"):
        y.requires_grad_(False)
    y.detach_()
    assert y.is_leaf and not y.requires_grad
    with torch.no_grad():
        assert not (x * 2).requires_grad
    x.requires_grad = False
    assert not (x * 2).requires_grad


@on_workers
def test_hooks_of_several_leaves():
    """torch finds the node of a leaf by a view of it, also on a worker without cells."""
    x, y, seen = split(noise(3, 5)).requires_grad_(), split(noise(3, 5, seed=2)).requires_grad_(), []
    handle = torch.autograd.graph.register_multi_grad_hook([x, y], seen.extend)
    (x * y).sum().backward()
    handle.remove()
    assert_close(seen[0], y.full_tensor())
    assert_close(seen[1], x.full_tensor())


@on_workers
def test_hooks():
    x, seen = split(x35).requires_grad_(), []
    handle = x.register_hook(lambda dx: (seen.append(dx.full_tensor()), dx * 2)[1])
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append(leaf.grad.full_tensor()))
    y = x * 3
    y.retain_grad()
    y.register_hook(lambda dy: dy + 1)
    y.sum().backward(retain_graph=True)
    assert [float(one.mean()) for one in seen] == [6, 12]
    assert_close(x.grad, torch.full_like(x35, 12))
    assert_close(y.grad, torch.full_like(x35, 2))
    handle.remove()
    x.grad = None
    y.sum().backward()
    assert_close(x.grad, torch.full_like(x35, 6))


@on_workers
def test_hooks_that_give_plain_tensors():
    """These are taken for whole ones, the same on every worker."""
    x, n = split(x35).requires_grad_(), split(x35).sum().detach().requires_grad_()
    x.register_hook(lambda dx: dx.full_tensor() + x35)
    n.register_hook(lambda dn: torch.tensor(3.0, dtype=dn.dtype))
    (x * n).sum().backward()
    assert_close(x.grad, torch.full_like(x35, float(n)) + x35)
    assert n.grad.item() == 3


@on_workers
@pytest.mark.parametrize("whole", [x35, x35.sum()])
@pytest.mark.parametrize("plain", [True, False])
def test_hooks_that_change_what_torch_keeps(whole, plain):
    def outcome(x):
        """What torch says of what hooks return."""
        told = []
        for change in (lambda g: g[None], lambda g: g.new_ones(2), lambda g: g.float(), lambda g: [g], lambda g: 3.0):
            y = x.detach().requires_grad_() * 2

            def hook(dy, change=change):
                return change(dy.full_tensor() if plain and type(dy) is GlobalTensor else dy)

            y.register_hook(hook)
            with pytest.raises((RuntimeError, TypeError)) as caught:
                y.sum().backward()
            told.append((type(caught.value), str(caught.value)))
        return told

    assert outcome(split(x35).sum() if not whole.dim() else split(whole)) == outcome(whole)


@on_workers
def test_copies():
    x = split(x35).requires_grad_()
    (x * x).sum().backward()
    y, z = copy.deepcopy([x, x])
    assert y is z and type(y) is GlobalTensor and y.requires_grad and y.layout is x.layout
    with torch.no_grad():
        y.mul_(0)
    assert_close(x, x35)
    assert_close(y, torch.zeros_like(x35))
    assert_close(y.grad, 2 * x35)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(x * 2)
    shallow = copy.copy(x)
    with torch.no_grad():
        x.mul_(0)
    assert_close(shallow, torch.zeros_like(x35))
    for write in (pickle.dumps, lambda value: torch.save(value, io.BytesIO())):
        with pytest.raises(TypeError, match="cannot be pickled"):
            write(x)


@on_workers
def test_copies_of_a_model():
    model = torch.nn.Sequential(torch.nn.LeakyReLU(), _Scale())
    distdl.distribute(model, split(x35).layout.partition)
    expected = torch.nn.functional.leaky_relu(x35)
    assert_close(model(x35), expected)
    other, part = copy.deepcopy(model), copy.deepcopy(model[1])
    with torch.no_grad():
        other[1].factor.fill_(3.0)
        part.factor.fill_(5.0)
    assert_close(model(x35), expected)
    assert_close(other(x35), expected * 3)
    assert_close(part(split(x35)), x35 * 5)
    other(x35).sum().backward()
    assert_close(other[1].factor.grad, expected.sum().reshape(1))
    assert model[1].factor.grad is None
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, mean = 1.0, None
    for _ in range(2):
        optimiser.zero_grad()
        model(x35).sum().backward()
        optimiser.step()
        average.update_parameters(model)
        weight -= 0.1 * float(expected.sum())
        mean = weight if mean is None else 0.9 * mean + 0.1 * weight
    assert_close(average(x35), expected * mean)
    model.load_state_dict(pickle.loads(pickle.dumps(average.module.state_dict())))
    assert_close(model(x35), expected * mean)


class _Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x):
        return x * self.factor


@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
@on_workers
def test_checkpoints(grid):
    """Also nested, with a block that is empty, and an idle worker."""

    def run(x, w, v):
        def step(a):
            return ((a * w).exp() * v).sum(0, keepdim=True).sigmoid()

        def two(a):
            return checkpoint(step, checkpoint(step, a, use_reentrant=False) * a, use_reentrant=False)

        y = checkpoint(two, x, use_reentrant=False).sum()
        return y, *torch.autograd.grad(y, (x, w))

    one = noise(1, 5)
    weights = [row.clone().requires_grad_() for _ in range(2)]
    expected = run(one.clone().requires_grad_(), weights[0], row)
    found = run(split(one, *grid).requires_grad_(), weights[1], split(row, 2))
    for ours, theirs in zip(found, expected, strict=True):
        assert_close(ours, theirs)


_places = torch.tensor([2, 0, 3])
SAVING = {  # the tensors for which an operator saves where there are cells
    "picked": lambda x: x[_places],
    "picked along": lambda x: x[:, [[0, 1], [4, 2]]],
    "select": lambda x: x.index_select(0, _places),
    "interleaved": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 1]), 0),
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(2, 0).values,
    "put": lambda x: x.index_put((_places,), x[0] * 2),
    "put number": lambda x: x.index_put((_places,), torch.tensor(2.0, dtype=x.dtype)),
    "accumulated": lambda x: x.index_put((_places,), x[0] * 2, accumulate=True),
    "add": lambda x: x.index_add(0, _places, x[:3]),
    "add to": lambda x: x.index_add(0, _places, x[:3].detach()),
    "add of": lambda x: x.detach().index_add(0, _places, x[:3]),
    "copy": lambda x: x.index_copy(0, _places, x[:3]),
    "amax": lambda x: x.index_reduce(0, _places, x[:3], "amax"),
    "cummax": lambda x: x.cummax(0).values,
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", SAVING)
def test_the_end_of_a_checkpoint_behind_a_movement_that_has_no_gradient(name):
    """All workers recompute as far as it, also those without cells, and the idle one."""

    def function(x):
        def measured(x):
            assert x.detach().abs().sum() > 0
            return SAVING[name](x)

        return checkpoint(measured, x, use_reentrant=False).sin()

    assert_same(function, Global(noise(4, 5)), grids=[(2, 1), (1, 4), (4, 1)])


@on_workers
def test_a_checkpoint_in_a_model():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = _Scale(), _Scale()

        def forward(self, x):
            return self.second(checkpoint(lambda y: self.first(y).exp(), x, use_reentrant=False))

    ours, theirs = Model(), Model()
    distdl.distribute(ours, split(x35).layout.partition)
    for model in (ours, theirs):
        model(x35).pow(2).sum().backward()
    for mine, own in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert_close(mine.grad, own.grad)


@on_workers
def test_a_checkpoint_that_enters_the_graph_again():
    """An autograd function of torch's. It draws again what it drew."""
    x = torch.ones_like(split(x35)).requires_grad_()
    y = checkpoint(lambda x: torch.dropout(x, 0.5, True).exp(), x, use_reentrant=True)
    torch.rand_like(x)
    y.sum().backward()
    dropped = y.full_tensor() == 1
    assert bool(dropped.any()) and bool(((x.grad.full_tensor() == 0) == dropped).all())
    assert bool((torch.dropout(x, 0.5, True).full_tensor() != torch.dropout(x, 0.5, True).full_tensor()).any())


@on_workers
def test_autocast():
    model = distdl.distribute(torch.nn.Sequential(_Scale().float()), split(x35).layout.partition)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(noise(1, 5).float())
        loss = torch.nn.functional.relu(y).float().pow(2).mean()
    loss.backward()
    assert loss.dtype == torch.float32 and torch.isfinite(model[0].factor.grad).all()


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


def test_gradients_that_are_kept_can_be_set():
    def doubled(x):
        y = x.detach().clone().requires_grad_() * 2
        y.retain_grad()
        (y * y).sum().backward()
        y.grad = y.grad * 2
        return y.grad

    assert_same(doubled, Global(x35))


def test_the_dtype_of_a_gradient_outlives_a_detach_in_place():
    def told(x):
        x = x.float().detach().requires_grad_()
        x.grad_dtype = torch.float64
        x.detach_().requires_grad_()
        (x * x).sum().backward()
        return [x.grad_dtype, x.grad.dtype, x.grad]

    assert_same(told, Global(x35))


def test_gradients_of_another_dtype():
    def told(x):
        x.requires_grad_()
        x.grad_dtype = torch.float32
        (x * x).sum().backward()
        found = [x.grad_dtype, x.grad.dtype, x.grad.double()]
        with pytest.raises(RuntimeError, match="dtype"):
            x.grad = found[-1]
        x.grad = x.grad * 2
        x.grad_dtype = None
        x.grad = found[-1]
        return [*found, x.grad_dtype, x.grad.dtype]

    assert_same(lambda x: told(x.detach().clone()), Global(x35))


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


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


class _Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.contiguous()  # which is x

    @staticmethod
    def backward(ctx, dy):
        return dy.contiguous()


class _Part(_Same):
    @staticmethod
    def forward(ctx, x):
        return x[:]  # a view, which says that it requires a gradient, because x does


USES = {
    "sum": torch.Tensor.sum,
    "beside": lambda y: torch.ones(3, 5) + y,
    "written": lambda y: y.mul_(2),
    "whole": lambda y: y.full_tensor(),
    "on one": lambda y: y.full_tensor(on=0),
    "block": lambda y: y.to_local(),
    "item": lambda y: y.tolist(),
    "cast": lambda y: y.float(),
    "split": lambda y: y.redistribute(split(x35, 1, 2).layout),
    "backward": lambda y: y.backward(x35),
    "backwards": lambda y: torch.autograd.backward(y, x35),
    "grad": lambda y: torch.autograd.grad(y, y, x35),
    "falls back": lambda y: torch.alias_copy(y),
    "asked": lambda y: y.requires_grad,
    "detached": lambda y: y.detach(),
    "list": lambda y: torch._foreach_add([y], 1.0),
}


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("function", [_Double, _Same, _Part])
@pytest.mark.parametrize("use", USES)
@on_workers
def test_a_function_of_a_users_own_never_loses_a_gradient(use, function):
    with pytest.raises(RuntimeError, match=f"{function.__name__} was applied to a global tensor by a reference"):
        USES[use](_older(function)(split(x35).requires_grad_() * 1))


@pytest.mark.parametrize("function", [_Double, _Same, _Part])
@on_workers
def test_a_function_of_a_users_own_never_loses_the_gradient_of_a_leaf(function):
    with pytest.raises(RuntimeError, match=f"{function.__name__} was applied to a global tensor by a reference"):
        _older(function)(split(x35).requires_grad_()).sum()


def _older(function):
    """What applies it and knows nothing of distdl, as ``function.apply`` did before that was imported."""
    return super(torch.autograd.Function, function).apply


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_second_derivatives_of_what_runs_on_one_worker():
    """All workers go through the same exchanges, also those that do not compute it."""

    def second(x):
        x, w = x.requires_grad_(), torch.ones(4, dtype=x.dtype, requires_grad=True)
        dx, dw = torch.autograd.grad(torch.linalg.pinv(x * w).sum(), [x, w], create_graph=True)
        ((dx * dx).sum() + (dw * dw).sum()).backward()
        return x.grad, w.grad

    for one, alone in zip(second(split(noise(4, 4, 4))), second(noise(4, 4, 4)), strict=True):
        torch.testing.assert_close(one.full_tensor() if isinstance(one, GlobalTensor) else one, alone)


@on_workers
def test_nothing_passes_by_the_table():
    x = split(x35)
    with (
        pytest.raises(RuntimeError, match="without passing through its table"),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        x * 2
    for memory in (torch.Tensor.data_ptr, torch.Tensor.const_data_ptr, torch.Tensor.storage_type):
        with pytest.raises(TypeError, match="memory"):
            memory(x)
    with pytest.raises(RuntimeError, match="data pointer"):  # (it was a capsule, of which reading ended the process)
        torch.utils.dlpack.to_dlpack(x)


@pytest.mark.parametrize("seeds", ["global", "the same everywhere"])
def test_gradients_of_many_seeds_at_once(seeds):
    def function(x):
        y = torch.flip(x, (0,)).tanh()
        dy = torch.stack([y.detach(), y.detach() * 2]) if seeds == "global" else noise(2, 3, 5, seed=3)
        (dx,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, create_graph=True)
        return dx

    assert_same(function, Global(noise(3, 5)), grids=[(3, 1), (1, 2)], workers=4, twice=True)


def test_gradients_of_many_seeds_need_one_number_of_them():
    def work():
        x = distdl.distribute_tensor(noise(3, 5), distdl.world().reshape(2, 1)).requires_grad_()
        with pytest.raises(ValueError, match="first dim"):
            torch.autograd.grad([x * 2, x * 3], x, [noise(2, 3, 5), noise(1, 3, 5)], is_grads_batched=True)
        with pytest.raises(ValueError, match="first dim"):
            torch.autograd.grad((x * 2).sum(), x, is_grads_batched=True)

    distdl.run_workers(work, 2)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@on_workers
def test_a_copy_of_a_parameter_has_no_gradient(weights):
    """In torch it has none, as the copy of another leaf has one. A copy that steps would add to it."""
    model = distdl.distribute(_Scale(), split(x35).layout.partition, weights=weights)
    model(x35).sum().backward()
    assert model.factor.grad is not None
    other = copy.deepcopy(model)
    assert other.factor.grad is None
    other(x35).sum().backward()
    assert_close(other.factor.grad, x35.sum().reshape(1))


@on_workers
def test_a_list_with_a_leaf_is_not_written():
    x, leaf = split(x35), split(x35).requires_grad_()
    for given in ([x, leaf], [x35.clone(), leaf]):
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            torch._foreach_add_(given, 1.0)
        assert_close(given[0], x35)


@on_workers
def test_numbers_are_compared_with_what_requires_a_gradient():
    found = []
    for place in (split, torch.clone):
        numbers = place(x35.long())
        numbers.lt_(place(x35).requires_grad_())
        found.append(numbers)
    assert_close(*found)


_BACKWARDS = {"backward": lambda y, x: y.backward(), "grad": torch.autograd.grad}


def _fail_in_backward(x, backward):
    """Differentiate a product of what was written since: torch's error."""
    factor = x * 2
    product = factor @ factor
    factor.add_(1)
    backward(product.sum(), x)


@pytest.mark.parametrize("backward", _BACKWARDS.values(), ids=_BACKWARDS)
def test_a_backward_that_fails_where_one_worker_computes(backward):
    """It alone has saved what was written. If it is caught there, the others would wait, or be out of step."""

    def work():
        alone = distdl.world().create_partition_inclusive([0])
        x = distdl.distribute_tensor(noise(3, 3), alone.reshape(1, 1)).requires_grad_()
        _fail_in_backward(x, backward)
        x.sum().item()

    assert_told_apart(work, 3, "a backward that has failed (RuntimeError: one of the variables needed for gradient")


@pytest.mark.parametrize("backward", _BACKWARDS.values(), ids=_BACKWARDS)
def test_workers_go_on_after_a_backward_that_has_failed_on_all(backward):
    def work():
        x = distdl.distribute_tensor(noise(4, 4), distdl.world().reshape(3, 1)).requires_grad_()
        factor = x * 2
        squares = factor * factor
        factor.add_(1)
        with pytest.raises(RuntimeError, match="one of the variables needed for gradient") as raised:
            backward(squares.sum(), x)
        assert type(raised.value) is RuntimeError
        assert_close(torch.autograd.grad((x * x).sum(), x)[0], 2 * noise(4, 4))

    distdl.run_workers(work, 3)


@on_workers
def test_a_view_of_what_was_detached_and_written():
    """Behind it torch makes the view anew, also on the worker without cells."""
    for leaf in (False, True):
        found = []
        for place in (split, torch.clone):
            x = place(x35).requires_grad_()
            y = x if leaf else x * 2
            view = y.transpose(0, 1)
            y.detach_()
            y[1:] += 1
            y.mul_(3)
            assert view.requires_grad and not view.is_leaf
            assert not y.requires_grad and y.is_leaf
            view.sum().backward()
            assert x.grad is None
            found.append(view)
        assert_close(*found)


@on_workers
def test_a_view_that_some_workers_have_no_cells_of():
    for leaf in (False, True):
        found = []
        for place in (split, torch.clone):
            x = place(x35).requires_grad_()
            y = x if leaf else x * 2
            y.sum().backward()
            views = [y[:1], y[-1:], y[:, :1], y[:, -1:]]
            y.detach_()
            y.mul_(3)
            assert all(view.requires_grad and not view.is_leaf for view in views)
            sum(view.sum() for view in views).backward()
            assert not y.requires_grad and y.is_leaf
            found.append([*views, x.grad])
        for ours, theirs in zip(*found, strict=True):
            assert_close(ours, theirs)


@on_workers
def test_hooks_of_a_leaf_that_was_detached_for_a_while():
    for place in (split, torch.clone):
        x, seen = place(x35).requires_grad_(), []
        x.register_hook(lambda dx, seen=seen: seen.append("hook"))
        later = x.register_post_accumulate_grad_hook(lambda leaf, seen=seen: seen.append("later"))
        view = x[:1]
        x.detach_()
        x.mul_(3)
        view.sum().backward()
        assert not seen
        x.requires_grad_()
        (x * 2).sum().backward()
        assert seen == ["hook", "later"]
        later.remove()
        (x * 2).sum().backward()
        assert seen == ["hook", "later", "hook"]


@on_workers
def test_a_view_without_gradients_of_what_was_detached():
    """It requires a gradient as long as its base does."""
    found = []
    for place in (split, torch.clone):
        x = place(x35).requires_grad_() * 2
        with torch.no_grad():
            view = x.transpose(0, 1)
        assert view.requires_grad
        x.detach_()
        for _ in range(2):
            assert not view.requires_grad and view.is_leaf
            x[1:] += 1
        view.mul_(3)
        found.append(x)
    assert_close(*found)


@on_workers
def test_a_later_hook_that_returns_something():
    """Torch's text depends on the block."""
    for place in (split, torch.clone):
        x = place(x35).requires_grad_()
        x.register_post_accumulate_grad_hook(lambda leaf: leaf.grad.mul_(3))
        with pytest.raises(RuntimeError, match="post accumulate grad hooks should return None"):
            (x * x).sum().backward()


@on_workers
def test_a_later_hook_does_not_keep_the_tensor():
    for place in (split, torch.clone):
        x = place(x35).requires_grad_()
        seen = []
        x.register_post_accumulate_grad_hook(lambda leaf, seen=seen: seen.append(leaf.grad.sum().item()))
        y, itself = (x * 2).sum(), weakref.ref(x)
        if place is split:
            block = weakref.ref(x._block)
        del x
        y.backward()
        assert seen == [30.0]
        del y
        assert itself() is None
    assert block() is None


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
