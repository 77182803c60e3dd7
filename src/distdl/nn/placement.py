"""Placement: on which worker each block of a parameter lives, and its initial values.

Initial values are those of torch's own layers, uniform within a bound that follows from the global fan-in. The value of
an element depends on the seed, on the parameter and on the element's index in the global tensor, and on nothing else.
So a network begins with the same values on any partition, and no worker ever holds a whole parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any
from weakref import WeakSet

import torch

from distdl.nn.keys import next_key
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import dims
from distdl.partition.layout import Layout
from distdl.tensors.uniform import Value, uniform_block
from distdl.transport.communicator import Communicator

_ADDRESSABLE = 2**44  # elements of 8 bytes in the 47 bits of a process's addresses


def random_block(layout: Layout, value: Value, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The block of a parameter that this worker stores, with random values; of zero volume where it has none.

    Every worker makes the parameters of a network in the same order. The seed is that of ``torch.manual_seed``, which
    has to be the same on all workers; torch's generator is not used.

    Args:
        layout: the box of the global parameter that each worker stores.
        value: maps numbers that are uniform in [0, 1) to the values of elements, both in float64.
        dtype: dtype of the block; by default torch's default dtype.
    """
    comm = layout.partition.comm
    check_storable(layout)
    key = next_key(comm, "parameter")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if comm.rank not in layout.partition:
        return torch.empty(0, dtype=dtype)
    return uniform_block(key, layout[comm.rank], layout.extents, value, dtype)


def check_storable(layout: Layout) -> None:
    """Check that each worker can store its block of a parameter, as far as addresses go.

    Raises: ValueError, on every worker.
    """
    largest = prod(max(stop - start for start, stop in ruler.intervals) for ruler in layout.rulers)
    if largest > _ADDRESSABLE:
        raise ValueError(
            f"a parameter needs blocks of at most {_ADDRESSABLE} elements; one of shape {dims(layout.extents)} has a "
            f"block of {largest} over {layout.partition}"
        )


@checks_arguments
def uniform_parameter(layout: Layout, bound: float) -> torch.nn.Parameter:
    """A parameter that is uniform in ``[-bound, bound)``: see :func:`random_block`."""
    return torch.nn.Parameter(random_block(layout, lambda u: (2 * u - 1) * bound))


def normal_parameter(layout: Layout) -> torch.nn.Parameter:
    """A parameter of mean 0 and standard deviation 1: see :func:`random_block`."""
    return torch.nn.Parameter(random_block(layout, normal))


def normal(u: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers from numbers that are uniform in [0, 1)."""
    numbers: torch.Tensor = torch.special.ndtri(u.clamp(min=2.0**-54))
    return numbers


def distributed_models(comm: Communicator) -> WeakSet[torch.nn.Module]:
    """The models over a communicator that :func:`distdl.distribute` has made and that are still there.

    Their parameters, but for those of our layers in them, are the same on every worker, or shares.
    """
    found: WeakSet[torch.nn.Module] = comm.kept.setdefault(distributed_models, WeakSet())
    return found


@checks_arguments
def parameter_layouts(network: torch.nn.Module) -> dict[str, Layout]:
    """The name and the layout of every parameter of a network that is split over workers.

    The order is that of the parameters of the sequential network. For a pruned or parametrised parameter, the name is
    that of the tensor that is trained instead, as in torch (``weight_orig``, ``parametrizations.weight.original``).
    """
    return {
        f"{prefix}.{name}" if prefix else name: layout
        for prefix, module in network.named_modules()
        for name, layout in getattr(module, "parameter_layouts", {}).items()
    }


@checks_arguments
def sequential_layouts(network: torch.nn.Module) -> dict[str, Layout]:
    """The same, in the shapes of the sequential network, with names that ``get_parameter`` finds on every worker.

    It differs from :func:`parameter_layouts` only for batch norm, whose published ``gamma`` and ``beta`` have all dims
    of x and exist on some workers only. Its ``weight`` and ``bias`` are the same numbers in torch's shape, and of zero
    volume on the other workers.
    """
    found: dict[str, Layout] = {}
    for prefix, module in network.named_modules():
        layouts = getattr(module, "sequential_layouts", None) or getattr(module, "parameter_layouts", {})
        found |= {f"{prefix}.{name}" if prefix else name: layout for name, layout in layouts.items()}
    return found


def keep_sequential_keys(module: torch.nn.Module) -> None:
    """Let a module with ``parameter_layouts`` read, and if possible write, the ``state_dict`` of its sequential layer.

    The sequential key of a parameter is the last component of its name (``weight`` for ``sublinear.weight``), or what
    the module's ``sequential_names`` say. It is written if one worker stores the whole parameter, and always accepted
    when reading. From a tensor of the global shape, a worker reads its block.
    """
    module.register_state_dict_post_hook(_write_sequential_keys)
    module.register_load_state_dict_pre_hook(_read_sequential_keys)


def _write_sequential_keys(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, layout in stored_tensors(module):
        if len(layout) == 1 and prefix + name in state:
            value = state.pop(prefix + name)
            one = name in getattr(
                module, "sequential_names", {}
            )  # published with all dims of x; sequentially it has one
            state[prefix + sequential_name(module, name)] = value.flatten() if one else value


def _read_sequential_keys(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    parameters = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, layout in stored_tensors(module):
        key, sequential = prefix + name, prefix + sequential_name(module, name)
        if sequential in state and key not in state:
            state[key] = state.pop(sequential)
        if key in state and name not in parameters:
            del state[key]  # of a parameter that this worker has not even in zero volume
        elif key in state:
            if name in getattr(module, "sequential_names", {}) and state[key].shape == (prod(layout.extents),):
                state[key] = state[key].reshape(layout.extents)
            own = parameters[name].shape
            if tuple(state[key].shape) == layout.extents != tuple(own):
                state[key] = layout.block(state[key]).reshape(own)


def stored_tensors(module: Any) -> Iterator[tuple[str, Layout]]:
    """The names and layouts of the split parameters, and of the masks of those that are pruned."""
    for name, layout in module.parameter_layouts.items():
        yield name, layout
        if name.endswith("_orig"):
            yield name.removesuffix("orig") + "mask", layout


def sequential_name(module: Any, name: str) -> str:
    """The name that one of :func:`stored_tensors` has in the sequential layer."""
    if "parametrizations." in name:
        return name[name.index("parametrizations.") :]
    renamed: str = getattr(module, "sequential_names", {}).get(name, name.rpartition(".")[2])
    return renamed
