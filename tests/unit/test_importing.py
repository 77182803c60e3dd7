"""What is done behind the import of a module."""

import importlib
import subprocess
import sys
from importlib.abc import MetaPathFinder

import pytest

from distdl.environment.importing import behind

NAME = "imported_late"


@pytest.fixture
def late(tmp_path, monkeypatch):
    """A module that nobody has imported yet; which is done, until the test has ended."""
    (tmp_path / f"{NAME}.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield NAME
    sys.modules.pop(NAME, None)


def test_of_several_each_acts_once(late):
    """As where a program drops distdl's modules and imports it again: they do not ask each other for ever."""
    done = []
    for one in range(3):
        behind(late, lambda one=one: done.append((one, sys.modules[late].value)))
    assert importlib.import_module(late).value == 3
    assert sorted(done) == [(0, 3), (1, 3), (2, 3)]
    behind(late, lambda: done.append("at once"))
    importlib.reload(sys.modules[late])
    assert done[3:] == ["at once"]


def test_what_failed_is_done_by_the_next_import(late):
    done = []

    def act():
        done.append(None)
        if len(done) == 1:
            raise ImportError("once")

    behind(late, act)
    with pytest.raises(ImportError, match="once"):
        importlib.import_module(late)
    assert importlib.import_module(late).value == 3 and len(done) == 2


def test_finders_without_find_spec_are_passed_over(late):
    """Such as Python 3.4 to 3.11 have asked by another name."""
    behind(late, lambda: None)
    sys.meta_path.insert(1, object())
    assert sys.meta_path[0].find_spec(late, None).name == late


def test_no_finder_is_left_out_of_an_import_meanwhile(late):
    """Python goes through the list while it imports."""

    class Importing(MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != late:
                importlib.import_module(late)

    class Last(MetaPathFinder):
        asked = ()

        def find_spec(self, name, path, target=None):
            self.asked = (*self.asked, name)

    last = Last()
    sys.meta_path[:0] = [Importing(), last]
    behind(late, lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("of_no_such_name")
    assert "of_no_such_name" in last.asked


@pytest.mark.parametrize("call", [
    "torch.func.grad(lambda x: x.square().sum())(x)", "torch.vmap(torch.sin)(x)",
    "torch.func.linearize(torch.sin, x)[1](x)", "torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))",
])  # fmt: skip
def test_functions_that_take_functions_are_imported_when_they_are_called(call):
    """Also by several threads at once, of which one imports; and distdl imports nothing of torch's for them."""
    text = f"""
import sys
import torch
before = set(sys.modules)
import distdl
found = {{name for name in set(sys.modules) - before if "functorch" in name or "distdl.globals.extras." in name}}
assert not found, found

def main():
    x = distdl.distribute_tensor(torch.arange(6.0), distdl.world())
    return {call}.full_tensor()

first, *others = distdl.run_workers(main, 3)
x = torch.arange(6.0)
torch.testing.assert_close(first, {call})
assert "distdl.globals.extras.transforms" in sys.modules
"""
    subprocess.run([sys.executable, "-c", text], check=True)
