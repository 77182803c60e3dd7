"""Right calls of what authors of layers, movements and back-ends use, and values that are wrong for the arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import distdl
from distdl.agreement.rows import Listed
from distdl.exchange import Operator, Together
from distdl.nn.primitive import Movement
from distdl.ops import Site
from distdl.partition import Layout, Partition
from distdl.partition.layout import Ruler
from distdl.plan import Move, Plan
from distdl.tensors.derivatives import Derivatives
from distdl.transport import Label, View

Right = Callable[[Partition], dict[str, Any]]

EVERYONE = (0, 1, 2, 3)
HUGE = 2**62
FORWARD = ((0, 2),)


class Nothing:
    """An op that nobody sets up."""

    def setup(self, site: Site, *signatures: Any) -> Any:
        raise NotImplementedError


def _square(P: Partition) -> Partition:
    return P.reshape(2, 2)


def _layout(P: Partition) -> Layout:
    return Layout.balanced(_square(P), (4, 6))


def _plan(P: Partition) -> Plan:
    return Plan({P.rank: (2,)}, {P.rank: (2,)}, (Move(P.rank, FORWARD, P.rank, FORWARD),))


def _operator(P: Partition) -> Operator:
    return Operator(**_operators(P))


def _operators(P: Partition) -> dict[str, Any]:
    return {
        "plan": _plan(P),
        "comm": P.comm,
        "members": EVERYONE,
        "label": Label("a test"),
        "dtype": torch.float32,
        "derivatives": Derivatives(),
        "inputs": [(2,)],
        "outputs": [(2,)],
    }


def _global(P: Partition) -> Any:
    return distdl.distribute_tensor(torch.arange(16.0).reshape(4, 4), _square(P))


def _float(x: torch.Tensor) -> torch.Tensor:
    return x.float()


RIGHT: dict[str, Right] = {
    "distdl.GlobalTensor.from_local": lambda P: {"block": torch.zeros(1, 2), "P": P.reshape(4, 1)},
    "distdl.GlobalTensor.full_tensor": lambda P: {"self": _global(P)},
    "distdl.GlobalTensor.redistribute": lambda P: {"self": _global(P), "to": P.reshape(1, 4)},
    "distdl.agreement.Headers": lambda P: {
        "members": EVERYONE, "rows": Listed(EVERYONE, np.zeros((4, 3), dtype=np.int64)), "tensors": 1, "dims": 1,
    },
    "distdl.backends.Backend": lambda P: {"opener": _float, "check": None, "start": None, "command": None},
    "distdl.backends.Job": lambda P: {"rank": 0, "size": 4, "local_rank": 0, "store": torch.distributed.HashStore()},
    "distdl.backends.mpi.buffer.MPIExpandableBuffer": lambda P: {"dtype": np.float32},
    "distdl.data.Blocks": lambda P: {"block": torch.zeros(2, 3), "shape": (4, 3)},
    "distdl.environment.whole": lambda P: {"name": "DISTDL_NOTHING", "default": 3},
    "distdl.exchange.Chain": lambda P: {"*steps": (Together(_operator(P)),)},
    "distdl.exchange.Operator": _operators,
    "distdl.exchange.Together": lambda P: {"*operators": (_operator(P),)},
    "distdl.geometry.runs": lambda P: {"lengths": (3, 0, 2)},
    "distdl.nn.ZeroVolumeCorrectorFunction.apply": lambda P: {"*x": (torch.zeros(0),)},
    "distdl.nn.layer.Application": lambda P: {"op": Nothing(), "places": (P, _layout(P)), "work": P},
    "distdl.nn.layer.Layer": lambda P: {
        "name": "Test", "everyone": P, "derive": Movement(P, P, lambda headers, me: _plan(P)),
    },
    "distdl.nn.layer.blank_shape": lambda P: {"x": (2, 3)},
    "distdl.nn.local": lambda P: {"operator": _float, "shape": (2,), "*operands": ((torch.zeros(2), (2,)),)},
    "distdl.nn.primitive.Movement": lambda P: {"P_x": P, "P_y": P, "plan": lambda headers, me: _plan(P)},
    "distdl.ops.Setup": lambda P: {"move_in": Together(), "local": _float, "move_out": _float},
    "distdl.ops.Site": lambda P: {"partition": P, "members": EVERYONE, "label": Label("a test")},
    "distdl.partition.Layout": lambda P: {"partition": _square(P), "rulers": _layout(P).rulers},
    "distdl.partition.Layout.of": lambda P: {"partition": _square(P), "intervals": _layout(P).intervals},
    "distdl.partition.Layout.balanced": lambda P: {"partition": _square(P), "extents": (4, 6)},
    "distdl.partition.Layout.everywhere": lambda P: {"P": P, "extents": (4, 6)},
    "distdl.partition.Layout.tiled": lambda P: {"partition": _square(P), "shapes": np.ones((2, 2, 2), dtype=int)},
    "distdl.partition.Signature": lambda P: {
        "layout": _layout(P), "dtype": torch.float32, "derivatives": Derivatives(), "local": (2, 3),
    },
    "distdl.partition.dims": lambda P: {"shape": (2, 3)},
    "distdl.plan.Move": lambda P: {"source": 1, "src": ((0, 2),), "target": 3, "dst": ((3, 5),)},
    "distdl.plan.Plan": lambda P: {
        "inputs": {0: (2,)}, "outputs": {1: (2,)}, "moves": (Move(0, FORWARD, 1, FORWARD),),
    },
    "distdl.plan.planners.all_sum": lambda P: {"P_x": P, "axes": (0,), "shapes": dict.fromkeys(EVERYONE, (2,))},
    "distdl.plan.planners.broadcast": lambda P: {"P_x": P[:1], "P_y": P, "shapes": {0: (2,)}},
    "distdl.plan.planners.copy": lambda P: {"owned": _layout(P), "needed": _layout(P)},
    "distdl.tensors.derivatives.Derivatives": lambda P: {"gradient": True},
    "distdl.transport.Label": lambda P: {"name": "a test"},
    "distdl.transport.Pending": lambda P: {},
    "distdl.transport.Prepared": lambda P: {"sends": [(1, View(0, 0, (2,), (1,), torch.int64, True))], "receives": []},
    "distdl.transport.View": lambda P: {
        "tensor": 0, "offset": 8, "shape": (2,), "strides": (1,), "dtype": torch.int64, "whole": False,
    },
    "distdl.transport.as_bytes": lambda P: {"tensor": torch.zeros(2, 3)},
    "distdl.workers.footprint.Footprint": lambda P: {},
}  # fmt: skip

_NEVER = (3, "a", object())
VALUES: dict[str, tuple[Any, ...]] = {  # always wrong: the call has to raise
    "anything": (),
    "of a class": (*_NEVER, None, torch.nn.ReLU()),
    "of a class or None": (*_NEVER, torch.nn.ReLU()),
    "tensor": (*_NEVER, None, [1.0], np.zeros(3)),
    "tensor in one piece": (*_NEVER, None, torch.zeros(2, 3).T),
    "workers or None": (*_NEVER, [[0, 1]], np.zeros((2, 2)), np.zeros(2, dtype=int)),
    "function": (*_NEVER, None),
    "function or None": _NEVER,
    "string": (3, None, [], object()),
    "flag": ("a", 2.5, [], object(), 7),
    "number": ("a", None, [], object(), 1j, 2.5),
    "place": ("a", None, [], object(), 1j, 2.5, -7),
    "default": ("a", None, [], object(), 1j, 2.5, -7, HUGE),
    "largest": ("a", None, [], object(), 1j, 2.5, -7, 0),
    "worker": ("a", [], object(), 2.5, -7, 4, HUGE),
    "members": (*_NEVER, None, (-7,), (0, 0), (0, HUGE), (2.5,)),
    "tuple": (*_NEVER, None, (3,), ("a", 2)),
    "printed": ("a", {}, object(), 2.5, (2.5, 1), (None,)),
    "shape": ("a", {}, object(), 2.5, (2.5, 1), (None,), (-7, -7)),
    "strides": (*_NEVER, None, (2.5,), (1, 1), ()),
    "shapes": (*_NEVER, None, [3], [(2.5,)], [(-7,)], [(3,)]),
    "shapes of workers": (
        *_NEVER,
        None,
        {0: 3},
        {0: (2.5,)},
        {0: (-7,)},
        {"a": (2,)},
        {0: (1,), 1: (1,)},
        {0: (), 1: ()},
    ),
    "shapes of x": (*_NEVER, None, {}, {0: 3}, {0: (2.5,)}, {0: (-7,)}, {"a": (2,)}, {9: (2,)}),
    "shapes of blocks": (*_NEVER, None, np.ones((2, 2)), np.ones((4, 2)), np.ones((3, 3, 2)), np.array(3)),
    "box": (*_NEVER, None, ((0,),), ((0, 2.5),), ((-7, -5),), ((0, HUGE),), ((0, 2), (0, 2))),
    "rulers": (*_NEVER, None, (3,), (Ruler(((0, 2),)),), (Ruler(((0, 2),)),) * 2),
    "intervals": (*_NEVER, None, [3], ["a", "b"], [[(0, 1)]], [[(0, 1)]] * 2, [[(0, 2.5), (3, 4)]] * 2, [[0, 1]] * 2),
    "extents": (*_NEVER, None, (2,), (2, 2, 2), (2.5, 1), (None, 1), (-7, 4)),
    "whole extents": (*_NEVER, None, (), (2.5, 1), (None, 1), (-7, 4)),
    "repeats": (*_NEVER, None, {9: (0, 2)}, {-1: (0, 2)}, {0: 3}, {0: (2,)}, {0: (5, 2)}, {0: (0, 2.5)}),
    "messages": (*_NEVER, None, [3], [(1,)], [(1, 2)]),
    "axes": ("a", 9, -9, (0, 0), (0, HUGE), 2.5, object()),
    "axes of dims": ("a", 9, (9, 0), (0,), (0, 0), (0, HUGE), 2.5, (2.5, 0), object()),
    "NumPy's": (3, "nonsense", None, object()),
    "operand": (*_NEVER, None, (torch.zeros(2),), (3, (2,)), (torch.zeros(2), 3)),
}
_KINDS = {
    "anything": "self detail options",
    "of a class or None": "at",
    "of a class": "P P_x P_y *operators *steps *x comm derivatives derive dtype everyone label layout needed "
    "op owned partition pattern plan rows store to work",
    "tensor": "block",
    "tensor in one piece": "tensor",
    "function": "alone local move_in move_out opener operator",
    "function or None": "check command configure finish start",
    "string": "host name unit what",
    "flag": "adds alike copies gradient keeps_format lends meta preserve_batch reuses still tangent tangent_gradient "
    "whole",
    "number": "offset",
    "place": "dims initial_capacity local_rank number rank size source target tensors",
    "default": "default",
    "largest": "largest",
    "worker": "me on",
    "members": "members",
    "tuple": "along moves names own places read results teams",
    "shape": "lengths shape x",
    "strides": "strides",
    "shapes": "inputs outputs",
    "box": "dst src",
    "rulers": "rulers",
    "intervals": "intervals",
    "extents": "extents",
    "repeats": "repeats",
    "messages": "receives sends",
    "axes of dims": "axes",
    "operand": "*operands",
}
_KIND = {argument: kind for kind, names in _KINDS.items() for argument in names.split()}
_OTHERS = {
    "distdl.data.Blocks": {"workers": "workers or None"},
    "distdl.agreement.Headers": {"derivatives": "tuple"},
    "distdl.backends.mpi.buffer.MPIExpandableBuffer": {"dtype": "NumPy's"},
    "distdl.nn.primitive.Movement": {"plan": "function"},
    "distdl.partition.Layout.everywhere": {"extents": "whole extents"},
    "distdl.partition.Layout.tiled": {"shapes": "shapes of blocks"},
    "distdl.partition.Signature": {"local": "shape"},
    "distdl.partition.dims": {"shape": "printed"},
    "distdl.plan.Plan": {"inputs": "shapes of workers", "outputs": "shapes of workers"},
    "distdl.plan.planners.all_sum": {"axes": "axes", "shapes": "shapes of x"},
    "distdl.plan.planners.broadcast": {"shapes": "shapes of x"},
    "distdl.transport.View": {"tensor": "place"},
}


def values_for(name: str, argument: str) -> tuple[Any, ...]:
    """What is wrong for an argument.

    Raises: KeyError for one that no kind is known for.
    """
    return VALUES[_OTHERS.get(name, {}).get(argument) or _KIND[argument]]
