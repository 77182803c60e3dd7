"""Whether the parameters and buffers that every worker has whole are still the same on all workers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from distdl.globals.consistency.checksums import Sample, is_comparable
from distdl.globals.consistency.comparing import Look, Turn, check_samples
from distdl.globals.consistency.equality import whole_of
from distdl.globals.layouts.context import Context
from distdl.tensors.recorders import as_one_call


class Drift:
    """The parameters and buffers of a model in the order in which they are compared, one in each backward."""

    def __init__(self) -> None:
        self._round: list[tuple[str, torch.nn.Module, str]] = []  # the name of each, its module, and its name there
        self._turn = Turn()  # graphs keep the turn, so it must not keep the model, which keeps graphs

    @as_one_call
    def look(self, context: Context, module: torch.nn.Module) -> Look:
        """What is compared with the gradients of the forward that begins now."""
        if context.comm.imagined or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return Look(context, None)  # a CUDA graph is replayed without Python
        if self._turn.number >= len(self._round):
            self._round, self._turn.number = _places_in(module), 0
        name, child, key = self._round[self._turn.number]
        one = getattr(child, key, None)  # None if a forward has deleted it
        return Look(context, self._turn, one if is_comparable(one) else torch.zeros(1, device="cpu"), name)


def _places_in(module: torch.nn.Module) -> list[tuple[str, torch.nn.Module, str]]:
    """Name, module and key of each parameter and buffer that every worker has whole and that a state_dict has."""
    found = []
    for name, _ in whole_of(module):
        path, _, key = name.rpartition(".")
        child = module.get_submodule(path)
        if key not in child._non_persistent_buffers_set:
            found.append((name, child, key))
    return found


def check_plain(context: Context, given: Sequence[torch.Tensor]) -> None:
    """Check that the plain tensors that a model takes are those of worker 0. Collective.

    Raises: ValueError, the same on every worker.
    """
    if context.comm.imagined:
        return
    what = "the plain tensors that a distributed model takes"
    counts = check_samples(context, what, len(given), [Sample.of(one) for one in given])
    for worker, count in enumerate(counts):
        if count != counts[0]:
            raise ValueError(
                f"a distributed model takes the same tensors on every worker; worker 0 gives {counts[0]} plain "
                f"tensors, and worker {worker} {count}"
            )
