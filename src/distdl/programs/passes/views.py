"""Make each view by the call that takes the least time, out of the first tensor in its memory.

A view of a view is made of the tensor that holds the memory. So a view that only other views read is not made any more.
This is done in memory in which an operator of torch, or a message, has put its result: the tensor begins where that
memory begins. Arguments, parameters, constants, and what functions of ours give, may begin elsewhere in the next call,
so their views stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from distdl.programs.calls import Call, Step, Value, values_in
from distdl.programs.passes.dead import without_dead
from distdl.programs.segments import VIEWS_IN_PLACE

_AS_STRIDED = torch.ops.aten.as_strided.default
_NAMES = """
    as_strided view _unsafe_view slice.Tensor select.int unsqueeze squeeze squeeze.dim squeeze.dims transpose.int t
    permute expand diagonal unfold unbind.int split.Tensor split_with_sizes
"""
_MOST = 1  # results of one call that are made one by one


def _operators(names: str) -> Iterator[Any]:
    for name in names.split():
        packet, _, overload = name.partition(".")
        yield getattr(getattr(torch.ops.aten, packet), overload or "default")


_VIEWS = frozenset(_operators(_NAMES))


def with_direct_views(step: Step) -> Step:
    """The same step. Its views have the same shapes and strides, and lie at the same place of the same memory.

    An operator that gives its argument another shape, as ``squeeze_``, leaves it as it is if that is read later.
    """
    last = dict.fromkeys(step.sources, -1)
    for place, call in enumerate(step.calls):
        last |= dict.fromkeys(call.read(), place)
    last |= dict.fromkeys(values_in(step.result), len(step.calls))
    roots = _Roots(step)
    calls: list[Call] = []
    for place, call in enumerate(step.calls):
        view = VIEWS_IN_PLACE.get(call.function) if call.kind == "operator" else None
        if view is not None and _may_be_a_view(call, last[call.args[0]] > place, step):
            call = replace(call, function=view, writes=False)
        roots.note(call)
        calls += _direct(call, [value for value in call.given() if value in last], roots)
    return without_dead(replace(step, calls=calls))


def _may_be_a_view(call: Call, is_read: bool, step: Step) -> bool:
    """Whether a view can stand for an operator that gives its argument another shape: nobody else needs that shape."""
    return call.args[0] not in step.sources and (is_read or call.results is None)


def _direct(call: Call, read: list[Value], roots: _Roots) -> list[Call]:
    """The calls that make those results of a view which are read."""
    is_view = call.kind == "operator" and call.function in _VIEWS
    if not is_view or len(read) > _MOST or not all(value in roots.of for value in read):
        return [call]
    made = []
    for value in read:
        root, lies = roots.of[value], roots.lies[value]
        args = (root, list(lies.shape), list(lies.stride), lies.offset)
        made.append(replace(call, function=_AS_STRIDED, args=args, kwargs={}, results=value))
    return made


class _Roots:
    """The tensors that hold the memory in which views lie.

    Attributes:
        of: the root of each value of which it is known, and of the root itself.
    """

    def __init__(self, step: Step) -> None:
        self.lies = step.lies
        self.of: dict[Value, Value] = {}
        self._seen = {step.lies[value].memory for value in step.sources if value in step.lies}

    def note(self, call: Call) -> None:
        """Take down the roots of what a call gives."""
        is_view = call.kind == "operator" and (call.function in _VIEWS or call.function in VIEWS_IN_PLACE)
        root = self.of.get(call.args[0]) if is_view else None
        for value in call.given():
            lies = self.lies.get(value)
            if lies is None:
                continue
            if root is not None:
                self.of[value] = root
            elif lies.memory not in self._seen and not lies.offset and not is_view and _is_steady(call):
                self.of[value] = value
            self._seen.add(lies.memory)


def _is_steady(call: Call) -> bool:
    """Whether what a call gives begins at the same place in its memory at each call."""
    return call.kind == "begin" or (call.kind == "operator" and call.function.namespace == "aten")
