"""What one worker does at each call of a compiled step: it calls the function, records it, or replays a line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from distdl import environment
from distdl.globals.layouts.context import Context, worlds
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import tensors_in
from distdl.programs.beside import Written, agree, differing, giver_of
from distdl.programs.calls import Step
from distdl.programs.following import is_followed
from distdl.programs.inductor import with_inductor
from distdl.programs.line import failed
from distdl.programs.matching import difference
from distdl.programs.optimisers import taken_whole
from distdl.programs.passes import improved
from distdl.programs.program import Program
from distdl.programs.randomness import States
from distdl.programs.reach import Reach, has_hook_of_all, hook_of
from distdl.programs.recorder import Recorder
from distdl.programs.structures import Result, changed, described, for_people, others_in, overlaps, versions_of
from distdl.tensors.recorders import here
from distdl.transport.communicator import Communicator

_TRIES = 4  # recordings of one signature, at most
_ASKS = 2  # what workers agree on if one of them asks before each backward
_COMPILES = 2  # the replay before which inductor compiles: the first one has the bits of the step
_WAITS = "distdl.compile: whether all workers have recorded this step"
_FITS = "distdl.compile: whether all workers can replay this backward"
_DEVICES = ("cpu", "cuda")


class Worker:
    """The programs of one worker.

    Attributes:
        name: of the function, for people.
        counts_gradients: whether a line depends on which parameters have a gradient.
    """

    counts_gradients = True

    def __init__(self, function: Callable[..., Any], signatures: int, check: bool, backend: str) -> None:
        self.function, self._most = function, signatures
        self._checks, self._debugs = check, environment.debug()
        self._inductor = backend == "inductor" and not self._debugs  # DISTDL_DEBUG compares bits, and inductor rounds
        self.programs: dict[Any, list[Program]] = {}
        self._made = self._called = 0
        self._has_warned = False

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", "a step")

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if here.recorder is not None:  # another compiled step calls this one, and records its operators
            return self.function(*args, **kwargs)
        tensors: list[torch.Tensor] = []
        named: list[Any] = []
        key = described((args, kwargs), tensors, named), overlaps(tensors), _modes()
        program = self._program(key, named, (args, kwargs))
        if program.comm is not None and program.comm.imagined:  # a rehearsal sends nothing
            return self.function(*args, **kwargs)
        ready = program.line is not None and not _is_watched() and not (program.halves and is_followed())
        halves = program.halves
        agreed = _agreed(program.comm, program.number if ready else 0, halves is not None and halves.asks)
        if agreed:
            if halves is not None:
                halves.asks = agreed == _ASKS
            if self._debugs or (self._checks and not program.checked):
                return self._replay_beside(program, tensors, args, kwargs)
            return self._replay(program, tensors, args, kwargs)
        if program.state is None:
            return self._first(program, tensors, args, kwargs)
        if program.reasons or program.line is not None or _is_watched():
            return self.function(*args, **kwargs)
        return self._record(program, tensors, args, kwargs)

    def _first(self, program: Program, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """The first call of a signature, which is as it is."""
        program.state = Reach(self.function, (args, kwargs)).state(self.counts_gradients)
        result = self.function(*args, **kwargs)
        program.state.settle()
        return result

    def _program(self, key: Any, named: list[Any], arguments: Any) -> Program:
        """That of a signature, with all that it can reach as it is now."""
        self._called += 1
        for program in self.programs.get(key, []):
            if program.state is None or program.state.holds():
                program.used = self._called
                return program
        self._made += 1
        program = Program(self._made, self._comm(arguments), named)
        program.used, program.given = self._called, for_people(*arguments)
        every = [one for ones in self.programs.values() for one in ones]
        if len(every) == self._most:
            every.sort(key=lambda one: one.used)
            self._forget(every[0])
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"distdl.compile: {self.name} has more than {self._most} signatures, and the one that was not "
                    f"called for longest goes. Since the call before, {changed(every[-1].given, program.given)}. Pass "
                    "numbers that change as tensors, or let distdl.compile(signatures=...) keep more",
                    stacklevel=2,
                )
        self.programs.setdefault(key, []).append(program)
        return program

    def _forget(self, program: Program) -> None:
        for key, ones in list(self.programs.items()):
            self.programs[key] = [one for one in ones if one is not program]
            if not self.programs[key]:
                del self.programs[key]

    def _comm(self, arguments: Any) -> Communicator | None:
        """What the step's messages go through."""
        given = next((x._context.comm for x in tensors_in(arguments) if type(x) is GlobalTensor), None)
        found = given or Reach(self.function, arguments).comm
        if found is None and len(worlds.contexts) == 1:
            found = next(iter(worlds.contexts)).comm
        return found

    def _record(self, program: Program, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        reach = Reach(self.function, (args, kwargs))
        told = "an argument requires a gradient" if any(one.requires_grad for one in tensors) else ""
        told = told or self._unfit(reach, args, kwargs)
        if told:
            return self._refuse(program, told, "", args, kwargs)
        program.modules = {path: module for module, path in reach.modules.items()}
        recorder = Recorder(reach, tensors, program.comm)
        with taken_whole(reach, recorder):
            result, found, values = self._run(program, recorder, tensors, args, kwargs)
        if any(one.requires_grad for one in found.tensors) and not recorder.differentiates:
            recorder.problem("its result requires a gradient, and no backward is in it")
        self._take(program, recorder, Step(recorder.calls, recorder.sources, values, recorder.lies))
        return result

    def _unfit(self, reach: Reach, args: Any, kwargs: Any) -> str:
        """Why a call is not worth recording; empty if it is."""
        hook = hook_of(reach)
        if hook:
            return f"{hook}, which a line would not call"
        if reach.arguments:
            return f"the function also names an argument, as {reach.arguments[0]}; use the argument there"
        foreign = next(others_in((args, kwargs)), None)
        return "" if foreign is None else f"an argument is a {type(foreign).__name__}"

    def _run(
        self, program: Program, recorder: Recorder, tensors: list[torch.Tensor], args: Any, kwargs: Any
    ) -> tuple[Any, Result, list[Any]]:
        """Call the function while it is recorded. Returns: its result, that taken apart, and the values in it."""
        states, versions = States(), versions_of(tensors)
        with recorder.recording():
            result = self.function(*args, **kwargs)
            found = Result(result)
            values = [recorder.result_of(one) for one in found.tensors]
        advanced = states.advanced()
        if advanced:
            recorder.problem(f"{advanced} random state advances, and no operator explains it")
        if versions_of(tensors) != versions:
            recorder.problem("it writes into its arguments")
        if program.result is not None and program.result.others != found.others:
            recorder.problem("a number or another thing in its result changes")
        program.recorded += 1
        program.draws = program.draws or recorder.draws
        program.result = found
        return result, found, values

    def _take(self, program: Program, recorder: Recorder, step: Step) -> None:
        """Make a line of a recording if it is the same as the one before."""
        before, program.step = program.step, step
        if recorder.problems:
            program.reasons = recorder.problems
            self._tell(program)
            return
        if before is None:
            return
        apart = difference(before, step)
        if apart is None:
            program.step = improved(step)
            program.does(program.step)
        elif program.recorded >= _TRIES:
            program.reasons = [apart]
            self._tell(program)

    def _refuse(self, program: Program, text: str, line: str, args: Any, kwargs: Any) -> Any:
        program.reasons = [(text, line)]
        self._tell(program)
        return self.function(*args, **kwargs)

    def _tell(self, program: Program) -> None:
        text, line = program.reasons[0]
        told = f"{text} ({line})" if line else text
        warnings.warn(f"distdl.compile: {self.name} stays as it is: {told}", stacklevel=2)

    def _replay_beside(self, program: Program, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """Call the function, put back what it has written, and replay.

        Raises: RuntimeError, the same on every worker, if the two differ.
        """
        assert program.step is not None
        comm, reach = program.comm, Reach(self.function, (args, kwargs))
        # threads draw from one generator of torch's, in an order that nobody knows
        shared = comm is not None and comm.threads and comm.size > 1
        before = Written(list(reach.tensors.values()), reach.optimisers, program.step, comm, shared)
        compared = not (shared and program.draws)
        theirs, graph = self._as_it_is(program, tensors, args, kwargs)
        after = before.again()
        before.restore()
        mine = self._replay(program, tensors, args, kwargs, graph if compared else None)
        if compared:
            self._compare(program, differing(mine, theirs), before.again().differs(after))
        program.checked = True
        return mine

    def _as_it_is(self, program: Program, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What the function gives; and of a model that is trained its graph, else None."""
        return self.function(*args, **kwargs), None

    def _compare(self, program: Program, result: tuple[str, int], written: str) -> None:
        assert program.step is not None
        what, place = result
        call = giver_of(program.step, what, place) if what else giver_of(program.step, written)
        text = what or written
        if text and call is not None:
            text += f", by {call.name}{f' in module {call.path}' if call.path else ''} ({call.line})"
        self._assert_same(program, text)

    def _assert_same(self, program: Program, text: str) -> None:
        """Check that the replay is the same as the step, as every worker has found it.

        Args:
            text: what differs here; empty if nothing does.
        Raises: RuntimeError, the same on every worker.
        """
        told = agree(program.comm, text)
        if told:
            program.line, program.reasons = None, [("its replay was another one than the step as it is", "")]
            raise RuntimeError(
                f"a replay of {self.name} differs from the step as it is: {told} is another one. A replay calls no "
                "Python of yours, and this step depends on something that distdl.compile does not see. Pass it as an "
                "argument"
            )

    def _replay(self, program: Program, tensors: list[torch.Tensor], args: Any, kwargs: Any, graph: Any = None) -> Any:
        assert program.result is not None
        return program.result.made(self._found(program, tensors))

    def _found(self, program: Program, tensors: list[torch.Tensor]) -> list[Any]:
        """What the line of a program gives."""
        program.replays += 1
        if self._inductor and program.replays == _COMPILES:
            self._compile(program)
            _agreed(program.comm, 1)  # no worker goes on while torch's tracer works for another one
        assert program.line is not None
        with below_autograd():
            try:
                found: list[Any] = program.replay(tensors)
            except BaseException as error:
                error.add_note(f"(in a replay of {self.name}, which repeats {failed(error)})")
                raise
        return found

    def _compile(self, program: Program) -> None:
        """Let inductor make functions of the segments of a line."""
        assert program.step is not None
        program.does(with_inductor(program.step))


@contextmanager
def below_autograd() -> Iterator[None]:
    """Where lines run: neither autograd nor autocast sees their operators."""
    with ExitStack() as around:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                around.enter_context(torch.autocast(device, enabled=False))
        around.enter_context(torch.no_grad())
        around.enter_context(torch._C._AutoDispatchBelowAutograd())
        yield


def _agreed(comm: Communicator | None, number: int, asks: bool = False) -> int:
    """Whether all workers have a line for this call, and the same one. One maximum of 16 bytes.

    Args:
        number: of the signature; 0 on a worker that has no line.
        asks: whether this worker's line may fail to do with the gradients that come in.
    Returns: 0 if not all have it. Otherwise 1, or 2 if a worker asks.
    """
    if comm is None or comm.size == 1:
        return int(number > 0)
    comm.where = _WAITS
    given = np.array([2 * number + asks, -2 * number], dtype=np.int64)
    highest, lowest = map(int, comm.through.all_max(Context.of(comm).everyone, given))
    return 1 + highest + lowest if lowest < 0 and highest + lowest < _ASKS else 0


def all_fit(comm: Communicator | None, fits: bool) -> bool:
    """Whether the backward of each worker can be a replay. One maximum of 8 bytes."""
    if comm is None or comm.size == 1:
        return fits
    comm.where = _FITS
    (misfits,) = comm.through.all_max(Context.of(comm).everyone, np.array([not fits], dtype=np.int64))
    return not misfits


def _modes() -> Any:
    """What of torch's modes a line depends on."""
    casts = [torch.get_autocast_dtype(one) for one in _DEVICES if torch.is_autocast_enabled(one)]
    return (
        torch.is_grad_enabled(), torch.is_inference_mode_enabled(), tuple(casts), torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip


def _is_watched() -> bool:
    """Whether a user's mode or hook sees what is computed here, or a transform or a checkpoint is about it."""
    return bool(
        any(not getattr(mode, "logs", False) for mode in _get_current_dispatch_mode_stack())
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        or torch._C._current_graph_task_id() != -1
        or has_hook_of_all()
    )
