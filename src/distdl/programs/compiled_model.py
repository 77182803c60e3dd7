"""A compiled model, which can stand wherever the model stood."""

from __future__ import annotations

from typing import Any

import torch

from distdl.programs.program import Program


class CompiledModel(torch.nn.Module):
    """A model whose calls become lines (see :func:`compile`).

    It is of a class below the model's, and has the model's own modules, parameters, hooks and other attributes, under
    the same names. What is set in one of the two is set in the other. ``_orig_mod`` is the model, which is called as it
    is; so is the ``forward`` of both.
    """

    __slots__ = ()
    _orig_mod: torch.nn.Module
    _calls: Any

    def __init_subclass__(cls) -> None:
        """Do not call the ``__init_subclass__`` of the model's class: no class of the user's is made here."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._calls(*args, **kwargs)

    def explain(self) -> str:
        """Why calls of this worker stay as they are, with the user's lines; or that nothing keeps them from a line."""
        told: str = self._calls.explain()
        return told

    @property
    def programs(self) -> list[Program]:
        """Those of this worker, in the order in which their signatures came. ``print`` shows each."""
        found: list[Program] = self._calls.programs
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _again, (self._orig_mod, type(self._calls), self._calls.options)


def compiled_model(model: torch.nn.Module, calls: Any) -> CompiledModel:
    """The compiled model, whose calls are these."""
    own = type(model)
    names = {"__slots__": ("_orig_mod", "_calls"), "__module__": own.__module__, "__qualname__": own.__qualname__}
    made: Any = object.__new__(type(own.__name__, (CompiledModel, own), names))
    object.__setattr__(made, "__dict__", model.__dict__)
    object.__setattr__(made, "_orig_mod", model)
    object.__setattr__(made, "_calls", calls)
    found: CompiledModel = made
    return found


def _again(model: torch.nn.Module, kind: Any, options: Any) -> CompiledModel:
    """What copies and pickles of a compiled model are made with."""
    return compiled_model(model, kind(model, *options))
