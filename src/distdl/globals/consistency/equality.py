"""Equality of models: all workers begin with the same one."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import zip_longest
from zlib import crc32

import torch

from distdl.globals.consistency.checksums import checksum
from distdl.globals.consistency.comparing import SAME, first_of
from distdl.globals.layouts.context import Context
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.views.aliasing import count_of_writes
from distdl.nn.module import Module
from distdl.partition import dims
from distdl.partition.sharing import gather_values
from distdl.tensors.memory import parts_of
from distdl.transport.callsite import users_call

_CONTAINERS = torch.nn.ParameterList.__module__  # their extra_repr tells the device of parameters
_LATER = "taking in what was set or written in a model since it was distributed, or since its last forward"

_SEED = torch.Generator("cpu").initial_seed()  # torch's own, while a program has set none
_DRAWN = (
    "the workers built different weights (the first is {}), and all of them use those of worker 0 now. If worker 0 "
    "alone has loaded them, nothing has to be done. Else they differ from launch to launch: threads share one "
    "generator, so torch.manual_seed in each of them gives no worker the weights that it gives alone. For the same "
    "weights at each launch, let one worker after another build the model, or run processes (distdl run --backend "
    "gloo), or with run_workers build the model before it and give each worker copy.deepcopy(model): see 'The same "
    "weights on every worker' in docs/details/global-tensors.md"
)


class _Warned:
    """Whether a world was told that its workers have drawn different weights."""

    done = False


def make_equal(
    module: torch.nn.Module, context: Context, only: Collection[int] | None = None, options: tuple[str, ...] = ()
) -> None:
    """Give a model on every worker the parameters and buffers of worker 0. Collective.

    Nothing moves but checksums if they are equal already.

    Args:
        only: the ids of the tensors that are made equal; if not given, all are.
        options: texts of what else has to be the same on every worker.

    Raises: ValueError, the same on every worker, if the models differ in names, shapes or dtypes, in their modules, or
        in the options, or if one has weights without values (on the meta device).
    """
    if context.comm.imagined:
        return  # nobody is there
    listed = [(name, one) for name, one in whole_of(module) if only is None or id(one) in only]
    for name, one in listed:
        if torch.nn.parameter.is_lazy(one):
            raise ValueError(
                f"distribute needs a model whose parameters have their shapes; {name} gets it in a forward"
            )
    found = [(name, part) for name, one in listed for part in parts_of(one)]
    texts = [f"{name} is {dims(one.shape) or 'a number'} of {one.dtype}" for name, one in found]
    texts += (*options, *_parts(module)) if only is None else ()
    call = "distribute" if only is None else _LATER
    context.comm.where = call
    # how often each was written, and its checksum
    states = [None if one.is_meta else (count_of_writes(one), checksum(one)) for _, one in found]
    described = crc32("\n".join(texts).encode())
    told = gather_values(context.comm, context.everyone, call, (described, states))
    if any(theirs != described for theirs, _ in told):
        _check_same(context, call, texts, "distribute needs the same model and options on every worker")
    for worker, (_, theirs) in enumerate(told):
        if None in theirs:
            raise ValueError(
                f"distribute needs a model whose weights have values; on worker {worker}, "
                f"{found[theirs.index(None)][0]} is on the meta device. Load them before (model.load_state_dict(state, "
                'assign=True)), or give them memory (model.to_empty(device="cpu")): all workers get what worker 0 has'
            )
    if len({tuple(number for _, number in theirs) for _, theirs in told}) == 1:
        return
    with torch.no_grad():
        for _, one in found:
            if one.numel():
                one.copy_(first_of(context, one))
    if context.comm.threads and context.comm.rank == 0 and torch.initial_seed() != _SEED:
        _tell_of_draws(context, [name for name, _ in found], [theirs for _, theirs in told])


def _tell_of_draws(context: Context, names: Sequence[str], told: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Warn, once in a world, that workers which are threads have drawn different weights after a seed was set.

    Only weights count that all workers have written equally often, and at least once: one worker that has loaded
    weights has written them more often, and what nobody has written was not drawn.
    """
    for name, *states in zip(names, *told, strict=True):
        writes = {times for times, _ in states}
        if len(set(states)) > 1 and len(writes) == 1 and 0 not in writes and not context.own(_Warned).done:
            context.own(_Warned).done = True
            warnings.warn(_DRAWN.format(name), stacklevel=users_call()[1])


def _parts(module: torch.nn.Module) -> list[str]:
    """A text for each module of a model: its path, its class, and of torch's own modules the options."""
    found = []
    for path, child in module.named_modules():
        kind, options = type(child), ""
        if kind.__module__.startswith("torch.nn.") and kind.__module__ != _CONTAINERS:
            with suppress(AttributeError):  # raised by a layer whose weights are set in a forward
                options = child.extra_repr()
        found.append(f"{path or 'the model'} is {kind.__name__}({options})")
    return found


def _check_same(context: Context, call: str, texts: Sequence[str], rule: str, cure: str = "") -> None:
    """Check that all workers have the same texts. Collective.

    Args:
        rule, cure: what the error says before and behind the first difference.
    Raises: ValueError, the same on every worker.
    """
    told = gather_values(context.comm, context.everyone, call, list(texts))
    for worker, theirs in enumerate(told):
        for one, other in zip_longest(told[0], theirs, fillvalue="nothing more"):
            if one != other:
                raise ValueError(f"{rule}; on worker 0 {one}, and on worker {worker} {other}{cure}")


def check_equal(module: torch.nn.Module, context: Context) -> None:
    """Check that the parameters and buffers of a model are equal on all workers. Collective.

    Raises: ValueError, the same on every worker, for the first that differs.
    """
    if context.comm.imagined:
        return  # nobody is there
    found = [(name, part) for name, one in whole_of(module) for part in parts_of(one)]
    context.comm.where = "a forward"
    texts = [f"{name} has the checksum {checksum(one):08x}" for name, one in found]
    rule = "a distributed model needs the same weights on every worker"
    _check_same(context, "comparing weights", texts, rule, f". {SAME}")


def whole_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers that all workers have whole, with their names.

    Those of modules of distdl.nn are left out, as they live on some workers, and so are sharded weights.
    """
    others = [child for child in module.modules() if isinstance(child, Module)]
    apart = {id(one) for child in others for one in (*child.parameters(), *child.buffers())}
    listed = [*module.named_parameters(), *module.named_buffers()]
    return [(name, one) for name, one in listed if id(one) not in apart and type(one) is not GlobalTensor]
