"""The line: a recorded step as a Python function that calls its operators and messages, one after the other.

A value is a local variable, which goes after the last call that reads it. So a step holds no more memory than autograd
would. Functions, and what is no number or text, are global names of the line.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from types import MethodType
from typing import Any

from torch.profiler import record_function

from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.programs.bindings import binding_of
from distdl.programs.calls import Call, Step, Value, values_in
from distdl.programs.passes import for_a_line
from distdl.transport.callsite import ORIGINS, Origin

_NUMBERS = count()


class Source:
    """The text of a line, and what its names mean.

    Args:
        step: what is to be done.
        followed: whether the line also takes a function that it calls with the path of each module to which it comes,
            and names messages in a profile.
    Attributes:
        text: Python.
        names: what the text does not define.
        origins: what its lines repeat, by their numbers.
    """

    def __init__(self, step: Step, followed: bool = False) -> None:
        self._followed = followed
        self.names: dict[str, Any] = {}
        self._known: dict[Any, str] = {}
        self._kept: list[Any] = []
        self.origins: dict[int, Origin] = {}
        texts = [f"def line(arguments{', follow' if followed else ''}):"]
        for text, call in self._body(for_a_line(step)):
            texts.append(f"    {text}")
            if call is not None:
                self.origins[len(texts)] = Origin(call.path, call.line, call.name)
        self.text = "\n".join(texts) + "\n"

    def compiled(self) -> Callable[..., Any]:
        """The function."""
        file = f"<a step of distdl.compile, {next(_NUMBERS)}>"
        linecache.cache[file] = len(self.text), None, self.text.splitlines(keepends=True), file
        scope = {**self.names, ORIGINS: self.origins}
        exec(compile(self.text, file, "exec"), scope)  # the text is our own
        line: Callable[..., Any] = scope.pop("line")  # no cycle keeps the tensors that it names
        weakref.finalize(line, linecache.cache.pop, file, None)
        return line

    def _body(self, step: Step) -> Iterator[tuple[str, Call | None]]:
        last, path = _last_uses(step), ""
        for text in self._sources(step):
            yield text, None
        for place, call in enumerate(step.calls):
            if self._followed and call.kind != "gradient" and call.path != path:
                path = call.path
                yield f"follow({path!r})", None
            gone = [value for value in dict.fromkeys((*call.read(), *call.given())) if last[value] == place]
            yield self._statement(call, {value for value in call.given() if last[value] == place}), call
            dying = [f"v{int(value)}" for value in gone if value not in call.given()]
            if dying:
                yield f"del {', '.join(dying)}", None
        yield f"return {self._text(step.result)}", None

    def _sources(self, step: Step) -> Iterator[str]:
        used = {value for call in step.calls for value in call.read()} | set(values_in(step.result))
        for value, source in step.sources.items():
            if value not in used:
                continue
            if source.kind == "argument":
                yield f"v{int(value)} = arguments[{source.of}]"
            elif source.kind == "gradient":
                yield f"v{int(value)} = {self._leaf(source.of)}.grad"
            elif source.kind == "block":
                yield f"v{int(value)} = {self._name(source.of, 'p')}._block"
            else:
                yield f"v{int(value)} = {self._name(source.of, 'p')}"

    def _statement(self, call: Call, unread: set[Value]) -> str:
        if call.kind == "wait":
            return f"{self._text(call.args[0])}.wait()"
        if call.kind == "gradient":
            return f"{self._leaf(call.function)}.grad = {self._text(call.args[0])}"
        function = binding_of(call.function) if call.kind == "operator" else call.function
        given = [*(self._text(one) for one in call.args), *(f"{k}={self._text(v)}" for k, v in call.kwargs.items())]
        stem = call.name.rpartition(".")[2] if call.kind != "operator" else call.name.split(".")[1]
        if self._followed and call.kind == "begin":
            function = partial(_profiled, call.label, function)
        text = f"{self._name(function, stem)}({', '.join(given)})"
        read = [value for value in values_in(call.results) if value not in unread]
        return f"{_pattern(call.results, set(read))} = {text}" if read else text

    def _leaf(self, owner: Any) -> str:
        """The plain tensor that has the gradient of a parameter."""
        return self._name(owner, "p") + ("._block" if type(owner) is GlobalTensor else "")

    def _text(self, one: Any) -> str:
        """A thing that a call takes, as Python."""
        kind = type(one)
        if kind is Value:
            return f"v{int(one)}"
        if one is None or kind in (bool, int) or (kind is float and one == one and abs(one) != float("inf")):
            return repr(one)
        if kind is str:
            return repr(one)
        if kind is list:
            return f"[{', '.join(map(self._text, one))}]"
        if kind is tuple:
            return f"({', '.join(map(self._text, one))}{',' if len(one) == 1 else ''})"
        return self._name(one, kind.__name__.lower())

    def _name(self, one: Any, stem: str) -> str:
        """The name of a thing that the line finds around it."""
        key = (id(one.__self__), id(one.__func__)) if type(one) is MethodType else id(one)
        if key not in self._known:
            self._known[key] = name = f"{stem if stem.isidentifier() else 'f'}_{len(self._known)}"
            self.names[name] = one
            self._kept.append(one)
        return self._known[key]


def failed(error: BaseException) -> str:
    """What a line called when an error was raised in it, with module and the user's line."""
    trace = error.__traceback__
    while trace is not None:
        origin = Origin.of(trace.tb_frame, trace.tb_lineno)
        if origin is not None:
            where = [f"module {origin.path}"] if origin.path else []
            return f"{origin.call} ({', '.join([*where, origin.line])})"
        trace = trace.tb_next
    return "what it reads"


def _profiled(label: str, function: Callable[..., Any], *args: Any) -> Any:
    with record_function(label):
        return function(*args)


def _pattern(results: Any, read: set[Value]) -> str:
    """What stands before the ``=``."""
    if type(results) in (tuple, list):
        parts = [_pattern(one, read) for one in results]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return f"v{int(results)}" if type(results) is Value and results in read else "_"


def _last_uses(step: Step) -> dict[Value, int]:
    """The place of the last call that needs each value; behind all calls if the result does."""
    last = dict.fromkeys(step.sources, -1)
    for place, call in enumerate(step.calls):
        for value in (*call.given(), *call.read()):
            last[value] = place
    return {**last, **dict.fromkeys(values_in(step.result), len(step.calls))}
