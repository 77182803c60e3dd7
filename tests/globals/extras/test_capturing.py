"""What functions of scores and masks have captured: tables, weights, tensors that are split."""

import pytest
import torch
from dense_flex import attend, k, q, v
from launched import on_workers, split
from same import Global, assert_same, noise
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import distdl
from distdl.testing import Counting

GRIDS = [(2, 1, 2, 1), (1, 3, 1, 1), (1, 1, 4, 1), (1, 1, 2, 2), (1, 2, 1, 2)]


CAPTURED = {
    "bias": (noise(3, 5, 7), lambda s, w, b, h, i, j: s + w[h, i, j]),
    "slopes": (noise(3), lambda s, w, b, h, i, j: s + w.exp()[h] * (j - i)),
    "distances": (noise(9, 3), lambda s, w, b, h, i, j: s + w[(i - j).clamp(-4, 4) + 4, h]),
    "documents": (noise(2, 7), lambda s, w, b, h, i, j: torch.where(w[b, i] > w[b, j], s, -torch.inf)),
    "a number": (noise(1)[0], lambda s, w, b, h, i, j: s * w),
}


@pytest.mark.parametrize("case", CAPTURED)
@pytest.mark.parametrize("split", [False, True])
def test_what_functions_have_captured(case, split):
    """A parameter, the same on every worker, or a tensor that is split: it has a gradient in any case."""
    captured, mod = CAPTURED[case]
    if case == "a number" and split:
        captured = noise(4)
        assert_same(
            lambda q, k, v, w: (lambda number: attend(q, k, v, lambda s, *_: s * number))(w.mean()),
            Global(q), Global(k), Global(v), Global(captured), grids=GRIDS,
        )  # fmt: skip
        return
    assert_same(
        lambda q, k, v, w: attend(q, k, v, lambda s, *places: mod(s, w, *places)),
        Global(q), Global(k), Global(v), Global(captured) if split else captured, grids=GRIDS,
    )  # fmt: skip


def test_tables_that_are_indexed_twice():
    """And modules that look up: of these, torch has no derivatives."""

    def function(q, k, v, w):
        if isinstance(q, distdl.GlobalTensor):
            near = torch.nn.functional.embedding
            return flex_attention(q, k, v, lambda s, b, h, i, j: s * w[b][h][i] + near(j % 2, w[0])[i])
        scores = q @ k.mT / 2 * w[..., None] + w[0][torch.arange(7) % 2].mT
        return scores.softmax(-1) @ v

    for table in (noise(2, 3, 5), Global(noise(2, 3, 5))):
        assert_same(function, Global(q), Global(k), Global(v), table, grids=GRIDS)


@on_workers
def test_what_functions_keep_of_a_global_tensor_for_another_time_is_refused():
    """Its gradient would be added up twice."""
    kept, w = [], split(noise(3)).requires_grad_()
    x = split(noise(2, 3, 7, 4), 2, 1)

    def mod(s, b, h, i, j):
        kept.append(w.exp())
        return s * kept[0][h]

    flex_attention(x, x, x, score_mod=mod)
    with pytest.raises(RuntimeError, match="gradient would be added up over the workers twice"):
        flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s * kept[0][h])


@on_workers
def test_what_functions_keep_of_a_plain_tensor_for_another_time_has_its_gradient():
    kept, w, values = [], noise(3).requires_grad_(), noise(2, 3, 7, 4)
    x = split(values, 2, 1)

    def mod(s, b, h, i, j):
        kept.append(w.exp())
        return s * kept[0][h]

    first = flex_attention(x, x, x, score_mod=mod)
    second = flex_attention(x, x, x, score_mod=lambda s, b, h, i, j: s * kept[0][h])
    (first.square().sum() + second.sin().sum()).backward()
    alone = w.detach().clone().requires_grad_()
    y = (values @ values.mT / 2 * alone.exp()[:, None, None]).softmax(-1) @ values
    (y.square().sum() + y.sin().sum()).backward()
    torch.testing.assert_close(w.grad, alone.grad)


@pytest.mark.parametrize("table", [noise(3), Global(noise(3))])
def test_functions_that_read_without_gradients_first(table):
    def function(q, k, v, w):
        def mod(s, b, h, i, j):
            with torch.no_grad():
                largest = torch.stack(list(w)).abs().max()
            return s * w[h] / largest

        return attend(q, k, v, mod)

    assert_same(function, Global(q), Global(k), Global(v), table, grids=GRIDS[:3])


def _refused(function):
    def work():
        x = distdl.distribute_tensor(q, distdl.world()[:2].reshape(1, 1, 2, 1))
        with pytest.raises(RuntimeError) as found:
            function(x)
        return str(found.value)

    texts = set(distdl.run_workers(work, 3))
    assert len(texts) == 1
    return texts.pop()


WRITES = {
    "mul_": lambda w: w.mul_(2),
    "add_": lambda w: w.select(0, 0).data.add_(1),
    "_foreach_add_": lambda w: torch._foreach_add_([w], 1),
    "add": lambda w: torch.add(w, 1, out=w),
    "constant_": lambda w: torch.nn.init.constant_(w, 2.0),
    "__set__": lambda w: setattr(w, "data", w.data + 1),
}


@pytest.mark.parametrize("name", WRITES)
def test_functions_that_write_into_what_is_split(name):
    """By any name. Each call has a copy of it."""
    text = _refused(lambda x: flex_attention(x, x, x, lambda s, *_: (WRITES[name](x), s)[1]))
    assert "write into no captured tensor" in text and f" {name} does" in text


def test_functions_that_write_into_plain_tensors():
    def count(x):
        calls = torch.zeros(())
        flex_attention(x, x, x, lambda s, *_: (torch._foreach_add_([calls], 1), s)[1])
        assert calls == 1

    def work():
        with torch.inference_mode():
            count(distdl.distribute_tensor(q, distdl.world().reshape(1, 1, 2, 1)))

    distdl.run_workers(work, 2)


def test_functions_that_know_tensors_of_another_world():
    def work():
        P = distdl.world()
        other = distdl.Partition(Counting(P.comm)).create_partition_inclusive([0, 1]).reshape(2)
        x, w = (distdl.distribute_tensor(one, grid) for one, grid in ((q, P.reshape(1, 1, 2, 1)), (noise(3), other)))
        unequal = BlockMask.from_kv_blocks(
            torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32),
            BLOCK_SIZE=8, mask_mod=lambda b, h, i, j: w[h] > 0, seq_lengths=(5, 5),
        )  # fmt: skip
        for given in ((lambda s, b, h, i, j: s + w[h], None), (None, unequal)):
            with pytest.raises(ValueError, match="needs tensors of one world; got some of worlds of 2 and of 2"):
                flex_attention(x, x, x, *given)

    distdl.run_workers(work, 2)


@pytest.mark.compiles
@pytest.mark.parametrize("number", [False, True])
def test_functions_that_know_what_is_split_for_plain_queries(number):
    def function(x):
        w = x.mean((2, 3))
        flex_attention(q, k, v, (lambda s, *_: s * w.sum()) if number else (lambda s, b, h, i, j: s + w[b, h]))

    assert "distribute the query" in _refused(function)
