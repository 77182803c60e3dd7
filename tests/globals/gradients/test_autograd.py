"""Differentiation of global tensors, as of torch's: what is asked of a tensor, of a graph and of an optimiser."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from launched import assert_close, on_workers, split
from same import Global, assert_raises_the_same, assert_same, noise
from torch.autograd import forward_ad

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)
y35 = noise(3, 5, seed=1)
row = noise(5, seed=2)


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


@pytest.mark.parametrize("call", [
    lambda x, P: forward_ad.make_dual(x, torch.ones(6)),
    lambda x, P: forward_ad.make_dual(torch.ones(6), x),
    lambda x, P: forward_ad.unpack_dual(x),
    lambda x, P: distdl.distribute_tensor(forward_ad.make_dual(torch.ones(6), torch.ones(6)), P),
    lambda x, P: distdl.GlobalTensor.from_local(_dual_on(0, P), P),
], ids=["make_dual", "tangent", "unpack_dual", "distribute_tensor", "from_local"])  # fmt: skip
def test_tangents_of_global_tensors_are_one_error_and_what_it_names_works(call):
    def main():
        P = distdl.world()[:2].reshape(2)
        x = distdl.distribute_tensor(torch.arange(6.0), P)
        with pytest.raises((NotImplementedError, ValueError)) as error:
            call(x, P)
        y, tangent = torch.func.jvp(lambda x: x * x, (x,), (torch.ones(6),))
        return str(error.value), y.tolist(), tangent.tolist()

    with forward_ad.dual_level():
        (text, y, tangent), *others = distdl.run_workers(main, 3)
    assert "torch.func.jvp(function, (x,), (tangent,))" in text and others == [(text, y, tangent)] * 2
    assert y == [0, 1, 4, 9, 16, 25] and tangent == [0, 2, 4, 6, 8, 10]


def _dual_on(worker, P):
    block = torch.ones(3)
    return forward_ad.make_dual(block, torch.ones(3)) if P.rank == worker else block
