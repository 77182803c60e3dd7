"""``distribute``: a user's model computes with global tensors from then on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from inspect import Signature, signature
from types import MethodType
from typing import Any

import torch

from distdl.geometry.regions import Region, meet
from distdl.globals.consistency import debug
from distdl.globals.consistency.checksums import PLAIN
from distdl.globals.consistency.drift import check_plain
from distdl.globals.consistency.equality import check_equal, make_equal
from distdl.globals.functions.plain_random import Drawing
from distdl.globals.layouts.context import Context, other_world, worlds
from distdl.globals.models.membership import join
from distdl.globals.models.parameters import Parameters, Weights
from distdl.globals.models.replicated_weights import ReplicatedWeights
from distdl.globals.models.sharded_weights import ShardedWeights
from distdl.globals.moving.alignment import local_slice
from distdl.globals.moving.idle import warn_of_idle
from distdl.globals.tensor.block import Block, unblocked
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.provenance import check_origin
from distdl.globals.tensor.running import running
from distdl.globals.tensor.structures import map_tensors, tensors_in
from distdl.nn.compiling import leave_uncompiled
from distdl.nn.placement import distributed_models
from distdl.partition.arguments import Split, checks_arguments
from distdl.tensors.derivatives import is_recomputed
from distdl.tensors.function import TransformError
from distdl.tensors.modes import unobserved
from distdl.tensors.private_torch import are_functorch_transforms_active, get_tracing_state
from distdl.tensors.recorders import aside
from distdl.transport.callsite import Place
from distdl.workers.worlds import split_of

WEIGHTS = ("replicated", "sharded")
FALLBACKS = ("warn", "error", "silent")
_COMPARED = 4  # in so many forwards of a model, its plain inputs are compared between workers first


@checks_arguments
def distribute(
    module: torch.nn.Module, P: Split, weights: str = "replicated", fallback: str = "warn"
) -> torch.nn.Module:
    """Make a model compute with tensors that are split over a partition. Its code, its parameters and its names stay.

    Every worker of the world of ``P`` has built the model, calls it, and calls what follows: the loss, ``backward``,
    the optimiser. Where weights or buffers differ, all workers get those of worker 0. ``model(x)`` takes global
    tensors. A plain tensor, which then has to be the same on every worker, is split over ``P`` if it has at least as
    many dims as ``P`` has axes; else every worker keeps all of it.

    While the forward runs, random functions of plain tensors (``torch.rand(x.shape)``) draw the same on every worker,
    by the seed of torch and by how many draws there were, and not from torch's generator. Outside of the model, as in
    the code of a loss, only those of global tensors do (``torch.rand_like(x)``): a plain random tensor differs there
    between workers, unless they are processes of one seed.

    Args:
        module: any torch module.
        P: how tensors are split: its axes are their dims (batch, channel, space...). A shape, as ``(1, 1, 2, 2)``,
            means ``distdl.world().reshape(1, 1, 2, 2)``, also if you have opened another world over a communicator.
        weights: ``"replicated"``: every worker has all parameters. The gradients of one backward travel in few
            messages, and are the same on every worker to the last bit. ``"sharded"``: every parameter becomes a global
            tensor that is split over all workers of the world, and so are its gradient and its state in an optimiser;
            so make the optimiser after this call. A module's weights are gathered when its forward begins to use
            them, and once more in backward. ``state_dict()`` gives whole tensors, and is collective.
        fallback: what is done about a torch function that has no op for global tensors: ``"warn"`` (it runs on one
            worker, with one warning for each line that calls it), ``"silent"`` (no warning) or ``"error"``.
    Returns: the module itself.
    Raises: ValueError, the same on every worker, for other options; for a module that is distributed already or
        compiled by ``torch.jit``; for a parameter of another distributed model that has other ``weights``; for weights
        on the meta device; for sharded weights that share memory (``b.weight.data = a.weight.data``); or if workers
        have different modules. The first forwards of the model raise it if workers give different plain tensors.
    """
    for name, value, known in (("weights", weights, WEIGHTS), ("fallback", fallback, FALLBACKS)):
        if value not in known:
            raise ValueError(f"distribute needs {name} to be one of {', '.join(known)}; got {value!r}")
    P = split_of(P, "distribute")
    _check_in_python(module)
    _check_undistributed(module)
    _check_shared(module, Context.of(P.comm), weights == "sharded")
    if weights == "sharded":
        _check_memory(module)
    refuses = f"fallback is {'' if fallback == 'error' else 'not '}'error'"
    make_equal(module, Context.of(P.comm), options=(f"the partition is {P}", f"weights={weights!r}", refuses))
    stored: Weights = ShardedWeights(module, P) if weights == "sharded" else ReplicatedWeights(module, P)
    join(module, stored, Place("", fallback))
    stored.additions.note_distributed(module)
    module.__dict__["forward"] = Forward(module, stored, fallback)
    distributed_models(P.comm).add(module)
    return module


def _check_in_python(module: torch.nn.Module) -> None:
    """Raises: ValueError for a model with a module that is compiled by ``torch.jit``."""
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ValueError(
                f"distribute needs modules in Python; {_where(module, path)} is compiled by torch.jit, so nothing sees "
                "inside"
            )


def _check_undistributed(module: torch.nn.Module) -> None:
    """Raises: ValueError for a model with a distributed module. One without state, as an activation, is let pass."""
    for path, child in module.named_modules():
        has_state = child._parameters or child._buffers or isinstance(child.__dict__.get("forward"), Forward)
        if isinstance(child._parameters, Parameters) and (child is module or has_state):
            raise ValueError(f"{_where(module, path)} is distributed already, over {child._parameters.weights.P}")


def _check_shared(module: torch.nn.Module, context: Context, sharded: bool) -> None:
    """Check that a parameter that another distributed model has, too, is to be stored in the same way in both.

    Raises: ValueError if one of them shards it and the other replicates it, or for a share of another world.
    """
    models = [model for each in {context, *worlds.contexts} for model in distributed_models(each.comm)]
    theirs = {id(one) for model in models for one in model.parameters()}
    named: list[tuple[str, Any]] = list(module.named_parameters())
    for path, one in named:
        if sharded != (type(one) is GlobalTensor) and (not sharded or id(one) in theirs):
            kept = "whole" if sharded else "in shares"
            raise ValueError(
                f"{path} is a parameter of another distributed model, too, which has it {kept}; distribute both with "
                "the same weights="
            )
        if type(one) is GlobalTensor and one._context is not context:
            raise other_world(f"distribute, of which {path} is a share of another model,", context, one._context)


def _check_memory(module: torch.nn.Module) -> None:
    """Check that no weight shares memory with another tensor of the model, as their shares would not.

    Raises: ValueError.
    """
    by_storage: dict[int, list[tuple[Region, str, torch.Tensor]]] = defaultdict(list)
    for path, one in (*module.named_parameters(), *module.named_buffers()):
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided and not one.is_nested:
            region = Region.of(one.shape, one.stride(), int(one.storage_offset()), one.element_size())
            by_storage[one.untyped_storage()._cdata].append((region, path, one))
    for found in by_storage.values():
        before: list[tuple[Region, str, torch.Tensor]] = []
        for region, path, one in sorted(found, key=lambda each: each[0].offset):
            before = [each for each in before if each[0].last >= region.offset]
            for known, other, theirs in before:
                if (one.requires_grad or theirs.requires_grad) and meet(region, known):
                    raise ValueError(
                        f'weights="sharded" needs weights that share no memory, as a share of one would not follow '
                        f"those of the other; {other} and {path} do. Let both be one parameter, or clone one"
                    )
            before.append((region, path, one))


def _where(module: torch.nn.Module, path: str) -> str:
    return f"its module {path}" if path else type(module).__name__


_NOT_TRACED = (
    "a distributed model runs in Python, where workers exchange messages: torch.jit and torch.export cannot trace or "
    "compile it. Do that to the sequential model, with load_state_dict(model.state_dict())"
)


class Forward:
    """The forward of a distributed model: it splits plain inputs, and runs the model's own forward on replicas.

    Attributes:
        P: the partition of its inputs.
    """

    def __init__(self, module: torch.nn.Module, weights: Weights, fallback: str) -> None:
        self.module, self.P, self.weights, self.fallback = module, weights.P, weights, fallback
        self._own: Callable[..., Any] | None = module.__dict__.get("forward")  # by which some models choose a forward
        self._compared = 0  # in how many forwards plain inputs were compared

    @property
    def __signature__(self) -> Signature:
        """The signature of the model's own forward. Libraries read it, and pass a model no other arguments."""
        return signature(self._own or MethodType(type(self.module).forward, self.module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        """The forward of a copied model. Its first call compares the weights with those of the other workers."""
        made = memo[id(self)] = Forward.__new__(Forward)
        made.__dict__.update(deepcopy(self.__dict__, memo))
        made.weights.additions.pending = True
        distributed_models(made.P.comm).add(made.module)
        return made

    def __getattr__(self, name: str) -> Any:
        if name in ("__code__", "__globals__"):  # torch.jit.script and torch.export ask for these
            raise AttributeError(_NOT_TRACED)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if get_tracing_state() is not None:
            raise RuntimeError(_NOT_TRACED)
        if are_functorch_transforms_active():
            raise TransformError
        weights = self.weights
        if not (weights.depth or self.P.comm.rank):
            self._warn_of_idle(args, kwargs)
        if self._compared < _COMPARED and not (weights.depth or is_recomputed()) and self.P.comm.watch is None:
            self._check_plain(args, kwargs)
        given = [x if type(x) is GlobalTensor else map_tensors(x, self._split) for x in args]
        named = map_tensors(kwargs, self._split) if kwargs else kwargs
        if not weights.depth:
            with unobserved():
                if weights.additions.pending:
                    self._take_in_additions()
                if self.P.comm.watch is not None:
                    with aside():
                        check_equal(self.module, Context.of(self.P.comm))
            weights.begin_forward()
        weights.depth += 1
        try:
            with running() as outermost, Drawing(Context.of(self.P.comm)) if outermost else nullcontext():
                if self._own is not None:
                    y = self._own(*given, **named)
                else:
                    y = type(self.module).forward(self.module, *given, **named)
                return y if type(y) is GlobalTensor else self._result(y, outermost)
        finally:
            weights.depth -= 1
            if not weights.depth:
                weights.end_forward()

    leave_uncompiled(__call__)

    def _result(self, y: Any, outermost: bool) -> Any:
        """What the model returns for the result of its own forward: outside of all models, blocks as plain tensors.

        Raises: what :func:`check_origin` raises, for plain tensors whose gradients would not be added up.
        """
        found = tensors_in(y)
        for one in found:
            if type(one) is torch.Tensor:
                check_origin(one, Context.of(self.P.comm))
        return map_tensors(y, unblocked) if outermost and any(type(one) is Block for one in found) else y

    def _warn_of_idle(self, *given: Any) -> None:
        """Warn of workers that get no cell of the largest input, if it is split. Smaller inputs may be broadcast."""
        largest = max(tensors_in(given), key=lambda x: x.numel(), default=None)
        if largest is not None and self._splits(largest):
            context = Context.of(self.P.comm)
            warn_of_idle("a distributed model", context.balanced(self.P.workers, largest.shape))

    def _check_plain(self, *given: Any) -> None:
        """Check that all workers give the model the same plain tensors, and not blocks or batches of their own.

        Raises: ValueError, the same on every worker.
        """
        self._compared += 1
        found = tensors_in(given)
        plain = [x for x in found if type(x) in PLAIN]
        if plain or not found:
            with unobserved(), aside():
                check_plain(Context.of(self.P.comm), plain)

    def _take_in_additions(self) -> None:
        """Make what was set in the model since its last forward a part of it, with the values of worker 0."""
        _check_in_python(self.module)
        unverified = self.weights.additions.unverified(self.module)
        if unverified:
            make_equal(self.module, Context.of(self.P.comm), unverified)
        join(self.module, self.weights, Place("", self.fallback))
        self.weights.additions.close(self.module)

    def _splits(self, x: torch.Tensor) -> bool:
        """Whether an input is split over P; else every worker keeps all of it."""
        return type(x) is torch.Tensor and not x.is_nested and x.dim() >= self.P.workers.ndim

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """A plain input as a global tensor, if it is to be split; others as they are."""
        if type(x) is not torch.Tensor or x.is_nested:
            return x
        if not self.weights.depth:
            debug.note_plain("a distributed model with", x)
        if not self._splits(x):
            return x
        layout = Context.of(self.P.comm).balanced(self.P.workers, x.shape)
        return GlobalTensor._of(local_slice(x, layout).clone(), layout)
