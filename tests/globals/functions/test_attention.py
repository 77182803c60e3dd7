"""Attention over queries that are split in any way."""

import functools
from copy import deepcopy

import pytest
import torch
from same import Global, assert_raises_the_same, assert_same, noise
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import distdl
from distdl.transport.recording import Recording

q, k, v = noise(2, 3, 5, 4), noise(2, 3, 7, 4, seed=1), noise(2, 3, 7, 6, seed=2)
attend = F.scaled_dot_product_attention
GRIDS = [(2, 1, 2, 1), (1, 3, 1, 1), (1, 1, 4, 1), (1, 1, 2, 2), (1, 2, 1, 2)]


@pytest.mark.parametrize(
    "key, value", [(Global(k), Global(v)), (Global(k, (1, 1, 3, 1)), Global(v, (1, 2, 1, 2))), (k, v)]
)
def test_attention(key, value):
    assert_same(attend, Global(q), key, value, grids=GRIDS)


@pytest.mark.parametrize(
    "mask",
    [noise(5, 7), noise(2, 1, 5, 7) > -1, Global(noise(2, 3, 5, 7)), Global(noise(2, 1, 1, 7) > -1), noise(1, 7) > -1],
)
def test_masks(mask):
    assert_same(attend, Global(q), Global(k), Global(v), mask, grids=GRIDS)


def test_causal_masks_know_where_the_queries_are():
    assert_same(
        lambda q, k, v: attend(q, k, v, is_causal=True, scale=0.3), Global(q), Global(k), Global(v), grids=GRIDS
    )


def test_queries_that_read_no_key():
    """With dropout, too, which is computed step by step: no number is dropped here, and none is nan."""
    mask = torch.ones(5, 7, dtype=torch.bool).tril(-2)
    attending = functools.partial(attend, attn_mask=mask, dropout_p=1e-12)
    assert_same(lambda q, k, v: attending(q, k, v), Global(q), Global(k), Global(v), grids=GRIDS, tolerance=1e-9)


@pytest.mark.parametrize("made", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("lengths", [(5, 5), (5, 7)])
def test_triangles_that_torch_does_not_write_out(made, lengths):
    """On workers without cells, too."""
    x, y = noise(2, 3, lengths[0], 4), noise(2, 3, lengths[1], 4, seed=1)
    assert_same(lambda q, k: attend(q, k, k, made(*lengths)), Global(x), Global(y), grids=[*GRIDS, (4, 1, 1, 1)])
    assert_raises_the_same(lambda q: attend(q, q, q, made(5, 5), is_causal=True), noise(2, 3, 5, 4), text=True)


def test_heads_that_share_keys():
    queries = noise(2, 6, 5, 4)
    grids = [(1, 4, 1, 1), (1, 2, 2, 1), (2, 1, 1, 2)]
    for causal in (False, True):
        assert_same(
            lambda q, k, v, causal=causal: attend(q, k, v, is_causal=causal, enable_gqa=True),
            Global(queries), Global(k), Global(v), grids=grids,
        )  # fmt: skip


@pytest.mark.parametrize("heads", [(2, 4), (4, 2), (1, 2), (4, 1)])
def test_keys_and_values_of_other_heads_each(heads):
    queries, keys, values = noise(2, 4, 5, 4), noise(2, heads[0], 7, 4, seed=1), noise(2, heads[1], 7, 3, seed=2)
    assert_same(
        lambda q, k, v: attend(q, k, v, enable_gqa=True), Global(queries), Global(keys), Global(values),
        grids=[(1, 4, 1, 1), (2, 1, 2, 1)],
    )  # fmt: skip


@pytest.mark.parametrize("heads", [0, 4])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_shared_keys_and_values_of_no_heads(p, heads):
    queries, keys = noise(2, heads, 5, 4), noise(2, 0, 7, 4, seed=1)
    assert_same(
        lambda q, k: attend(q, k, k, dropout_p=p, enable_gqa=True), Global(queries), Global(keys),
        grids=[(1, 4, 1, 1), (2, 1, 2, 1)],
    )  # fmt: skip


def test_queries_that_every_worker_has():
    assert_same(lambda k, q: attend(q, k, k), Global(k), q, grids=GRIDS)
    assert_same(lambda k, q: attend(q, k, k), Global(k), noise(2, 3, 1, 4), grids=GRIDS)


def test_fewer_dims():
    assert_same(attend, Global(noise(3, 5, 4)), Global(noise(3, 7, 4)), Global(noise(3, 7, 2)))


def test_second_derivatives():
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):  # (for all threads: not one by one)
        assert_same(
            lambda q, k, v: attend(q, k, v).tanh(), Global(q), Global(k), Global(v), grids=GRIDS[:1], twice=True
        )


@pytest.mark.parametrize("weights", [False, True])
def test_multi_head_attention(weights):
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)

    def function(x, w, b):
        own = deepcopy(layer)  # (the workers are threads)
        named = {"in_proj_weight": w, "in_proj_bias": b}
        return torch.func.functional_call(own, named, (x, x, x), {"need_weights": weights})

    assert_same(function, Global(noise(2, 5, 6)), noise(18, 6), noise(18), grids=[(2, 2, 1), (1, 3, 1), (1, 1, 2)])


_PADDED = torch.arange(6) > torch.tensor([3, 5, 4])[:, None]
_BIASES = noise(6, 5, 6, seed=7)
OPTIONS = {
    "self": ({}, {}),
    "weights": ({}, {"need_weights": True, "average_attn_weights": False}),
    "padding": ({}, {"key_padding_mask": _PADDED, "attn_mask": torch.ones(5, 6).triu(4) > 0, "need_weights": True}),
    "causal": ({}, {"attn_mask": torch.ones(5, 6).triu(1) > 0, "is_causal": True}),
    "causal, with weights": ({}, {"attn_mask": torch.ones(5, 6).triu(1) > 0, "is_causal": True, "need_weights": True}),
    "padding that is split": ({}, {"key_padding_mask": Global(_PADDED, (3, 1))}),
    "a mask for each head": ({}, {"attn_mask": _BIASES}),
    "other keys": ({"kdim": 4, "vdim": 3}, {"need_weights": True}),
    "more keys": ({"add_bias_kv": True, "add_zero_attn": True}, {"need_weights": True}),
    "no bias": ({"bias": False, "batch_first": False}, {}),
    "dropout": ({"dropout": 0.5}, {}),
}


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("workers", [2, 3])
def test_multi_head_attention_of_samples(case, workers):
    """Where samples alone are split, a forward sends nothing, and idle workers go the same way."""
    layers, options = OPTIONS[case]
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(6, 2, **{"batch_first": True, **layers}, dtype=torch.float64)
    layer.eval() if "dropout" in layers else layer.train()
    first = layer.batch_first

    def of(model, given, enter):
        x = enter(given[0]).requires_grad_()
        others = [x, x] if case == "self" else [enter(one).requires_grad_() for one in given[1:]]
        y, weights = model(x, *others, **{"need_weights": False, **{name: enter(one) for name, one in options.items()}})
        found = [y] if weights is None else [y, weights]
        loss = sum((one * one.detach().cos()).sum() for one in found)
        inputs = list({id(one): one for one in (x, *others)}.values())
        gradients = torch.autograd.grad(loss, [*inputs, *model.parameters()], create_graph=len(found) > 1)
        if weights is not None:  # (else torch's kernel has no second derivative)
            sum(one.square().sum() for one in gradients).backward()
        return [*found, *gradients, *(one.grad for one in (*inputs, *model.parameters()))]

    shapes = [(3, 5, 6), (3, 6, layers.get("kdim", 6)), (3, 6, layers.get("vdim", 6))]
    inputs = [
        noise(*shape, seed=at) if first else noise(*shape, seed=at).transpose(0, 1) for at, shape in enumerate(shapes)
    ]
    plain = of(
        deepcopy(layer),
        inputs,
        lambda one: one.tensor if type(one) is Global else one.clone() if type(one) is torch.Tensor else one,
    )

    def work():
        P = distdl.world()[:workers].reshape((workers, 1, 1) if first else (1, workers, 1))

        def enter(one):
            if type(one) is Global:
                return distdl.distribute_tensor(one.tensor, distdl.world()[:3].reshape(3, 1))
            if type(one) is not torch.Tensor or one.dtype is torch.bool or one is _BIASES:
                return one
            return distdl.distribute_tensor(one, P)

        model = distdl.distribute(deepcopy(layer), P, fallback="error")
        for ours, theirs in zip(of(model, inputs, enter), plain, strict=True):
            whole = ours.full_tensor() if type(ours) is distdl.GlobalTensor else ours
            assert (whole is None) == (theirs is None)
            if whole is not None:
                torch.testing.assert_close(whole, theirs, rtol=1e-10, atol=1e-10)

    distdl.run_workers(work, 4)


@pytest.mark.parametrize("samples", [2, 3, 5])
def test_what_multi_head_attention_has_copied_may_be_written(samples):
    """Or that is an error: of one sample, torch saves the block itself."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64, bias=False)  # (which is added)

    def function(x, z):
        own, x = deepcopy(layer), x * 1  # (the workers are threads)
        y, weights = own(x, z, z)
        x *= 2
        return y, weights, x

    for grid in [(3, 1, 1), (2, 1, 1)]:  # (of both: what lies otherwise is moved, and so a copy)
        given = Global(noise(samples, 4, 6), grid), Global(noise(samples, 3, 6, seed=1), grid)
        try:
            assert_same(function, *given, grids=[grid])
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error), grid


def test_samples_of_attention_stay_where_they_are():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True, dtype=torch.float64)

    def work():
        P = distdl.world().reshape(2, 1, 1)
        x = distdl.distribute_tensor(noise(4, 5, 6), P)
        model, sent = distdl.distribute(deepcopy(layer), P), []
        P.comm.recorder = Recording(P.comm, lambda _: sent.append(1), lambda _: None)
        model(x)
        P.comm.recorder = None
        return len(sent)

    assert distdl.run_workers(work, 2) == [0, 0]


def test_multi_head_attention_of_plain_queries_beside_a_mask_that_is_split():
    """Torch tells nobody of the mask: it counts queries, keys, values and weights as tensors only."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64)

    mask, x = noise(2, 5, 5), noise(5, 6)
    expected = layer(x, x, x, attn_mask=mask)

    def work():
        P = distdl.world()[:3].reshape(1, 3, 1)
        model = distdl.distribute(deepcopy(layer), P, fallback="error")
        for mine, theirs in zip(model(x, x, x, attn_mask=distdl.distribute_tensor(mask, P)), expected, strict=True):
            assert torch.allclose(mine.full_tensor(), theirs, rtol=1e-12)

    distdl.run_workers(work, 4)


def test_dropout_is_the_same_over_any_partition():
    found = []

    def draw(grid):
        P = distdl.world().create_partition_inclusive(range(int(torch.Size(grid).numel())))
        x = distdl.distribute_tensor(q, P.create_cartesian_topology_partition(grid))
        y = attend(x, k, v, dropout_p=0.4, is_causal=True).full_tensor()
        if P.comm.rank == 0:
            found.append(y)

    torch.manual_seed(3)
    for grid in [(1, 1, 1, 1), *GRIDS]:
        distdl.run_workers(lambda grid=grid: draw(grid), 5)
    assert not torch.allclose(found[0], attend(q, k, v, is_causal=True))
    for one in found[1:]:
        torch.testing.assert_close(one, found[0], rtol=1e-12, atol=1e-12)


def test_what_moves_is_under_way_at_the_same_time():
    """Keys and values, and the pieces of a tensor that is rolled: one wait for all of them, forward and backward."""

    def work():
        P = distdl.world()[:2].reshape(1, 1, 2, 1)
        x = distdl.distribute_tensor(noise(2, 3, 6, 4), P).requires_grad_()
        found = []
        for function in (lambda x: attend(x, x * 2, x * 3), lambda x: x.roll(2, 2), lambda x: torch.cat([x, x], 2)):
            events = []
            P.comm.recorder = Recording(P.comm, lambda _, to=events: to.append(-1), lambda _, to=events: to.append(1))
            y = function(x)
            torch.autograd.grad(y, x, torch.ones_like(y))
            P.comm.recorder = None
            found.append(events)
        return found

    for worker in distdl.run_workers(work, 2):
        for events in worker:
            assert events == [1, 1, -1, -1] * 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("grid", [(3, 1, 1), (1, 3, 1), (1, 1, 3)])
def test_padded_places_of_an_encoder_in_evaluation_are_those_of_torch_with_gradients(grid):
    """There torch's fast path, which it takes without gradients, gives zeros."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, dtype=torch.float64)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x, padded = noise(3, 6, 6), _PADDED
    expected = encoder(x, src_key_padding_mask=padded).detach()
    with torch.no_grad():
        fast = encoder(x, src_key_padding_mask=padded)
    assert not fast[padded].any() and torch.allclose(fast[~padded], expected[~padded], atol=1e-12)

    @functools.partial(distdl.run_workers, workers=3)
    def found():
        P = distdl.world().reshape(grid)
        model = distdl.distribute(deepcopy(encoder), P, fallback="error")
        with torch.no_grad():
            return model(distdl.distribute_tensor(x, P), src_key_padding_mask=padded).full_tensor()

    for one in found:
        assert torch.allclose(one, expected, atol=1e-12)
