"""Tensors as their memory is read with other sizes and strides."""

import copy

import pytest
import torch
import torch.nn.functional as F
from launched import assert_close, on_workers, split
from same import Global, assert_raises_the_same, assert_same, noise

import distdl

x4, x3, x2 = noise(3, 2, 4, 6), noise(3, 8, 5), noise(5, 6)


def chunks(x):
    """Windows of 2w of a sequence, each w behind the one before it, as sparse attention takes them."""
    size, stride = list(x.size()), list(x.stride())
    size[1], stride[1] = 2 * size[1] - 1, stride[1] // 2
    return x.as_strided(size=size, stride=stride)


def padded_chunks(x):
    (b, n, d), stride = x.shape, x.stride()
    return x.as_strided((b, n // 2 - 1, 4, d), (stride[0], 2 * stride[1], stride[1], stride[2]))


STRIDED = {
    "chunks": (chunks, x4),
    "padded chunks": (padded_chunks, x3),
    "frames of a signal": (lambda x: torch.as_strided(x, (6, 5), (4, 1)), noise(25)),
    "frames of signals": (lambda x: x.as_strided((3, 4, 10), (40, 10, 1), 0), x3),
    "another order": (lambda x: torch.as_strided(x, (6, 5), (1, 6)), x2),
    "a part": (lambda x: x.as_strided((2, 1, 2), (12, 7, 2), 7), x3),
    "single cells": (lambda x: torch.as_strided(x, (1, 4), (1, 6), storage_offset=8), x2),
    "one cell": (lambda x: torch.as_strided(x, (), (), 11), x2),
    "one cell in two dims": (lambda x: x.as_strided((1, 1), (7, 3)), x3),
    "a diagonal": (lambda x: x[:, :5].clone().as_strided((4,), (6,), 1), x2),
    "windows of windows": (lambda x: x.as_strided((3, 2, 4, 2, 3), (40, 20, 5, 2, 1)), x3),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strides(name):
    function, x = STRIDED[name]
    falls_back = name == "a diagonal"
    assert_same(function, Global(x), twice=True, falls_back=falls_back)


@on_workers
def test_what_is_written_there_reaches_the_tensor_or_is_not_lost_in_silence():
    x, plain = split(x3) * 1, x3.clone()
    x.as_strided((3, 4, 10), (40, 10, 1)).mul_(2)
    plain.as_strided((3, 4, 10), (40, 10, 1)).mul_(2)
    assert_close(x, plain)


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize(
    "function",
    [
        lambda x, *offset: x.as_strided_((2, 2), (2, 1), *offset),
        lambda x, *offset: torch.as_strided_copy(x, (2, 2), (2, 1), *offset),
        lambda x, *offset: torch.as_strided_scatter(x, torch.ones(2, 2).double(), (2, 2), (2, 1), *offset),
    ],
)  # fmt: skip
@on_workers
def test_what_falls_back_reads_strides_in_its_own_cells_or_is_refused(function):
    row = (split(x2) * 1)[1]
    with pytest.raises(RuntimeError, match=r"shape .6,., strides .1,. and offset 6 .* may meet gaps, cells before"):
        function(row, 0)
    with pytest.raises(RuntimeError, match=r"strides .6,. and offset 0 .* may meet gaps"):
        function((split(x2) * 1)[:, 0])
    assert_close(function(row), function(x2[1]))


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("workers", [1, 2])
def test_strides_of_a_part_of_a_block_are_those_of_its_cells(workers):
    """Also where it has not moved to the worker that reads them: in the memory of a block lie other cells before it."""

    def work():
        x = split(x2, 1, 1)
        assert_close(torch.as_strided(x[1:], (2, 3), (0, 1)), torch.as_strided(x2[1:], (2, 3), (0, 1)))
        assert_close(torch.as_strided(x[2], (2, 2), (3, 1), 13), torch.as_strided(x2[2], (2, 2), (3, 1), 13))
        with pytest.raises(RuntimeError, match="out of bounds"):
            torch.as_strided(x[1, 2], (3,), (1,))
        x = split(x2.mT, 1, 1)  # (which lies as any global tensor that enters)
        assert_close(torch.as_strided(x, (3, 2), (1, 7)), torch.as_strided(x2.mT.contiguous(), (3, 2), (1, 7)))

    distdl.run_workers(work, workers)


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.as_strided((5, 7), (6, 1)), lambda x: x.as_strided((5, 6), (6,)),
        lambda x: x.as_strided((2,), (-1,)), lambda x: x.as_strided((5, 6), (6, 1), 1),
        lambda x: x[:0].clone().as_strided((2,), (1,)),
    ],
)  # fmt: skip
def test_strides_that_torch_refuses(function):
    assert_raises_the_same(function, x2)


MAYBE_COPIES = {
    "slice, flatten": lambda x: x[:, :2].flatten(0, 1), "slice, reshape": lambda x: x[:, :2].reshape(-1, x.shape[2]),
    "transpose, flatten": lambda x: x.transpose(0, 1).flatten(0, 1), "T, ravel": lambda x: x.mT.ravel(),
    "transpose, reshape": lambda x: x.transpose(1, 2).reshape(x.shape[0], -1), "slices": lambda x: x[:, ::2].flatten(1),
    "permute, contiguous": lambda x: x.permute(1, 0, 2).contiguous(), "row": lambda x: x[:, :1].contiguous(),
    "first row, reshape": lambda x: x[:, 0].reshape(-1), "piece": lambda x: x.chunk(3, 1)[0].reshape(-1, x.shape[2]),
    "expand, reshape": lambda x: x[:, :1].expand(-1, 3, -1).reshape(-1, x.shape[2]), "as it is": lambda x: x.ravel(),
    "twice": lambda x: x.detach().transpose(0, 1).unsqueeze(0).flatten(1, 2), "last": lambda x: x[-1:].flatten(1),
    "diagonal": lambda x: x.diagonal(0, 1, 2).reshape(-1),
    "bits": lambda x: x.transpose(0, 1).view(torch.int64).view(torch.float64).reshape(-1),
    "part, copied": lambda x: copy.copy(x[:, :2]).flatten(1), "copied": lambda x: copy.copy(x).flatten(1),
    "parts of numbers": lambda x: torch.view_as_real(torch.view_as_complex(x[..., :2])[:, :1]).flatten(1),
    "windows": lambda x: x.unfold(2, 2, 1).flatten(2),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 3, 5), (4, 3, 5), (2, 3, 3), (2, 3, 1)])
def test_what_torch_copies_may_be_written(shape):
    """A worker's block may be contiguous where the whole is not."""
    whole = noise(*shape)

    def written(x, function):
        y = function(x)
        y += 10
        return x.full_tensor() if isinstance(x, distdl.GlobalTensor) else x

    def work():
        root = distdl.world()
        for grid in ((2, 1, 1), (1, 3, 1), (1, 1, 2)):
            P = root[: max(grid)].reshape(grid)
            for name, function in MAYBE_COPIES.items():
                try:
                    expected = written(whole.clone(), function)
                except RuntimeError:
                    continue  # (torch has no such windows)
                x = distdl.distribute_tensor(whole, P)
                try:
                    found = written(x, function)
                except RuntimeError as error:
                    assert "its cells had moved" in str(error), (name, grid)
                    assert not torch.equal(expected, whole), (name, grid)  # (a view in torch)
                    continue
                assert torch.equal(found, expected), (name, grid)

    distdl.run_workers(work, 4)


STEPS = {
    "linear": lambda u, w: F.linear(u, w, w[0]), "linear without a bias": F.linear, "matmul": lambda u, w: u @ w,
    "einsum": lambda u, w: torch.einsum("bij,kj->bik", u, w), "tensordot": lambda u, w: torch.tensordot(u, w, 1),
    "bilinear": lambda u, w: F.bilinear(u, u, w.expand(6, 6, 6)),
    "products": lambda u, w: (u @ w) @ (u @ w).mT @ (u @ w),
    "linear of rows": lambda u, w: F.linear(u.transpose(0, 1), w).transpose(0, 1), "sine": lambda u, w: u.sin(),
    "group norm": lambda u, w: F.group_norm(u, 2, w[0, :4]), "instance norm": lambda u, w: F.instance_norm(u * 1) @ w,
    "instance norm of it": lambda u, w: F.instance_norm(u, weight=w[0, :4]),
    "layer norm": lambda u, w: F.rms_norm(u, (6,), w[1]),
    "attention": lambda u, w: F.multi_head_attention_forward(
        u, u, u, 6, 2, w.repeat(3, 1), None, None, None, False, 0.0, w, None
    )[0],
}  # fmt: skip


def assert_right_or_refused(function, *arguments, grids):
    """Over each grid, a function gives torch's numbers, or all workers have one error; see ``assert_same``."""
    for grid in grids:
        try:
            assert_same(function, *arguments, grids=[grid])
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), grid


def rollout(step):
    def run(x, weight):
        u = x.new_zeros(x.shape[0], 3, *x.shape[1:])
        u[:, 0] = x
        for t in range(2):
            u[:, t + 1] = step(u[:, t], weight)
        return u

    return run


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("name", STEPS)
def test_steps_that_are_written_beside_each_other(name, samples):
    """Rollouts in one buffer: torch computes some steps with a copy. Where a block is used itself, that is an error."""
    function, weight = rollout(STEPS[name]), noise(6, 6, seed=3) / 3
    try:
        function(noise(samples, 4, 6).requires_grad_(), weight.clone().requires_grad_()).sum().backward()
    except RuntimeError as error:  # (torch computes with the step itself; a group norm from 2.14 on)
        assert name in ("sine", "layer norm", "group norm") and "modified by an inplace operation" in str(error)
        return
    grids = [(2, 1, 1), (1, 2, 1), (1, 1, 3), (2, 2, 1)]
    assert_right_or_refused(function, Global(noise(samples, 4, 6)), weight, grids=grids)


def test_a_step_that_one_worker_alone_cannot_differentiate_is_an_error_of_all():
    def work():
        x, weight = noise(3, 4, 6), noise(6, 6).requires_grad_()
        rollout(F.linear)(split(x, 2, 1, 1), weight).sum().backward()

    with pytest.raises(distdl.CommunicationError, match="modified by an inplace operation"):
        distdl.run_workers(work, 2)


def test_steps_are_stacked():
    """What the documentation says to write instead."""

    def function(x, weight):
        steps = [x]
        for _ in range(2):
            steps.append(F.linear(steps[-1], weight))
        return torch.stack(steps, 1)

    assert_same(function, Global(noise(3, 4, 6)), noise(6, 6, seed=3) / 3, grids=[(2, 1, 1), (3, 1, 1), (2, 2, 1)])


def _equation(equation):
    return lambda x, w: torch.einsum(equation, x, w)


COPYING = {
    **{equation: (_equation(equation), (4, 5)) for equation in ("bij,ik->bkj", "bij,ik->jbk", "bij,ik->jk")},
    "bij,bk->jik": (_equation("bij,bk->jik"), (3, 5)),
    "bij,b->": (_equation("bij,b->"), (3,)),
    "a matrix times matrices": (lambda x, w: w.T @ x, (4, 5)),
    "one matrix times matrices": (lambda x, w: w.T[None] @ x, (4, 5)),
    "a vector times matrices": (lambda x, w: w @ x, (4,)),
}


@pytest.mark.parametrize("function", COPYING)
def test_what_a_product_has_copied_may_be_written(function):
    """Or that is an error: of one sample, nothing has to be copied to put dims into another order."""
    product, shape = COPYING[function]

    def written(x, weight):
        y = x * 1
        z = product(y, weight)
        y *= 2
        return z, y

    grids = [(3, 1, 1), (1, 2, 2), (2, 2, 1)]
    assert_right_or_refused(written, Global(noise(3, 4, 4)), noise(*shape, seed=3), grids=grids)


def test_a_product_of_what_lies_in_another_order():
    def written(x, w):
        y = torch.einsum("bij,jk->bki", x, w)
        z = F.linear(y, w)
        y += 1
        return z, y

    grids = [(3, 1, 1), (1, 2, 2), (2, 2, 1)]
    assert_right_or_refused(written, Global(noise(3, 5, 4)), noise(4, 5), grids=grids)


def test_functions_of_elements_keep_the_order_of_memory():
    whole = noise(2, 3, 5)

    def steps(x):
        y = x.transpose(0, 1).exp()
        z = (y + y).mul(2.0).flatten(1)
        z.zero_()
        t = y.clone().transpose_(0, 1).reshape(-1)
        t += 1
        return y, z, t

    def work():
        for grid in ((2, 1, 1), (1, 3, 1)):
            x = distdl.distribute_tensor(whole, distdl.world()[: max(grid)].reshape(grid))
            for ours, theirs in zip(steps(x), steps(whole), strict=True):
                assert torch.equal(ours.full_tensor(), theirs)

    distdl.run_workers(work, 4)


IN_ORDER = {
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "contiguous clone": lambda x: x.transpose(0, 1).clone(memory_format=torch.contiguous_format),
    "contiguous zeros": lambda x: torch.zeros_like(x.mT, memory_format=torch.contiguous_format),
    "same order": lambda x: x.transpose(0, 1).clone(memory_format=torch.preserve_format),
    "channels last": lambda x: x[None].contiguous(memory_format=torch.channels_last),
    "again": lambda x: x[None].to(memory_format=torch.channels_last).contiguous(memory_format=torch.channels_last),
    "and back": lambda x: x[None].contiguous(memory_format=torch.channels_last).contiguous(),
    "dtype, too": lambda x: x[None].float().double(memory_format=torch.channels_last),
    "log sigmoid": lambda x: torch.nn.functional.logsigmoid(x.transpose(0, 1)),
    "float": lambda x: x.transpose(0, 1).to(torch.float32),
    "deep copy": lambda x: copy.deepcopy(x.transpose(0, 1)),
}


@pytest.mark.parametrize("write", [lambda y: y.reshape(-1), lambda y: y.transpose(0, 1).flatten(1), lambda y: y])
@pytest.mark.parametrize("function", IN_ORDER.values(), ids=IN_ORDER)
def test_orders_of_memory_are_the_same_on_every_worker(function, write):
    """A block, even that of an idle worker, may lie in the wanted order where the whole does not."""
    whole = noise(2, 3, 4)

    def outcome(x):
        y = function(x)
        z = write(y)
        z += 10
        return x, y, z

    def work():
        for grid in ((2, 1, 1), (1, 3, 1), (1, 1, 2)):
            found = outcome(distdl.distribute_tensor(whole, distdl.world()[: max(grid)].reshape(grid)))
            for ours, theirs, before in zip(found, expected, (whole, function(whole), None), strict=True):
                try:
                    assert torch.allclose(ours.full_tensor(), theirs), grid
                except RuntimeError as error:
                    assert "its cells had moved" in str(error), grid
                    assert not torch.equal(theirs, before), grid  # (a view in torch)

    expected = outcome(whole.clone())
    distdl.run_workers(work, 4)


@pytest.mark.filterwarnings("ignore:.*has no op")
def test_what_is_resized_in_the_order_of_its_memory():
    def work():
        whole = noise(2, 3, 4)
        x = distdl.distribute_tensor(whole, distdl.world()[:2].reshape(2, 1, 1))
        with pytest.raises(RuntimeError, match=r"resize_ .* call .contiguous\(\) first"):
            x.transpose(0, 1).clone().resize_(3, 4)
        y = x.transpose(0, 1).contiguous().resize_(3, 4)
        assert torch.equal(y.T.reshape(-1).full_tensor(), whole.transpose(0, 1).contiguous().resize_(3, 4).T.ravel())

    distdl.run_workers(work, 3)


def in_other_order(x):
    return x.transpose(0, 2).contiguous().transpose(0, 2)


ORDERED = {
    "transpose": lambda x: x.transpose(0, 1), "slices": lambda x: x[:, 1:, ::2], "piece": lambda x: x.chunk(2, 2)[1],
    "windows": lambda x: x.unfold(2, 2, 1), "diagonal": lambda x: x.diagonal(1, 0, 2), "last": lambda x: x.unbind(1)[2],
    "in place": lambda x: x.clone().transpose_(0, 1), "flat": lambda x: x.mT.reshape(-1), "1 -": lambda x: 1 - x.mT,
    "image": lambda x: x[None].to(memory_format=torch.channels_last), "copied": lambda x: copy.copy(x[1:, 1:]),
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1), "view": lambda x: x[:, 1:].view(4, 12),
    "detached": lambda x: x.mT.detach(), "order of both": lambda x: x[:, :1] + in_other_order(x),
    "order of the second": lambda x: x[:1, :1, :1] + x.mT,
    "plain": lambda x: x[:, :1, :1] * torch.ones(6, 3, 4).permute(2, 1, 0), "floor": lambda x: x.mT // x[:, :1].mT,
    "where": lambda x: torch.where(x.mT > 0, x.mT, 0.0), "clamp": lambda x: x[:, :, :1].clamp(min=in_other_order(x)),
    "masked fill": lambda x: x.mT.masked_fill(x.mT > 0, 1.0),
    "dropout": lambda x: F.dropout(x.mT) * 0, "lerp": lambda x: torch.lerp(x.mT, x.reshape(4, 6, 3), 0.5),
    "addcmul": lambda x: torch.addcmul(x[:, :, :1], in_other_order(x), x),
    "chosen": lambda x: x.permute(2, 0, 1)[x.permute(2, 0, 1)[:, 0, 0] < 9],
    "shuffled": lambda x: F.pixel_shuffle(x.mT[None, :], 1), "real": lambda x: torch.complex(x, x).real,
    "imaginary": lambda x: torch.view_as_complex(x.mT.contiguous().reshape(4, 9, 2)).imag,
    "complex": lambda x: torch.view_as_complex(x[..., 2:4]), "conj": lambda x: torch.complex(x, x).mT.conj(),
    "its memory": lambda x: x.mT.as_strided((4, 2, 6), (18, 6, 1), 6),
    "a part": lambda x: x[1:].as_strided((3,), (1,), 20), "on one worker": lambda x: x.mT.as_strided((5, 2), (1, 5)),
    "no view": lambda x: x.mT.view(-1),
    "no view as": lambda x: x[:, :2].view_as(x[:, :2].reshape(8, 6)),
    "not of another size": lambda x: x.mT.view(torch.float32),
    "no whole numbers": lambda x: torch.view_as_complex(x[..., 1:3]),
    "no numbers": lambda x: torch.view_as_complex(x.mT[..., :2]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*has no op")
@pytest.mark.parametrize("function", ORDERED.values(), ids=ORDERED)
def test_strides_are_those_of_the_whole(function):
    """On every worker, whatever those of its block are."""
    whole = noise(4, 3, 6)

    def told(x):
        try:
            y = function(x)
        except RuntimeError as error:
            return str(error)
        image = y.dim() == 4 and y.is_contiguous(memory_format=torch.channels_last)
        full = y.full_tensor() if isinstance(y, distdl.GlobalTensor) else y
        return (
            y.stride(),
            y.stride(-1),
            y.storage_offset(),
            y.is_contiguous(),
            image,
            full.resolve_conj().numpy().round(9).tolist(),
        )

    def work():
        for grid in ((2, 1, 1), (1, 3, 1), (1, 1, 2)):
            x = distdl.distribute_tensor(whole, distdl.world()[: max(grid)].reshape(grid))
            assert told(x) == expected, grid

    expected = told(whole)
    distdl.run_workers(work, 4)


@on_workers
def test_results_of_other_functions_are_taken_to_be_contiguous():
    x = split(x3)
    for y in (x.mT.flip(0), x.mT.sort(-1)[0], x.mT[torch.tensor([0, 2])], torch.cat([x.mT, x.mT])):
        assert y.is_contiguous() and y.stride() == torch.empty(y.shape).stride()
    assert not x.mT.is_contiguous() and not (x.mT + 1).is_contiguous()


@on_workers
def test_strides_are_not_read_across_gaps():
    x = split(x2)
    for read in (
        lambda: x[1:].as_strided((3,), (1,), 0),
        lambda: x[:, 1:].as_strided((4, 6), (6, 1)),
        lambda: x[:, :2].as_strided((12,), (1,)),
        lambda: x[:, 1:].as_strided((2, 2), (12, 2)),
    ):
        with pytest.raises(RuntimeError, match="cannot read the memory of a global tensor"):
            read()


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.add_(1),
        lambda y: y.__setitem__(..., 7.0),
        lambda y: y.exp_(),
    ],
)
def test_several_elements_in_one_place_are_written_nowhere(write):
    """Also not on the workers whose blocks have no two of them, or no cell."""

    def work():
        x = split(x2[:1], 1, 2)
        for y in (x.expand(2, 6), split(x2[:, :1].contiguous(), 1, 2).expand(5, 2)):
            before = y.full_tensor()
            with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
                write(y)
            assert torch.equal(y.full_tensor(), before)
        x[:, :0].expand(2, 0).add_(1)
        y = x.expand(2, 6)
        y[0] = 1.0
        assert x.full_tensor().eq(1).all()

    distdl.run_workers(work, 3)


@on_workers
def test_what_shuffles_nothing_is_a_copy():
    x = split(noise(2, 3, 4, 5))
    for y in (
        F.pixel_shuffle(x, 1),
        F.unfold(x, 1),
        F.unfold(x, (4, 5), stride=(4, 5)),
        F.unfold(x, (2, 1), stride=(2, 1)),
    ):
        y.zero_()
        assert_close(x, noise(2, 3, 4, 5))


@on_workers
def test_torch_takes_a_layout_for_that_of_dense_memory():
    """As losses do that make ``torch.zeros(..., layout=x.layout)`` beside what a model gives."""
    x = split(x2)
    beside = torch.zeros(5, 6, dtype=x.dtype, layout=x.layout, device=x.device)
    assert type(beside) is torch.Tensor and beside.layout is torch.strided
    assert_close(x + torch.ones_like(beside, layout=x.layout), x2 + 1)
    assert_close(x.new_zeros(6, layout=x.layout) + torch.full_like(x, 2, layout=x.layout), torch.full_like(x2, 2))
    assert x.layout == torch.strided and torch.strided == x.layout and x.layout != torch.sparse_coo
    for wrong in (lambda: torch.add(beside, x.layout), lambda: torch.stack([x.layout]), lambda: x.view(5, x.layout)):
        with pytest.raises(TypeError):  # (where torch takes no layout)
            wrong()
    assert x.layout == split(x2).layout and x.layout != split(x3).layout


x35 = noise(3, 5)


@on_workers
def test_a_part_is_contiguous_on_all_workers_or_on_none():
    """Of two columns, the block of two rows is not contiguous, and the block of one row is."""
    part = split(x35)[:, 1:3]
    assert not part.is_contiguous() and part.stride() == (5, 1) and part.storage_offset() == 1
    image = split(noise(2, 3, 4, 5)).contiguous(memory_format=torch.channels_last)
    assert not image.is_contiguous() and image.is_contiguous(memory_format=torch.channels_last)


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
