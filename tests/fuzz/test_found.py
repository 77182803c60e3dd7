"""What fuzzing has found, and has been mended since."""

import pytest
import torch
from chains import Chain
from judging import judge, judge_chain, judge_network
from networks import Batch, Network, Part
from partitions import Blocks
from programs import Input, Program, Ref, Step
from team import Team, quietly

import distdl
from distdl.globals.consistency import debug
from distdl.globals.layouts.context import Context
from distdl.nn import DistributedFeatureConv1d
from distdl.nn.utils import clip_grad_value_

FOUND = {
    "a second derivative of logsumexp waits for workers whose blocks are empty": Program(
        (Input((3, 1, 2), 70, "normal", True, False, Blocks((2, 1, 3, 0), ((1, 2), (0, 1), (2,)))),),
        (Step("torch.logsumexp", (Ref(0), (0,)), (("keepdim", True),)),),
        (1,),
        (0,),
    ),
    "a worker outside has no second derivative of cumprod": Program(
        (Input((2, 4), 40, "normal", True, False, Blocks((0, 2, 3), ((1, 1, 0), (4,)))),),
        (Step("torch.cumprod", (Ref(0), -2)),),
        (0, 1),
        (0,),
    ),
    "a second derivative of logcumsumexp waits for workers that hold nothing": Program(
        (Input((6,), 66, "normal", True, False, Blocks((3, 0), ((3, 3),))),),
        (Step("torch.logcumsumexp", (Ref(0), 0)), Step("torch.mul", (Ref(1), -1.25))),
        (1, 2),
        (0,),
    ),
    "workers that hold nothing have no second derivative of a variance": Program(
        (Input((1, 1, 2), 0, "normal", True, False, Blocks((0,), ((1,), (1,), (2,)))),),
        (Step("torch.var", (Ref(0), (2,))), Step("torch.add", (Ref(1), 0.5))),
        (2,),
        (0,),
    ),
    "a product over one number has no second derivative where that is 0, or is not there": Program(
        (Input((2, 1), 1, "normal", True, False, Blocks((0, 1), ((1, 1), (1,)))),),
        (Step("torch.add", (Ref(0), 0.5)), Step("torch.prod", (Ref(1), 1))),
        (2,),
        (0,),
    ),
    "a product of blocks of which one has a zero": Program(
        (Input((2, 3), 1, "normal", True, False, Blocks((2, 1), ((1, 1), (3,)))),),
        (Step("torch.relu", (Ref(0),)), Step("torch.prod", (Ref(1), 0))),
        (2,),
        (0,),
    ),
    "workers that hold nothing have no second derivative of cumprod along a dim that is not split": Program(
        (Input((2,), 0, "normal", True, False, Blocks((0,), ((2,),))),),
        (Step("torch.add", (Ref(0), 0.5)), Step("torch.cumprod", (Ref(1), 0))),
        (2,),
        (0,),
    ),
    "booleans in front of an empty block cut it off": Program(
        (Input((1, 1), 0, "normal", True, False, Blocks((0, 1), ((1,), (1, 0)))),),
        (Step("torch.gt", (Ref(0), 0.3137)), Step("torch.cat", ((Ref(1), Ref(0)), 1))),
        (2,),
    ),
    "a tensor is multiplied in place by a view of it": Program(
        (Input((3, 3), 0, "normal", False, False, Blocks((0,), ((3,), (3,)))),),
        (Step("torch.select", (Ref(0), 0, 0)), Step("Tensor.mul_", (Ref(0), Ref(1)))),
        (2,),
    ),
    "torch refuses a view, and then each worker what was written in place": Program(
        (Input((2, 2, 1, 2), 0, "normal", True, False, Blocks((0,), ((2,), (2,), (1,), (2,)))),),
        (
            Step("Tensor.mul_", (Ref(0), Ref(0))),
            Step("torch.diagonal", (Ref(1), 0)),
            Step("Tensor.view", (Ref(2), (4,))),
        ),
        (2,),
    ),
    "what should be a view does not see what is written into its tensor": Program(
        (Input((4, 7), 41, "normal", False, True, Blocks((1, 0), ((1, 3), (7,)))),),
        (Step("Tensor.reshape", (Ref(0), (14, 1, -1))), Step("Tensor.add_", (Ref(0), 2)), Step("torch.exp", (Ref(1),))),
        (1, 2),
    ),
    "a value of a border that repeats cells was not looked at": Program(
        (Input((1, 1, 1), 0, "normal", False, False, Blocks((0,), ((1,), (1,), (1,)))),),
        (Step("functional.pad", (Ref(0), (0, 0), "replicate", -7)),),
        (0,),
    ),
    "torch's logsumexp over no dims fails": Program(
        (Input((1, 2), 0, "normal", False, False, Blocks((0,), ((1,), (2,)))),),
        (Step("torch.logsumexp", (Ref(0), [])),),
        (0,),
    ),
    "a stride that torch takes, for there is one window": Program(
        (Input((1, 1, 1), 0, "normal", False, False, Blocks((0,), ((1,), (1,), (1,)))),),
        (Step("functional.conv1d", (Ref(0), Ref(0)), (("stride", 2**62),)),),
        (1,),
    ),
    "torch's cummax of nothing looks at no dim": Program(  # (until 2.13)
        (Input((0, 1), 0, "normal", False, False, Blocks((0,), ((0,), (1,)))),),
        (Step("torch.cummax", (Ref(0), -7)),),
        (2,),
    ),
}

_WEIGHT = Part("Conv1d", (1, 1, 1))
_ALONE = Blocks((0,), ((1,), (1,), (4,)))
NETWORKS = {
    "in place behind weights in shares, workers outside do not gather them again": Network(
        (_WEIGHT, Part("ReLU", (), (("inplace", True),))), (Batch(_ALONE, 0),), _ALONE, "sharded",
    ),
    "nor does anybody where what a layer returns is a view": Network(
        (Part("Flatten", (0, 1)), _WEIGHT, Part("ReLU", (), (("inplace", True),))), (Batch(_ALONE, 0, wants=True),),
        _ALONE, "sharded",
    ),
    "a loss of classes requires a gradient where nothing does": Network(
        (Part("Identity"),), (Batch(_ALONE, 0), Batch(_ALONE, 1)), _ALONE, classes=True
    ),
}  # fmt: skip

OUTCOMES = {
    "a stride that torch takes, for there is one window": "refused: a number that no window has",
    "torch's cummax of nothing looks at no dim": (
        "same error" if torch.__version__ >= "2.14" else "refused: a dim that is not there, of a tensor without cells"
    ),
    "torch's logsumexp over no dims fails": "same error",
    "a value of a border that repeats cells was not looked at": "same error",
    "a tensor is multiplied in place by a view of it": "torch refuses: to write what it reads",
    "torch refuses a view, and then each worker what was written in place": "same error",
    "what should be a view does not see what is written into its tensor": "refused: a view would see a write",
}


@pytest.fixture(scope="module")
def team():
    made = Team()
    yield made
    made.close()


@pytest.mark.parametrize("what", FOUND)
def test_what_fuzzing_has_found(team, what):
    case = FOUND[what]
    judged = judge_chain if isinstance(case, Chain) else judge
    assert quietly(lambda: judged(case, team)) == OUTCOMES.get(what, "equal")


@pytest.mark.parametrize("what", NETWORKS)
def test_what_random_networks_have_found(team, what):
    assert quietly(lambda: judge_network(NETWORKS[what], team)) == "equal"


def test_what_one_worker_has_forgotten_is_made_alike():
    """The name of a function is in the tags of its messages; it was that of the first function that moved so."""

    def work():
        P = distdl.world().reshape(2, 2)
        x = distdl.distribute_tensor(torch.arange(20.0).reshape(4, 5), P)
        context = Context.of(P.comm)
        total, double = x.sum(0), distdl.local_map(torch.Tensor.double)
        y = double(x) * total
        if P.rank == 1:
            context._kept.clear()
        assert torch.equal((double(x) - x.mean(0)).full_tensor(), (x - x.sum(0) / 4).full_tensor().double())
        return y.sum().item()

    assert len(set(distdl.run_workers(work))) == 1


def test_a_worker_without_gradients_clips_none():
    def work():
        P = distdl.world()
        layer = DistributedFeatureConv1d(P[:1].reshape(1, 1, 1), 1, 1, 3)
        x = torch.ones(1, 1, 8) if P.rank == 0 else torch.zeros(1, 0)
        if P.rank == 0:
            (layer(x).sum() * 100).backward()
        clip_grad_value_(layer, 0.5)
        return P.rank or layer.weight.grad.abs().max().item()

    assert distdl.run_workers(work) == [0.5, 1, 2, 3]


NO_TENSOR = {
    "layer_norm": lambda F, x: F.layer_norm(x, (5,), -7),
    "group_norm": lambda F, x: F.group_norm(x, 1, -7),
    "batch_norm": lambda F, x: F.batch_norm(x, None, None, weight=-7, training=True),
    "embedding": lambda F, x: F.embedding(x.long(), ()),
    "cross_entropy": lambda F, x: F.cross_entropy(x, -7),
    "einsum": lambda F, x: torch.einsum("ij,ij->i", [x, -7]),
}


@pytest.mark.parametrize("noted", [False, True], ids=["plain", "debug"])
def test_what_is_no_tensor_is_a_type_error_that_says_so(monkeypatch, noted):
    """It was the AttributeError of whatever looked at it first, and still was where functions are noted."""
    watching = [debug.noted] if noted else []
    monkeypatch.setattr("distdl.globals.tensor.torch_function.AROUND_CALLS", watching)

    def work():
        x = distdl.distribute_tensor(torch.ones(4, 5), distdl.world().reshape(4, 1))
        for name, call in NO_TENSOR.items():
            with pytest.raises(TypeError, match=rf"{name}\(\) needs a tensor where it got (-7, a int|\(\), a tuple)"):
                call(torch.nn.functional, x)
        with pytest.raises(TypeError, match="running_mean"):
            torch.nn.functional.batch_norm(x, -7, None, training=True)
        with pytest.raises(TypeError, match=r"pad\(\) needs value to be a number; got 'a', a str"):
            torch.nn.functional.pad(x, (0, 1), "constant", "a")
        with pytest.raises(TypeError, match=r"'ceil_mode' .* must be bool, not NoneType"):
            torch.nn.functional.lp_pool1d(x.unsqueeze(0), 2.0, 1, 1, None)
        with pytest.raises(RuntimeError, match="'output_size' should contain one int"):
            torch.nn.functional.adaptive_avg_pool1d(x.unsqueeze(0), (2, 2))
        assert torch.nn.functional.normalize(x, None).shape == (4, 5)  # (in torch, None is 2)
        with pytest.raises(TypeError, match="must be tuple of ints, not dict"):
            torch.nn.functional.normalize(x, 2.0, {})
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = x.nonsense
        return len(NO_TENSOR)

    assert distdl.run_workers(work) == [6] * 4


def test_sizes_that_adaptive_poolings_do_not_make():
    """2**62 outputs were listed one by one, until memory was full; True was taken for 1, and -7 for a third result."""

    def work():
        F, P = torch.nn.functional, distdl.world().reshape(1, 1, 2, 1)
        x = distdl.distribute_tensor(torch.rand(1, 2, 4, 4), P)
        layer = distdl.nn.DistributedAdaptiveMaxPool2d(P, (1, 2**31 - 1))
        for pool in F.adaptive_avg_pool2d, F.adaptive_max_pool2d:
            assert pool(x, 1).shape == (1, 2, 1, 1)  # (1 and True are equal)
            with pytest.raises(TypeError, match="must be tuple of ints, not bool"):
                pool(x, True)
            with pytest.raises(RuntimeError, match="overflow"):
                pool(x, (1, 2**62))
            with pytest.raises(ValueError, match=r"makes at most 4194304 outputs along a dim; got 1099511627776"):
                pool(x, (1, 2**40))
        with pytest.raises(ValueError, match=r"AdaptiveMaxPool2d.* makes at most 4194304 outputs along a dim"):
            layer(x.to_local())
        return len(F.adaptive_max_pool2d(x, (1, 1), -7))

    assert distdl.run_workers(work, 2) == [2, 2]
