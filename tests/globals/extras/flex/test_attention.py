"""Attention with functions of scores and masks, over queries that are split in any way."""

import inspect
import subprocess
import sys
import time
import warnings
from copy import deepcopy

import pytest
import torch
from dense_flex import attend, dense, k, mask, q, v
from same import Global, assert_raises_the_same, assert_same, noise
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import (
    AuxRequest,
    BlockMask,
    and_masks,
    create_block_mask,
    create_mask,
    flex_attention,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.transport.recording import Recording

GRIDS = [(2, 1, 2, 1), (1, 3, 1, 1), (1, 1, 4, 1), (1, 1, 2, 2), (1, 2, 1, 2)]
EMPTY = [(4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 5, 1)]  # (workers without cells; with 3 heads, and 5 workers)


MODS = {
    "none": None,
    "soft cap": lambda score, b, h, i, j: 2 * torch.tanh(score / 2),
    "places": lambda score, b, h, i, j: score * (b + 1) + 0.3 * h + 0.1 * (i - 2 * j),
}


@pytest.mark.parametrize("mod", MODS)
@pytest.mark.parametrize(
    "key, value", [(Global(k), Global(v)), (Global(k, (1, 1, 3, 1)), Global(v, (1, 2, 1, 2))), (k, v)]
)
def test_functions_of_scores(mod, key, value):
    assert_same(lambda q, k, v: attend(q, k, v, MODS[mod]), Global(q), key, value, grids=GRIDS)


def test_workers_without_cells():
    allowed = mask(lambda b, h, i, j: (i + 2 >= j) | (h == 1), 2, 3)
    assert_same(
        lambda q, k, v, w: attend(q, k, v, lambda s, b, h, i, j: s + w[h, i, j], allowed, return_lse=True),
        Global(q), Global(k), Global(v), noise(3, 5, 7), grids=EMPTY,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_torch_as_it_is_called(monkeypatch):
    """And not its formula alone: with the derivative that torch has for it."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    allowed = mask(lambda b, h, i, j: i + b >= j, 2)

    def function(q, k, v, w):
        return flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s) + w[h, i, j], allowed, 0.3, return_lse=True)

    assert_same(function, Global(q), Global(k), Global(v), noise(3, 5, 7), grids=GRIDS[:2], tolerance=1e-11)


def test_second_derivatives():
    """Also of tables that are indexed, of which torch's has none."""
    assert_same(
        lambda q, k, v, w: attend(q, k, v, lambda s, *_: torch.tanh(s) * w.sum()),
        Global(q), Global(k), Global(v), noise(3), grids=GRIDS[:2], twice=True,
    )  # fmt: skip

    def function(q, k, v, w):
        if isinstance(q, distdl.GlobalTensor):
            return flex_attention(q, k, v, lambda s, b, h, i, j: s * w[h] + w[j % 3])
        scores = q @ k.mT / 2 * w[:, None, None] + w[torch.arange(7) % 3]
        return scores.softmax(-1) @ v

    assert_same(function, Global(q), Global(k), Global(v), noise(3), grids=GRIDS[:2], twice=True)


@pytest.mark.parametrize("grid", [(1, 4, 1, 1), (1, 2, 2, 1), (2, 1, 1, 2)])
def test_heads_that_share_keys(grid):
    assert_same(
        lambda q, k, v: attend(q, k, v, MODS["places"], enable_gqa=True),
        Global(noise(2, 6, 5, 4)), Global(k), Global(v), grids=[grid],
    )  # fmt: skip


def test_keys_of_one_sample():
    allowed = mask(lambda b, h, i, j: i + b >= j, 2)
    assert_same(
        lambda q, k, v: attend(q, k, v, block_mask=allowed), Global(q), Global(k[:1]), Global(v[:1]), grids=GRIDS
    )
    assert_same(lambda k, q, v: attend(q, k, v, MODS["places"], allowed), Global(k), q, v, grids=GRIDS)


def test_queries_that_read_no_key():
    nowhere = mask(lambda b, h, i, j: j < i - 1)
    assert_same(
        lambda q, k, v: attend(q, k, v, block_mask=nowhere, return_lse=True), Global(q), Global(k), Global(v),
        grids=GRIDS,
    )  # fmt: skip


def test_a_mask_of_blocks_is_read_as_torch_reads_it():
    """What its function says counts, and not which blocks are listed."""
    numbers, places = torch.zeros(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    empty = BlockMask.from_kv_blocks(
        numbers, places, BLOCK_SIZE=8, mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(5, 7)
    )
    assert_same(lambda q, k, v: attend(q, k, v, block_mask=empty), Global(q), Global(k), Global(v), grids=GRIDS[:2])


@pytest.mark.filterwarnings("ignore:_compile flag")
@pytest.mark.parametrize("compiles", [False, True])
def test_masks_of_documents_that_are_split(compiles):
    """A mask is a plain one, the same on every worker. The compiler is not asked for what it cannot trace."""
    documents = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1]])

    def function(documents, x):
        is_split = isinstance(documents, distdl.GlobalTensor)
        given = (lambda b, h, i, j: (documents[b, i] == documents[b, j]) & (i >= j), 2, None, 5, 5, "cpu")
        mask = create_block_mask(*given, BLOCK_SIZE=2, _compile=compiles and is_split)
        whole = create_mask(*given)
        scored = create_mask(lambda s, b, h, i, j: s + documents[b, i].log(), *given[1:])
        assert type(whole) is type(scored) is torch.Tensor
        return attend(x, x, x, None, mask), whole, scored, mask.to_dense()

    assert_same(function, Global(documents), Global(noise(2, 3, 5, 4)), grids=[(1, 2), (2, 2), (1, 4)])


def test_results_lie_in_memory_as_queries_do():
    def function(q, k, v):
        y = attend(q.transpose(1, 2), k, v)
        return y, y.stride(), y.is_contiguous(), y.transpose(1, 2).reshape(2, 5, -1).contiguous()

    assert_same(function, Global(noise(2, 5, 3, 4)), Global(k), Global(v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    lower = torch.bfloat16 if dtype is torch.float32 else dtype
    for kind in {dtype, lower}:
        assert_same(
            lambda q, k, v: attend(q, k, v, MODS["soft cap"]),
            Global(q.to(dtype)), Global(k.to(kind)), Global(v.to(kind)), grids=GRIDS[:3],
            tolerance=1e-5 if kind is torch.float32 else 2e-2,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast(dtype):
    def function(q, k, v):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            return flex_attention(q, k, v, MODS["places"])

    given = [Global(one.to(dtype)) for one in (q, k, v)]
    assert_same(function, *given, grids=GRIDS[:3], curved=False, tolerance=1e-12)


WRONG = {
    "heads": lambda x: flex_attention(x, x[:, :1], x[:, :1]),
    "features": lambda x: flex_attention(x, x[..., :2], x),
    "samples": lambda x: flex_attention(x[:1], x, x),
    "keys": lambda x: flex_attention(x, x[:, :, :3], x),
    "no keys": lambda x: flex_attention(x, x[:, :, :0], x[:, :, :0]),
    "dims": lambda x: flex_attention(x[0], x[0], x[0]),
    "lengths": lambda x: flex_attention(x, x, x, block_mask=mask(lambda b, h, i, j: i >= j)),
    "kernel": lambda x: flex_attention(x, x, x, kernel_options={"BACKEND": "none"}),
    "maxima": lambda x: flex_attention(x, x, x, return_aux=AuxRequest(max_scores=True)),
    "lse twice": lambda x: flex_attention(x, x, x, return_lse=True, return_aux=AuxRequest(lse=True)),
    "no value": lambda x: flex_attention(x, x),
}


@pytest.mark.compiles
@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments(case):
    kinds = (RuntimeError, IndexError, ValueError, NotImplementedError, TypeError)
    assert_raises_the_same(WRONG[case], q, text=True, kinds=kinds)


def _refused(function):
    def work():
        x = distdl.distribute_tensor(q, distdl.world()[:2].reshape(1, 1, 2, 1))
        with pytest.raises(RuntimeError) as found:
            function(x)
        return str(found.value)

    texts = set(distdl.run_workers(work, 3))
    assert len(texts) == 1
    return texts.pop()


def test_what_functions_of_scores_may_not_do():
    def unseen(s, *places):
        with torch._C.DisableTorchFunction():
            return s * weight

    weight = torch.nn.Parameter(noise(1)[0])
    assert "used unseen" in _refused(lambda x: flex_attention(x, x, x, unseen))
    text = _refused(lambda x: flex_attention(x, x, x, lambda s, *_: s + x.full_tensor().sum()))
    assert "sends messages for each element" in text
    assert "control flow" in _refused(lambda x: flex_attention(x, x, x, lambda s, *_: s if s > 0 else -s))


def test_errors_of_plain_arguments_in_a_world():
    """They are torch's own."""

    def causal(b, h, i, j):
        return True

    cases = [
        lambda: create_block_mask(causal),
        lambda: create_block_mask(causal, 1, 1, 2, 2, blocks=2),
        lambda: create_mask(causal, 1, 1, 2, 2, "cpu"),
        lambda: flex_attention(q, k[:1], v),
    ]

    def texts():
        found = []
        for case in cases:
            with pytest.raises((TypeError, ValueError)) as error:
                case()
            found.append((error.type, str(error.value)))
        return found

    def work():
        distdl.distribute_tensor(q, distdl.world().reshape(1, 1, 2, 1))
        return texts()

    assert distdl.run_workers(work, 2) == [texts()] * 2


def test_samples_stay_where_they_are():
    """Where samples or heads are split, nothing moves; where queries are, keys and values come, as one message each."""

    def work():
        found = []
        for grid in [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)]:
            P, sent = distdl.world().reshape(grid), []
            x = distdl.distribute_tensor(noise(2, 4, 6, 4), P)
            P.comm.recorder = Recording(P.comm, lambda _, to=sent: to.append(1), lambda _: None)
            flex_attention(x, x * 2, x * 3, MODS["places"], mask(lambda b, h, i, j: i >= j, queries=6, keys=6))
            P.comm.recorder = None
            found.append(len(sent))
        return found

    assert distdl.run_workers(work, 2) == [[0, 0, 2]] * 2


def test_no_tensor_is_larger_than_a_share_of_the_scores():
    class Largest(TorchDispatchMode):
        cells = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            y = func(*args, **(kwargs or {}))
            if isinstance(y, torch.Tensor):
                self.cells = max(self.cells, y.untyped_storage().nbytes() // y.element_size())
            return y

    weight = torch.nn.Parameter(noise(3))

    def work():
        x = distdl.distribute_tensor(noise(2, 3, 64, 4), distdl.world().reshape(1, 1, 4, 1)).requires_grad_()
        causal = mask(lambda b, h, i, j: i >= j, queries=64, keys=64)
        with Largest() as seen:
            flex_attention(x, x, x, lambda s, b, h, i, j: torch.tanh(s) * weight[h] + i - j, causal).sum().backward()
        return seen.cells

    assert distdl.run_workers(work, 4) == [2 * 3 * 16 * 64] * 4


def test_functions_that_write_scores_in_place():
    def function(q, k, v, w):
        def mod(s, b, h, i, j):
            s += w[h]
            return s.mul_(2)

        return attend(q, k, v, mod)

    assert_same(function, Global(q), Global(k), Global(v), noise(3), grids=GRIDS[:3])


def test_plain_tensors_go_to_torch():
    assert torch.equal(flex_attention(q, k, v, MODS["places"]), dense(q, k, v, MODS["places"]))
    assert "score_mod" in inspect.signature(flex_attention).parameters
    assert "scaled dot product" in flex_attention.__doc__
    traced = torch.compile(flex_attention, backend="eager", fullgraph=True)
    assert torch.equal(traced(q, k, v, MODS["places"]), dense(q, k, v, MODS["places"]))
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        flex_attention(q.clone().requires_grad_(), k, v)


@pytest.mark.compiles
def test_compiled_by_torch():
    """Of global tensors, it is what it is without the compiler; of others, compiled."""
    traced = torch.compile(flex_attention, backend="eager")

    def function(q, k, v, w):
        of = traced if isinstance(q, distdl.GlobalTensor) else dense
        return of(q, k, v, lambda s, b, h, i, j: s + w[h, i, j])

    assert_same(function, Global(q), Global(k), Global(v), noise(3, 5, 7), grids=GRIDS[:1])
    strict = torch.compile(flex_attention, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "workers agree and exchange messages" in _refused(lambda x: strict(x, x, x, MODS["soft cap"]))


def test_distdl_is_imported_again():
    """By a notebook, or a test that drops its modules: torch's functions do not call themselves for ever."""
    code = """
import importlib, inspect, sys, torch
from torch.nn.attention import flex_attention as flex

def arguments():
    return [inspect.getfullargspec(one) for one in (flex.flex_attention, flex.create_mask, flex.create_block_mask)]

before = arguments()
flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
q = torch.ones(1, 1, 3, 2)
for again in range(2):
    for name in [name for name in sys.modules if name.partition(".")[0] == "distdl"]:
        del sys.modules[name]
    import distdl
    importlib.reload(sys.modules["distdl.globals.patches"]).arrange()
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 3, 3, device="cpu")
    assert flex.flex_attention(q, q, q, block_mask=mask).sum() == 6
assert before == arguments()

def work():
    x = distdl.distribute_tensor(q, distdl.world().reshape(1, 1, 2, 1))
    return flex.flex_attention(x, x, x).sum().item()

assert distdl.run_workers(work, 2) == [6, 6]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_a_program_imports_it_behind_distdl():
    """distdl does not by itself: with torch 2.14 it takes long. Libraries first ask whether there is such a module."""
    code = """
import importlib.util, sys, torch
import distdl
name = "torch.nn.attention.flex_attention"
assert name not in sys.modules and importlib.util.find_spec(name) is not None
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
q = torch.arange(12.0).reshape(1, 2, 3, 2)

def work():
    x = distdl.distribute_tensor(q, distdl.world().reshape(1, 1, 3, 1))
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 3, 3, device="cpu")
    return flex_attention(x, x, x, block_mask=mask, scale=torch.tensor(0.5)).full_tensor()

mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 3, 3, device="cpu")
for y in distdl.run_workers(work, 3):
    assert torch.allclose(y, flex_attention(q, q, q, block_mask=mask, scale=0.5))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@pytest.mark.parametrize("make", [
    lambda x: flex_attention(x, x, x), lambda x: create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 3, 3, device="cpu"),
    lambda x: create_block_mask(lambda b, h, i, j: x[0, 0, i, 0] >= j, 1, 1, 3, 3, device="cpu"),
    lambda x: flex_attention(noise(1, 2, 3, 2), noise(1, 2, 3, 2), noise(1, 2, 3, 2)),
])  # fmt: skip
def test_workers_take_turns_where_torch_makes_a_mask(make, monkeypatch):
    """Torch keeps a note of it that all threads share, and an error where two take it away."""
    inside, most, sort = [], [], torch.argsort

    def slow(*args, **kwargs):
        inside.append(args)
        most.append(len(inside))
        time.sleep(0.02)
        inside.pop()
        return sort(*args, **kwargs)

    monkeypatch.setattr(torch, "argsort", slow)  # (meanwhile)
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)

    def work():
        make(distdl.distribute_tensor(noise(1, 2, 3, 2), distdl.world().reshape(1, 1, 3, 1)))

    distdl.run_workers(work, 3)
    assert len(most) >= 3 and max(most) == 1


LENGTH, HEADS = 6, 2


class Attention(nn.Module):
    """Of (samples, positions, 8)."""

    def __init__(self, kind: str, attend, groups: int = 1) -> None:
        super().__init__()
        self.kind, self.attend = kind, attend
        self.query, self.value = nn.Linear(8, 8), nn.Linear(8, 16 // groups)
        self.slopes = nn.Parameter(torch.linspace(0.5, 1, HEADS))
        self.table = nn.Embedding(2 * LENGTH, HEADS)
        self.register_buffer("documents", torch.arange(LENGTH) // 4)

    def forward(self, x):
        samples, queries, _ = x.shape
        q = self.query(x).view(samples, queries, HEADS, -1).transpose(1, 2)
        k, v = self.value(x).view(samples, queries, -1, 8 // HEADS).transpose(1, 2).chunk(2, 1)
        mod, mask = self.functions(x)
        if mask is not None:
            mask = create_block_mask(mask, samples, None, queries, queries, device="cpu")
        y = self.attend(q, k, v, mod, mask, enable_gqa=True)
        return x + y.transpose(1, 2).reshape(x.shape)

    def functions(self, x):
        def causal(b, h, i, j):
            return i >= j

        if self.kind == "window":
            return None, and_masks(causal, lambda b, h, i, j: i - j < 3)
        if self.kind == "documents":
            return None, and_masks(causal, lambda b, h, i, j: self.documents[i] == self.documents[j])
        if self.kind == "activations":  # (a mask, and scores, that follow from what is split)
            level = x.mean(-1)
            return lambda s, b, h, i, j: s + level[b, j], lambda b, h, i, j: (level[b, i] > level[b, j]) | (i == j)
        if self.kind == "slopes":
            return lambda s, b, h, i, j: s + self.slopes[h].exp() * (j - i), causal
        if self.kind == "table":
            return lambda s, b, h, i, j: s + self.table.weight[i - j + LENGTH, h], None
        if self.kind == "lookup":
            return lambda s, b, h, i, j: s + self.table(i - j + LENGTH)[h], None
        return lambda s, *_: 2 * torch.tanh(s / 2), None


class Network(nn.Module):
    def __init__(self, kind: str, attend, again=None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(kind, attend), Attention(kind, attend, 2)])
        self.again = again

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.again is None else checkpoint(layer, x, use_reentrant=self.again)
        return x


KINDS = ["cap", "window", "documents", "activations", "slopes", "table", "lookup"]


def _check(kind, weights, grid, again=None):
    torch.manual_seed(0)
    # (torch differentiates no module there; it is the same table)
    plain = Network("table" if kind == "lookup" else kind, dense).double()
    network = Network(kind, flex_attention, again).double()
    network.load_state_dict(plain.state_dict())
    x = noise(2, LENGTH, 8)
    expected = plain(x)
    expected.cos().sum().backward()

    def work():
        P = distdl.world()[: torch.Size(grid).numel()].reshape(grid)
        model = distdl.distribute(deepcopy(network), P, weights=weights, fallback="error")
        for _ in range(2):
            model.zero_grad()
            y = model(distdl.distribute_tensor(x, P).requires_grad_())
            y.cos().sum().backward()
            torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-10, atol=1e-12)
            for name, theirs in plain.named_parameters():
                ours = model.get_parameter(name).grad
                ours = ours.full_tensor() if isinstance(ours, distdl.GlobalTensor) else ours
                assert theirs.grad is None or torch.allclose(ours, theirs.grad, rtol=1e-10, atol=1e-12), name

    distdl.run_workers(work, 4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights, grid", [("replicated", (2, 1, 2)), ("sharded", (1, 3, 1))])
def test_models(kind, weights, grid):
    _check(kind, weights, grid)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("weights", ["replicated", "sharded"])
def test_checkpoints(weights, again):
    for kind in ("lookup", "activations"):
        _check(kind, weights, (1, 2, 1), again)


def test_scores_of_weights_alone():
    """Each worker computes them, and their gradients count once."""

    class Latents(nn.Module):
        def __init__(self, attend):
            super().__init__()
            self.attend = attend
            self.queries, self.keys = nn.Parameter(noise(1, 2, 5, 4)), nn.Parameter(noise(1, 2, 6, 4, seed=1))

        def forward(self, x):
            level = x.mean((0, 1, 3))
            y, sums = self.attend(
                self.queries, self.keys, self.keys, lambda s, b, h, i, j: s + level[i], return_lse=True
            )
            return x * y + sums[..., None]

    x = noise(2, 2, 5, 4)
    plain = Latents(dense)
    expected = plain(x)
    expected.cos().sum().backward()

    def work():
        for weights in ("replicated", "sharded"):
            P = distdl.world()[:2].reshape(1, 1, 2, 1)
            model = distdl.distribute(Latents(flex_attention), P, weights=weights, fallback="error")
            y = model(distdl.distribute_tensor(x, P))
            y.cos().sum().backward()
            assert torch.allclose(y.full_tensor(), expected, rtol=1e-12)
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                whole = ours.grad.full_tensor() if isinstance(ours.grad, distdl.GlobalTensor) else ours.grad
                assert torch.allclose(whole, theirs.grad, rtol=1e-10)

    distdl.run_workers(work, 3)


@pytest.mark.parametrize("kind", ["window", "documents", "lookup"])
def test_summary(kind):
    """Without memory, also where masks and tables have some."""

    def work():
        P = distdl.world().reshape(1, 2, 1)
        network = nn.Sequential(Attention(kind, flex_attention))
        return str(distdl.summary(network, P, (2, LENGTH, 8), weights="sharded"))

    assert "Attention" in distdl.run_workers(work, 2)[0]
