"""Parameters that torch has renamed, by a parametrisation or by pruning; and norms of parameters that are split.

torch then trains a tensor of another name, and computes the parameter from it. If this works element by element (as
pruning by a mask does, and many parametrisations), each worker can do it on its block. It is different where an element
depends on others:

=================  =======================================================================================
``spectral_norm``  depends on the whole parameter
``weight_norm``    depends on all elements with the same index in ``dim``; on all of them if that is None
``orthogonal``     depends on the matrix that the last two dims form
=================  =======================================================================================

If one worker holds everything that an element depends on, torch's function of the block is the block of the result.
Otherwise the layer refuses the norm, on all workers. This file has torch's functions for the first case. torch's own do
the same where a worker stores a block, but on the other workers, whose tensor is empty, most of them raise an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any, cast

import torch
from torch.nn.utils import parametrizations, parametrize

from distdl.geometry.boxes import shape
from distdl.partition.arguments import checks_arguments
from distdl.partition.groups import dims
from distdl.partition.layout import Layout

_KINDS = ("spectral_norm", "weight_norm", "orthogonal")
_OF_TORCH = {"_SpectralNorm": 0, "SpectralNorm": 0, "_WeightNorm": 1, "WeightNorm": 1, "_Orthogonal": 2}
_WHOLE = -1  # the dim of a weight_norm that takes all dims together
_RENAMED = re.compile(r"(.*\.)?(?:([^.]+)_(?:orig|g|v)|parametrizations\.([^.]+)\.original\d?)")


class _Nothing(torch.nn.Module):
    """The parametrisation of a block without elements, under the same names as those of other blocks."""

    def __init__(self, kind: int, dim: int) -> None:
        super().__init__()
        self.kind, self.dim = kind, dim
        self.register_load_state_dict_pre_hook(_leave_out)

    def forward(self, first: torch.Tensor, block: torch.Tensor | None = None) -> torch.Tensor:
        return first if block is None else block + first.sum()

    def right_inverse(self, block: torch.Tensor) -> Any:
        if _KINDS[self.kind] != "weight_norm":
            return block
        return block.new_zeros(() if self.dim == _WHOLE else 0), block


def _leave_out(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Skip the buffers that the norm has on workers with a block."""
    for key in [key for key in state if key.startswith(prefix)]:
        del state[key]


def trained(module: torch.nn.Module, layouts: Mapping[str, Layout], everywhere: bool = True) -> dict[str, Layout]:
    """The layouts, by the names that the module's parameters have now, in the module's order.

    For a pruned or parametrised parameter, the name is that of the tensor that is trained instead (``weight_orig``,
    ``parametrizations.weight.original``), if it has the shape of the block. The magnitudes of ``weight_norm`` are split
    in its dim. Other tensors that a parametrisation trains are left out: they are not blocks of a parameter.

    Args:
        layouts: the layouts by the original names of the parameters.
        everywhere: whether every worker has the parameters, perhaps of zero volume. If not, a worker that has none of
            them gets ``layouts`` as they are.
    """
    found = {}
    for name, parameter in module.named_parameters():
        layout = layouts[name] if name in layouts else _renamed(module, name, parameter, layouts)
        if layout is not None:
            found[name] = layout
    if everywhere or found:
        return found
    return dict(layouts)


def _renamed(
    module: torch.nn.Module, name: str, parameter: torch.Tensor, layouts: Mapping[str, Layout]
) -> Layout | None:
    match = _RENAMED.fullmatch(name)
    path, old, new = ("", "", "") if match is None else match.groups("")
    layout = layouts.get(path + old + new)
    if layout is None:
        return None
    norms = dict(_norms(module.get_submodule(path.removesuffix(".")), old + new))
    weight_norm = _KINDS.index("weight_norm")
    if weight_norm in norms and name.endswith(("_g", ".original0")):
        if norms[weight_norm] == _WHOLE:
            return None  # one number, which is no block
        layout = _magnitudes(layout, norms[weight_norm] % len(layout.rulers))
    me = layout.partition.comm.rank
    mine = shape(layout[me]) if me in layout.partition else (0,)
    return layout if tuple(parameter.shape) == mine or not (parameter.numel() or prod(mine)) else None


def _magnitudes(layout: Layout, kept: int) -> Layout:
    """The layout of the factors of ``weight_norm``, along one dim of the parameter."""
    at = tuple(slice(None) if dim == kept else slice(0, 1) for dim in range(len(layout.rulers)))
    intervals = [along if dim == kept else [(0, 1)] for dim, along in enumerate(layout.intervals)]
    return Layout.along(layout.partition[at], intervals)


def _norms(owner: torch.nn.Module, name: str) -> Iterator[tuple[int, int]]:
    """Which of torch's norms a parameter has, and along which dim."""
    found = [*getattr(owner._modules.get("parametrizations"), name, ())]
    found += [hook for hook in owner._forward_pre_hooks.values() if getattr(hook, "name", None) == name]
    for one in found:
        if isinstance(one, _Nothing):
            yield one.kind, one.dim
        elif type(one).__module__.startswith("torch.nn.utils.") and type(one).__name__ in _OF_TORCH:
            yield _OF_TORCH[type(one).__name__], int(getattr(one, "dim", 0))


def _together(kind: int, dim: int, layout: Layout) -> list[int]:
    """The dims along which an element of the result depends on others."""
    rank = len(layout.rulers)
    if _KINDS[kind] == "orthogonal":
        return list(range(rank))[-2:]
    kept = dim % rank if _KINDS[kind] == "weight_norm" and dim != _WHOLE else None
    return [d for d in range(rank) if d != kept]


def _is_split(kind: int, dim: int, layout: Layout) -> bool:
    filled = [sum(stop > start for start, stop in along) for along in layout.intervals]
    return any(filled[d] > 1 for d in _together(kind, dim, layout))


def unfit(owner: torch.nn.Module, name: str, layout: Layout) -> int:
    """The number of a norm that a parameter has and that cannot be computed block by block; 0 if there is none.

    Args:
        owner: the module that has the parameter itself.
    """
    if "parametrizations" not in owner._modules and not owner._forward_pre_hooks:
        return 0
    return next((1 + kind for kind, dim in _norms(owner, name) if _is_split(kind, dim, layout)), 0)


def check_unfit(layer: str, name: str, found: int, layout: Layout) -> None:
    """Check the largest number that ``unfit`` has returned on any worker.

    Raises: ValueError that names the layer.
    """
    if found:
        raise ValueError(_refusal(layer, name, found - 1, layout))


def _refusal(layer: str, name: str, kind: int, layout: Layout) -> str:
    needs = ("the whole of it", "all that it takes the norm of", "its last two dims")[kind]
    blocks = dims([len(along) for along in layout.intervals])
    return (
        f"{layer}: {_KINDS[kind]} of {name} needs {needs} on one worker; {name} has the global shape "
        f"{dims(layout.extents)} and is split into {blocks} blocks"
    )


@checks_arguments
def spectral_norm(
    module: torch.nn.Module,
    name: str = "weight",
    n_power_iterations: int = 1,
    eps: float = 1e-12,
    dim: int | None = None,
) -> torch.nn.Module:
    """``torch.nn.utils.parametrizations.spectral_norm``, for a parameter that one worker stores.

    Args:
        module: a distributed layer. Every worker calls this.
        name: the name of the parameter, as in the sequential layer.
        n_power_iterations, eps: as in torch.
        dim: as in torch: if not given, 0, and 1 for transposed convolutions.
    Returns: the layer.
    Raises: ValueError, on every worker, if the parameter is split.
    """
    if n_power_iterations < 1:
        raise ValueError(f"spectral_norm needs n_power_iterations to be at least 1; got {n_power_iterations}")
    rows: int = getattr(module, "output_dim", 0) if dim is None else dim
    norm = partial(parametrizations.spectral_norm, n_power_iterations=n_power_iterations, eps=eps, dim=rows)
    return _parametrise(module, name, "spectral_norm", rows, norm)


@checks_arguments
def weight_norm(module: torch.nn.Module, name: str = "weight", dim: int | None = 0) -> torch.nn.Module:
    """``torch.nn.utils.parametrizations.weight_norm``, for a parameter that is not split, or only in ``dim``.

    Args:
        module: a distributed layer. Every worker calls this.
        name: the name of the parameter, as in the sequential layer.
        dim: as in torch.
    Returns: the layer.
    Raises: ValueError, on every worker, if the parameter is split in another dim.
    """
    norm = partial(parametrizations.weight_norm, dim=cast(int, dim))  # None is missing in torch's types
    return _parametrise(module, name, "weight_norm", _WHOLE if dim is None else dim, norm)


@checks_arguments
def orthogonal(
    module: torch.nn.Module,
    name: str = "weight",
    orthogonal_map: str | None = None,
    *,
    use_trivialization: bool = True,
) -> torch.nn.Module:
    """``torch.nn.utils.parametrizations.orthogonal``, for a parameter whose last two dims are not split.

    Args:
        module: a distributed layer. Every worker calls this.
        name: the name of the parameter, as in the sequential layer.
        orthogonal_map, use_trivialization: as in torch.
    Returns: the layer.
    Raises: ValueError, on every worker, if the parameter is split in one of its last two dims.
    """
    if orthogonal_map not in (None, "matrix_exp", "cayley", "householder"):
        raise ValueError(
            f"orthogonal needs orthogonal_map to be None, matrix_exp, cayley or householder; got {orthogonal_map!r}"
        )
    norm = partial(parametrizations.orthogonal, orthogonal_map=orthogonal_map, use_trivialization=use_trivialization)
    return _parametrise(module, name, "orthogonal", 0, norm)


def _parametrise(
    module: torch.nn.Module, name: str, kind: str, dim: int, norm: Callable[[torch.nn.Module, str], torch.nn.Module]
) -> torch.nn.Module:
    layouts: Mapping[str, Layout] = getattr(module, "parameter_layouts", {})
    full = next((one for one in layouts if one == name or one.endswith(f".{name}")), None)
    layer = type(module).__name__
    if full is None:
        raise ValueError(f"{kind} needs the name of a split parameter of {layer}, {' or '.join(layouts)}; got {name!r}")
    layout, number = layouts[full], _KINDS.index(kind)
    if _is_split(number, dim, layout):
        raise ValueError(_refusal(layer, name, number, layout))
    path, _, last = full.rpartition(".")
    owner = module.get_submodule(path)
    if getattr(owner, last) is None:
        return module  # batch norm has no parameter at all where it stores none
    if module.get_parameter(full).numel():
        norm(owner, last)
    else:
        parametrize.register_parametrization(owner, last, _Nothing(number, dim), unsafe=True)
    return module
