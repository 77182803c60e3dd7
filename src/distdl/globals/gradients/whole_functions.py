"""Users' autograd functions (``torch.autograd.Function``), applied to global tensors and to weights.

Forward and backward are code that calls functions of torch. Both get global tensors, and plain tensors for weights. So
they compute what they compute in a program of one worker, and the functions that they call move what they need::

    x, w  --forward-->  y         global tensors and plain ones, without a graph, as in torch
    dy  --backward-->  dx, dw     whole gradients, of which each worker takes its block

A weight is one variable there, the same on every worker. Results of weights alone are plain, and become replicas.

The graph has one node of blocks, which saves blocks. If a backward computes its forward again, as many do, it draws the
random numbers of the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, FunctionCtx

from distdl.globals.functions.plain_random import drawing, drawn_by
from distdl.globals.gradients.parts import enter_results, variable_of
from distdl.globals.layouts.context import KnownLayout
from distdl.globals.moving.alignment import gather_plain, local_block
from distdl.globals.moving.writes_into_plain import Arguments, split_beside
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.provenance import check_origin
from distdl.globals.tensor.replicas import Replica, parameter_of, plain_of
from distdl.globals.tensor.table import REPLICATED, TABLE
from distdl.globals.tensor.torch_function import check_unmixed
from distdl.nn.compiling import leave_uncompiled
from distdl.tensors.draws import Draws
from distdl.tensors.function import Function
from distdl.tensors.private_torch import DelayedError, DisableTorchFunctionSubclass, get_user_fn

_DERIVES = torch.autograd.Function.setup_context
_ONCE = b"trying to differentiate twice a function that was marked with @once_differentiable"
_REFUSAL = type(DelayedError(_ONCE, 1)(torch.ones((), requires_grad=True)).grad_fn)


class Own(FunctionCtx):
    """The ``ctx`` of such a function. ``saved_tensors`` is set while its backward runs."""

    saved_tensors: Any
    # torch's ways to call a backward: by one of its two names, with a tuple or a list
    apply: Any = BackwardCFunction.apply
    _get_user_fn: Any = get_user_fn

    def __init__(self, function: Any, needs_input_grad: tuple[bool, ...]) -> None:
        self._forward_cls = function
        self.needs_input_grad, self.requires_grad = needs_input_grad, any(needs_input_grad)
        self._input_grad_buffers = (None,) * len(needs_input_grad)  # torch may show sums under way; here there are none
        self.to_save: Any = ()
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.materialize_grads = True

    def set_output_grad_dtype(self, *dtypes: Any) -> None:
        """Raise NotImplementedError; torch has this method since 2.14."""
        raise NotImplementedError(
            "ctx.set_output_grad_dtype of an autograd function of global tensors, or of weights of a distributed "
            "model: convert the gradient in its backward, by dy.to(dtype)"
        )

    @property
    def saved_variables(self) -> Any:
        """Return ``saved_tensors``, by its old name, which layer norms of image restoration still use."""
        return self.saved_tensors


def _may_be_written(x: Any) -> bool:
    """Whether a function may write global tensors into an argument, as torchdiffeq does by ``scratch.data[i] = y``."""
    return type(x) is torch.Tensor and not x.requires_grad and x.layout is torch.strided


def _input(x: torch.Tensor) -> torch.Tensor:
    """Return an argument as an input of the node: a variable, or a detached tensor if it may become global."""
    return x.detach() if _may_be_written(x) else variable_of(x)


class _Call:
    """One call of such a function.

    Attributes:
        args: all arguments, until the forward has begun.
        count: the number of arguments.
        places: the places of tensors among the arguments: the inputs of the node.
        layouts: for each input its layout; None for a plain tensor.
        shapes: for each input the shape of the whole tensor.
        drawn: the seed, and how many random calls came before this one.
        drawn_by: the world whose random numbers plain tensors get in the forward.
        single: whether the function returns one tensor, not a tuple.
        results: for each result its layout if it is global, ``Replica`` if it is plain, or itself if it is no tensor.
        memories: for each global result, by place, its strides and offset in torch's memory.
    """

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function, self.args, self.count = function, list(args), len(args)
        self.places = [place for place, one in enumerate(args) if isinstance(one, torch.Tensor)]
        tensors = [args[place] for place in self.places]
        self.layouts = [one._layout if type(one) is GlobalTensor else None for one in tensors]
        self.shapes = [one.shape for one in tensors]
        graph = torch.is_grad_enabled()
        self.own = Own(function, tuple(isinstance(one, torch.Tensor) and graph and one.requires_grad for one in args))
        self.context = next(one._context for one in tensors if type(one) in (GlobalTensor, Replica))
        self.draws = self.context.own(Draws)
        self.drawn = self.draws.seed, self.draws.counted()
        self.drawn_by = drawn_by()
        self.single = True
        self.results: list[Any] = []
        self.memories: dict[int, dict[str, Any]] = {}

    def inputs(self) -> list[torch.Tensor]:
        """Return the inputs of the node: blocks of global tensors, and whole plain tensors."""
        tensors = [self.args[place] for place in self.places]
        for one in tensors:
            if type(one) is torch.Tensor:
                check_origin(one, self.context)
        return [block_of(one) if type(one) is GlobalTensor else _input(one) for one in tensors]

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[list[Any], list[torch.Tensor]]:
        """Run the user's forward. Returns its results, and the tensors that it got as arguments.

        Raises: RuntimeError if it marks an argument as written.
        """
        given = [_global(one, layout) for one, layout in zip(inputs, self.layouts, strict=True)]
        args, self.args = self.args, []  # so that arguments which it does not save can be freed
        for number, (place, one) in enumerate(zip(self.places, given, strict=True)):
            if type(one) is GlobalTensor:
                one.__dict__.update(_placement_of(args[place]))
            elif _may_be_written(args[place]):
                given[number] = args[place]
            args[place] = given[number]
        function, arguments = self.function, self.context.own(Arguments)
        around, arguments.given = arguments.given, (*arguments.given, *filter(_may_be_written, args))
        try:
            if function.setup_context is _DERIVES:
                y = function.forward(self.own, *args)
            else:
                y = function.forward(*args)
                function.setup_context(self.own, tuple(args), y)
        finally:
            arguments.given = around
        if getattr(self.own, "dirty_tensors", ()):
            raise RuntimeError(
                f"the autograd function {function.__name__} writes into an argument (ctx.mark_dirty), and what it "
                "writes would not reach the global tensor, or the weight; return a new tensor"
            )
        self.single = not isinstance(y, tuple)
        return [y] if self.single else list(y), given

    def backward(self, saved: tuple[torch.Tensor | None, ...], gradients: Sequence[Any]) -> list[torch.Tensor | None]:
        """Run the user's backward. Returns, for each input of the node, this worker's gradient."""
        self.own.saved_tensors = saved
        try:
            with self.draws.again(*self.drawn), drawing(self.drawn_by):
                found = self.own.apply(*gradients)
        finally:
            del self.own.saved_tensors
        found = tuple(map(_refusing, found)) if isinstance(found, tuple) else (_refusing(found),)
        self.check(found)
        wanted = self.own.needs_input_grad
        return [
            self.gradient(found[place], layout, shape) if wanted[place] else None  # torch drops it, of any shape
            for place, layout, shape in zip(self.places, self.layouts, self.shapes, strict=True)
        ]

    def check(self, gradients: tuple[Any, ...]) -> None:
        """Raise torch's RuntimeError unless each tensor argument has a tensor or None, and each other argument None."""
        name = f"function {self.function.__name__}Backward returned"
        if len(gradients) < self.count or any(one is not None for one in gradients[self.count :]):
            raise RuntimeError(f"{name} an incorrect number of gradients (expected {self.count}, got {len(gradients)})")
        for place, one in enumerate(gradients):
            if one is None:
                continue
            if place not in self.places:
                raise RuntimeError(
                    f"{name} a gradient different than None at position {place + 1}, but the corresponding forward "
                    "input was not a Variable"
                )
            if not isinstance(one, torch.Tensor):
                raise RuntimeError(f"expected Variable or None (got {type(one).__name__})")

    def gradients(self, given: Sequence[Any]) -> list[Any]:
        """Return for each result the gradient that the user's backward takes; None for one that is no tensor.

        Args:
            given: what torch has for the results that are tensors: blocks, or whole gradients of plain results.
        """
        rest = iter(given)
        found = [next(rest) if kind is Replica or isinstance(kind, KnownLayout) else None for kind in self.results]
        return [
            one if one is None or kind is Replica else GlobalTensor._of(one, kind)
            for one, kind in zip(found, self.results, strict=True)
        ]

    def blocks(self, gradients: Sequence[Any]) -> tuple[Any, ...]:
        """Return this worker's block of the gradient of each result that is a tensor: the inverse of ``gradients``."""
        kinds: list[Any] = [kind for kind in self.results if kind is Replica or isinstance(kind, KnownLayout)]
        name = self.function.__name__
        return tuple(
            None if one is None else gather_plain(one) if kind is Replica else local_block(one, kind, name)
            for one, kind in zip(gradients, kinds, strict=True)
        )

    def gradient(self, value: Any, layout: KnownLayout | None, shape: torch.Size) -> torch.Tensor | None:
        """Return this worker's gradient of an input: a block if the input is global, else the whole gradient."""
        if value is None:
            return None
        if value.shape != shape:  # torch sums the gradient of a broadcast input, too
            value = value.sum_to_size(shape)
        return gather_plain(value) if layout is None else local_block(value, layout, self.function.__name__)


def _global(block: torch.Tensor, layout: KnownLayout | None) -> torch.Tensor:
    """Return the global tensor of a block; without a layout, the tensor as it is."""
    return block if layout is None else GlobalTensor._of(block, layout)


def _refusing(gradient: Any) -> Any:
    """If ``once_differentiable`` makes a global gradient raise when differentiated, let its block raise then, too."""
    if type(gradient) is not GlobalTensor:
        return gradient
    with DisableTorchFunctionSubclass():
        refuses = type(gradient.grad_fn) is _REFUSAL
    if not refuses:
        return gradient
    refusal = DelayedError(_ONCE, 1)
    return GlobalTensor._of(refusal(gradient._block.detach().requires_grad_()), gradient._layout)


def _placement_of(x: Any) -> dict[str, Any]:
    """Return the attributes of a global tensor that say where in torch's memory it lies."""
    return {name: x.__dict__[name] for name in ("_strides", "_offset") if name in x.__dict__}


class _Applied(Function):
    """The node of a call of a user's function: from its inputs to the blocks of its results."""

    observed = True

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results, given = call.forward(inputs)
        pairs = zip(given, inputs, call.layouts, strict=True)  # plain arguments that have become global are left out
        blocks = {id(one): block for one, block, at in pairs if (at is None) == (type(one) is not GlobalTensor)}
        known, layouts, outputs = set(blocks), {}, []
        beside = [one for one in given if type(one) is GlobalTensor]
        call.results, name = list(results), f"the autograd function {call.function.__name__}"
        for place, result in enumerate(results):
            if not isinstance(result, torch.Tensor):
                continue
            check_unmixed(name, (type(result), GlobalTensor if beside else Replica))
            if type(result) is not GlobalTensor and (id(result) in known or not beside):
                call.results[place] = Replica
                outputs.append(blocks.setdefault(id(result), plain_of(result)))
                continue
            # a plain result was computed from values that are the same on every worker
            one = result if type(result) is GlobalTensor else split_beside(result, beside)
            block = blocks[id(result)] if id(result) in blocks else block_of(one)
            block = block.clone() if block._is_view() else block
            if any(one is other for other in given) and id(one) not in known:  # a plain argument that became global
                block = block.detach()
            blocks[id(result)] = block
            layouts[id(result)] = call.results[place] = one._layout
            call.memories[place] = _placement_of(one)
            outputs.append(block)
        own = call.own
        ctx.call = call
        ctx.kinds = [one._layout if type(one) is GlobalTensor else layouts.get(id(one)) for one in own.to_save]
        ctx.save_for_backward(*(None if one is None else _saved(one, blocks) for one in own.to_save))
        ctx.mark_non_differentiable(*(blocks[id(one)] for one in own.non_differentiable if id(one) in blocks))
        ctx.set_materialize_grads(own.materialize_grads)
        own.to_save = own.non_differentiable = ()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        saved = tuple(
            None if one is None else _global(one, layout)
            for one, layout in zip(ctx.saved_tensors, ctx.kinds, strict=True)
        )
        return None, *call.backward(saved, call.gradients(gradients))


def _saved(one: torch.Tensor, known: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the plain tensor to save for a tensor; ``known`` are those of arguments and results, by id."""
    if id(one) in known:
        return known[id(one)]
    return block_of(one) if type(one) is GlobalTensor else one


class _Node:
    """The ``grad_fn`` that users see of a result: its hooks get whole gradients."""

    def __init__(self, node: Any) -> None:
        self._node, self._call = node, node.call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def name(self) -> str:
        return f"{self._call.function.__name__}Backward"

    def register_prehook(self, hook: Callable[..., Any]) -> Any:
        call = self._call

        def on_blocks(gradients: tuple[Any, ...]) -> Any:
            changed = hook(tuple(call.gradients(gradients)))
            return None if changed is None else call.blocks(changed)

        return self._node.register_prehook(on_blocks)

    def register_hook(self, hook: Callable[..., Any]) -> Any:
        call = self._call

        def on_blocks(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> Any:
            found = zip(inputs, call.layouts, strict=True)  # torch passes gradients of tensor arguments only
            given = tuple(None if one is None else _global(one, layout) for one, layout in found)
            changed = hook(given, tuple(call.gradients(outputs)))
            if changed is None:
                return None
            kinds = zip(changed, call.layouts, call.shapes, strict=True)
            return tuple(call.gradient(one, layout, shape) for one, layout, shape in kinds)

        return self._node.register_hook(on_blocks)


def _node(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``x.grad_fn``: None for a parameter that a forward reads, as in torch."""
    x = args[0]
    parameter = parameter_of(x)
    if parameter is not x:
        return func(parameter)
    node = block_of(x).grad_fn if type(x) is GlobalTensor else x.__dict__.get("_node", plain_of(x).grad_fn)
    return _Node(node) if getattr(type(node), "_forward_cls", None) is _Applied else node


_attribute: Any = torch.Tensor.grad_fn
TABLE[_attribute.__get__] = REPLICATED[_attribute.__get__] = _node


def _by_position(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return all arguments by position. A forward without ctx gets its defaults, too, for its setup_context.

    Raises: TypeError for a keyword-only argument.
    """
    first: tuple[Any, ...] = (None,) if function.setup_context is _DERIVES else ()  # stands for ctx
    if first and not kwargs:
        return args
    bound = signature(function.forward).bind(*first, *args, **kwargs)
    if not first:
        bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(f"{function.__name__}.apply takes arguments by position; got {', '.join(bound.kwargs)} by name")
    return bound.args[len(first) :]


def apply_whole(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a user's autograd function to arguments of which some are global tensors or replicas."""
    call = _Call(function, _by_position(function, args, kwargs))
    outputs = iter(_Applied.apply(call, *call.inputs()))
    results: list[Any] = []
    for place, kind in enumerate(call.results):
        if isinstance(kind, KnownLayout):
            results.append(GlobalTensor._of(next(outputs), kind))
            results[-1].__dict__.update(call.memories[place])
        else:
            results.append(next(outputs) if kind is Replica else kind)
    results = enter_results(results, call.context)
    return results[0] if call.single else tuple(results)


leave_uncompiled(apply_whole)
