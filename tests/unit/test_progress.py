"""Bars on the terminal for what takes long."""

import io
import sys
import time

import pytest
import torch
from torch import nn

import distdl
from distdl.environment.progress import progress


class Screen(io.StringIO):
    """A terminal that keeps what is written on it."""

    def __init__(self, is_terminal=True):
        super().__init__()
        self.isatty = lambda: is_terminal


def written(monkeypatch, seconds, is_terminal=True, shows=True):
    """What a loop of two slow rounds writes to standard error."""
    screen = Screen(is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)
    seen = []
    for item in progress(["a", "b"], "distdl.load: blocks", shows):
        seen.append(item)
        time.sleep(seconds)
    assert seen == ["a", "b"]
    return screen.getvalue()


def test_a_bar_names_what_is_done_and_how_much(monkeypatch):
    text = written(monkeypatch, seconds=1.1)
    assert "distdl.load: blocks: " in text and "1/2" in text


def test_what_is_quick_has_no_bar(monkeypatch):
    assert "blocks" not in written(monkeypatch, seconds=0.0)


def test_a_file_gets_no_bar(monkeypatch):
    assert written(monkeypatch, seconds=1.1, is_terminal=False) == ""


def test_without_a_standard_error_there_is_no_bar(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    seen = []
    for item in progress(["a", "b"], "distdl.load: blocks"):
        seen.append(item)
        time.sleep(1.1)
    assert seen == ["a", "b"]


def test_other_workers_show_no_bar(monkeypatch):
    assert written(monkeypatch, seconds=1.1, shows=False) == ""


def test_without_tqdm_there_is_no_bar(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert written(monkeypatch, seconds=1.1) == ""


@pytest.fixture
def bars(monkeypatch):
    """The names and lengths of the bars that are made from here on."""
    found = []

    def bar(items, desc, **_):
        found.append((desc, len(items)))
        return items

    monkeypatch.setattr("tqdm.tqdm", bar)
    return found


def test_worker_0_alone_shows_how_saving_and_loading_go_on(bars, tmp_path):
    def both():
        model = nn.LayerNorm(3)
        distdl.save(tmp_path, model)
        distdl.load(tmp_path, model)

    distdl.run_workers(both, 2)
    assert [name for name, _ in bars] == ["distdl.save: blocks", "distdl.load: blocks"]


def test_suggest_shows_one_round_for_each_grid(bars):
    found = distdl.suggest(nn.Conv2d(1, 1, 3, padding=1), 4, (1, 1, 8, 8))
    assert bars == [("distdl.suggest: grids", len(found))]


def test_verify_shows_its_perturbed_runs(bars):
    distdl.run_workers(lambda: distdl.verify(nn.Linear(3, 3), (2, 1), torch.ones(4, 3)), 2)
    assert bars == [("distdl.verify: perturbed runs", 3)]
