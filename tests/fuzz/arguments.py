"""A right call of every public constructor and function, and values that are wrong for each of their arguments."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from inspect import Parameter, signature
from typing import Any, get_args, get_type_hints

import authors
import numpy as np
import torch

import distdl
from distdl import nn
from distdl.partition import Layout, Partition

Right = Callable[[Partition], dict[str, Any]]

NO_ARGUMENTS = "takes no arguments: a call with one is a TypeError of Python or torch"
ABSTRACT = "cannot be made: a TypeError says so"
ANY_VALUE = "takes any value: the text of an error; what it returns; what the agreement then refuses on all workers"
RESULT = "is what a function of ours returns; no user makes one"
ELSEWHERE = "needs a job of processes, the main thread, or MPI"

HUGE = 2**62
NO_NUMBER = ("a", None, [], {}, object(), 1j)
VALUES: dict[str, tuple[Any, ...]] = {
    # always wrong: the call has to raise
    "partition": (3, "a", (1, 2), object(), torch.zeros(2)),
    "count": (*NO_NUMBER, 2.5, -7, 0, HUGE, -HUGE),
    "iterations": (*NO_NUMBER, 2.5, -7, 0),
    "extent": (*NO_NUMBER, 2.5, -7, HUGE, -HUGE),
    "whole": (*NO_NUMBER, 2.5),
    "sizes": ("a", {}, object(), 2.5, -7, HUGE, (1,) * 9, (2.5, 1), (None,)),
    "number": ("a", [], {}, object(), 1j),
    "string": (3, None, "nonsense", [], object()),
    "flag": ("a", 2.5, [], object(), 7),
    "tensor": (3, "a", [1.0], object()),
    "module": (3, "a", None, torch.zeros(2), object()),
    "function": (3, "a", None),
    "dtype": (3, "a", object()),
    "optimiser": (3, "a", object()),
    "layout": (3, "a", None, object()),
    "array": ("a", object(), {"a": 1}),
    "axes": ("a", 9, -9, (0, 0), (0, HUGE), 2.5, object()),
    "shape": ("a", {}, object(), 2.5, (2.5, 1), (None,), (-7, -7)),
    "layer": (3, "a", None, object(), torch.nn.ReLU()),
    "intervals": (3, "a", object(), [3], [[(0, 1)]]),
    "buffers": (3, "a", object()),
    "parameters": (3, "a", object()),
    "path": (3, None, object()),
    "worker": ("a", [], object(), 2.5, True, -7, 9, HUGE),
    "state": (3, "a", None, object(), [1]),
    "comm": (3, "a", object()),
    "handler": (3, "nonsense", object()),
    "cells of a block": ("a", {}, object(), 2.5, (2.5,), (None,), (0, 1, 2, 3, 4, 5, 6)),
    "source": (3, None, object(), [3]),
    "structure": (3, "a", None),
    "numbers": ("a", None, object(), {"a": 1}, ("a", "b"), (None, None)),
    "name": (3, None, "nonsense", [], object()),
    # what cannot be wrong, or is read by another library
    "anything": (),
    "cells": ("a", {}, object(), 2.5, (1,) * 9, (2.5, 1), (None,), (HUGE, HUGE)),
    "factor": ("a", {}, object(), -7.0, 0, (1.0,) * 9, (None,)),
    "mapping": (3, "a", object(), {9: (1, 2)}, {2: "a"}, {2: 3}, {2: (-1, 5)}),
}
KINDS = {
    "partition": "P P_x P_y P_w",
    "count": "in_channels out_channels num_groups groups workers keep",
    "iterations": "n_power_iterations batch_size",
    "extent": "in_features out_features num_features num_channels num_embeddings embedding_dim",
    "whole": "seed ignore_index padding_idx divisor_override step dim rank i b",
    "sizes": "kernel_size stride padding dilation output_padding output_size normalized_shape",
    "number": "eps p norm_type label_smoothing beta delta value gain a b mean std max_norm clip_value momentum bound "
    "tolerance",
    "string": "reduction padding_mode mode nonlinearity weights fallback",
    "flag": "bias affine track_running_stats inplace count_include_pad ceil_mode return_indices elementwise_affine "
    "log_target log_input full transpose_src transpose_dest preserve_batch scale_grad_by_freq sparse "
    "bounded error_if_nonfinite align_corners use_trivialization wait random backward",
    "tensor": "weight pos_weight parameter x dy tensor",
    "module": "network model module reference",
    "function": "function opener check start command",
    "dtype": "dtype",
    "optimiser": "optimiser optimizer",
    "layout": "layout",
    "axes": "axes axes_reduce axes_keep",
    "layer": "layer",
    "intervals": "blocks",
    "buffers": "buffer_manager",
    "path": "path",
    "worker": "on worker",
    "state": "state optimiser_state",
    "comm": "comm inner",
    "source": "source dataset",
    "structure": "global_tensor_structure local_tensor_structure",
    "numbers": "P_shape index shape start_index stop_index r0_start_index r0_stop_index r1_start_index r1_stop_index "
    "P_r_shape r_index P_s_shape s_index x_global_shape x_start_index x_stop_index y_start_index y_stop_index shapes "
    "slices index_filter pad",
    "name": "name backend",
}
KIND = {name: kind for kind, names in KINDS.items() for name in names.split()}


def line(P: Partition) -> Partition:
    return P.reshape(1, 1, 4)


def convolution(P: Partition) -> dict[str, Any]:
    return {"in_channels": 2, "out_channels": 3, "kernel_size": 3}


def spatial(space: int) -> Callable[[Partition], dict[str, Any]]:
    return lambda P: {"P_x": P.reshape(1, 1, 4, *[1] * (space - 1))}


def made(options: dict[str, Any], *places: Callable[[Partition], Partition]) -> Right:
    return lambda P: {**{name: place(P) for name, place in zip(("P_x", "P_y", "P_w"), places, strict=False)}, **options}


def _shaped(*shape: int) -> Callable[[Partition], Partition]:
    return lambda P: P.reshape(*shape)


def layers() -> dict[str, Right]:
    """The right calls of all layers."""
    found: dict[str, Right] = {}
    channels = {"in_channels": 4, "out_channels": 4, "kernel_size": 3}
    for space in (1, 2, 3):
        own = _shaped(1, 1, 4, *[1] * (space - 1))
        for kind in ("Conv", "FeatureConv", "ConvTranspose"):
            found[f"Distributed{kind}{space}d"] = made(channels, own)
        for kind in ("ChannelConv", "GeneralConv"):
            split = _shaped(1, 2, *[1] * space)
            pair = lambda P, split=split: split(P[:2])  # noqa: E731  # (one of each turn of the loop)
            found[f"Distributed{kind}{space}d"] = made(channels, pair, pair, _shaped(2, 2, *[1] * space))
        for kind in ("MaxPool", "AvgPool"):
            found[f"Distributed{kind}{space}d"] = made({"kernel_size": 2}, own)
        found[f"DistributedLPPool{space}d"] = made({"norm_type": 2.0, "kernel_size": 2}, own)
        for kind in ("AvgPool", "MaxPool"):
            found[f"DistributedAdaptive{kind}{space}d"] = made({"output_size": 4}, own)
        found[f"DistributedDropout{space}d"] = made({}, own)
    axis = _shaped(1, 1, 4)
    found["DistributedDropout"] = made({}, axis)
    for kind in ("BatchNorm", "InstanceNorm"):
        found[f"Distributed{kind}"] = made({"num_features": 4}, axis)
    found["DistributedGroupNorm"] = made({"num_groups": 2, "num_channels": 4}, axis)
    for kind in ("LayerNorm", "RMSNorm"):
        found[f"Distributed{kind}"] = made({"normalized_shape": (8,)}, axis)
    for kind in (
        "BCE",
        "BCEWithLogits",
        "CrossEntropy",
        "Huber",
        "KLDiv",
        "L1",
        "MSE",
        "NLL",
        "PoissonNLL",
        "SmoothL1",
    ):
        found[f"Distributed{kind}Loss"] = made({}, axis)
    found["DistributedLossBase"] = made({"function": "l1_loss", "reduction": "mean"}, axis)
    found["DistributedPad"] = made({"padding": (1, 1)}, axis)
    found["DistributedUpsample"] = made({"scale_factor": 2.0}, axis)
    linear = {"in_features": 4, "out_features": 6}
    found["DistributedLinear"] = made(linear, _shaped(1, 4), _shaped(1, 4), lambda P: P[:].reshape(1, 4, 1)[:, :, :])
    found["DistributedLinear"] = made(
        linear, lambda P: P[:2].reshape(1, 2), lambda P: P[2:].reshape(1, 2), _shaped(2, 2)
    )
    table = {"num_embeddings": 5, "embedding_dim": 3}
    found["DistributedEmbedding"] = made(table, _shaped(4), _shaped(4, 1), _shaped(4, 1, 1))
    found["AllGather"] = made({"axes": (2,)}, axis)
    found["AllSumReduce"] = made({"axes_reduce": (2,)}, axis)
    found["ReduceScatter"] = made({"axes": (2,)}, axis)
    found["Broadcast"] = made({}, lambda P: P[:1].reshape(1, 1), _shaped(2, 2))
    found["SumReduce"] = made({}, _shaped(2, 2), lambda P: P[:1].reshape(1, 1))
    found["Repartition"] = made({}, _shaped(2, 2), _shaped(1, 4))
    return {f"distdl.nn.{name}": right for name, right in found.items()}


def _parameter(P: Partition) -> dict[str, Any]:
    return {"parameter": torch.zeros(2, 3), "layout": Layout.balanced(P.reshape(4, 1), (8, 3))}


def _network(P: Partition) -> Any:
    return nn.DistributedFeatureConv1d(line(P), 1, 1, 3)


def _parameters(P: Partition) -> dict[str, Any]:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return {"network": [parameter]}


def _plain() -> Any:
    return _with_ones(torch.nn.Linear(4, 4))


def _with_ones(module: Any) -> Any:
    """The module, the same on every worker."""
    torch.nn.init.ones_(module.weight), torch.nn.init.ones_(module.bias)
    return module


def _optimiser() -> Any:
    return torch.optim.SGD(_plain().parameters(), 0.1)


def _folder(P: Partition) -> str:
    """A folder for all workers, with a checkpoint in it."""
    folder = P.broadcast_data(tempfile.mkdtemp() if P.rank == 0 else None)
    if P.rank == 0:
        atexit.register(shutil.rmtree, folder)
    distdl.save(f"{folder}/0", _plain())
    return folder


INITIAL: dict[str, dict[str, Any]] = {
    "constant_": {"value": 1.0},
    "uniform_": {},
    "normal_": {},
    "trunc_normal_": {},
    "xavier_uniform_": {},
    "xavier_normal_": {},
    "kaiming_uniform_": {},
    "kaiming_normal_": {},
}
BLOCKS = {"P_shape": (2, 2), "index": (0, 1), "shape": (5, 7)}

FUNCTIONS: dict[str, Right] = {
    **{f"distdl.nn.init.{name}": (lambda P, more=more: {**_parameter(P), **more}) for name, more in INITIAL.items()},
    "distdl.nn.init.fans": lambda P: {"layout": _parameter(P)["layout"]},
    "distdl.nn.utils.get_total_norm": _parameters,
    "distdl.nn.utils.clip_grad_norm_": lambda P: {**_parameters(P), "max_norm": 1.0},
    "distdl.nn.utils.clip_grad_value_": lambda P: {**_parameters(P), "clip_value": 1.0},
    "distdl.nn.utils.orthogonal": lambda P: {"module": _network(P)},
    "distdl.nn.utils.spectral_norm": lambda P: {"module": _network(P)},
    "distdl.nn.utils.weight_norm": lambda P: {"module": _network(P)},
    "distdl.nn.placement.parameter_layouts": lambda P: {"network": _network(P)},
    "distdl.nn.placement.sequential_layouts": lambda P: {"network": _network(P)},
    "distdl.nn.placement.uniform_parameter": lambda P: {"layout": _parameter(P)["layout"], "bound": 0.5},
    "distdl.nn.Interpolate": lambda P: (
        {"scale_factor": 2.0}
        | dict(
            zip(
                ("x_start", "x_stop", "x_global_shape", "y_start", "y_stop", "y_global_shape"),
                [(0, 0, 0), (1, 1, 4), (1, 1, 4), (0, 0, 0), (1, 1, 8), (1, 1, 8)],
                strict=True,
            )
        )
    ),
    "distdl.nn.HaloExchange": lambda P: {
        "P_x": P.reshape(4),
        "halo_shape": ((0, 0),),
        "recv_buffer_shape": ((0, 0),),
        "send_buffer_shape": ((0, 0),),
    },
    "distdl.check": lambda P: {"network": _network(P)},
    "distdl.distribute": lambda P: {"module": _plain(), "P": P.reshape(4, 1)},
    "distdl.distribute_tensor": lambda P: {"x": torch.zeros(4, 4), "P": P.reshape(4, 1)},
    "distdl.export_state": lambda P: {"model": _plain()},
    "distdl.import_state": lambda P: {"model": _plain(), "state": _plain().state_dict()},
    "distdl.draw": lambda P: {"thing": P.reshape(2, 2), "shape": (4, 4)},
    "distdl.drawing.Drawing": lambda P: {"scene": distdl.draw(P).scene},
    "distdl.finish_saving": lambda P: {},
    "distdl.save": lambda P: {"path": f"{_folder(P)}/1", "model": _plain()},
    "distdl.load": lambda P: {"path": f"{_folder(P)}/0", "model": _plain()},
    "distdl.ledger": lambda P: {},
    "distdl.local_map": lambda P: {"function": torch.relu},
    "distdl.name_layers": lambda P: {"model": _network(P)},
    "distdl.optimizer_state_dict": lambda P: {"optimizer": _optimiser()},
    "distdl.load_optimizer_state_dict": lambda P: {"optimizer": _optimiser(), "state": _optimiser().state_dict()},
    "distdl.register": lambda P: {"function": lambda x: x, "handler": "elementwise"},
    "distdl.reproducible": lambda P: {},
    "distdl.run_workers": lambda P: {"function": lambda: None, "workers": 1, "backend": "serial"},
    "distdl.report": lambda P: {
        "model": _plain(),
        "P": (2, 2),
        "input_shape": (4, 4),
        "path": f"{_folder(P)}/report.html",
        "trace": None,
    },
    "distdl.suggest": lambda P: {"model": _plain(), "workers": 2, "input_shape": (4, 4)},
    "distdl.summary": lambda P: {"model": _plain(), "P": (2, 1), "input_shape": (4, 4)},
    "distdl.compile": lambda P: {"function": torch.relu, "signatures": 2, "backend": "line"},
    "distdl.trace": lambda P: {"path": f"{_folder(P)}/trace.json", "model": _plain(), "operators": True},
    "distdl.verify": lambda P: {
        "model": _plain(),
        "P": (2, 2),
        "inputs": torch.ones(4, 4),
        "loss": torch.sum,
        "steps": 1,
        "optimizer": torch.optim.SGD,
        "weights": "replicated",
    },
    "distdl.world": lambda P: {},
    "distdl.amp.GradScaler": lambda P: {"device": "cpu"},
    "distdl.backends.find": lambda P: {"name": "threads"},
    "distdl.backends.register": lambda P: {"name": "mine", "opener": lambda: None},
    "distdl.Partition": lambda P: {"comm": P.comm, "workers": [0, 1]},
    "distdl.CartesianPartition": lambda P: {"comm": P.comm, "workers": [[0, 1]]},
    "distdl.data.BlockDataset": lambda P: {"source": np.zeros((5, 4, 4)), "P": P.reshape(1, 2, 2)},
    "distdl.data.DataLoader": lambda P: {"dataset": distdl.data.BlockDataset(np.zeros((5, 4, 4)), P.reshape(1, 2, 2))},
    "distdl.data.collate": lambda P: {"P": P.reshape(1, 2, 2)},
    "distdl.testing.Counting": lambda P: {"inner": P.comm},
    "distdl.testing.Silent": lambda P: {"rank": 1, "size": 4},
    "distdl.testing.assert_adjoint": lambda P: {
        "layer": nn.AllSumReduce(P.reshape(4), [0]),
        "x": torch.ones(2, dtype=torch.float64),
    },
    "distdl.testing.assert_matches_sequential": lambda P: {
        "layer": _network(P).double(),
        "reference": _with_ones(torch.nn.Conv1d(1, 1, 3).double()),
        "x": torch.arange(8.0, dtype=torch.float64).reshape(1, 1, 8),
    },
    "distdl.utilities.debug.print_sequential": lambda P: {"comm": P, "val": 3},
    "distdl.utilities.index_tricks.cartesian_index_c": lambda P: {"shape": (2, 3), "i": 4},
    "distdl.utilities.index_tricks.cartesian_index_f": lambda P: {"shape": (2, 3), "i": 4},
    "distdl.utilities.slicing.assemble_index_filter": lambda P: {"index": (1, 2), "axes": (0,)},
    "distdl.utilities.slicing.assemble_slices": lambda P: {"start_index": (0, 1), "stop_index": (2, 3)},
    "distdl.utilities.slicing.compute_intersection": lambda P: dict.fromkeys(
        ("r0_start_index", "r0_stop_index", "r1_start_index", "r1_stop_index"), (0, 1)
    ),
    "distdl.utilities.slicing.compute_nd_slice_shape": lambda P: {"slices": (slice(0, 2),)},
    "distdl.utilities.slicing.compute_nd_slice_volume": lambda P: {"slices": (slice(0, 2),)},
    "distdl.utilities.slicing.compute_partition_intersection": lambda P: {
        "P_r_shape": (2, 2),
        "r_index": (0, 0),
        "P_s_shape": (1, 4),
        "s_index": (0, 1),
        "x_global_shape": (5, 7),
    },
    **{
        f"distdl.utilities.slicing.compute_{name}": lambda P: BLOCKS
        for name in ("start_index", "stop_index", "subshape")
    },
    "distdl.utilities.slicing.filtered_range_index": lambda P: {"shape": (2, 3), "index_filter": (slice(None), 1)},
    "distdl.utilities.slicing.range_index": lambda P: {"shape": (2, 3)},
    "distdl.utilities.slicing.worker_layout": lambda P: {"shape": (2, 3)},
    "distdl.utilities.tensor_decomposition.compute_subtensor_intersection_slice": lambda P: dict.fromkeys(
        ("x_start_index", "x_stop_index", "y_start_index", "y_stop_index"), (0, 1)
    ),
    "distdl.utilities.tensor_decomposition.compute_subtensor_shapes_balanced": lambda P: {
        "global_tensor_structure": torch.zeros(4, 5),
        "P_shape": (2, 2),
    },
    "distdl.utilities.tensor_decomposition.compute_subtensor_shapes_unbalanced": lambda P: {
        "local_tensor_structure": torch.zeros(4, 5),
        "P_x": P.reshape(2, 2),
    },
    "distdl.utilities.tensor_decomposition.compute_subtensor_start_indices": lambda P: {"shapes": np.ones((2, 1), int)},
    "distdl.utilities.tensor_decomposition.compute_subtensor_stop_indices": lambda P: {"shapes": np.ones((2, 1), int)},
    "distdl.utilities.torch.TensorStructure": lambda P: {"tensor": torch.zeros(3)},
    "distdl.utilities.torch.distdl_padding_to_torch_padding": lambda P: {"pad": ((1, 1), (2, 2))},
    "distdl.utilities.torch.zero_volume_tensor": lambda P: {"b": 2},
}
RIGHT = {**layers(), **FUNCTIONS, **authors.RIGHT}
NOT_CALLED = {  # patterns of names, and why there are no wrong arguments of them
    NO_ARGUMENTS: (
        r"distdl\.(fixed_shapes|backends\.(chosen|names)|backends\.mpi\.buffer\.MPIBufferManager)",
        r"distdl\.environment\.(chosen_backend|cuda_aware_mpi|debug|grace|recycled_memory|timeout|tunes_malloc)",
        r"distdl\.nn\.(Module|Option|repeat_calls|mixins\..*)",
    ),
    ABSTRACT: (r"distdl\.ops\.Op", r"distdl\.transport\.Communicator"),
    ANY_VALUE: (r"distdl\.CommunicationError", r"distdl\.ops\.setup\.same", r"distdl\.nn\.layer\.given"),
    RESULT: (
        r"distdl\.(verification\.(Certificate|Mismatch)|reporting\.Report|tracing\.Trace|programs\.CompiledStep)",
    ),
    ELSEWHERE: (r"distdl\.backends\.job", r"distdl\.on_terminate", r"distdl\.backends\.mpi\.partition\..*"),
}
ALONE = ("distdl.run_workers",)  # which no worker of a world calls


def wrong(name: str, function: Callable[..., Any], right: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The arguments of a public name, each with values that are wrong for it.

    Raises: KeyError for an argument that no kind is known for.
    """
    for argument in arguments_of(function, right):
        for value in values_for(name, argument):
            if (name, argument) in ALLOWED and value in ALLOWED[name, argument]:
                continue
            if value is None and signature(function).parameters.get(argument, Parameter).default is None:
                continue
            yield argument, (value,) if argument.startswith("*") else value


def values_for(name: str, argument: str) -> tuple[Any, ...]:
    """What is wrong for an argument."""
    if name in authors.RIGHT:
        return authors.values_for(name, argument)
    return VALUES[SPECIAL.get((name, argument)) or SPECIAL.get(("", argument)) or KIND[argument]]


def call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """Call a function by names. Where a name begins with a star, all arguments before it are passed by their places."""
    behind = [value for name, value in given.items() if name.startswith("*")]
    if not behind:
        return function(**given)
    return function(*[value for name, value in given.items() if not name.startswith("*")], *behind[0])


def arguments_of(function: Callable[..., Any], right: dict[str, Any]) -> list[str]:
    """The names of all arguments, those of a TypedDict of options included."""
    found = dict.fromkeys(right)
    for name, parameter in signature(function).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD and "Unpack" in str(parameter.annotation):
            found |= dict.fromkeys(get_args(get_type_hints(function)[name])[0].__annotations__)
        elif parameter.kind not in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            found[name] = None
    return list(found)


SPECIAL: dict[tuple[str, str], str] = {
    ("distdl.nn.DistributedLossBase", "function"): "name",
    ("distdl.nn.DistributedPad", "padding"): "cells",
    ("distdl.nn.DistributedUpsample", "size"): "cells",
    ("", "scale_factor"): "factor",
    ("", "sizes"): "mapping",
    ("distdl.distribute_tensor", "src"): "worker",
    ("distdl.register", "handler"): "handler",
    ("distdl.register", "function"): "anything",
    ("distdl.suggest", "input_shape"): "shape",
    ("distdl.summary", "input_shape"): "shape",
    ("distdl.summary", "P"): "shape",
    ("distdl.report", "input_shape"): "shape",
    ("distdl.report", "P"): "shape",
    ("distdl.report", "splits"): "flag",
    ("distdl.report", "trace"): "path",
    ("distdl.local_map", "out"): "handler",
    ("distdl.testing.Silent", "rank"): "worker",
    ("distdl.testing.Silent", "size"): "iterations",
    ("distdl.check", "allowed"): "anything",
    ("distdl.draw", "thing"): "name",
    ("distdl.draw", "shape"): "shape",
    ("distdl.drawing.Drawing", "scene"): "name",
    ("distdl.compile", "signatures"): "iterations",
    ("distdl.trace", "operators"): "flag",
    ("distdl.verify", "P"): "shape",
    ("distdl.verify", "inputs"): "anything",
    ("distdl.verify", "loss"): "function",
    ("distdl.verify", "steps"): "iterations",
    ("distdl.data.BlockDataset", "source"): "source",
    ("distdl.amp.GradScaler", "device"): "anything",
    ("distdl.Partition", "workers"): "numbers",
    ("distdl.CartesianPartition", "workers"): "numbers",
    ("distdl.utilities.debug.print_sequential", "val"): "anything",
    ("distdl.utilities.debug.print_sequential", "comm"): "comm",
    ("distdl.utilities.slicing.assemble_index_filter", "invert"): "anything",
    ("distdl.nn.utils.orthogonal", "orthogonal_map"): "name",
    ("distdl.nn.utils.get_total_norm", "network"): "parameters",
    ("distdl.nn.utils.clip_grad_norm_", "network"): "parameters",
    ("distdl.nn.utils.clip_grad_value_", "network"): "parameters",
    ("distdl.save", "wait"): "anything",
    ("distdl.load", "random"): "anything",
    **{
        ("distdl.nn.HaloExchange", name): "anything"
        for name in ("halo_shape", "recv_buffer_shape", "send_buffer_shape")
    },
    **{
        ("distdl.nn.Interpolate", name): "cells of a block"
        for name in ("x_start", "x_stop", "x_global_shape", "y_start", "y_stop", "y_global_shape")
    },
    **{("", name): "anything" for name in ("foreach", "scheduler", "requires_grad", "device", "dilation_", "val")},
}
ALLOWED: dict[tuple[str, str], tuple[Any, ...]] = {
    ("distdl.backends.register", "name"): ("nonsense",),
    ("distdl.nn.utils.weight_norm", "dim"): (None,),
    **{(f"distdl.nn.DistributedAdaptive{kind}Pool1d", "output_size"): ((None,),) for kind in ("Avg", "Max")},
}
