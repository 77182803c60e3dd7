"""Attribution: which module of a model this worker computes in, forward and backward, and for how long."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from distdl.tensors.derivatives import next_node


class Owner(NamedTuple):
    """What time and messages are counted for.

    Attributes:
        path: of the module in the model; empty for the model itself, and for what happens outside of it.
        add: takes seconds that it has computed.
    """

    path: str
    add: Callable[[float], None]


class _Opened(threading.local):
    """Of this thread.

    Attributes:
        here: the attributions that are open.
    """

    here: tuple[Attribution, ...] = ()


opened = _Opened()


class Attribution:
    """Follows a model while it is open: modules own the forward between their calls' begin and end, without the
    modules inside.

    Nodes of autograd have growing numbers, so those that a module has made in its forward lie between the number at its
    begin and that at its end. In backward, the module whose node runs is the owner. Which one that is, is looked up
    where a tensor has entered or left a module, and for each message.

    Args:
        paths: those of the modules that are followed.
        called: gets a module and its path as a call begins; returns the owner.
        outside: owner of all else.
    """

    def __init__(
        self,
        paths: dict[torch.nn.Module, str],
        called: Callable[[torch.nn.Module, str], Owner],
        outside: Owner,
    ) -> None:
        self._paths, self._called, self._outside = paths, called, outside
        self._current, self._since = outside, time.perf_counter()
        self._stack: list[tuple[Owner, Owner]] = []  # modules whose forward runs, and who was the owner before
        self._marks = [(-1, outside)]  # from which number on nodes belong to whom
        self._backward = -1  # at whose end the owner is set back
        self._hooks = ExitStack()

    def __enter__(self) -> Attribution:
        # these hooks are global: torch and distdl would take hooks of each module for hooks of the model
        begin = torch.nn.modules.module.register_module_forward_pre_hook(self._begin)
        end = torch.nn.modules.module.register_module_forward_hook(self._end, always_call=True)
        self._hooks.callback(begin.remove)
        self._hooks.callback(end.remove)
        opened.here = (*opened.here, self)
        self._since = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()
        opened.here = tuple(one for one in opened.here if one is not self)
        self._pass_to(self._outside)
        self._paths = {}

    @property
    def path(self) -> str:
        """That of the module for which this worker does something now."""
        node = torch._C._current_autograd_node()
        if node is not None and not self._stack:
            self._pass_to(self._maker(node))
        return self._current.path

    def replay(self) -> Callable[[torch.nn.Module | None], None]:
        """Follow a replay of a recorded step, in which no module is called.

        Each module that does something in it counts as called once.

        Returns: what is called with the module that comes next, and with None for what is outside of all of them.
        """
        known: dict[torch.nn.Module | None, Owner] = {}

        def comes_to(module: torch.nn.Module | None) -> None:
            owner = known.get(module)
            if owner is None:
                path = None if module is None else self._paths.get(module)
                owner = self._outside if module is None or path is None else self._called(module, path)
                known[module] = owner
            self._pass_to(owner)

        return comes_to

    def waited(self, seconds: float) -> None:
        """Take note that this worker has waited: it has not computed meanwhile."""
        self._since += seconds

    def _pass_to(self, owner: Owner) -> None:
        now = time.perf_counter()
        self._current.add(now - self._since)
        self._current, self._since = owner, now

    def _begin(self, module: torch.nn.Module, inputs: Any) -> None:
        path = self._paths.get(module)
        if path is not None:
            owner = self._called(module, path)
            self._stack.append((owner, self._current))
            self._watch(inputs)
            self._marks.append((next_node(), owner))
            self._pass_to(owner)

    def _end(self, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        if module in self._paths and self._stack:
            _, before = self._stack.pop()
            self._watch(result)
            self._marks.append((next_node(), before))
            self._pass_to(before)

    def _maker(self, node: Any) -> Owner:
        """Who has made a node of autograd."""
        return self._marks[bisect_right(self._marks, node._sequence_nr(), key=lambda mark: mark[0]) - 1][1]

    def _watch(self, value: Any) -> None:
        """Let the makers of tensors own the backward from where it comes to these."""
        for one in tree_leaves(value):
            node = one.grad_fn if isinstance(one, torch.Tensor) else None
            if node is not None:
                node.register_prehook(partial(self._reach, self._maker(node)))

    def _reach(self, maker: Owner, gradients: Any) -> None:
        # the owner stays the same after the end, and while a forward itself differentiates
        if not self._paths or self._stack:
            return
        backward = torch._C._current_graph_task_id()
        if backward != self._backward:
            self._backward = backward
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._pass_to(self._outside))
        self._pass_to(maker)
