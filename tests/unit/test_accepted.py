"""What authors may pass where a tuple is named: lists, named tuples, arrays and iterators, which become tuples."""

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import torch

from distdl import nn
from distdl.exchange import Operator, Together
from distdl.nn.layer import Application
from distdl.ops import Setup, Site
from distdl.partition import Layout, Signature
from distdl.plan import Move, Plan, planners
from distdl.tensors.derivatives import Derivatives
from distdl.transport import Label, View


class Run(NamedTuple):
    start: int
    stop: int


class Lent:
    """An op that is another's."""

    def __getattr__(self, name):
        if name == "setup":
            return lambda site, *signatures: None
        raise AttributeError(name)


class Own(Operator):
    """An operator with a constructor of its own."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.own = True


MOVE = Move(0, ((0, 2),), 1, ((0, 2),))
PLAN = Plan({0: (2,)}, {1: (2,)}, (MOVE,))
HALVES = ((0, 2), (2, 4))
VIEW = partial(View, dtype=torch.float32, whole=True)
COMMON = (Label("a test"), torch.float32, Derivatives())


def layout(P):
    return Layout.balanced(P, (4,))


def operator(P, inputs):
    return Operator(PLAN, P.comm, (0, 1), *COMMON, inputs=inputs, outputs=[(0,)])


# what is made, and what it has to equal
ACCEPTED = {
    "View of lists": (lambda P: hash(VIEW(0, 0, [2, 3], [3, 1])), hash(VIEW(0, 0, (2, 3), (3, 1)))),
    "Site of a list": (lambda P: Site(P, [0, 1], COMMON[0]).members, (0, 1)),
    "Layout.of lists": (lambda P: Layout.of(P, [[[0, 2], [2, 4]]]).intervals, (HALVES,)),
    "Layout.of named tuples": (lambda P: Layout.of(P, [[Run(0, 2), Run(2, 4)]]).intervals, (HALVES,)),
    "Layout.of zip": (lambda P: Layout.of(P, [zip([0, 2], [2, 4], strict=True)]).intervals, (HALVES,)),
    "Layout.of a generator": (lambda P: Layout.of(P, (along for along in [HALVES])).intervals, (HALVES,)),
    "Layout.balanced of a generator": (lambda P: Layout.balanced(P, (n for n in [4])).intervals, (HALVES,)),
    "a planner of lists": (lambda P: planners.broadcast(P[:1], P, {0: [3, 4]}).inputs, {0: (3, 4)}),
    "a planner of arrays": (lambda P: planners.all_sum(P, [0], dict.fromkeys((0, 1), np.array([3]))).outputs[1], (3,)),
    "Plan of lists": (lambda P: Plan({0: [2]}, {1: [2]}, [MOVE]), PLAN),
    "Move of lists": (lambda P: Move(0, [[0, 2]], 1, [(0, 2)]), MOVE),
    "Operator of lists": (lambda P: operator(P, [[2]]).inputs, ((2,),)),
    "a subclass of Operator": (lambda P: Own.identity(P.comm, (0, 1), *COMMON, [(2,)]).own, True),
    "Application of lists": (lambda P: Application(Lent(), places=[P], work=P, names=["x"]).names, ("x",)),
    "Setup of a list": (lambda P: len(Setup(Together(), abs, abs, results=[layout(P)]).results), 1),
    "Setup of a function": (lambda P: Setup(lambda x: (x,), abs, abs)(torch.tensor(-1.0)), 1.0),
    "Signature of a list": (lambda P: Signature(layout(P), torch.float32, Derivatives(), local=[2]).local, (2,)),
    "ReduceScatter of pairs": (lambda P: nn.ReduceScatter(P, 0, sizes=[(0, (3, 1))]).sizes, {0: (3, 1)}),
    "local of lists": (lambda P: nn.local(torch.neg, [1], [torch.ones(1), [1]]).item(), -1.0),
    "an array of objects": (lambda P: P.reshape(np.array([2, 1], dtype=object)).workers.shape, (2, 1)),
}


@pytest.mark.parametrize("what", ACCEPTED)
def test_a_list_is_taken_for_a_tuple_and_becomes_one(world, what):
    make, expected = ACCEPTED[what]
    assert make(world(2).reshape(2)) == expected


@pytest.mark.parametrize("shape", [[[1, 1]], [np.inf], np.array([1.5], dtype=object), np.array([2**70])])
def test_what_is_no_shape_of_whole_numbers_is_refused(world, shape):
    with pytest.raises(TypeError, match="needs whole numbers"):
        world(1).create_cartesian_topology_partition(shape)
