"""Placement: on which worker a block of a parameter lives, and with which values it begins.

Initial values are those of torch's own layers, uniform within a bound that follows from the global fan-in. The value of
an element depends on the seed, the parameter and the element's place in the global tensor, and on nothing else: another
partition begins with the same network, and no worker ever holds the whole of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from distdl.nn.uniform import Value, next_key, uniform_block
from distdl.partition.layout import Layout


def random_block(layout: Layout, value: Value, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The block of a parameter that this worker stores, with random values; of zero volume where it has none.

    Every worker makes the parameters of a network in the same order. The seed is that of ``torch.manual_seed``, which
    has to be the same on all workers; torch's generator is not drawn from.

    Args:
        layout: the box of the global parameter on each worker that stores some of it.
        value: what an element is of a number that is uniform in [0, 1), both in float64.
        dtype: of the block; torch's default dtype if not given.
    """
    comm = layout.partition.comm
    key = next_key(comm, "parameter")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if comm.rank not in layout.partition:
        return torch.empty(0, dtype=dtype)
    return uniform_block(key, layout[comm.rank], layout.extents, value, dtype)


def uniform_parameter(layout: Layout, bound: float) -> torch.nn.Parameter:
    """A parameter that is uniform in ``[-bound, bound)``: see :func:`random_block`."""
    return torch.nn.Parameter(random_block(layout, lambda u: (2 * u - 1) * bound))


def normal_parameter(layout: Layout) -> torch.nn.Parameter:
    """A parameter of mean 0 and standard deviation 1: see :func:`random_block`."""
    return torch.nn.Parameter(random_block(layout, normal))


def normal(u: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers of numbers that are uniform in [0, 1)."""
    numbers: torch.Tensor = torch.special.ndtri(u.clamp(min=2.0**-54))
    return numbers


def parameter_layouts(network: torch.nn.Module) -> dict[str, Layout]:
    """Of every parameter in a network that is split over workers: its name, and which block of it lives where.

    They stand in the order in which the sequential network has its parameters. A pruned or parametrised parameter has
    the name of what is trained in its place, as in torch (``weight_orig``, ``parametrizations.weight.original``).
    """
    return {
        f"{prefix}.{name}" if prefix else name: layout
        for prefix, module in network.named_modules()
        for name, layout in getattr(module, "parameter_layouts", {}).items()
    }


def sequential_layouts(network: torch.nn.Module) -> dict[str, Layout]:
    """The same in the shapes of the sequential network, under names that ``get_parameter`` knows on every worker.

    It differs for batch norm, whose published ``gamma`` and ``beta`` have all dims of x and exist on some workers only.
    Its ``weight`` and ``bias`` are the same numbers as torch has them, and of zero volume elsewhere.
    """
    found: dict[str, Layout] = {}
    for prefix, module in network.named_modules():
        layouts = getattr(module, "sequential_layouts", None) or getattr(module, "parameter_layouts", {})
        found |= {f"{prefix}.{name}" if prefix else name: layout for name, layout in layouts.items()}
    return found


def keep_sequential_keys(module: torch.nn.Module) -> None:
    """Let a module with ``parameter_layouts`` read, and where it can write, the ``state_dict`` of its sequential layer.

    The key of a parameter is the last part of its name, as in the sequential layer (``weight`` for
    ``sublinear.weight``), or what the module's ``sequential_names`` say. It is written where one worker stores the
    whole parameter, and read everywhere; of a parameter of the global shape, a worker reads its block.
    """
    module.register_state_dict_post_hook(_write_sequential_keys)
    module.register_load_state_dict_pre_hook(_read_sequential_keys)


def _write_sequential_keys(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, layout in _stored(module):
        if len(layout) == 1 and prefix + name in state:
            value = state.pop(prefix + name)
            one = name in getattr(
                module, "sequential_names", {}
            )  # published with all dims of x; sequentially it has one
            state[prefix + _sequential_name(module, name)] = value.flatten() if one else value


def _read_sequential_keys(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    parameters = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, layout in _stored(module):
        key, sequential = prefix + name, prefix + _sequential_name(module, name)
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


def _stored(module: Any) -> Iterator[tuple[str, Layout]]:
    """The names of the split parameters, and of the masks of those that are pruned, and their layouts."""
    for name, layout in module.parameter_layouts.items():
        yield name, layout
        if name.endswith("_orig"):
            yield name.removesuffix("orig") + "mask", layout


def _sequential_name(module: Any, name: str) -> str:
    if "parametrizations." in name:
        return name[name.index("parametrizations.") :]
    renamed: str = getattr(module, "sequential_names", {}).get(name, name.rpartition(".")[2])
    return renamed
