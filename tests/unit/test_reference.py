"""The reference is made of the public names: it has all of them, once, and nothing private."""

import inspect
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest
from published import ROWS
from published_further import FURTHER

import distdl
import distdl.testing

SCRIPT = Path(__file__).parents[2] / "docs" / "public_names.py"
PACKAGES = (distdl, distdl.nn, distdl.testing, distdl.backends)


@pytest.fixture(scope="module")
def page():
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def paths(page):
    return re.findall(r"^\.\. auto(?:class|function):: (\S+)$", page, re.MULTILINE)


def object_at(path):
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_what_a_package_hands_on_is_in_the_reference(package, paths):
    listed = {path.rpartition(".")[2] for path in paths}
    handed_on = {name: getattr(package, name) for name in package.__all__}
    documented = {name for name, value in handed_on.items() if inspect.isclass(value) or inspect.isfunction(value)}
    aliases = {name for name in documented if handed_on[name].__name__ != name}
    assert documented - aliases and documented - aliases <= listed


def test_what_was_published_is_in_the_reference(paths):
    listed = [object_at(path) for path in paths]
    for row in (*ROWS, *FURTHER):
        value = object_at(f"{row.module}.{row.name.partition('.')[0]}")
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value in listed, f"{row.module}.{row.name}"


def test_what_the_pages_import_is_in_the_reference(paths):
    assert {"Layout", "Communicator", "Move", "Plan", "Movement", "parameter_layouts", "clip_grad_norm_"} <= {
        path.rpartition(".")[2] for path in paths
    }


def test_nothing_is_listed_twice_or_private_or_without_words(paths, page):
    assert max(Counter(id(object_at(path)) for path in paths).values()) == 1
    for path in paths:
        assert not any(part.startswith("_") for part in path.split(".")), path
        assert inspect.getdoc(object_at(path)), path
    assert page.count("```{eval-rst}\n") * 2 == page.count("```")
    assert not [path for path in paths if object_at(path).__name__ in ("Schedule", "Pattern", "_Watch")]


def test_what_bases_without_an_entry_have_is_shown_with_their_classes(paths, page):
    listed = [object_at(path) for path in paths]
    entries = dict(re.findall(r"^\.\. autoclass:: (\S+)\n((?:   :.*\n)*)", page, re.MULTILINE))
    assert "inherited" in entries["distdl.nn.DistributedConvTranspose2d"]  # forward has output_size
    for path, options in entries.items():
        kind = object_at(path)
        hidden = {one for one in kind.__mro__[1:] if one.__module__.startswith("distdl") and one not in listed}
        elsewhere = re.findall(r":inherited-members: (.*)", options)
        assert bool(elsewhere) == bool(hidden.intersection(kind.__bases__)), path
        if elsewhere:
            others = {one.__name__ for one in kind.__mro__[1:-1] if one not in hidden}
            assert set(elsewhere[0].split(", ")) == others, path
