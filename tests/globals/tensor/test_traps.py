"""What defeats a tensor subclass in real models: each was met in one."""

import copy
import operator
import threading
import weakref

import numpy
import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise
from torch.nn import functional as F
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)


@on_workers
def test_libraries_choose_by_the_module_of_the_class():
    x = split(x35)
    assert type(x).__module__.split(".")[0] == "torch"
    assert isinstance(x, torch.Tensor) and torch.is_tensor(x) and torch.jit.isinstance(x, torch.Tensor)


@on_workers
def test_another_class_of_tensors_is_shed_but_never_taken_on():
    x = split(x35)
    assert x.as_subclass(torch.Tensor) is x
    with pytest.raises(TypeError, match="a global tensor cannot be a Parameter"):
        x.as_subclass(torch.nn.Parameter)


@on_workers
def test_scripted_functions_never_compute_on_a_block():
    scripted = torch.jit.script(_twice)
    with pytest.raises(RuntimeError):
        scripted(split(x35))


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 2 * x * dy


class _Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x):
        return _Square.apply(x * self.w) + x


@on_workers
def test_an_autograd_function_in_a_model_has_its_gradient():
    model, alone = distdl.distribute(_Own(), split(x35).layout.partition), _Own()
    model(x35).sum().backward()
    alone(x35).sum().backward()
    assert_close(model.w.grad, alone.w.grad)


CELLS = torch.tensor([[0, 2, 1, 4, 3], [1, 0, 2, 2, 4], [4, 4, 0, 1, 2]])
WRITES = {
    "copy_": lambda o, x, i: o.copy_(x),
    "add_": lambda o, x, i: o.add_(x, alpha=2),
    "+=": lambda o, x, i: operator.iadd(o, x[:, :1]),
    "masked_fill_": lambda o, x, i: o.masked_fill_(x > 0, 3.0),
    "assignment": lambda o, x, i: o.__setitem__(slice(0, 3), x),
    "assignment of a row": lambda o, x, i: o.__setitem__(1, x[2]),
    "assignment of a number": lambda o, x, i: o.__setitem__((0, 2), x.sum()),
    "assignment at a mask": lambda o, x, i: o.__setitem__(x > 0, 7.0),
    "out=": lambda o, x, i: torch.mul(x, 2, out=o),
    "scatter_": lambda o, x, i: o.scatter_(dim=1, index=i, value=1),
    "scatter_add_": lambda o, x, i: o.scatter_add_(1, i, x),
    "index_add_": lambda o, x, i: o.index_add_(0, torch.tensor([2, 0]), x[1:]),
    "index_copy_": lambda o, x, i: o.index_copy_(1, torch.tensor([4, 0]), x[:, 1:3]),
    "bernoulli_": lambda o, x, i: o.bernoulli_((x > 0).double()),
    "index_put_, which falls back": lambda o, x, i: o.index_put_((torch.tensor([1, 0]),), x[1:]),
    "max with out=": lambda o, x, i: torch.max(x[:, None], 1, out=(o, torch.zeros(3, 5, dtype=torch.int64))),
    "cumsum with out=": lambda o, x, i: torch.cumsum(x, 0, out=o),
}

OUT = [write for name, write in WRITES.items() if name.endswith("out=")]  # (torch does not differentiate these)


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@on_workers
def test_a_plain_tensor_becomes_global_when_a_global_one_is_written_into_it(write):
    """Under the name that the caller has for it, with its own memory freed, and with gradients."""
    target = noise(3, 5, seed=3)
    plain, leaf = target.clone(), x35.clone().requires_grad_(write not in OUT)
    write(plain, leaf, CELLS)
    for grid in [(2, 1), (1, 2), (1, 1)]:
        o, x = target.clone(), split(x35, *grid).requires_grad_(leaf.requires_grad)
        write(o, x, split(CELLS, *grid))
        assert type(o) is GlobalTensor and o.shape == (3, 5)
        block = o.to_local()
        assert block.untyped_storage().nbytes() == 8 * block.numel()
        assert_close(o, plain)
        assert o.requires_grad == plain.requires_grad
        if plain.requires_grad:
            (o * o).sum().backward()
            leaf.grad = None
            (plain * plain).sum().backward(retain_graph=True)
            assert_close(x.grad, leaf.grad)


@on_workers
def test_losses_add_up_in_a_plain_tensor():
    x, plain = split(x35).requires_grad_(), x35.clone().requires_grad_()

    def total(one):
        found, parts = torch.zeros((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
        found += one.mean()
        found += one.exp().sum()
        parts[1] = (one * one).sum()
        return found + parts.sum()

    total(x).backward()
    total(plain).backward()
    assert_close(total(x), total(plain))
    assert_close(x.grad, plain.grad)


def _viewed():
    base = torch.zeros(20, dtype=torch.float64)
    return base[5:].view(3, 5), base


def _seen():
    base = torch.zeros(3, 5, dtype=torch.float64)
    return base, base.detach()


def _array():
    array = numpy.zeros((3, 5))
    return torch.from_numpy(array), torch.from_numpy(array)


@pytest.mark.parametrize("made", [_viewed, _seen, _array])
@pytest.mark.parametrize("write", ["copy_", "add_", "+=", "assignment", "scatter_", "index_add_", "out="])
@on_workers
def test_a_tensor_that_others_see_does_not_become_global(made, write):
    target, other = made()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"plain tensor.*because"):
        WRITES[write](target, split(x35), split(CELLS))
    assert not other.any() and not target.any() and type(target) is not GlobalTensor


@pytest.mark.parametrize("write", ["copy_", "add_", "+=", "assignment", "scatter_", "index_add_", "out="])
@on_workers
def test_a_parameter_of_no_model_is_written_on_every_worker(write):
    """As an optimiser does that has one beside others in shares."""
    found = []
    for x, index in ((split(x35), split(CELLS)), (x35, CELLS)):
        parameter = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
        other = parameter.data
        if write != "assignment":
            with pytest.raises(RuntimeError):  # (it requires a gradient)
                WRITES[write](parameter, x, index)
        with torch.no_grad():
            WRITES[write](parameter, x, index)
        assert type(parameter) is torch.nn.Parameter and type(other) is torch.Tensor
        found.append((parameter, other))
    assert_close(*[parameter.detach() for parameter, _ in found])
    assert_close(*[other for _, other in found])


@on_workers
def test_a_view_becomes_global_where_nobody_has_what_it_is_a_view_of():
    x, target = split(x35), torch.zeros(15, dtype=torch.float64).view(3, 5)
    target += x
    assert type(target) is GlobalTensor
    assert_close(target, x35)
    base = torch.zeros(15, dtype=torch.float64)
    target, other = base.view(3, 5), base[3:6].view(1, 3)
    del base
    with pytest.raises(RuntimeError, match=r"add_ .*shares its memory"):
        target += x
    assert not other.any()


@on_workers
def test_a_number_is_written_into_a_plain_tensor_that_others_see():
    """Gradients of a global medium and of a plain wavelet, which are clipped by the norm of both."""
    found = []
    for x in (split(x35), x35.clone()):
        medium, wavelet = x.requires_grad_(), noise(5, seed=4).requires_grad_()
        ((medium * wavelet) ** 2).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([medium, wavelet], 0.1)
        table = torch.zeros(2, 5, dtype=torch.float64)
        row = table[1]
        row += norm
        found.append((norm, medium.grad, wavelet.grad, table))
        assert type(wavelet.grad) is type(table) is torch.Tensor
    for one, other in zip(*found, strict=True):
        assert_close(one, other)


@on_workers
def test_a_part_of_a_plain_tensor_becomes_global_together_with_the_tensor():
    found = []
    for x in (split(x35).requires_grad_(), x35.clone().requires_grad_()):
        y = torch.ones(2, 3, 5, dtype=torch.float64)
        y[1] += x
        y[0, :2] *= x[:2]
        y[:, 1] /= x[1]
        z = torch.ones(2, 3, 5, dtype=torch.float64)
        row = z[1, :, ::2]
        row += x[:, ::2]
        row.mul_(2)
        z[0].copy_(x)
        (y.square().sum() + z.square().sum()).backward()
        found.append((y, z, row, x.grad))
    assert all(type(one) is GlobalTensor for one in found[0])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@on_workers
def test_a_part_of_a_plain_tensor_refuses_where_others_see_the_tensor():
    x = split(x35)
    parts = list(torch.ones(2, 3, 5, dtype=torch.float64))
    turned, whole = torch.ones(2, 5, 3, dtype=torch.float64).transpose(1, 2), torch.ones(3, 15, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"add_ .*it shares its memory .*zeros_like.*distribute_tensor"):
        parts[0] += x
    with pytest.raises(RuntimeError, match=r"mul_ .*it shares its memory"):
        turned[0] *= x
    with pytest.raises(RuntimeError, match=r"add_ .*no z\[i\] of integers and slices"):
        whole.view(-1)[3:18].view(3, 5).add_(x)
    with pytest.raises(RuntimeError, match=r"written into a plain tensor"):
        torch.zeros(3, 5, dtype=torch.complex128).real = x
    assert all(one.eq(1).all() for one in (*parts, turned, whole))
    turned[0] = turned[0] * x
    assert_close(turned[0], x35)


class _Written(torch.nn.Module):
    """Parameters and buffers that a forward writes, in the ways in which people write them."""

    def __init__(self):
        super().__init__()
        self.started = False
        self.scale = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
        self.table = torch.nn.Parameter(torch.ones(2, 5, dtype=torch.float64), requires_grad=False)
        self.replaced = torch.nn.Parameter(torch.ones(5, dtype=torch.float64))
        for name in ("mean", "seen", "rows", "centre"):
            self.register_buffer(name, torch.zeros(3, 5, dtype=torch.float64))
        self.register_buffer("cells", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if not self.started:
            with torch.no_grad():
                self.scale.data.copy_(1 / (x.std(0) + 1e-6))
                self.table.copy_(x[:2])
            self.started = True
        self.mean.mul_(0.9).add_(x.detach(), alpha=0.1).sub_(0.25)
        self.seen[1:].add_(x[:2].detach())
        self.seen.data.clamp_(max=x.detach().amax() / 2)
        with torch.no_grad():
            self.rows[1] = x.mean(0)
            self.rows.index_add_(0, torch.tensor([2, 0]), x[1:])
            self.cells += (x > 0).sum()
        self.centre = self.centre * 0.5 + x.detach().cumsum(1)
        self.replaced = torch.nn.Parameter(x.detach().mean(0))
        return (x - self.mean) * self.scale + self.seen * self.rows + self.table.sum(0) + self.replaced * self.cells


def _assert_written_alike(model, plain, x, x_plain):
    for _ in range(2):
        model(x).square().mean().backward()
        plain(x_plain).square().mean().backward()
        assert_close(x.grad, x_plain.grad)
        assert_close(model.scale.grad, plain.scale.grad)
        assert_close(model.replaced.grad, plain.replaced.grad)
        saved = model.state_dict()
        assert list(saved) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            assert type(saved[name]) is torch.Tensor, name
            assert_close(saved[name], value)


@on_workers
def test_what_a_model_writes_into_its_parameters_and_buffers_reaches_all_workers():
    x_plain = x35.clone().requires_grad_()
    for grid in [(2, 1), (1, 2)]:
        x_plain.grad, plain = None, _Written()
        x = split(x35, *grid).requires_grad_()
        model = distdl.distribute(_Written(), x.layout.partition)
        _assert_written_alike(model, plain, x, x_plain)
    copied, mean = copy.deepcopy(model), model.mean.clone()
    _assert_written_alike(copied, copy.deepcopy(plain), x, x_plain)
    assert torch.equal(model.mean, mean) and not torch.equal(copied.mean, mean)


class _Masked(torch.nn.Module):
    """What was computed from parameters is written into, as masked autoencoders do with their mask tokens."""

    def __init__(self):
        super().__init__()
        self.token, self.gain = (torch.nn.Parameter(noise(1, 1, 2, seed=seed)) for seed in (6, 7))

    def forward(self, x):
        rows = torch.arange(x.shape[0]).unsqueeze(1)
        places = torch.tensor([[2, 0], [1, 3], [3, 2]])
        y = self.token.repeat(x.shape[0], 5, 1)
        y[rows, places] = x.reshape(3, 5, 1)[:, :2] * self.gain
        z = (self.gain * 2).clone().expand(3, 5, 2).contiguous()
        z[:, 1:] = z[:, 1:] + y[:, :-1]
        return y * y + z


@on_workers
def test_what_was_computed_from_parameters_becomes_global_and_keeps_its_graph():
    plain, alone = x35.clone().requires_grad_(), _Masked()
    expected = alone(plain)
    expected.square().sum().backward()
    for grid in [(2, 1), (1, 2)]:
        x = split(x35, *grid).requires_grad_()
        model = distdl.distribute(_Masked(), x.layout.partition, fallback="error")
        y = model(x)
        assert_close(y, expected)
        y.square().sum().backward()
        for one, other in ((x, plain), (model.token, alone.token), (model.gain, alone.gain)):
            assert_close(one.grad, other.grad)


class _Totals(torch.nn.Module):
    """Adds up terms of parameters and of data in one plain tensor, as flows do with log-determinants."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(noise(5, seed=6))

    def forward(self, x):
        each, every, most = (torch.zeros(size, dtype=x.dtype) for size in (3, (), 6))
        each += self.gain.exp().sum()
        every += self.gain.sin().sum()
        every += self.gain.exp().sum()
        each += (x * self.gain).sum(1)
        every += each.square().sum()
        most[1:] += self.gain
        most *= 2
        most[0] = x.sum()
        most[1:] -= x[1]
        table = torch.zeros(15, dtype=x.dtype).view(3, 5)
        table += self.gain
        table += x
        return each, every, most, table


@on_workers
def test_a_plain_tensor_takes_what_follows_from_parameters_and_then_from_data():
    plain, alone = x35.clone().requires_grad_(), _Totals()
    expected = alone(plain)
    sum(y.square().sum() for y in expected).backward()
    for grid in [(2, 1), (1, 2)]:
        x = split(x35, *grid).requires_grad_()
        model = distdl.distribute(_Totals(), x.layout.partition, fallback="error")
        found = model(x)
        sum(y.square().sum() for y in found).backward()
        for one, other in zip((*found, x.grad, model.gain.grad), (*expected, plain.grad, alone.gain.grad), strict=True):
            assert_close(one, other)


class _Viewed(torch.nn.Module):
    """Writes into a tensor of which a view is still there."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(noise(5, seed=6))

    def forward(self, x):
        total = torch.zeros(3, 5, dtype=x.dtype)
        total += self.gain
        part = total[1]
        with pytest.raises(RuntimeError, match=r"it shares its memory"):
            total += x
        with pytest.raises(RuntimeError, match=r"it is a view"):
            part += x[0]
        del part
        total += x
        return total


@on_workers
def test_a_plain_tensor_with_what_follows_from_parameters_and_a_view_refuses_data():
    x = split(x35)
    model = distdl.distribute(_Viewed(), x.layout.partition)
    assert_close(model(x), x35 + model.gain)


@on_workers
def test_a_buffer_does_not_take_a_gradient():
    x = split(x35).requires_grad_()
    model = distdl.distribute(_Written(), x.layout.partition)
    with pytest.raises(RuntimeError, match=r"add_ .*buffer.*gradient"):
        model.mean.add_(x)
    with pytest.raises(RuntimeError, match=r"add_ .*buffer.*gradient"):
        model.mean += x
    assert type(model.mean) is torch.Tensor and not model.mean.any()


@on_workers
def test_what_has_written_into_a_buffer_or_a_part_of_it_gives_that_itself():
    x = split(x35)
    model = distdl.distribute(_Written(), x.layout.partition)
    whole, part = model.mean.add_(x), model.mean[:2].mul_(x[:2])
    assert whole is model.mean
    model.mean.mul_(0.5)
    assert_close(whole, torch.cat([x35[:2] ** 2, x35[2:]]) / 2)
    assert_close(part * x[:2], x35[:2] ** 3 / 2)


class _Assigned(torch.nn.Module):
    """What a forward writes by operators, in which Python assigns what was written."""

    def __init__(self):
        super().__init__()
        self.w, self.v = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
        self.inner = None

    def forward(self, x):
        if self.inner is None:
            self.inner = torch.nn.Module()
            self.inner.register_buffer("seen", torch.zeros(5, dtype=torch.float64))
        with torch.no_grad():
            self.w += x.mean(0)
            self.w *= 2
            self.w.data -= x.amax(0)
            self.v[1:] **= x[0, 1:].abs()
        self.inner.seen += x.detach().sum(0)
        return x * self.w * self.v + self.inner.seen


@on_workers
def test_operators_in_place_assign_the_parameter_itself():
    x_plain, plain = x35.clone().requires_grad_(), _Assigned()
    x = split(x35).requires_grad_()
    model = distdl.distribute(_Assigned(), x.layout.partition)
    kept = list(model.parameters())
    for _ in range(2):
        model(x).square().sum().backward()
        plain(x_plain).square().sum().backward()
    assert all(one is other for one, other in zip(model.parameters(), kept, strict=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        assert type(model.state_dict()[name]) is torch.Tensor
        assert_close(model.state_dict()[name], value)
    for one, other in ((x, x_plain), (model.w, plain.w), (model.v, plain.v)):
        assert_close(one.grad, other.grad)


@pytest.mark.parametrize("plain", [False, True])
@on_workers
def test_a_parameter_whose_data_is_set_in_a_forward_has_them(plain):
    class Set(_Own):
        def forward(self, x):
            self.w.data = noise(5, seed=8) if plain else x.mean(0)
            return x * self.w

    x, alone = split(x35), Set()
    model = distdl.distribute(Set(), x.layout.partition)
    for one, given in ((model, x), (alone, x35)):
        one(given).square().sum().backward()
    assert_close(model.w, alone.w)
    assert_close(model.w.grad, alone.w.grad)


@on_workers
def test_a_buffer_and_the_tensor_that_it_was_set_to_are_not_written():
    """In torch, they are one."""
    x = split(x35)
    model = distdl.distribute(_Written(), x.layout.partition)
    model.mean = t = x * 1
    with pytest.raises(RuntimeError, match=r"clamp_ writes a tensor to which a buffer .* was set.*clone\(\)"):
        t[1:].clamp_(max=0)
    for write in (lambda: model.mean.mul_(3), lambda: model.mean[1:].add_(x[1:])):
        model.mean = t = x * 1
        assert type(model.mean) is torch.Tensor
        assert_close(t + model.mean, 2 * x35)
        write()
        with pytest.raises(RuntimeError, match="of a buffer that was set to this tensor has written in place"):
            t.sum()
    assert_close(model.mean, torch.cat([x35[:1], 2 * x35[1:]]))


@on_workers
def test_the_forward_of_a_model_that_another_thread_has_distributed_writes_its_buffers():
    x = split(x35)
    model = distdl.distribute(_Written(), x.layout.partition)
    thread = threading.Thread(target=lambda: model.mean.mul_(0.9).add_(x))
    thread.start()
    thread.join()
    assert type(model.mean) is torch.Tensor
    assert_close(model.mean, x35)


@on_workers
def test_a_computed_parameter_of_a_functional_call_keeps_its_gradient():
    def loss(model, x):
        weights = {"w": x.exp().mean(0), "v": x.detach()[0]}
        return torch.func.functional_call(model, weights, (x,)).square().sum()

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.v = (torch.nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))

        def forward(self, x):
            return x * self.w + self.v

    x_plain, x = x35.clone().requires_grad_(), split(x35).requires_grad_()
    model = distdl.distribute(Scaled(), x.layout.partition)
    for _ in range(2):
        loss(Scaled(), x_plain).backward()
        loss(model, x).backward()
        assert_close(x.grad, x_plain.grad)
    assert model.w.grad is None and torch.equal(model.w, torch.ones(5))


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@on_workers
def test_a_parameter_that_another_model_has_computed(weights):
    def train(models, x):
        hyper, model = models
        bias = hyper(2.0)
        y = torch.func.functional_call(model, {"bias": bias}, (x,))
        (y.square().mean() + bias.sum()).backward()
        return [p.grad for one in models for p in one.parameters()]

    class Hyper(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(noise(5))

        def forward(self, factor):
            return self.w.sin() * factor

    def models():
        linear = torch.nn.Linear(5, 5, dtype=torch.float64)
        with torch.no_grad():
            linear.weight.copy_(noise(5, 5))
            linear.bias.copy_(noise(5))
        return Hyper(), linear

    x = split(x35)
    ours = train([distdl.distribute(one, x.layout.partition, weights) for one in models()], x)
    for one, other in zip(ours, train(models(), x35), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert_close(one, other)


@on_workers
def test_out_of_place_a_plain_tensor_is_split_beside_a_global_index():
    table, plain = noise(3, 5, seed=4).requires_grad_(), noise(3, 5, seed=4).requires_grad_()
    y = torch.scatter(table, 1, split(CELLS), 0.5)
    z = torch.scatter(plain, 1, CELLS, 0.5)
    assert_close(y, z)
    (y * y).sum().backward()
    (z * z).sum().backward()
    assert_close(table.grad, plain.grad)


@on_workers
def test_plain_tensors_of_a_list_do_not_become_global():
    x = split(x35)
    for refused in (torch.zeros(3, 5, dtype=torch.float64), torch.zeros(20, dtype=torch.float64)[5:].view(3, 5)):
        with pytest.raises(TypeError, match=r"_foreach_add_ would write a global tensor into a plain.*zeros_like"):
            torch._foreach_add_([refused], [x])
        assert type(refused) is torch.Tensor and not refused.any()
    model = distdl.distribute(_Written(), x.layout.partition)
    torch._foreach_add_([model.mean], [x])  # (of what a model has whole, each worker has all)
    assert type(model.mean) is torch.Tensor and torch.equal(model.mean, x35)


@on_workers
def test_a_recomputed_forward_is_intercepted_in_backward():
    x = split(x35).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda a: F.gelu(a).sum(0).exp(), x, use_reentrant=False)
    y.sum().backward()
    plain = x35.clone().requires_grad_()
    F.gelu(plain).sum(0).exp().sum().backward()
    assert_close(x.grad, plain.grad)


@on_workers
def test_values_tables_and_constants():
    """``.item()`` in a forward, ``.data`` of a tensor, ``torch.as_tensor``, NumPy of a tensor."""
    x = split(x35).requires_grad_()
    assert_close(x / x.abs().sum().item(), x35 / x35.abs().sum())
    assert_close(x.data * 2, x35 * 2)
    assert not x.data.requires_grad
    assert type(torch.as_tensor(x)) is GlobalTensor
    assert x.detach().numpy().tolist() == x35.tolist()


@on_workers
def test_as_tensor_of_another_dtype_has_a_gradient():
    """Torch asks nobody there, but for a copy below autograd."""
    given = []
    for x in (split(x35), x35.clone()):
        x.requires_grad_()
        y = torch.as_tensor(x, dtype=torch.complex128) * 1j + torch.as_tensor((x * 2).exp(), dtype=torch.float32)
        y.abs().square().sum().backward()
        given += [y, x.grad]
    assert_close(given[0], given[2])
    assert_close(given[1], given[3])


@on_workers
def test_a_part_is_contiguous_on_all_workers_or_on_none():
    """Of two columns, the block of two rows is not contiguous, and the block of one row is."""
    part = split(x35)[:, 1:3]
    assert not part.is_contiguous() and part.stride() == (5, 1) and part.storage_offset() == 1
    image = split(noise(2, 3, 4, 5)).contiguous(memory_format=torch.channels_last)
    assert not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last)


@on_workers
def test_an_in_place_write_reaches_what_it_is_a_view_of():
    """Where the view had to move, the tensor itself is not used again in silence."""
    x, plain = split(x35) * 1, x35.clone()
    x[1:].mul_(2)
    plain[1:].mul_(2)
    assert_close(x, plain)
    x.view(-1).add_(1)
    plain.view(-1).add_(1)
    assert_close(x, plain)


@pytest.mark.filterwarnings("ignore:as_strided")
@on_workers
def test_what_is_written_into_a_view_that_fell_back_is_not_lost_in_silence():
    x = split(x35) * 1
    x.as_strided((3,), (6,)).mul_(2)
    with pytest.raises(RuntimeError, match="written in place"):
        x.sum()


@on_workers
def test_what_returns_its_argument_has_written_nothing():
    x = split(x35) * 1
    y = x.view(15).contiguous().double() + 0
    assert_close(y, x35.view(15))
    assert_close(x * 2, x35 * 2)


@pytest.mark.parametrize("written", [
    lambda x, part, moved, view: (x.to_local().mul_(2), moved),
    lambda x, part, moved, view: (moved.to_local().zero_(), x),
    lambda x, part, moved, view: (part.mul_(2), moved),
    lambda x, part, moved, view: (x.mul_(2), view),
    lambda x, part, moved, view: (view.mul_(2), x),
    lambda x, part, moved, view: (view.mul_(2), part),
])  # fmt: skip
@on_workers
def test_a_view_whose_cells_have_moved_is_never_used_with_old_values(written):
    """Whatever was written: the tensor, a part of it, the view, or a block of one of them."""
    x = split(noise(4, 6), 1, 3) * 1
    part = x[:2]
    moved, view = x.view(6, 4), part.view(-1)
    assert_close(moved + 0, noise(4, 6).view(6, 4))
    _, stale = written(x, part, moved, view)
    with pytest.raises(RuntimeError, match="has written in place"):
        stale.sum()


@pytest.mark.parametrize("share", [lambda x: x.detach(), lambda x: x.data, lambda x: x.detach()[1:]])
@on_workers
def test_what_shares_memory_without_a_graph_is_told_apart_from_copies(share):
    def both():
        x = split(noise(4, 6), 1, 3) * 1
        shared = share(x)
        return x, shared, shared.view(-1)

    for written, stale in ((0, 2), (1, 2), (2, 0), (2, 1)):
        found = both()
        found[written].mul_(2)
        with pytest.raises(RuntimeError, match="has written in place"):
            found[stale].sum()
    x = split(x35, 1, 3) * 1
    x.detach().mul_(2)
    assert_close(x, 2 * x35)


@on_workers
def test_the_data_of_a_plain_tensor_is_never_that_of_a_global_one():
    """Torch asks nobody there; reading it ended the process."""
    x, plain, weight = split(x35), x35.clone(), torch.nn.Parameter(x35.clone())
    for target in (plain, weight):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            target.data = x
        assert_close(target * 2, 2 * x35)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        torch.nn.utils.vector_to_parameters(x.reshape(-1), [weight])
    torch.nn.utils.vector_to_parameters(x35.reshape(-1) * 2, [own := (x * 1).requires_grad_()])
    assert_close(own, 2 * x35)
    (grouped,) = _group_tensors_by_device_and_dtype([[x]])
    assert grouped == (torch.device("cpu"), torch.float64)


@on_workers
def test_a_copy_of_a_copy_is_told_apart_from_what_the_first_is_a_copy_of():
    x = split(noise(4, 6), 1, 3) * 1
    first = x.view(8, 3)
    second = first.view(3, 8)
    second.mul_(2)
    for stale in (x, first):
        with pytest.raises(RuntimeError, match="has written in place"):
            stale.sum()
    x = split(noise(4, 6), 1, 3) * 1
    last = x.view(8, 3).view(3, 8)[1:]  # (the ones between are gone)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="has written in place"):
        last.sum()


@on_workers
def test_what_was_written_stays_refused_when_the_view_has_gone():
    x = split(noise(4, 6), 1, 3) * 1
    part = x[:, 1:]
    x.reshape(-1).zero_()
    for one in (part, x, part):
        with pytest.raises(RuntimeError, match="has written in place"):
            one.reshape(-1)


@on_workers
def test_a_view_does_not_keep_what_it_is_a_view_of():
    x = split(noise(4, 6), 1, 3) * 1
    kept, gone = x.transpose(0, 1)[1:], weakref.ref(x)
    del x
    assert gone() is None
    assert_close(kept, noise(4, 6).T[1:])


@pytest.mark.filterwarnings("error:.*has no op")
@on_workers
def test_an_assertion_of_a_value_is_that_of_every_worker():
    x = split(x35)
    torch._assert_async((x < 100).all(), "too large")
    with pytest.raises(RuntimeError, match="too small"):
        torch._assert_async((x > 100).all(), "too small")


def _in_rows(table, w, v):
    table[0] += w
    table[torch.tensor([False, True, True])] = v
    return table


def _in_a_view(table, w, v):
    table[1:].add_(w).mul_(2)
    table[0].copy_(v)
    return table.unsqueeze(0).squeeze(0)


def _in_complex_parts(table, w, v):
    spectrum = torch.fft.fft(w)
    spectrum.imag *= -2  # (sets the imaginary part, too, once it is written)
    spectrum.real = spectrum.real + v
    spectrum.real[0] = 3
    table = table.to(torch.complex128)
    table.real = v
    table.imag[1:] = spectrum.imag
    return (spectrum * table).abs()


@pytest.mark.parametrize("fill", [_in_rows, _in_a_view, _in_complex_parts])
@on_workers
def test_a_parameter_in_a_plain_table_gets_its_gradient(fill):
    """As the tables of positions and prompts that a model makes in its forward."""

    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.linspace(0.5, 0.8, 5, dtype=torch.float64) ** 2)
            self.v = torch.nn.Parameter(torch.full((5,), 2.0, dtype=torch.float64))

        def forward(self, x):
            return x * fill(torch.zeros(3, 5, dtype=torch.float64), self.w, self.v)

    alone, model = Table(), distdl.distribute(Table(), split(x35).layout.partition, fallback="error")
    for module, x in ((alone, x35), (model, split(x35))):
        (module(x) ** 2).sum().backward()
    assert_close(model.w.grad, alone.w.grad)
    assert_close(model.v.grad, alone.v.grad)


class _Filled(torch.nn.Module):
    def __init__(self, fill):
        super().__init__()
        self.w, self.fill = torch.nn.Parameter(torch.full((5,), 0.5, dtype=torch.float64)), fill

    def forward(self, x, code):
        return x * self.fill(code, self.w)


@on_workers
def test_a_plain_tensor_that_requires_a_gradient_keeps_it():
    """As a latent code outside of the model that begins as a parameter."""

    def begun(code, w):
        with torch.no_grad():
            code.copy_(w)
        return code

    alone, model = _Filled(begun), distdl.distribute(_Filled(begun), split(x35).layout.partition, fallback="error")
    codes = [torch.ones(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    for module, x, code in ((alone, x35, codes[0]), (model, split(x35), codes[1])):
        (module(x, code) ** 2).sum().backward()
    assert type(codes[1]) is torch.Tensor
    assert_close(codes[1].grad, codes[0].grad)


@on_workers
def test_a_plain_tensor_that_requires_a_gradient_does_not_take_a_parameter():
    model = distdl.distribute(_Filled(lambda code, w: (code * 2).copy_(w)), split(x35).layout.partition)
    with pytest.raises(RuntimeError, match="into a plain tensor that requires a gradient"):
        model(split(x35), torch.ones(5, dtype=torch.float64, requires_grad=True))
