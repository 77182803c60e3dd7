"""The line of the user's and the module that errors name."""

import sys
import threading
from pathlib import Path

import torch

from distdl.transport.callsite import ORIGINS, Origin, Place, Site, put

HERE = Path(__file__)


class Asks(torch.nn.Module):
    def forward(self):
        return Site.of(threading.get_ident())


def line_of(text):
    [number] = [n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.strip() == text]
    return number


def test_a_site_is_the_innermost_line_of_the_users_shown_from_the_working_directory(monkeypatch):
    monkeypatch.chdir(HERE.parent)
    site = Site.of(threading.get_ident())
    assert str(site) == f" at test_callsite.py:{line_of('site = Site.of(threading.get_ident())')}"


def test_a_site_in_a_model_names_the_module_and_the_line_that_called_the_model(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Sequential()
    model.ask = Asks()
    put(model.ask, Place("encoder.ask"))
    model.forward = lambda: model.ask()
    site = model()
    inside, called = line_of("return Site.of(threading.get_ident())"), line_of("site = model()")
    assert str(site) == f" at {HERE}:{inside} (module encoder.ask, called at {HERE}:{called})"


def test_lines_of_installed_packages_are_not_the_users():
    scope = {"Site": Site, "thread": threading.get_ident()}
    exec(compile("def call():\n    return Site.of(thread)", "/lib/site-packages/monai/net.py", "exec"), scope)
    call = scope["call"]
    assert call().line.endswith(f"test_callsite.py:{sys._getframe().f_lineno}")


def test_a_thread_that_has_ended_has_no_site():
    assert str(Site.of(0)) == ""


def test_generated_code_is_where_its_line_comes_from():
    scope = {"Site": Site, "thread": threading.get_ident(), ORIGINS: {2: Origin("encoder.0", "net.py:14", "add")}}
    exec(compile("def call():\n    return Site.of(thread)", "<generated>", "exec"), scope)
    call = scope["call"]
    generated = call()
    assert (generated.path, generated.line) == ("encoder.0", "net.py:14")
    assert generated.called.endswith(f"test_callsite.py:{line_of('generated = call()')}")
