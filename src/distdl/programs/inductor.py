"""Segments of a step as functions that torch's inductor compiles.

The graph of a segment is made of its recorded calls, not by running the step. All of it happens under a lock: torch's
tracer keeps state of the process, and workers may be threads.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from distdl.programs.calls import Lies, Step, Value, mapped
from distdl.programs.segments import Segment, segmented

_LOCK = threading.Lock()


def assert_can_compile() -> None:
    """Check that there is a C++ compiler.

    Raises: RuntimeError that names the cure.
    """
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(name) is None:
        raise RuntimeError(
            f'distdl.compile with backend="inductor" needs a C++ compiler, and finds no {name}: install one, as by '
            '"apt-get install g++", or name it in the variable CXX, or use backend="line", which needs none'
        )


def with_inductor(step: Step) -> Step:
    """The same step with its segments compiled.

    A segment that inductor refuses stays as it is, and a warning says so.
    """

    def compiled(segment: Segment) -> Callable[..., Any] | None:
        try:
            return _compiled(segment, step.lies)
        except Exception as error:  # whatever inductor raises: the operators are there to be called
            first = segment.calls[0]
            where = f" of {first.path}" if first.path else ""
            warnings.warn(
                f"distdl.compile: inductor refuses the {len(segment.calls)} operators from {first.name}{where} on, "
                f"which are called one by one: {type(error).__name__}: {error}",
                stacklevel=2,
            )
            return None

    with _LOCK:
        return segmented(step, compiled)


def _compiled(segment: Segment, lies: dict[Value, Lies]) -> Callable[..., Any]:
    """The function of a segment. It writes what the segment writes."""
    inductor: Any = import_module("torch._inductor.compile_fx")
    config: Any = import_module("torch._inductor.config")
    decompositions: Any = import_module("torch._inductor.decomposition")
    virtualized: Any = import_module("torch._inductor.virtualized")
    tracer: Any = import_module("torch.fx.experimental.proxy_tensor")
    fake: Any = import_module("torch._subclasses.fake_tensor")

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        known = dict(zip(segment.takes, given, strict=True))

        def now(one: Any) -> Any:
            return known[one] if type(one) is Value else one

        for call in segment.calls:
            named = {name: mapped(one, now) for name, one in call.kwargs.items()}
            _bind(call.results, call.function(*mapped(call.args, now), **named), known)
        return [known[value] for value in segment.gives]

    mode = fake.FakeTensorMode()
    with torch.no_grad(), mode:
        examples = _examples([lies[value] for value in segment.takes])
        graph = tracer.make_fx(
            torch.func.functionalize(run, remove="mutations_and_views"), decompositions.select_decomp_table()
        )(*examples)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    options = config.patch(compile_threads=1, layout_optimization=False)
    with torch.no_grad(), options, virtualized.V.set_fake_mode(mode):
        function: Any = inductor.compile_fx_inner(graph, examples, is_inference=True)
    return lambda *given: function(list(given))


def _bind(values: Any, found: Any, known: dict[Value, torch.Tensor]) -> None:
    if type(values) is Value:
        known[values] = found
    elif type(values) in (tuple, list):
        for value, one in zip(values, found, strict=True):
            _bind(value, one, known)


def _examples(lies: list[Lies]) -> list[torch.Tensor]:
    """Tensors that lie as values do, in the same memory if these do."""
    memories: dict[int, torch.Tensor] = {}
    sizes: dict[int, int] = {}
    for one in lies:
        last = one.offset + 1 + sum((n - 1) * by for n, by in zip(one.shape, one.stride, strict=True) if n > 0)
        sizes[one.memory] = max(sizes.get(one.memory, 0), last * one.dtype.itemsize)
    examples = []
    for one in lies:
        if one.memory not in memories:
            memories[one.memory] = torch.empty(sizes[one.memory], dtype=torch.uint8, device=one.device)
        cells = memories[one.memory]
        cells = cells[: cells.numel() // one.dtype.itemsize * one.dtype.itemsize].view(one.dtype)
        examples.append(cells.as_strided(one.shape, one.stride, one.offset))
    return examples
