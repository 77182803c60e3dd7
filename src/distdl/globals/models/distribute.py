"""A model that a user has, made to compute with global tensors."""

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
from distdl.globals.models.parameters import Copies, Parameters
from distdl.globals.models.replicated_weights import Replicas
from distdl.globals.models.sharded_weights import Shares
from distdl.globals.moving.alignment import taken
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
from distdl.transport.callsite import Place
from distdl.workers.worlds import split_of

WEIGHTS = ("replicated", "sharded")
FALLBACKS = ("warn", "error", "silent")
_FIRST = 4  # forwards of a model in which its plain inputs are compared before anything is computed


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
            means ``distdl.world().reshape(1, 1, 2, 2)``, also where you have opened another world over a communicator.
        weights: ``"replicated"``: every worker has all parameters. The gradients of one backward travel in few
            messages, and are the same on every worker to the last bit. ``"sharded"``: every parameter becomes a global
            tensor that is split over all workers of the world, and so are its gradient and what an optimiser keeps of
            it; so make the optimiser after this call. A module's weights come together when its forward begins to use
            them, and once more in backward. ``state_dict()`` gives whole tensors, and is collective.
        fallback: what is done about a torch function that has no op for global tensors: ``"warn"`` (it runs on one
            worker, and says so once for each place that calls it), ``"silent"`` (it does not say so) or ``"error"``.
    Returns: the module itself.
    Raises: ValueError for other options, for a module that is distributed already or compiled by ``torch.jit``, for a
        parameter that another distributed model has with other ``weights``, for weights on the meta device, for weights
        in shares that lie in the memory of others (``b.weight.data = a.weight.data``), or if workers have different
        modules. The model raises it, on every worker, for other plain tensors on some workers,
        which it looks at in its first forwards.
    """
    for name, value, known in (("weights", weights, WEIGHTS), ("fallback", fallback, FALLBACKS)):
        if value not in known:
            raise ValueError(f"distribute needs {name} to be one of {', '.join(known)}; got {value!r}")
    P = split_of(P, "distribute")
    _check(module)
    for path, child in module.named_modules():
        if isinstance(child._parameters, Parameters) and (child is module or not _is_shared(child)):
            where = _where(module, path)
            raise ValueError(f"{where} is distributed already, over {child._parameters.copies.P}")
    _check_shared(module, Context.of(P.comm), weights == "sharded")
    if weights == "sharded":
        _check_memory(module)
    refuses = f"fallback is {'' if fallback == 'error' else 'not '}'error'"
    make_equal(module, Context.of(P.comm), options=(f"the partition is {P}", f"weights={weights!r}", refuses))
    copies: Copies = Shares(module, P) if weights == "sharded" else Replicas(module, P)
    join(module, copies, Place("", fallback))
    copies.additions.begin(module)
    module.__dict__["forward"] = Forward(module, copies, fallback)
    distributed_models(P.comm).add(module)
    return module


def _is_shared(child: torch.nn.Module) -> bool:
    """Whether a module that is distributed already may be part of another model, too: an activation has no state."""
    return not (child._parameters or child._buffers or isinstance(child.__dict__.get("forward"), Forward))


def _check_shared(module: torch.nn.Module, context: Context, in_shares: bool) -> None:
    """Check that a parameter that another distributed model has, too, lies in both alike.

    Raises: ValueError for a share of another world, or if one model is to have it whole and the other in shares.
    """
    models = [model for each in {context, *worlds.contexts} for model in distributed_models(each.comm)]
    theirs = {id(one) for model in models for one in model.parameters()}
    listed: list[tuple[str, Any]] = list(module.named_parameters())
    for path, one in listed:
        if in_shares != (type(one) is GlobalTensor) and (not in_shares or id(one) in theirs):
            kept = "whole" if in_shares else "in shares"
            raise ValueError(
                f"{path} is a parameter of another distributed model, too, which has it {kept}; distribute both with "
                "the same weights="
            )
        if type(one) is GlobalTensor and one._context is not context:
            raise other_world(f"distribute, of which {path} is a share of another model,", context, one._context)


def _check_memory(module: torch.nn.Module) -> None:
    """Check that no weight shares memory with another tensor of the model, which shares of both would not."""
    lying: dict[int, list[tuple[Region, str, torch.Tensor]]] = defaultdict(list)
    for path, one in (*module.named_parameters(), *module.named_buffers()):
        if type(one) in (torch.Tensor, torch.nn.Parameter) and one.layout is torch.strided and not one.is_nested:
            region = Region.of(one.shape, one.stride(), int(one.storage_offset()), one.element_size())
            lying[one.untyped_storage()._cdata].append((region, path, one))
    for found in lying.values():
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


def _check(module: torch.nn.Module) -> None:
    for path, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise ValueError(
                f"distribute needs modules in Python; {_where(module, path)} is compiled by torch.jit, so nothing sees "
                "inside"
            )


_NOT_TRACED = (
    "a distributed model runs in Python, where workers exchange messages: torch.jit and torch.export cannot trace or "
    "compile it. Do that to the sequential model, with load_state_dict(model.state_dict())"
)


class Forward:
    """The forward of a distributed module: parameters enter, inputs are split, and the module's own forward runs.

    Attributes:
        P: the partition of its inputs.
    """

    def __init__(self, module: torch.nn.Module, copies: Copies, fallback: str) -> None:
        self.module, self.P, self.copies, self.fallback = module, copies.P, copies, fallback
        # (some models choose between forwards by such an attribute)
        self._own: Callable[..., Any] | None = module.__dict__.get("forward")
        self._checked = 0  # in how many forwards plain inputs have been compared

    @property
    def __signature__(self) -> Signature:
        """The arguments of the model's own forward. Libraries read them, and pass a model no others."""
        return signature(self._own or MethodType(type(self.module).forward, self.module))

    def __deepcopy__(self, memo: dict[int, Any]) -> Forward:
        """The forward of a copied model. Its first call compares the weights with those of the other workers."""
        made = memo[id(self)] = Forward.__new__(Forward)
        made.__dict__.update(deepcopy(self.__dict__, memo))
        made.copies.additions.open = True
        distributed_models(made.P.comm).add(made.module)
        return made

    def __getattr__(self, name: str) -> Any:
        if name in ("__code__", "__globals__"):  # (for which torch.jit.script and torch.export ask)
            raise AttributeError(_NOT_TRACED)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch._C._get_tracing_state() is not None:
            raise RuntimeError(_NOT_TRACED)
        if torch._C._are_functorch_transforms_active():
            raise TransformError
        copies = self.copies
        if not (copies.running or self.P.comm.rank):
            self._warn_of_idle(args, kwargs)
        if self._checked < _FIRST and not (copies.running or is_recomputed()) and self.P.comm.watch is None:
            self._check_plain(args, kwargs)
        given = [x if type(x) is GlobalTensor else map_tensors(x, self._split) for x in args]
        named = map_tensors(kwargs, self._split) if kwargs else kwargs
        if not copies.running:
            with unobserved():
                if copies.additions.open:
                    self._add()
                if self.P.comm.watch is not None:
                    check_equal(self.module, Context.of(self.P.comm))
            copies.begin()
        copies.running += 1
        try:
            with running() as outermost, Drawing(Context.of(self.P.comm)) if outermost else nullcontext():
                if self._own is not None:
                    y = self._own(*given, **named)
                else:
                    y = type(self.module).forward(self.module, *given, **named)
                return y if type(y) is GlobalTensor else self._result(y, outermost)
        finally:
            copies.running -= 1
            if not copies.running:
                copies.end()

    leave_uncompiled(__call__)

    def _result(self, y: Any, outermost: bool) -> Any:
        """What the model gives. Outside of it, blocks are plain tensors."""
        found = tensors_in(y)
        for one in found:
            if type(one) is torch.Tensor:
                check_origin(one, Context.of(self.P.comm))
        return map_tensors(y, unblocked) if outermost and any(type(one) is Block for one in found) else y

    def _warn_of_idle(self, *given: Any) -> None:
        """Warn of workers without a cell of the largest input, if it is split here. Smaller ones may be broadcast."""
        largest = max(tensors_in(given), key=lambda x: x.numel(), default=None)
        if largest is not None and self._splits(largest):
            context = Context.of(self.P.comm)
            warn_of_idle("a distributed model", context.balanced(self.P.workers, largest.shape))

    def _check_plain(self, *given: Any) -> None:
        """Check that all workers give the same plain tensors: blocks and batches of their own are a usual mistake."""
        self._checked += 1
        found = tensors_in(given)
        plain = [x for x in found if type(x) in PLAIN]
        if plain or not found:
            with unobserved():
                check_plain(Context.of(self.P.comm), plain)

    def _add(self) -> None:
        """Take in what was set in the model since its last forward: of weights that differ, those of worker 0."""
        _check(self.module)
        unknown = self.copies.additions.unknown(self.module)
        if unknown:
            make_equal(self.module, Context.of(self.P.comm), unknown)
        join(self.module, self.copies, Place("", self.fallback))
        self.copies.additions.close(self.module)

    def _splits(self, x: torch.Tensor) -> bool:
        return type(x) is torch.Tensor and not x.is_nested and x.dim() >= self.P.workers.ndim

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is not torch.Tensor or x.is_nested:
            return x
        if not self.copies.running:
            debug.note_plain("a distributed model with", x)
        if not self._splits(x):
            return x
        layout = Context.of(self.P.comm).balanced(self.P.workers, x.shape)
        return GlobalTensor._of(taken(x, layout).clone(), layout)
