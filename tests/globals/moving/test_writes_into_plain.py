"""Global tensors that are written into plain ones: these become global, take the value, or refuse."""

import operator

import numpy
import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise

import distdl
from distdl import GlobalTensor

x35 = noise(3, 5)


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
def test_out_of_place_a_plain_tensor_is_split_beside_a_global_index():
    table, plain = noise(3, 5, seed=4).requires_grad_(), noise(3, 5, seed=4).requires_grad_()
    y = torch.scatter(table, 1, split(CELLS), 0.5)
    z = torch.scatter(plain, 1, CELLS, 0.5)
    assert_close(y, z)
    (y * y).sum().backward()
    (z * z).sum().backward()
    assert_close(table.grad, plain.grad)


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


GIVING = {
    "add": lambda x, out: torch.add(x, x, out=out), "mm": lambda x, out: torch.mm(x, x.T, out=out),
    "sum": lambda x, out: torch.sum(x, 0, out=out), "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "argmax": lambda x, out: torch.argmax(x, 1, out=out), "cat": lambda x, out: torch.cat([x, x], out=out),
    "chosen": lambda x, out: torch.masked_select(x, x > 0, out=out),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", GIVING)
def test_where_results_are_written_as_in_torch(name):
    """Tensors of another dtype are refused, and so are those with elements that torch still resizes."""

    def outcome(x, out):
        try:
            GIVING[name](x, out)
        except (RuntimeError, TypeError) as error:
            return str(error)
        return out

    def work():
        x = split(x35)
        for dtype in (torch.float64, torch.float32, torch.int64, torch.complex128):
            for shape in ((0,), (3, 5), (5,)):
                for split_out in (False, True):
                    for wants in (False, True):
                        out, plain = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
                        given = [one.detach().clone().requires_grad_(wants) for one in (x, x35)]
                        ours = outcome(given[0], split(out) if split_out else out)
                        theirs = outcome(given[1], plain)
                        case = dtype, shape, split_out, wants, ours, theirs
                        if isinstance(ours, str) and not isinstance(theirs, str):
                            if "needs out= of the result's shape" in ours:
                                assert theirs.shape != shape and shape != (0,), case
                            else:
                                assert "needs out= of the result's dtype" in ours, case
                                assert name in ("add", "sum", "cumsum", "cat"), case
                            continue
                        assert isinstance(ours, str) == isinstance(theirs, str), case
                        if not isinstance(ours, str):
                            assert ours.dtype == theirs.dtype, case
                            assert_close(ours, theirs)

    distdl.run_workers(work, 3)
