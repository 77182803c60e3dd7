"""Tensors that share cells in torch: what is written into one is in the other, or an error where that is used."""

import weakref

import pytest
import torch
from launched import assert_close, on_workers, split
from same import noise
from torch import nn

import distdl
from distdl import GlobalTensor

x46, x64 = noise(4, 6), noise(6, 4)


def _of(place):
    """Two tensors of one shape, of which the second lies on other workers where they are global."""
    x = place(x46)
    return x, (split(x64, 2, 1) if type(x) is distdl.GlobalTensor else x64.clone()).t()


SHARES = {
    "data": lambda x, y: setattr(x, "data", y),
    "data of data": lambda x, y: setattr(x, "data", y.data),
    "set_": lambda x, y: x.set_(y),
}
WRITES = {
    "one": lambda x, y: x.add_(1),
    "other": lambda x, y: y.add_(1),
    "view of one": lambda x, y: x[1:].mul_(2),
    "view of other": lambda x, y: y.t()[2:].mul_(2),
    "data of one": lambda x, y: x.data.zero_(),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@on_workers
def test_what_is_given_as_data_is_shared(share, write):
    """Also where it lies on other workers, in another order, and where what it replaces had views."""
    found = []
    for place in (lambda x: split(x, 2, 1), lambda x: split(x, 1, 2), torch.clone):
        x, y = _of(place)
        before = x[:2]
        share(x, y)
        before.zero_()
        write(x, y)
        found.append([x, y, before, x.t() * 2, torch.tensor([*x.stride(), x.storage_offset()])])
    for ours in found[:2]:
        for one, other in zip(ours, found[2], strict=True):
            assert_close(one, other)


@on_workers
def test_the_data_of_a_leaf_stays_where_its_gradient_is():
    """So what lies elsewhere is copied there, and says so when it is used later."""
    for written, stale in ((0, 1), (1, 0)):
        x, y = _of(split)
        x.requires_grad_()
        (x * x).sum().backward()
        x.data = y
        assert_close(x, x64.t())
        assert_close(x.grad, 2 * x46)
        pair = (x, y)
        with torch.no_grad():
            pair[written].add_(1)
        with pytest.raises(RuntimeError, match="has written in place"):
            pair[stale].sum()
        assert_close(pair[written], x64.t() + 1)


@on_workers
def test_a_leaf_is_not_set_to_what_has_another_shape():
    """It stays where its gradient is, and so does its shape; a tensor without a gradient has then that of the other."""
    x = split(x46, 2, 1)
    x.set_(split(x64, 2, 1))
    assert_close(x, x64)
    leaf = split(x46, 2, 1).requires_grad_()
    with torch.no_grad(), pytest.raises(TypeError, match=r"takes a tensor of its shape \(4, 6\) as its data"):
        leaf.set_(split(x64, 2, 1))
    assert_close(leaf, x46)


@pytest.mark.parametrize("leaf", [False, True])
@on_workers
def test_a_backward_needs_what_was_there_before_other_memory_was_set(leaf):
    for place in (torch.clone, lambda x: split(x, 3, 1)):
        x, w = place(x46).requires_grad_(leaf), x46.clone().requires_grad_()
        y = x * w * x
        with torch.no_grad():
            x.set_(place(x46))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.parametrize("share", SHARES.values(), ids=SHARES)
@on_workers
def test_copies_follow_the_data_that_a_tensor_has(share):
    """Those of what is shared, and no longer those of what was replaced."""
    x, y = split(x46, 1, 3), split(x46, 1, 3)
    old, new = x.view(24), y.view(24)
    share(x, y)
    x.add_(1)
    with pytest.raises(RuntimeError, match="has written in place"):
        new.sum()
    x.view(24).add_(1)
    for stale in (x, y):
        with pytest.raises(RuntimeError, match="has written in place"):
            stale.sum()
    if share is not SHARES["set_"]:
        assert_close(old, x46.view(24))
        return
    with pytest.raises(RuntimeError, match="has written in place"):  # (torch counts set_ as a write)
        old.sum()


@on_workers
def test_parts_that_were_taken_before_a_write_are_refused():
    x = split(x46, 1, 3) * 1
    first, last, moved, other = x[:2], x[2:], x.view(24), x.view(3, 8)
    moved[:12].zero_()
    for stale in (first, x, other):
        with pytest.raises(RuntimeError, match="has written in place"):
            stale.sum()
    assert_close(last, x46[2:])
    del x, first
    last.zero_()
    with pytest.raises(RuntimeError, match="has written in place"):
        moved.sum()


@on_workers
def test_parts_without_a_common_cell_are_told_apart():
    """As queries, keys and values are, of which one is reshaped, and scaled in place."""
    x = split(x64, 2, 1) * 1
    q, k, v = x.chunk(3, 1) if x.shape[1] % 3 == 0 else x.split([1, 1, 2], 1)
    moved = v.flatten()
    q.mul_(2)
    assert_close(moved, x64[:, 2:].flatten())
    x = split(x46, 1, 3) * 1
    q, k = x.chunk(2)
    k = k.view(12)
    q.mul_(2)
    assert_close(k, x46[2:].reshape(12))
    k.mul_(3)
    assert_close(q, 2 * x46[:2])
    with pytest.raises(RuntimeError, match="has written in place"):
        x.sum()


@on_workers
def test_what_is_written_into_a_block_is_noticed_when_its_tensor_has_gone():
    def both():
        x = split(x46, 1, 3) * 1
        return x, x[1:], x.view(24)

    for place, rest in ((0, 2), (1, 2), (2, 1)):
        found = [*both()]
        left = found[rest]
        found[place].to_local().zero_()
        del found
        if left.layout.active:  # (of the others, no block was written)
            with pytest.raises(RuntimeError, match="has written in place"):
                left.to_local()


@on_workers
def test_copies_of_expanded_tensors_are_not_written():
    """Elements that lie in one place in torch are on several workers."""

    def copied():
        return split(x46[:1], 1, 2).expand(3, 6).view(3, 2, 3, 1).view(3, 3, 2)

    for expanded in (lambda: split(x46[:1], 1, 2).expand_as(split(x46[:3].contiguous(), 3, 1)), copied):
        for write in (
            lambda y: y[0].add_(1),
            lambda y: y[1:].fill_(2),
            lambda y: y.__setitem__(0, 7.0),
            torch.Tensor.zero_,
            lambda y: y.masked_fill_(torch.tensor([True, False, False]).view(3, *[1] * (y.dim() - 1)), 1.0),
        ):
            y = expanded()
            with pytest.raises(RuntimeError, match=r"one place in torch|single memory location"):
                write(y)


WINDOWED = {
    "cumsum_": lambda y: y.cumsum_(0),
    "index_add_": lambda y: y.index_add_(0, torch.tensor([0]), torch.ones_like(y[:1])),
    "index_copy_": lambda y: y.index_copy_(0, torch.tensor([1]), y[:1] * 2),
    "index_put_": lambda y: y.index_put_((torch.tensor([0]),), y[1] * 2),
    "at indices": lambda y: y.__setitem__(torch.tensor([0]), 3.0),
    "at a mask": lambda y: y.__setitem__(torch.ones(3, 3, dtype=torch.bool), 3.0),
    "tril_": lambda y: y.tril_(),
    "masked_scatter_": lambda y: y.masked_scatter_(torch.ones(3, 3, dtype=torch.bool), y.clone()),
}


@pytest.mark.parametrize("write", WINDOWED.values(), ids=WINDOWED)
@on_workers
def test_windows_that_overlap_are_written_element_by_element_only(write):
    whole = noise(5, 2)
    for grid in ((1, 2), (2, 1)):
        x = split(whole, *grid) * 1
        y = x.unfold(0, 3, 1)[:, 1]
        with pytest.raises(RuntimeError, match=r"windows that overlap|has written in place"):
            write(y)
            x.sum()
        assert grid == (2, 1) or torch.equal(x.full_tensor(), whole)
    x, y = split(whole, 1, 2) * 1, whole.clone()
    for one in (x, y):
        one.unfold(0, 3, 1)[1].mul_(2)
        one.unfold(0, 3, 1)[2, 0] = 5.0
        one.unfold(0, 2, 2).add_(1)
    assert_close(x, y)


@on_workers
def test_broadcast_tensors_are_views():
    found = []
    for place in (split, torch.clone):
        x, row = place(x46), place(x46[:1]) if place is torch.clone else split(x46[:1], 1, 2)
        wide, low = torch.broadcast_tensors(x, row)
        wide[1:] = 3.0
        low[0, 1:3] = 7.0
        assert low.stride() == (0, 1)
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            low.add_(1)
        found.append([x, row, wide, low])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("equation", ["ab->ba", "ab", "aa->a", "...a->a...", "a...->a..."])
@on_workers
def test_an_einsum_that_sums_nothing_is_a_view(equation):
    found = []
    for place in (split, torch.clone):
        x = place(noise(4, 4)).requires_grad_()
        y = x * 1
        view = torch.einsum(equation, y)
        view.mul_(3)
        view[0] = 5.0
        y.square().sum().backward()
        found.append([y, view, x.grad])
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


class _Clamped(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("state", None)

    def forward(self, x):
        h = self.linear(x)
        self.state = h.detach()
        self.state.clamp_(-0.1, 0.1)
        return h + self.state


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_a_buffer_was_set_to_is_refused_once_the_buffer_was_written(mode):
    def work():
        P = distdl.world()[:2].reshape(2, 1)
        model = distdl.distribute(_Clamped(), P)
        with mode(), pytest.raises(RuntimeError, match="a buffer that was set to this tensor"):
            model(distdl.distribute_tensor(noise(6, 4), P))

    distdl.run_workers(work, 3)


x35 = noise(3, 5)


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
