"""What is written where torch does not count the writes: by fused optimisers, and in inference mode."""

from copy import deepcopy

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import distdl
from distdl import GlobalTensor
from distdl.globals.models import buckets

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


@torch.library.custom_op("distdl_tests::double", mutates_args={"x"})
def double(x: torch.Tensor) -> None:
    """An operator that writes into its argument and returns nothing."""
    x.mul_(2)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_fallbacks_in_inference_mode():
    """What they return, what they write and return, and what they write and do not return."""
    square, rows = x35 @ x35.t(), torch.tensor([1, 0])
    found = []
    for place in (split, torch.clone):
        before = place(square).requires_grad_()
        with torch.inference_mode():
            x, y, z, w = place(square), place(x35), place(x35), before.detach()
            results = [torch.linalg.matrix_exp(x), torch.linalg.matrix_exp(before)]
            returned = y.index_put_((rows,), y[1:].clone())
            assert returned is y
            double(z)
            double(w)
        found.append([*results, y, z, w, torch.linalg.matrix_exp(x)])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)
    assert_close(found[0][3], 2 * x35)
    assert_close(found[0][4], 2 * square)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_a_fallback_writes_a_plain_tensor_on_every_worker():
    """Only one of them has run the function."""
    rows, table = torch.tensor([4, 0, 0, 2]), 3 * noise(5, 3)
    found = []
    for place in (split, torch.clone):
        plain = table.clone()
        view = table.repeat(2, 1)[5:]
        leaf = table.clone().requires_grad_()
        given = place(rows)
        results = [functional.embedding(given, one, max_norm=0.5) for one in (plain, view, leaf)]
        mean, variance = torch.zeros(3), torch.ones(3)  # (whose writes torch does not count)
        weight = place(torch.arange(1.0, 4.0))
        results.append(functional.batch_norm(table.float(), mean, variance, weight, training=True))
        found.append([*results, plain, view, leaf, mean, variance])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


class Renormed(nn.Module):
    """Tables whose forward writes into them."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 3, max_norm=0.5, dtype=torch.float64)
        self.bags = nn.EmbeddingBag(6, 3, max_norm=0.4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x).sum(1) + self.bags(x)


@pytest.mark.filterwarnings("ignore:.*has no op")
def test_tables_that_are_renormed_stay_equal():
    indices = torch.randint(0, 6, (4, 5), generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    sequential = Renormed()
    state = {name: 3 * one.clone() for name, one in sequential.state_dict().items()}

    def steps(model, x):
        model.load_state_dict(state)
        optimiser = torch.optim.SGD(model.parameters(), 0.01)
        _steps(optimiser, lambda: model(x).square().sum())
        return model.state_dict()

    expected = {name: one.clone() for name, one in steps(sequential, indices).items()}

    def work() -> None:
        P = distdl.world()[:2].reshape(2, 1)
        for weights in ("replicated", "sharded"):
            model = distdl.distribute(Renormed(), P, weights=weights)
            for name, one in steps(model, distdl.distribute_tensor(indices, P)).items():
                torch.testing.assert_close(one, expected[name], rtol=1e-12, atol=1e-12)

    distdl.run_workers(work, 3)


@pytest.mark.filterwarnings("ignore:.*has no op")
@on_workers
def test_fallbacks_that_return_their_argument():
    """Written or not, and of another size or not."""
    found = []
    for place in (split, torch.clone):
        leaf = place(x35).requires_grad_()
        assert leaf.to_dense() is leaf
        x, y, z = place(x35), place(x35), place(x35)
        assert x.resize_(2, 4) is x
        assert x.shape == (2, 4)
        y.resize_as_(place(noise(5)))
        assert z.apply_(lambda number: 2 * number) is z
        found.append([leaf, 2 * x, x.sum(), y, z])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


def _with_other_data(x):
    x.data = torch.ones(3, 5, dtype=torch.float64)
    return x.add_(1)


EXPANSIONS = {
    "rows": lambda x: x[:1].expand(3, 5),
    "columns": lambda x: x[:, :1].expand(3, 5),
    "number": lambda x: x.sum().expand(3, 5),
    "as another": lambda x: x[:1].expand_as(x),
    "part": lambda x: x[:1].expand(4, 5)[1:],
    "other dims": lambda x: x[:, :1].expand(3, 5).detach().t().t(),
}
WRITTEN = {
    "add_": lambda x: x.add_(1),
    "number": lambda x: x.__iadd__(1.0),
    "copy_": lambda x: x.copy_(torch.ones(5, dtype=torch.float64)),
    "relu": lambda x: torch.nn.functional.relu(x, inplace=True),
    "uniform_": lambda x: x.uniform_(),
    "dropout": lambda x: torch.nn.functional.dropout(x, inplace=True),
    "foreach": lambda x: torch._foreach_add_([x], 1),
    "cumsum_": lambda x: x.cumsum_(0),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(3, 5, dtype=torch.long), 1.0),
}


@pytest.mark.parametrize("grid", [(2, 1), (1, 3)])
@pytest.mark.parametrize("expand", EXPANSIONS.values(), ids=EXPANSIONS)
@on_workers
def test_what_torch_refuses_to_write_is_one_error(expand, grid):
    for write in WRITTEN.values():
        for x in (split(x35, *grid), x35.clone()):
            with pytest.raises(RuntimeError, match="more than one element of the written-to tensor refers to a single"):
                write(expand(x))
    for write in (lambda x: x.fill_(2), lambda x: x.zero_()):  # of these alone torch takes such a tensor
        if expand is EXPANSIONS["as another"]:  # a block of it has moved
            with pytest.raises(RuntimeError, match="of which several elements lie in one place in torch"):
                write(expand(split(x35, *grid)))
        else:
            assert_close(write(expand(split(x35, *grid))), write(expand(x35.clone())))
    for write in (
        lambda x: x.contiguous().add_(1),
        lambda x: x.clone().abs_(),
        lambda x: x.real,
        lambda x: x.type(torch.float64),
        _with_other_data,
    ):
        assert_close(write(expand(split(x35, *grid))), write(expand(x35.clone())))
    assert_close(x35[:1].expand(1, 5).clone().add_(1), split(x35, *grid)[:1].expand(1, 5).add_(1).full_tensor())


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


MAY_ONLY_READ = "in shares, which a forward may only read"


class Halved(nn.Linear):
    """A layer whose forward writes into its weight, which it has read with a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        with torch.no_grad():
            weight.mul_(0.5)
        return super().forward(x)


def test_a_forward_does_not_write_into_shares():
    def work() -> None:
        P = distdl.world()[:2].reshape(2, 1)
        model = distdl.distribute(nn.Sequential(Halved(5, 4)).double(), P, weights="sharded")
        with pytest.raises(RuntimeError, match=r"Halved.forward has written into a weight .* in shares"):
            model(distdl.distribute_tensor(x35, P))

    distdl.run_workers(work, 3)


class Merged(nn.Module):
    """A layer that evaluates by another one, whose weights it computes anew (as SPAN and other merged layers do)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(5, 4), nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            return self.second(self.first(x))
        self.both.weight.data = self.second.weight.data @ self.first.weight.data
        with torch.no_grad():
            self.both.bias.copy_(self.second.weight @ self.first.bias + self.second.bias)
        return self.both(x)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_weights_that_an_evaluation_computes(weights):
    torch.manual_seed(0)
    merged = Merged().double()
    y = merged.eval()(x35)

    def work() -> None:
        P = distdl.world()[:2].reshape(2, 1)
        model = distdl.distribute(Merged().double(), P, weights=weights)
        model.load_state_dict(initial)
        x = distdl.distribute_tensor(x35, P)
        if weights == "sharded":
            with torch.no_grad(), pytest.raises(RuntimeError, match=MAY_ONLY_READ):
                model.eval()(x)
            return
        with torch.no_grad():
            assert_close(model.eval()(x), y)
        for name, one in model.state_dict().items():
            torch.testing.assert_close(one, merged.state_dict()[name])
        assert_close(model(x), y)

    initial = {name: torch.zeros_like(one) if "both" in name else one for name, one in merged.state_dict().items()}
    distdl.run_workers(work, 3)


class Averaging(nn.Module):
    """A layer that writes what has a gradient into the data of a buffer, as the codebooks of Encodec do."""

    def __init__(self, use) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(5, 5), use
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x * self.use(self, self.mean.data.mul_(0.9).add_(x.mean(0), alpha=0.1))


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)])
@pytest.mark.parametrize("use", [lambda model, _: model.mean, lambda _, alias: alias], ids=["buffer", "alias"])
def test_what_has_a_gradient_is_written_into_the_data_of_a_buffer(use, grid, weights):
    torch.manual_seed(0)
    model = Averaging(use).double()
    wanted = _two_steps(deepcopy(model), x35)

    def work() -> None:
        P = distdl.world()[:2].reshape(*grid)
        distributed = distdl.distribute(deepcopy(model), P, weights=weights)
        for ours, theirs in zip(_two_steps(distributed, distdl.distribute_tensor(x35, P)), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)

    distdl.run_workers(work, 3)


@on_workers
def test_the_data_of_a_buffer_of_which_there_are_other_views_is_not_written_with_a_gradient():
    model = Averaging(lambda model, alias: model.mean.data[1:].add_(alias[1:].exp())).double()
    x = distdl.distribute_tensor(x35, distdl.world()[:2].reshape(2, 1))
    with pytest.raises(RuntimeError, match="into a plain tensor of which there are other views"):
        distdl.distribute(model, x.layout.partition)(x)


class Started(nn.Module):
    """A layer whose first batches set its scale, as those of normalising flows do."""

    def __init__(self, start) -> None:
        super().__init__()
        self.linear, self.start, self.left = nn.Linear(5, 5), start, 2
        self.scale = nn.Parameter(torch.ones(1, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        alias = None
        if self.left:
            self.left -= 1
            alias = self.start(self, x.std(0, keepdim=True))
        return x * self.scale + (0 if alias is None else alias)


def _assigned(model, std):
    model.scale += std


def _assigned_data(model, std):
    model.scale.data += std


def _kept(model, std):
    alias = model.scale.data
    alias.view(-1)[1:] = std[0, 1:]
    return alias * 2


def _read_before(model, std):
    read = model.scale * 2
    with torch.no_grad():
        read = read * model.scale.data.norm()
        model.scale.data[0, 1:] *= 0.5
    return read


STARTS = {
    "data": lambda model, std: model.scale.data.copy_(std),
    "view of data": lambda model, std: model.scale.data.view(-1)[1:].copy_(std[0, 1:]).sum(),
    "number": lambda model, std: model.scale.data[0, 2].fill_(std.sum()),
    "assigned data": _assigned_data,
    "kept data": _kept,
    "without gradients": torch.no_grad()(lambda model, std: model.scale.copy_(std)),
    "view": torch.no_grad()(lambda model, std: model.scale.view(-1)[1:].mul_(std[0, 1:]).sum()),
    "assigned": torch.no_grad()(_assigned),
    "data without gradients": torch.no_grad()(lambda model, std: model.scale.data.add_(std)),
    "data behind a graph": _read_before,
    "plain data": torch.no_grad()(lambda model, std: model.scale.data.mul_(0.3)),
    "plain": torch.no_grad()(lambda model, std: model.scale.mul_(0.3)),
}


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_weights_that_the_first_batches_set(start, weights):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Started(start)).double()
    wanted = _two_steps(deepcopy(model), x35)

    def work() -> None:
        P = distdl.world()[1:].reshape(2, 1)
        distributed = distdl.distribute(deepcopy(model), P, weights=weights)
        x = distdl.distribute_tensor(x35, P)
        if weights == "sharded":
            with pytest.raises(RuntimeError, match=MAY_ONLY_READ):
                distributed(x)
            return
        for ours, theirs in zip(_two_steps(distributed, x), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)

    distdl.run_workers(work, 3)


def test_a_backward_does_not_read_what_a_later_forward_has_written():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Started(STARTS["plain"])).double()

    def work() -> None:
        P = distdl.world()[1:].reshape(2, 1)
        distributed = distdl.distribute(deepcopy(model), P)
        x = distdl.distribute_tensor(x35, P)
        y = distributed(x)
        distributed(x)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    distdl.run_workers(work, 3)


class Kept(nn.Linear):
    """A layer that writes one element of its weight, by a name that it had before it has read it with a graph."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            kept = self.weight.data
        y = super().forward(x)
        kept[0, 0] = 3
        return y


def test_a_late_write_into_shares_is_one_error():
    def work() -> None:
        P = distdl.world()[1:].reshape(2, 1)
        distributed = distdl.distribute(Kept(5, 4).double(), P, weights="sharded")
        with pytest.raises(RuntimeError, match="has written into a weight that is stored in shares"):
            distributed(distdl.distribute_tensor(x35, P))

    distdl.run_workers(work, 3)


class Reshaped(nn.Linear):
    """A layer that gives its weight data of another shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.zeros(self.extents, dtype=x.dtype)
        return super().forward(x)


@pytest.mark.parametrize("extents", [(3, 5), (1, 5), (4, 5, 1), ()])
@on_workers
def test_data_of_another_shape_is_one_error_with_shares_and_changes_nothing(extents):
    model = Reshaped(5, 4).double()
    model.load_state_dict({"weight": noise(4, 5), "bias": noise(4)})
    model.extents = extents
    distributed = distdl.distribute(model, split(x35).layout.partition, weights="sharded")
    with pytest.raises(RuntimeError, match=MAY_ONLY_READ):
        distributed(split(x35))
    torch.testing.assert_close(distributed.state_dict()["weight"], noise(4, 5))


class Masked(nn.Linear):
    """A layer that masks its weight in each forward, as PixelCNN's do."""

    def __init__(self, style: str) -> None:
        super().__init__(5, 5)
        self.style = style
        self.register_buffer("mask", torch.ones(5, 5).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.style == "set":
            self.weight.data = self.weight.data * self.mask
        elif self.style == "assigned":
            self.weight.data *= self.mask
        else:
            self.weight.data.mul_(self.mask)
        return super().forward(x)


class Listed(nn.Linear):
    """A layer that sets its weights where nobody reads them by name."""

    def __init__(self, style: str) -> None:
        super().__init__(5, 5)
        self.style, self.halved = style, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.style == "vector":
            vector = nn.utils.parameters_to_vector(self.parameters()).detach()
            nn.utils.vector_to_parameters(vector.clamp(-0.2, 0.2), self.parameters())
        elif self.style == "without gradients":
            with torch.no_grad():
                for p in self.parameters():
                    p.data = p.clamp(-0.2, 0.2)
        elif self.style == "applied":
            self._apply(lambda p: p.clamp(-0.2, 0.2))
        elif self.style == "transposed":
            for p in self.parameters():
                p.data = p.data.t()
        elif self.style == "transposed by name":
            self.weight.data = self.weight.data.t()
        elif self.style == "between two uses":
            y = super().forward(x)
            self.weight.data = self.weight.data / 2
            return y + super().forward(x)
        elif self.style == "after a use":
            y = super().forward(x)
            self.weight.data = self.weight.data / 2
            return y
        elif self.style == "after a use as it is":
            y = x @ self.weight + self.weight.square().sum() + x * self.bias
            self.weight.data = self.weight.data / 2
            self.bias.data = self.bias.data / 2
            return y
        elif self.style == "after a use of all of it":
            y = x @ self.weight[:] + self.weight.view(5, 5).pow(3).sum() + (x[0, 0] * self.weight.detach()).sum()
            self.weight.data = self.weight.data / 2
            return y
        elif self.style == "before a checkpoint":
            for p in self.parameters():
                p.data = p.data / 2
            return checkpoint(super().forward, x, use_reentrant=False)
        elif self.style == "in a checkpoint":
            return checkpoint(self._halved, x, use_reentrant=False)
        else:
            return self.to(torch.float32)(x.float()).double() if x.dtype is torch.float64 else super().forward(x)
        return super().forward(x)

    def _halved(self, x: torch.Tensor) -> torch.Tensor:
        if not self.halved:  # (and not when it is recomputed)
            self.halved = True
            for p in self.parameters():
                p.data = p.data / 2
        return super().forward(x)


def _two_steps(model, x):
    optimiser = torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.1)
    for _ in range(2):
        optimiser.zero_grad()
        model(x).square().sum().backward()
        optimiser.step()
    return list(model.state_dict().values())


def _assert_steps_are_sequential(model, weights, writes=True):
    wanted = _two_steps(deepcopy(model), x35)

    def work() -> None:
        P = distdl.world()[:2].reshape(2, 1)
        distributed = distdl.distribute(deepcopy(model), P, weights=weights)
        x = distdl.distribute_tensor(x35, P)
        if weights == "sharded" and writes:
            with pytest.raises(RuntimeError, match=MAY_ONLY_READ):
                distributed(x)
            return
        for ours, theirs in zip(_two_steps(distributed, x), wanted, strict=True):
            torch.testing.assert_close(ours, theirs)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("style", ["set", "assigned", "written"])
def test_weights_that_are_masked_in_each_forward(style, weights):
    torch.manual_seed(0)
    model = nn.Sequential(Masked(style), nn.Tanh(), Masked(style)).double()
    _assert_steps_are_sequential(model, weights)


def _set_without_counting(model):
    for p in model.parameters():
        p.data.mul_(0.5)


def _set_by_name(model):
    model.weight.data = model.weight.data / 3
    _set(model, lambda w: w / 2)


def _look_and_set(model):
    assert model.weight.data.norm() > 0
    _set(model, lambda w: w / 2)


def _write_by_name_and_as_list(model):
    model.weight.data.mul_(2)
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.25)


def _write_by_name_and_set(model):
    model.weight.data.mul_(3)
    _set(model, lambda w: w / 2)
    model.weight.data = model.weight.data + 1
    _set_without_counting(model)


def _write_in_place(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


HALVED = {
    "set": lambda model: _set(model, lambda w: w / 2), "its data": _set_without_counting,
    "by name before": _set_by_name, "looked at by name before": _look_and_set, "in place": _write_in_place,
    "by name and as a list": _write_by_name_and_as_list, "by name and set": _write_by_name_and_set,
    "applied": lambda model: model._apply(lambda w: w / 2),
    "loaded": lambda model: model.load_state_dict({name: w / 2 for name, w in model.state_dict().items()}),
}  # fmt: skip


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("change", HALVED.values(), ids=HALVED)
def test_a_forward_that_writes_shares_that_it_has_read_is_an_error(change, graph):
    class Halved(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            change(self)
            return y

    def work() -> None:
        x = split(x35)
        distributed = distdl.distribute(Halved(5, 5).double(), x.layout.partition, weights="sharded")
        with torch.set_grad_enabled(graph), pytest.raises(RuntimeError, match=f"{MAY_ONLY_READ}|been written since"):
            distributed(x)

    distdl.run_workers(work, 3)


class Product(nn.Linear):
    """A layer that reads a view of its weight, as linear maps do, or the weight itself."""

    def __init__(self, itself: bool, frozen: bool) -> None:
        super().__init__(5, 5)
        self.weight.requires_grad_(not frozen)
        self.itself = itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias if self.itself else super().forward(x)


def _set(model, change):
    for p in model.parameters():
        p.data = change(p.data)


BETWEEN = {
    "halved": lambda model: _set(model, lambda w: w / 2),
    "twice": lambda model: [_set(model, lambda w: w / 2) for _ in range(2)],
    "cloned": lambda model: _set(model, torch.clone),
    "the same": lambda model: _set(model, lambda w: w), "transposed": lambda model: _set(model, lambda w: w.t()),
    "moved": lambda model: model.to("cpu"),
    "of another dtype and back": lambda model: model.float().double(),
    "vector": lambda model: nn.utils.vector_to_parameters(
        nn.utils.parameters_to_vector(model.parameters()).detach() / 2, model.parameters()
    ),
}  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("itself", [False, True])
@pytest.mark.parametrize("change", BETWEEN.values(), ids=BETWEEN)
@on_workers
def test_other_data_between_a_forward_and_its_backward_is_an_error_with_shares(change, itself, frozen):
    x = split(x35).requires_grad_()
    distributed = distdl.distribute(Product(itself, frozen).double(), x.layout.partition, weights="sharded")
    y = distributed(x).tanh()
    change(distributed)
    with pytest.raises(RuntimeError, match=r"given other data .* since the forward; call backward before"):
        y.square().sum().backward()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("itself", [False, True])
@on_workers
def test_other_memory_between_a_forward_and_its_backward_is_an_error_with_shares(itself, frozen):
    x = split(x35).requires_grad_()
    for model, given in (
        (Product(itself, frozen).double(), x35.clone().requires_grad_()),
        (distdl.distribute(Product(itself, frozen).double(), x.layout.partition, weights="sharded"), x),
    ):
        y = model(given)
        with torch.no_grad():
            model.weight.set_(model.weight.clone())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("weights", ["replicated", "sharded"])
@pytest.mark.parametrize("style", [
    "vector", "without gradients", "applied", "of another dtype", "transposed",
    "transposed by name", "between two uses", "after a use", "after a use as it is", "after a use of all of it",
    "before a checkpoint", "in a checkpoint",
])  # fmt: skip
def test_weights_that_are_set_as_a_list_in_each_forward(style, weights, monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET", 200)  # (several buckets, of which some are read later)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), Listed(style), nn.Tanh(), Listed(style)).double()
    _assert_steps_are_sequential(model, weights, writes="after a use" in style or style in WRITTEN_BY_NAME)


WRITTEN_BY_NAME = ("transposed by name", "between two uses")


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_tables_that_are_renormed_in_evaluation(weights):
    indices, table = torch.tensor([[4, 0, 5]]), 3 * noise(6, 3)

    def looked_up(model, given):
        model.load_state_dict({"weight": table})
        with torch.no_grad():
            return model(given), model.state_dict()["weight"].clone()

    y, shortened = looked_up(nn.Embedding(6, 3, max_norm=0.5, dtype=torch.float64), indices)

    def work() -> None:
        P = distdl.world()[:2].reshape(1, 2)
        model = distdl.distribute(nn.Embedding(6, 3, max_norm=0.5, dtype=torch.float64), P, weights=weights)
        for given in (indices, distdl.distribute_tensor(indices, P)):
            found, now = looked_up(model, given)
            assert_close(found, y)
            torch.testing.assert_close(now, shortened)

    distdl.run_workers(work, 3)


MANY_VIEWS = {
    "chunk": lambda x: x.chunk(2)[0], "split": lambda x: x.split(3, 1)[1], "sizes": lambda x: x.split([2, 1])[1],
    "rows": lambda x: x.unbind(0)[2], "columns": lambda x: x.unbind(1)[2], "iterated": lambda x: next(iter(x)),
    "view": lambda x: x.chunk(2)[0].view(-1, 1, 5), "part": lambda x: x.chunk(2, 1)[0][:1],
    "parts": lambda x: x.tensor_split(2)[0], "detached": lambda x: x.chunk(2)[0].detach(),
    "one": lambda x: x.chunk(1)[0], "v": lambda x: x.vsplit([2])[0],
}  # fmt: skip


def without_gradients(function, x):
    with torch.no_grad():
        return function(x * 1)


MADE = {
    "with gradients": lambda function, x: function(x * 1),
    "of a constant": lambda function, x: function(x.detach().clone()),
    "without gradients": without_gradients,
}


@pytest.mark.parametrize("value", [False, True])
@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
@pytest.mark.parametrize("function", MANY_VIEWS.values(), ids=MANY_VIEWS)
def test_views_that_one_function_makes_are_written_where_torch_writes_them(function, made, value):
    def outcome(x):
        y = made(function, x)
        try:
            y.copy_((x * 2).sum()) if value else y.mul_(2)
        except RuntimeError as error:
            return str(error).split(".")[1]  # (behind the name of the view)
        return y

    def work():
        for grid in ((2, 1), (1, 2)):
            ours = outcome(split(x35.clone().requires_grad_(), *grid))
            assert type(ours) is type(theirs) or not isinstance(theirs, str), ours
            if isinstance(theirs, str):
                assert ours == theirs
            else:
                assert_close(ours, theirs)

    theirs = outcome(x35.clone().requires_grad_())
    distdl.run_workers(work, 3)


OUT = {
    "add": lambda x, out: torch.add(x, x, out=out), "mm": lambda x, out: torch.mm(x, x.T, out=out),
    "sum": lambda x, out: torch.sum(x, 0, out=out), "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "argmax": lambda x, out: torch.argmax(x, 1, out=out), "cat": lambda x, out: torch.cat([x, x], out=out),
    "chosen": lambda x, out: torch.masked_select(x, x > 0, out=out),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", OUT)
def test_where_results_are_written_as_in_torch(name):
    """Tensors of another dtype are refused, and so are those with elements that torch still resizes."""

    def outcome(x, out):
        try:
            OUT[name](x, out)
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


@pytest.mark.parametrize("part", [slice(1, None), (slice(None), slice(1, 3)), (slice(None), slice(2, 2)), 0])
@on_workers
def test_parts_of_leaves_are_written_without_gradients(part):
    """Of a view that was made without gradients, and written, torch refuses to say what it follows from."""
    found = []
    for place in (split, torch.clone):
        x = place(x35).requires_grad_()
        with torch.no_grad():
            x[part] -= 1.5
            y = x[part]
            y.mul_(2)
            x[part] = y + y.sum()
        with torch.inference_mode():
            x[part] += 1
        found.append(x.detach())
        (x * x).sum().backward()
        assert_close(x.grad, 2 * x.detach())
    assert_close(*found)


NUMBERS_WRITTEN = {
    "fill_": lambda x, plain: x.fill_(plain), "fill_ itself": lambda x, plain: x.fill_(x),
    "masked_fill_": lambda x, plain: x.masked_fill_(torch.tensor(True), plain),
    "detach_": lambda x, plain: x.detach_(), "detach_ of a sum": lambda x, plain: (x * 1).sum().detach_(),
}  # fmt: skip


@pytest.mark.parametrize("write", NUMBERS_WRITTEN.values(), ids=NUMBERS_WRITTEN)
@on_workers
def test_tensors_without_dims_are_written_on_every_worker(write):
    """One worker has such a tensor; on the others its block has a dim."""
    for x in (split(x35).sum(), distdl.distribute_tensor(torch.tensor(2.0), distdl.world()[1:2], axes=())):
        plain = x.full_tensor()
        ours, theirs = (write(one, torch.tensor(3)) for one in (x, plain))
        assert_close(ours, theirs)


RESULTS = {
    "rot90": torch.rot90, "sum": torch.sum,
    "cat": lambda x: torch.cat([x, x]),
    "index_select": lambda x: x.index_select(1, torch.tensor([4, 0])), "roll": lambda x: x.roll(1, 1),
    "matmul": lambda x: x @ x.T, "cumsum": lambda x: x.cumsum(1), "sorted": lambda x: x.sort(1)[0],
    "max": lambda x: x.max(0)[0], "aminmax": lambda x: x.aminmax(dim=1).min, "median": lambda x: x.median(0).values,
}  # fmt: skip


@pytest.mark.parametrize("function", RESULTS.values(), ids=RESULTS)
@on_workers
def test_results_that_are_no_views_in_torch_are_written_with_gradients(function):
    """They were made without; on some workers they are views of what has come from others."""
    found = []
    for place in (split, torch.clone):
        x = place(x35).requires_grad_()
        with torch.no_grad():
            y = function(x)
        y *= (x * x).sum()
        (dx,) = torch.autograd.grad(y.sum(), x)
        found.append((y, dx))
        assert not function(x).detach_().requires_grad
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


WRITTEN_APART = {
    "index_reduce_": lambda x, y: x.index_reduce_(0, torch.tensor([0, 1, 1]), y, "prod"),
    "scatter_add_ of a number": lambda x, y: x[0, 0].clone().scatter_add_(0, torch.tensor(0), y[2, 4]),
    "index_add_ of a number": lambda x, y: x[2, 0].clone().index_add_(0, torch.tensor([0]), y[0, 4].clone()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*has no op", "ignore:index_reduce")
@pytest.mark.parametrize("write", WRITTEN_APART.values(), ids=WRITTEN_APART)
def test_a_fallback_writes_what_has_a_gradient_into_what_has_none(write):
    def outcome(x, y):
        y.requires_grad_()
        written = write(x, y * 1)
        return written, *torch.autograd.grad((written * written).sum(), y)

    def work():
        for grid in ((2, 1), (1, 2)):
            for ours, one in zip(outcome(split(x35, *grid), split(x35 + 1, *grid)), theirs, strict=True):
                assert_close(ours, one)

    theirs = outcome(x35.clone(), x35 + 1)
    distdl.run_workers(work, 3)


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


@on_workers
def test_the_sum_of_a_number_is_another_tensor():
    x = distdl.distribute_tensor(torch.tensor(2.0), distdl.world()[1:2], axes=()).requires_grad_()
    for y in (x.sum(), x.sum(0), torch.sum(x, dim=0, keepdim=True)):
        assert not y.is_leaf and y.dtype is x.dtype
        y.mul_(3)
        (dx,) = torch.autograd.grad(y, x)
        assert dx.item() == 3 and x.item() == 2
    assert (x > 1).sum().dtype is torch.int64 and x.sum(dtype=torch.float64).dtype is torch.float64


LEAVES = {
    "of a view that a worker has": lambda x, P: GlobalTensor.from_local(
        distdl.distribute_tensor(x, P).to_local()[...], P
    ),
    "of one cell": lambda x, P: distdl.distribute_tensor(x[0, 0].clone(), P[1:2, 0:1], axes=()),
}


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES)
@pytest.mark.parametrize("view", [lambda x: x[...], lambda x: x.view(-1), lambda x: x.view_as(x)])
def test_views_of_leaves_stay_in_their_graphs_when_they_are_written(make, view):
    """A block may be a view of memory that has no graph, at which the graph of its views would begin."""

    def gradient(x):
        x.requires_grad_()
        y = view(x)
        with torch.no_grad():
            y.mul_(2)
        (y * y).sum().backward()
        return x.grad

    def work():
        P = distdl.world().reshape(3, 1)
        found = gradient(make(x35.clone(), P))
        assert_close(found, theirs if found.dim() else theirs[0, 0])

    theirs = gradient(x35.clone())
    distdl.run_workers(work, 3)


@on_workers
def test_data_of_another_layout():
    """It is one memory, as in torch, and no more once there is other data."""
    P = distdl.world()
    other = distdl.distribute_tensor(noise(3, 5, seed=1), P.reshape(1, -1))
    for first, second in ((0, 1), (1, 0)):
        pair = split(x35), other.clone()
        pair[0].data = pair[1]
        assert_close(pair[0], noise(3, 5, seed=1))
        pair[first].add_(1)
        assert_close(pair[second], noise(3, 5, seed=1) + 1)
    x, own = split(x35), split(x35)
    x.data = other  # for a while, as evaluations with averaged weights do
    x.data = own
    x.add_(1)
    assert_close(other * 1, noise(3, 5, seed=1))
    assert_close(own, x35 + 1)
    part = split(x35)
    copy = part.view(15)
    part.data = split(x35 * 3)
    part.add_(1)
    assert_close(copy, x35.view(15))


class Halving(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.linear, self.tied = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.tied.weight = self.linear.weight

    def forward(self, x, sets):
        x = self.before(x)
        if sets:
            self.linear.weight.data = self.linear.weight.data / 2
        return self.linear(x).sigmoid() + self.tied(x)


def test_data_that_a_second_forward_sets_is_not_read_by_the_graph_of_the_first():
    """Also where the weight has been read from its state_dict before."""
    torch.manual_seed(0)
    model = Halving().double()

    def outcome(model, x):
        optimiser, found = torch.optim.SGD(model.parameters(), 0.1), []
        for _ in range(2):
            optimiser.zero_grad()
            (model(x, False) + model(x, True)).square().sum().backward()
            found += [one.grad.clone() for one in model.parameters()]
            found += [one.clone() for one in model.state_dict().values()]
            optimiser.step()
        return found

    x = noise(4, 3, 5)
    wanted = outcome(deepcopy(model), x)

    def work() -> None:
        P = distdl.world()[1:].reshape(2, 1, 1)
        distributed = distdl.distribute(deepcopy(model), P)
        for ours, theirs in zip(outcome(distributed, distdl.distribute_tensor(x, P)), wanted, strict=True):
            assert_close(ours, theirs)

    distdl.run_workers(work, 3)
