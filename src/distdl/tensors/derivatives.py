"""What a tensor carries for differentiation, and whether anything is being differentiated or checkpointed."""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from distdl.environment.arguments import checks_fields
from distdl.tensors.private_torch import current_graph_task_id


@checks_fields
class Derivatives(NamedTuple):
    """What tensors carry along for differentiation, on any member.

    Attributes:
        gradient: one requires a gradient (and grad mode is on).
        tangent: one has a forward-mode derivative.
        tangent_gradient: one has a forward-mode derivative that itself requires a gradient.
    """

    gradient: bool = False
    tangent: bool = False
    tangent_gradient: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor, mode: bool) -> Derivatives:
        """What this worker's tensor carries.

        Args:
            mode: whether grad mode is on.
        """
        tangent = forward_ad.unpack_dual(tensor).tangent
        gradient = mode and tensor.requires_grad
        return cls._make((gradient, tangent is not None, mode and tangent is not None and tangent.requires_grad))

    def __or__(self, other: Derivatives) -> Derivatives:
        return Derivatives._make(map(operator.or_, self, other))


NONE = Derivatives()


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a forward-mode derivative."""
    return forward_ad.unpack_dual(tensor).tangent is not None


def is_differentiated_forward() -> bool:
    """Whether a level of forward-mode differentiation is open: unlike a tangent, that is the same on every worker."""
    return forward_ad._current_level >= 0


def is_checkpointed() -> bool:
    """Whether what is saved for backward now is kept by hooks, as inside an activation checkpoint."""
    hooks = saved_tensors_hooks()
    return hooks is not None and not hasattr(hooks[0], KEEPS_TENSORS)


KEEPS_TENSORS = "keeps_tensors"
"""An attribute of hooks that keep what is saved: nothing is recomputed because of them."""


class Keeping(torch.autograd.graph.saved_tensors_hooks):
    """A context in which hooks of ours keep what is saved.

    A selective checkpoint (since torch 2.14) takes them for those of checkpoints: it asks about those of users, around.
    """

    def __enter__(self) -> None:
        pack: Any = self.pack_hook
        setattr(pack, KEEPS_TENSORS, True)
        pack._checkpoint_internal, pack._user_hooks = True, saved_tensors_hooks()
        super().__enter__()

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        # the graph keeps the hook, and need not keep the hooks around it
        del self.pack_hook._user_hooks  # type: ignore[attr-defined]


def recorded() -> Any:
    """A context for what runs below autograd, as ``__torch_dispatch__`` does: autograd records there as above it."""
    keys = torch._C.DispatchKey
    excluded = torch._C._dispatch_tls_local_exclude_set()
    excluded = excluded.remove(keys.AutogradFunctionality).remove(keys.ADInplaceOrView)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def saved_tensors_hooks() -> Any:
    """The hooks that keep what is saved for backward now, as a pair; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def is_recomputed() -> bool:
    """Whether a backward is under way in which a graph is made: that of a forward that a checkpoint recomputes.

    Or that of a derivative, which is differentiated again.
    """
    return current_graph_task_id() != -1 and (torch.is_grad_enabled() or _here.recomputed)


class _Here(threading.local):
    recomputed = False


_here = _Here()


@contextmanager
def recomputing() -> Iterator[None]:
    """In which code may make no graph for a while, and is one that a backward recomputes, if it is outside."""
    around, _here.recomputed = _here.recomputed, is_recomputed()
    try:
        yield
    finally:
        _here.recomputed = around


def keeps_graph() -> bool:
    """Whether the backward that is under way keeps the graph, for another one."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


MADE_BY = "_made_by"
"""An attribute of leaves that no program has made: the transform of ``torch.func`` that has; None of a backward's."""


def next_node() -> int:
    """The number of the autograd node that this thread makes next."""
    return torch._C._autograd._get_sequence_nr()
