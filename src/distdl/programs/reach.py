"""What a function can reach: the modules and tensors that it names, and whether they are still the same.

A line reads parameters and buffers from where they are. That they are still those of the recording, that nobody has
frozen one, hung a hook on a module or switched it to evaluation, is looked up before each replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dis import get_instructions
from functools import lru_cache, partial
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.nn.modules import module as torch_modules
from torch.optim.lr_scheduler import LRScheduler

from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.structures import tensors_in
from distdl.programs.calls import leaf_of
from distdl.transport.communicator import Communicator

_NUMBERS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_LIBRARIES = ("torch.", "distdl.", "numpy.", "builtins.")
_OPTIONS = (bool, int, float, str, FunctionType, MethodType, partial)
_DEEP = 4  # how far objects are looked into
_LONG = 1000  # things of a list that are looked at
_HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)  # fmt: skip
# dicts of a distributed model look up otherwise
_values: Callable[[Any], Any] = dict.values
_length: Callable[[Any], int] = dict.__len__
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Reach:
    """What a function and its arguments name.

    Attributes:
        modules: each module, with all modules in it, and its path.
        tensors: parameters, buffers and other tensors that it names, with their names.
        items: what dicts, lists, objects, optimisers and modules of the user's hold: the dict or list, the key or
            place, and what is there.
        lengths: of dicts, lists and objects.
        arguments: names by which the function also reaches a tensor among its arguments.
        optimisers: in the order in which they were found.
        schedulers: of learning rates.
        generators: of random numbers.
        comm: that of the models among them; None if there is none.
    """

    def __init__(self, function: Callable[..., Any], arguments: Any) -> None:
        self.modules: dict[torch.nn.Module, str] = {}
        self.tensors: dict[int, tuple[str, torch.Tensor]] = {}
        self.items: list[tuple[Any, Any, Any]] = []
        self.lengths: list[tuple[Any, int]] = []
        self.optimisers: list[torch.optim.Optimizer] = []
        self.schedulers: list[LRScheduler] = []
        self.generators: list[torch.Generator] = []
        self.comm: Communicator | None = None
        self._seen: set[int] = set()
        self._names: list[tuple[Any, str, Any]] = []  # an object's or a function's names, and what they stand for
        self._cells: list[tuple[CellType, Any]] = []
        self.arguments: list[str] = []
        self._given = set(map(id, tensors_in(arguments)))  # these a line takes anew
        self._look("", function, 0)
        self._seen |= self._given
        self._look("", arguments, 0)

    def paths(self) -> dict[int, str]:
        """The paths of modules by their ids."""
        return {id(module): path for module, path in self.modules.items()}

    def _look(self, name: str, one: Any, depth: int) -> None:
        if id(one) in self._seen or type(one) in _NUMBERS or depth > _DEEP:
            return
        self._seen.add(id(one))
        if id(one) in self._given:
            self.arguments.append(name)
            return
        if isinstance(one, torch.Tensor):
            self._take(name, one)
        elif isinstance(one, torch.Generator):
            self.generators.append(one)
        elif isinstance(one, torch.nn.Module):
            self._module(name, one)
        elif isinstance(one, FunctionType):
            self._function(one, depth)
        elif isinstance(one, MethodType):
            self._look(name, one.__self__, depth)
            self._look(name, one.__func__, depth)
        elif isinstance(one, partial):
            for part in (one.func, one.args, one.keywords):  # a tuple of them would be gone, and its id another's
                self._look(name, part, depth)
        elif isinstance(one, torch.optim.Optimizer):
            self.optimisers.append(one)
            self._hold(one.__dict__, [(key, one.__dict__[key]) for key in ("param_groups", "state")])
            self._look(name, one.param_groups, depth)
        elif isinstance(one, LRScheduler):
            self.schedulers.append(one)
            self._look(name, one.optimizer, depth)
        elif isinstance(one, (tuple, list)):
            for place, item in enumerate(one[:_LONG]):
                self._look(f"{name}[{place}]", item, depth)
            if isinstance(one, list):
                self._hold(one, enumerate(one[:_LONG]))
                self.lengths.append((one, len(one)))
        elif isinstance(one, dict):
            for key, item in list(one.items())[:_LONG]:
                self._look(f"{name}[{key!r}]", item, depth)
            self._hold(one, list(one.items())[:_LONG])
            self.lengths.append((one, len(one)))
        elif not f"{type(one).__module__}.".startswith(_LIBRARIES) and isinstance(getattr(one, "__dict__", None), dict):
            for key, item in list(one.__dict__.items()):
                if isinstance(item, (torch.Tensor, torch.nn.Module)):
                    self._names.append((one.__dict__, key, item))
                self._look(f"{name}.{key}" if name else key, item, depth + 1)
            self._hold(one.__dict__, list(one.__dict__.items()))
            self.lengths.append((one.__dict__, len(one.__dict__)))

    def _hold(self, held: Any, items: Iterable[tuple[Any, Any]]) -> None:
        self.items += [(held, key, item) for key, item in items]

    def _function(self, one: FunctionType, depth: int) -> None:
        for name, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=True):
            try:
                found = cell.cell_contents
            except ValueError:  # it is empty
                continue
            self._cells.append((cell, found))
            self._look(name, found, depth)
        for name in _global_names(one.__code__):
            if name in one.__globals__:
                found = one.__globals__[name]
                self._names.append((one.__globals__, name, found))
                self._look(name, found, depth)
        self._look("", one.__defaults__ or (), depth)
        self._look("", one.__kwdefaults__ or {}, depth)

    def _module(self, name: str, root: torch.nn.Module) -> None:
        for path, module in root.named_modules():
            where = ".".join(part for part in (name, path) if part)
            if module in self.modules:
                continue
            self.modules[module] = where or type(module).__name__
            for key, one in (*dict.items(module._parameters), *dict.items(module._buffers)):
                if one is not None:
                    self._take(f"{where}.{key}" if where else key, one)
            for key, one in module.__dict__.items():
                if isinstance(one, torch.Tensor):
                    self._names.append((module.__dict__, key, one))
                    self._take(f"{where}.{key}" if where else key, one)
            if not f"{type(module).__module__}.".startswith(_LIBRARIES):
                for key, one in list(module.__dict__.items()):
                    if not key.startswith("_") and type(one) not in _OPTIONS:
                        self._hold(module.__dict__, [(key, one)])
                        self._look(f"{where}.{key}" if where else key, one, 1)
                for function in [one for one in vars(type(module)).values() if isinstance(one, FunctionType)]:
                    self._look("", function, _DEEP)
            for partition in (getattr(copies_of(module), "P", None), module.__dict__.get("P_x")):
                if self.comm is None and partition is not None:
                    self.comm = partition.comm

    def _take(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors.setdefault(id(tensor), (name, tensor))

    def state(self, gradients: bool = True) -> State:
        """How all of it is now.

        Args:
            gradients: whether it matters which parameters have a gradient.
        """
        return State(self, gradients)

    def names(self) -> Iterator[tuple[Any, str, Any]]:
        return iter(self._names)

    def cells(self) -> Iterator[tuple[CellType, Any]]:
        return iter(self._cells)


def copies_of(module: torch.nn.Module) -> Any:
    """How the parameters of a distributed model come to its forward; None of another module."""
    return getattr(module._parameters, "copies", None)


@lru_cache(maxsize=1024)
def _global_names(code: CodeType) -> list[str]:
    """The global names that a function reads, and those in it."""
    found = [one.argval for one in get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for one in code.co_consts if isinstance(one, CodeType) for name in _global_names(one)]
    return list(dict.fromkeys([*found, *inner]))


def hook_of(reach: Reach) -> str:
    """Where a user's hook hangs that a line would not call; empty if there is none."""
    for module, path in reach.modules.items():
        if any(_is_users(hook) for name in _HOOKS for hook in getattr(module, name).values()):
            return f"the module {path} has a hook"
    for name, tensor in reach.tensors.values():
        if any(getattr(leaf_of(tensor), each) for each in _OF_TENSORS):
            return f"the tensor {name} has a hook"
    return ""


def has_hook_of_all() -> bool:
    """Whether a user's hook hangs on every module, as by ``register_module_forward_hook``."""
    return any(_is_users(hook) for name in _HOOKS for hook in getattr(torch_modules, f"_global{name}").values())


def _is_users(hook: Any) -> bool:
    return not str(getattr(hook, "__module__", "")).startswith("distdl.")


class State:
    """How what a function reaches was at some time. (Lists are compared at the speed of C.)"""

    def __init__(self, reach: Reach, gradients: bool) -> None:
        self._gradients = gradients
        self._names = list(reach.names())
        self._cells = list(reach.cells())
        self._modules = list(reach.modules)
        self._training = [module.training for module in self._modules]
        self._lengths = reach.lengths
        self._items = reach.items + [
            (module.__dict__, key, one)
            for module in self._modules
            for key, one in module.__dict__.items()
            if type(one) in _OPTIONS and key != "training"
        ]
        self._dicts = [
            (held, list(_values(held)))
            for module in self._modules
            for held in (module._parameters, module._buffers, module._modules)
            if _length(held)
        ]
        self._hooks = [getattr(module, name) for module in self._modules for name in _HOOKS]
        self._hooked = [len(hooks) for hooks in self._hooks]
        self._copies = list({id(one): one for one in map(copies_of, self._modules) if one is not None}.values())
        tensors = [one for _, one in reach.tensors.values()]
        self._plain = [one for one in tensors if type(one) is not GlobalTensor]
        self._global = [one for one in tensors if type(one) is GlobalTensor]
        self._kept = self._of_tensors()

    def _of_tensors(self) -> list[Any]:
        """Whether each tensor requires a gradient, has one, and has hooks; where it lies, and how."""
        every: list[Any] = [*self._plain, *[one._block for one in self._global]]
        return [
            *[one.requires_grad for one in every],
            *[one.requires_grad and one.is_leaf and self._has(one.grad) for one in every],
            *[one._backward_hooks is None for one in every],
            *[one._post_accumulate_grad_hooks is None for one in every],
            *[(one.dtype, one.shape, one.layout is torch.strided and one.stride()) for one in every],
        ]

    def _has(self, gradient: Any) -> bool:
        """Whether there is a gradient that matters: a forward gathers one that is a global tensor."""
        return gradient is not None if self._gradients else type(gradient) is GlobalTensor

    def settle(self) -> None:
        """Leave out what the function itself has changed since, as counts of its calls."""
        self._items = [each for each in self._items if _is_at(*each)]
        self._lengths = [(held, length) for held, length in self._lengths if len(held) == length]

    def holds(self) -> bool:
        """Whether all of it is still so."""
        same = all(_is_same(names.get(name), one) for names, name, one in self._names)
        return (
            same
            and all(_is_in(cell, one) for cell, one in self._cells)
            and [module.training for module in self._modules] == self._training
            and all(_is_at(held, key, one) for held, key, one in self._items)
            and all(len(held) == length for held, length in self._lengths)
            and all(_length(held) == len(ones) and all(map(is_, _values(held), ones)) for held, ones in self._dicts)
            and list(map(len, self._hooks)) == self._hooked
            and not any(copies.additions.open or copies.running for copies in self._copies)
            and self._of_tensors() == self._kept
        )


def _is_same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and type(now) in _NUMBERS and now == before)


def _is_at(held: Any, key: Any, before: Any) -> bool:
    try:
        return _is_same(held[key], before)
    except (KeyError, IndexError):
        return False


def _is_in(cell: CellType, before: Any) -> bool:
    try:
        return _is_same(cell.cell_contents, before)
    except ValueError:
        return False
