"""The recorder: it takes down the calls of a step while the step runs.

It is a dispatch mode, below autograd, and its stack is that of the thread: workers that are threads record at the same
time. It sees each operator of torch, in the forward and in the backward. What it must not look into, it takes down as
one call (see :mod:`distdl.tensors.recorders`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import tensors_in
from distdl.programs.calls import Call, Lies, Source, Step, Value, leaf_of, mapped
from distdl.programs.constants import Constants
from distdl.programs.memory import Memory
from distdl.programs.owners import Owners
from distdl.programs.places import Places
from distdl.programs.randomness import Generators, generator_for, number_of
from distdl.programs.reach import Reach
from distdl.programs.reads import Reads
from distdl.programs.segments import written
from distdl.tensors.draws import Draw
from distdl.tensors.recorders import here
from distdl.transport import Pending
from distdl.transport.communicator import Communicator
from distdl.transport.recording import Call as Sent
from distdl.transport.recording import Recording

_PLAIN = (type(None), bool, int, float, str)
_DEPENDS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_SET = (
    "a random state is set, or advances though no operator explains it, as in a checkpoint that draws from torch's "
    "own generator"
)
_DEVICE = torch.ops.prim.device.default
_INDEX = torch.ops.aten.index.Tensor
_AS_STRIDED = torch.ops.aten.as_strided.default
_LSTM = torch.ops.aten.mkldnn_rnn_layer.default
_MOVES_MEMORY = frozenset(
    [
        torch.ops.aten.set_.source_Tensor,
        torch.ops.aten.set_.source_Storage_storage_offset,
        torch.ops.aten.resize_.default,
    ]
)


class Recorder(TorchDispatchMode):
    """What records a step.

    Args:
        reach: the parameters, buffers, modules and generators that the step may use.
        arguments: the plain tensors among the step's arguments, of global tensors their blocks.
        comm: what its messages go through; None if there is none.
    Attributes:
        problems: why the step cannot be a line, each with the user's line.
        draws: whether an operator was recorded that draws from torch's generators.
        differentiates: whether there was a backward in it.
    """

    unseen = True  # torch's kernels are chosen as if it were not there

    def __init__(self, reach: Reach, arguments: Sequence[torch.Tensor], comm: Communicator | None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.sources: dict[Value, Source] = {}
        self.problems: list[tuple[str, str]] = []
        self.draws = self.differentiates = False
        self._owners, self._comm = Owners(reach.tensors.values()), comm
        self._memory, self._places = Memory(), Places(reach.paths())
        self._constants, self._generators = Constants(), Generators(reach.generators)
        self._objects: dict[int, tuple[Value, Any]] = {}
        self._count, self._reserved, self._is_paused = 0, 0, False
        self._gradients: Mapping[int, Any] = {}  # as they were before the calls that are recorded now
        self._message: Call | None = None  # the one whose messages are under way just now
        for number, one in enumerate(arguments):
            self.argument(number, one, f"argument {number}")

    def argument(self, number: int, tensor: torch.Tensor, name: str) -> None:
        """Note that a tensor comes from outside, and is another one in each call."""
        source, _ = self._owners.find(tensor)
        if source is not None and source.kind != "argument" and tensor.numel():
            self.problem(f"{name} lies in the memory of {source.name}; pass a clone of it")
        self._owners.add(Source("argument", number, name), tensor)

    # -- what is recorded

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs inside on this thread."""
        before = None if self._comm is None else self._comm.recorder
        if self._comm is not None:
            self._comm.recorder = Recording(self._comm.through, begun=self._sent)
        here.recorder = self
        self._gradients = self._owners.gradients()
        self._generators.begin()
        try:
            with self, Reads(self._reads):
                yield
            if self._generators.any_is_set():
                self.problem(_SET)
            moved = self._owners.moved()
            if moved:
                self.problem(f"{moved} gets other memory, as by .data = ...")
            self._take_gradients()
        finally:
            here.recorder = None
            if self._comm is not None:
                self._comm.recorder = before

    def step(self, result: Any) -> Step:
        """What has been recorded, of which this is the result."""
        return Step(self.calls, self.sources, self._given(result), self.lies)

    def optimise(self, optimiser: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Call the step of an optimiser, and take it down as one call, before which gradients are set."""
        self._take_gradients()
        self._gradients = self._owners.gradients()
        leaves = [leaf_of(one) for group in optimiser.param_groups for one in group["params"]]
        given = self._given((step, leaves, [one.grad for one in leaves if one.grad is not None]))
        self._constants.forget(leaves)
        with self.paused():
            if self._generators.any_is_set():
                self.problem(_SET)
            result = step()
            self.draws = self.draws or self._generators.any_is_set()
            self._generators.begin()
        if result is not None:
            self.problem("the step of its optimiser gives a value")
        self._append(Call("function", optimised, given))
        return result

    def result_of(self, tensor: torch.Tensor) -> Value:
        """The value that a tensor of the result is."""
        return self._value(tensor)

    def problem(self, text: str) -> None:
        """Note why the step cannot be a line."""
        self.problems.append((text, self._places.here()[1]))

    @property
    def lies(self) -> dict[Value, Lies]:
        """How values lie in memory."""
        return self._memory.lies

    def _reads(self, name: str, tensor: Any) -> None:
        """Note that Python reads a tensor, unless it makes a list of a constant. Shared memory may be written later."""
        if name != "tolist" or type(tensor) is GlobalTensor or not self._constants.hold([tensor]):
            self.problem(f"a value is read, by {name}")

    # -- what the hooks call

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if GlobalTensor in types:  # which calls the operator on its block
            return NotImplemented
        if self._is_paused or func is _DEVICE:
            return func(*args, **kwargs)
        read = list(tensors_in((args, kwargs)))
        depends = any(tag in func.tags for tag in _DEPENDS) and not (func is _INDEX and not _has_mask(args[1]))
        if depends and not self._constants.hold(read):
            self.problem(f"a value is read, by {func.name()}")
        if func in _MOVES_MEMORY:
            self.problem(f"a tensor gets other memory, by {func.name()}")
        generator = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws, generator = True, self._generator(read, args, kwargs)
        if torch._C._current_graph_task_id() != -1:
            self.differentiates = True
        given, named = self._given(args), {name: self._given(one) for name, one in kwargs.items()}
        result = func(*args, **kwargs)
        if generator is not None:
            self._generators.leave(generator)
        self._constants.note(func, read, result)
        self._note(func, given, named, result)
        return result

    def call(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        given = self._given(args)
        self._constants.forget(list(tensors_in(args)))
        with self.paused():
            result = function(*args)
        if type(result) is Draw and _identity(result) in self._objects:
            return result  # a checkpoint draws again what its forward drew
        self._append(Call("function", function, given, {}, mapped(result, self._made)))
        return result

    def reserve(self) -> int:
        self._reserved += 1
        return self._reserved - 1

    def begin(
        self, function: Callable[..., Any], args: tuple[Any, ...], again: tuple[Any, ...] | None = None
    ) -> tuple[Any, Any]:
        call = Call("begin", function, self._given(args if again is None else again))
        before, self._message = self._message, call
        try:
            with self.paused():
                y, pending = function(*args)
        finally:
            self._message = before
        waits = self._next()
        call.results = [self._made(y), waits]
        self._append(call)
        return y, Pending(partial(self._wait, call, waits, pending))

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused, here.recorder = self._is_paused, True, None
        try:
            yield
        finally:
            self._is_paused, here.recorder = before, self

    def _wait(self, call: Call, waits: Value, pending: Pending) -> None:
        before, self._message = self._message, call
        try:
            with self.paused():
                pending.wait()
        finally:
            self._message = before
        self._append(Call("wait", call.function, (waits,)))

    def _sent(self, sent: Sent) -> None:
        """Count messages, and find those that are not recorded."""
        if self._message is not None:
            if sent.operation in ("all_gather", "all_max"):
                return  # DISTDL_DEBUG compares before each exchange
            if sent.operation == "exchange":
                self._message.sends += sent.sends
                self._message.receives += sent.receives
            else:
                others = [worker for worker in sent.workers if self._comm is not None and worker != self._comm.rank]
                self._message.sends += [(worker, sent.nbytes) for worker in others]
        elif not self._is_paused and sent.operation != "all_max":
            self.problem(f"workers tell each other values, in {sent.where}")

    def _generator(self, read: Sequence[torch.Tensor], args: Any, kwargs: dict[str, Any]) -> torch.Generator | None:
        """From which generator an operator draws; None if a call of the step has made it."""
        device = read[0].device if read else torch.device(kwargs.get("device") or "cpu")
        generator = generator_for((*args, *kwargs.values()), device)
        if _identity(generator) in self._objects:
            return None
        if self._generators.is_set(generator):
            self.problem(_SET)
        return generator

    # -- values

    def _next(self) -> Value:
        self._count += 1
        return Value(self._count - 1)

    def _append(self, call: Call) -> None:
        call.path, call.line = self._places.here()
        self.calls.append(call)

    def _given(self, structure: Any) -> Any:
        return mapped(structure, self._taken)

    def _taken(self, one: Any) -> Any:
        """What a call takes, as a value if it is one."""
        if isinstance(one, torch.Tensor):
            return self._value(one)
        if type(one) in _PLAIN:
            return one
        found = self._objects.get(_identity(one))
        return one if found is None else found[0]

    def _made(self, one: Any) -> Any:
        """The value that a call of ours gives: a new one, also where a tensor was a value before."""
        if one is None:
            return None
        value = self._next()
        if isinstance(one, torch.Tensor):
            self._memory.bind(one, value)
        elif type(one) in _PLAIN:
            self.problem(f"a function gives {one!r}, and may give another value next time")
        else:
            self._objects[_identity(one)] = value, one
        return value

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        writes = func._schema.is_mutable
        shapes: dict[Value, Any] = {}
        anew = False

        def made(one: Any) -> Any:
            nonlocal anew
            if not isinstance(one, torch.Tensor):
                return None
            value = self._memory.value(one)
            if value is not None:
                return None
            anew, value = True, self._next()
            self._memory.bind(one, value)
            shapes[value] = tuple(one.shape), one.dtype
            return value

        results = mapped(result, made)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if anew or writes or draws:  # else it gives only what is a value already, as detach does
            trains = func is _LSTM and torch.is_grad_enabled()
            kind, function = ("function", trained_lstm) if trains else ("operator", func)
            call = Call(kind, function, args, kwargs, results, writes or draws, shapes)
            self._append(call)
            into = written(call) if kind == "operator" and writes else ()
            if any(value in self.sources and self.sources[value].kind == "constant" for value in into):
                self.problem(f"{func.name()} writes into a tensor that the function does not name")

    def _value(self, tensor: torch.Tensor) -> Value:
        """The value that a tensor is, which comes from outside if the step has not made it."""
        value = self._memory.value(tensor)
        if value is not None:
            return value
        source, owner = self._owners.find(tensor)
        if source is not None:
            if owner is tensor or self._memory.value(owner) is None:
                value = self._next()
                self.sources[value] = source
                self._memory.bind(owner, value)
            value = self._memory.value(tensor)
            return self._as_strided(tensor, source.kind == "argument") if value is None else value
        if self._memory.shares(tensor):
            return self._as_strided(tensor)
        if tensor.requires_grad and tensor.numel():
            self.problem("it reads a tensor that requires a gradient, and that the function does not name")
        value = self._next()
        self.sources[value] = Source("constant", tensor, self._places.here()[1])
        self._memory.bind(tensor, value)
        return value

    def _as_strided(self, tensor: torch.Tensor, is_given: bool = False) -> Value:
        """A view that the recorder did not see. Of an argument there is none, as the next one may lie elsewhere."""
        base = self._memory.beside(tensor)
        if base is None or is_given or tensor.is_conj() or tensor.is_neg():
            self.problem(f"a view of the shape {list(tensor.shape)} was made where nobody sees it")
            base = Value(0)
        value = self._next()
        self._memory.bind(tensor, value)
        args = (base, list(tensor.shape), list(tensor.stride()), tensor.storage_offset())
        self._append(
            Call("operator", _AS_STRIDED, args, {}, value, False, {value: (tuple(tensor.shape), tensor.dtype)})
        )
        return value

    def _take_gradients(self) -> None:
        """Take down which gradients are other tensors now."""
        before = self._gradients
        for owner in self._owners.leaves():
            now = leaf_of(owner).grad
            if now is not None and now is not before.get(id(owner)):
                self.calls.append(Call("gradient", owner, (self._value(now),), path=self._owners.name(owner)))
            elif now is None and before.get(id(owner)) is not None:
                self.calls.append(Call("gradient", owner, (None,), path=self._owners.name(owner)))


def optimised(step: Callable[[], Any], parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Call the step of an optimiser. The tensors are what it reads and writes, which a line has to know."""
    step()


def trained_lstm(*args: Any, **kwargs: Any) -> Any:
    """The layer of an LSTM by oneDNN. It keeps what its backward needs only if gradients are enabled."""
    with torch.enable_grad():
        return _LSTM(*args, **kwargs)


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in indices)


def _identity(one: Any) -> Any:
    """What tells an object from others."""
    return ("generator", number_of(one)) if isinstance(one, torch.Generator) else id(one)
