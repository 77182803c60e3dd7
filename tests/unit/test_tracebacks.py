"""Tracebacks without our frames."""

import sys
import traceback
from pathlib import Path

import pytest
import torch

import distdl
from distdl.transport.tracebacks import fold, fold_uncaught

SOURCE = str(Path(distdl.__file__).parent)


def raised(call):
    with pytest.raises(Exception) as error:
        call()
    return error.value


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def refused():
    """Of functions of distdl, below a line of this file."""
    distdl.world("serial").reshape(3)


def fails_in_torch():
    torch.nn.Linear(2, 2)(torch.ones(3))


def test_our_frames_are_folded():
    error = raised(refused)
    assert any(file.startswith(SOURCE) for file in files(error))
    assert fold(error) and set(files(error)) == {__file__}
    assert not fold(error)


def test_frames_of_torch_stay_where_none_is_ours():
    error = raised(fails_in_torch)
    before = files(error)
    assert not fold(error) and files(error) == before and any("/torch/" in file for file in before)


def test_causes_are_folded_too():
    cause = raised(refused)
    error = ValueError("because of that")
    error.__cause__ = cause
    assert not fold(error) and set(files(cause)) == {__file__}


@pytest.mark.parametrize("debug", ["1", "abc"])
def test_debug_shows_all_frames(monkeypatch, debug):
    """Also where the variable cannot be read: no error hides another one."""
    monkeypatch.setenv("DISTDL_DEBUG", debug)
    error = raised(refused)
    before = files(error)
    assert not fold(error) and files(error) == before


def test_an_error_with_no_frame_but_ours_keeps_them():
    error = raised(refused)
    while not traceback.extract_tb(error.__traceback__)[0].filename.startswith(SOURCE):
        error.__traceback__ = error.__traceback__.tb_next
    assert not fold(error) and files(error)


def test_the_hook_of_uncaught_errors_folds_says_how_to_see_all_and_keeps_the_marks_of_the_one_before(monkeypatch):
    shown = []

    def show(kind, error, trace):
        shown.append((error.__notes__, {frame.filename for frame in traceback.extract_tb(trace)}))

    show.aborts = True
    monkeypatch.setattr(sys, "excepthook", show)
    fold_uncaught()
    fold_uncaught()
    error = raised(refused)
    sys.excepthook(type(error), error, error.__traceback__)
    assert shown == [(["(DISTDL_DEBUG=1 shows the frames of distdl, too)"], {__file__})]
    assert sys.excepthook.aborts and sys.excepthook.__wrapped__ is show
