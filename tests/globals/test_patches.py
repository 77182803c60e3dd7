"""The changes that distdl makes to torch: each is in the table, has a test, and leaves plain tensors to torch."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from same import noise
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import distdl
from distdl.globals.patches import PATCHES, install, standing
from distdl.globals.tensor.table import original_of

ROOT = Path(__file__).parents[2]
NAMES = [f"{patch.holder}.{patch.name}" for patch in PATCHES]
x35 = noise(3, 5)


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_a_patch_has_a_reason_and_a_test(patch):
    path, name = patch.test.split("::")
    tree = ast.parse((ROOT / path).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert patch.reason


def test_no_patch_is_there_twice():
    assert len(set(NAMES)) == len(NAMES)


@pytest.fixture(scope="module", autouse=True)
def everything():
    """All that is installed later is installed, and there are global tensors."""
    import_module("torch.nn.attention.flex_attention")

    distdl.run_workers(lambda: distdl.distribute_tensor(x35, distdl.world().reshape(2, 1)), 2)


def original(patch):
    now = standing(patch)
    return inspect.unwrap(now) if patch.by_code else original_of(now)


@pytest.mark.parametrize("patch", PATCHES, ids=NAMES)
def test_torchs_own_is_there_and_has_the_same_signature(patch):
    now, torchs = standing(patch), original(patch)
    assert torchs is not now
    again = resolve_name(patch.holder)
    assert getattr(again, patch.name) is not None
    if not callable(getattr(again, patch.name)) or patch.name == "__class__":
        return
    now, torchs = (one.__get__(None, again) if isinstance(one, classmethod) else one for one in (now, torchs))
    if not isinstance(now, type):
        assert inspect.signature(now) == inspect.signature(torchs)
    assert (now.__name__, now.__qualname__, now.__module__) == (
        torchs.__name__, torchs.__qualname__, torchs.__module__,
    )  # fmt: skip


def test_they_are_installed_once():
    before = [standing(patch) for patch in PATCHES]
    for when in {patch.when for patch in PATCHES}:
        install(when)
    assert all(one is other for one, other in zip(before, map(standing, PATCHES), strict=True))


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, times=1):
        ctx.save_for_backward(x)
        return x**3 * times

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * dy, None


class _Doubled(torch.nn.Module):
    def forward(self, w):
        return 2 * w


def _derivative(function):
    x = x35.clone().requires_grad_()
    y = function(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    return y, dx


def _cached():
    model = torch.nn.Linear(5, 5).double()
    with torch.no_grad():
        model.weight.copy_(noise(5, 5))
        model.bias.zero_()
    parametrize.register_parametrization(model, "weight", _Doubled())
    with parametrize.cached():
        assert model.weight is model.weight
        y = model(x35)
    assert model.weight is not model.weight
    return y


def _block_mask():
    from torch.nn.attention.flex_attention import create_block_mask, create_mask

    def causal(b, h, i, j):
        return i >= j

    block = create_block_mask(causal, 1, 1, 300, 300, device="cpu")
    return create_mask(causal, 1, 1, 4, 4, device="cpu"), block.to_dense()


def _flex():
    from torch.nn.attention import flex_attention as flex

    return flex.flex_attention(*[noise(1, 2, 4, 3, seed=seed).float() for seed in range(3)])


def _dropout(x):
    return torch.nn.functional.dropout(x.sin(), 0.5)


PLAIN = {
    "an autograd function": lambda: _derivative(lambda x: _Cube.apply(x, 2)),
    "a checkpoint": lambda: _derivative(lambda x: checkpoint(_dropout, x, use_reentrant=False)),
    "a checkpoint with re-entry": lambda: _with_backward(lambda x: checkpoint(_dropout, x, use_reentrant=True)),
    "grad": lambda: torch.func.grad(lambda x: x.sin().sum())(x35),
    "vjp": lambda: torch.func.vjp(torch.sin, x35)[1](x35),
    "jvp": lambda: torch.func.jvp(torch.sin, (x35,), (x35,)),
    "vmap": lambda: torch.vmap(lambda x: x @ x, randomness="error")(x35),
    "hessian": lambda: torch.func.hessian(lambda x: x.prod())(x35[0]),
    "a cached parametrisation": _cached,
    "masks": _block_mask,
    "flex_attention": _flex,
    "random numbers": lambda: (torch.get_rng_state(), torch.random.initial_seed(), torch.rand(3)),
}


def _with_backward(function):
    x = x35.clone().requires_grad_()
    y = function(x)
    y.sum().backward()
    return y, x.grad


@pytest.mark.parametrize("name", PLAIN)
def test_plain_tensors_are_torchs(name, monkeypatch):
    monkeypatch.setattr(
        resolve_name("torch.nn.attention.flex_attention"), "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True
    )
    torch.manual_seed(0)
    found = PLAIN[name]()
    for patch in PATCHES:
        if patch.by_code:
            monkeypatch.setattr(standing(patch), "__code__", original(patch).__code__)
            monkeypatch.setattr(standing(patch), "__defaults__", original(patch).__defaults__)
            monkeypatch.setattr(standing(patch), "__kwdefaults__", original(patch).__kwdefaults__)
        elif patch.name not in ("__class__", "default_generator"):
            monkeypatch.setattr(resolve_name(patch.holder), patch.name, original(patch))
    torch.manual_seed(0)
    expected = PLAIN[name]()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


WALK = """
import inspect, sys
import torch, torch._dynamo, torch.testing, torch.func, torch.utils.checkpoint
import torch._higher_order_ops.utils, torch.nn.utils.parametrize
from torch.nn.attention import flex_attention as flex
FIRST = {first}

def seen():
    found = {{}}
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] != "torch" or module is None:
            continue
        found[path, "__class__"] = type(module)
        for name, value in list(vars(module).items()):
            found[path, name] = value
            if inspect.isclass(value) and value.__module__.partition(".")[0] == "torch":
                for inner, one in list(vars(value).items()):
                    found[f"{{path}}.{{name}}", inner] = one
            if inspect.isfunction(value):
                found[f"{{path}}.{{name}}", "__code__"] = value.__code__
    return found

def differences(before, after):
    for key, value in after.items():
        old = before.get(key, before)
        if old is value or inspect.ismodule(value) or key[1] in ("__warningregistry__", "__doc__"):
            continue
        if FIRST or callable(value) or callable(old):
            yield key, old if old is not before else None, value

before = seen()
import distdl
if not FIRST:
    def work():
        x = distdl.distribute_tensor(torch.ones(4, 3), distdl.world().reshape(2, 1))
        model = distdl.distribute(torch.nn.Linear(3, 2), distdl.world().reshape(2, 1))
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        torch.func.grad(lambda x: x.sum())(x)
        torch.vmap(torch.sin)(x)
        flex.create_mask(lambda b, h, i, j: i >= j, 1, 1, 3, 3, device="cpu")
    distdl.run_workers(work, 2)
from distdl.globals.patches import PATCHES, standing
replaced = [standing(patch) for patch in PATCHES if not patch.by_code]
lent = [standing(patch).__code__ for patch in PATCHES if patch.by_code]
left = []
for key, old, value in differences(before, seen()):
    if any(value is one for one in replaced + lent) or key[1].startswith("_distdl_"):
        continue
    if key[0] in [f"{{patch.holder}}.{{patch.name}}" for patch in PATCHES]:  # of the class that stands there now
        continue
    if key[1] == "__code__" and any(getattr(one, "__code__", None) is value for one in replaced):
        continue
    left.append(key)
assert not left, left
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", [True, False], ids=["imported", "used"])
def test_nothing_else_of_torch_is_changed(first):
    subprocess.run([sys.executable, "-c", WALK.format(first=first)], check=True)
