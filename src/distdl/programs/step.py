"""``distdl.compile``: a step that is called as it is, recorded while it runs, and then replayed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import update_wrapper
from typing import Any

import torch

from distdl.environment.arguments import checks_arguments
from distdl.programs.compiled_model import CompiledModel, compiled_model
from distdl.programs.inductor import assert_can_compile
from distdl.programs.models import ModelWorker
from distdl.programs.printing import shown
from distdl.programs.program import Program
from distdl.programs.worker import Worker


class CompiledStep:
    """A function whose calls become a line (see :func:`compile`)."""

    def __init__(self, function: Callable[..., Any], signatures: int, check: bool, backend: str) -> None:
        self._function, self.options = function, (signatures, check, backend)
        self._here = threading.local()
        self._is_model = isinstance(function, torch.nn.Module)
        if not self._is_model:  # it has names of its own
            update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._worker().call(args, kwargs)

    def _worker(self) -> Worker:
        found: Worker | None = getattr(self._here, "worker", None)
        if found is None:
            kind = ModelWorker if self._is_model else Worker
            found = self._here.worker = kind(self._function, *self.options)
        return found

    def explain(self) -> str:
        """Why calls of this worker stay as they are, with the user's lines; or that nothing keeps them from a line."""
        told = []
        for program in self.programs:
            told += [
                f"signature {program.number}: {text}{f' ({line})' if line else ''}" for text, line in program.reasons
            ]
        return "\n".join(told) or "nothing that was recorded keeps its calls from being a line"

    def __str__(self) -> str:
        name = getattr(self._function, "__name__", "a step")
        told = [shown(one.step, f"{name}, signature {one.number}") for one in self.programs if one.line and one.step]
        return "\n\n".join(told) or f"# {name}: {self.explain()}"

    @property
    def programs(self) -> list[Program]:
        """Those of this worker, in the order in which their signatures came."""
        return sorted((one for ones in self._worker().programs.values() for one in ones), key=lambda one: one.number)


@checks_arguments
def compile(
    function: Callable[..., Any] | None = None, *, signatures: int = 16, check: bool = False, backend: str = "line"
) -> Any:
    """A step that is recorded while it runs, and then replayed without Python between torch's operators.

    ``@distdl.compile``, or ``@distdl.compile(signatures=4)``, before a function that trains: it computes a loss, calls
    ``loss.backward()`` and returns numbers or tensors. The first call of a signature runs as it is. The second and the
    third are recorded while they run, and compared. From then on its operators and messages are called one after the
    other, as a line of Python that ``print(step)`` shows, with the same bits. Every worker calls it, as it would call
    the function.

    The signature is what a line depends on: layouts, shapes, strides and dtypes of arguments, numbers among them, which
    modules it reaches and which of their parameters require gradients and have one, training mode, gradient mode and
    autocast. If any of it changes, the call runs as it is, and a line of its own is recorded.

    ``distdl.compile(model)`` gives a model whose forward is one node of autograd, and whose backward is a line, too. It
    is of the model's class, and its parameters, modules and other attributes are the model's own; ``_orig_mod`` is the
    model, which is called as it is. A call is recorded together with its first backward. Where backwards are
    differentiated (``create_graph=True``), or begin at other results than in the recordings, the model stays as it is;
    a replay before that is computed once more, or raises where it drew random numbers or keeps statistics.

    What cannot be recorded stays as it is, and warns once with the reason: a value that Python reads, a constant that
    changes, hooks, random numbers that no operator of torch draws, writing into arguments, a result that requires a
    gradient without a backward inside. ``step.explain()`` says it again.

    Args:
        function: what is compiled: a function that trains or predicts, or a model.
        signatures: how many are kept. The one that was not called for longest goes, and one warning says what changes.
        check: whether the first replay of each signature is compared with the function: it is called, what it has
            written is put back, and results, gradients, weights, statistics and random states of the replay have to
            have the same bits. With ``DISTDL_DEBUG=1`` every replay is compared. Of a model, the backwards of that
            replay are compared, too.
        backend: ``"line"``, or ``"inductor"``, which compiles the operators between messages before the second replay.
            Its results are those of the step up to rounding, and it needs a C++ compiler.
    Returns: the compiled step, whose results are detached, or the compiled model. Results are new memory on each call.
        Attributes: ``programs``, each with ``counts`` of operators, messages and bytes.
    Raises: ValueError for no signatures and another backend; RuntimeError where ``"inductor"`` finds no C++ compiler.
        A call raises RuntimeError, the same on every worker, if a compared replay differs.
    """
    if signatures < 1:
        raise ValueError(f"distdl.compile needs signatures to be at least 1; got {signatures}")
    if backend not in ("line", "inductor"):
        raise ValueError(f'distdl.compile knows the backends "line" and "inductor"; got {backend!r}')
    if backend == "inductor":
        assert_can_compile()
    if function is None:
        return lambda one: compile(one, signatures=signatures, check=check, backend=backend)
    if isinstance(function, CompiledModel):
        function = function._orig_mod
    made = CompiledStep(function, signatures, check, backend)
    return compiled_model(function, made) if isinstance(function, torch.nn.Module) else made
