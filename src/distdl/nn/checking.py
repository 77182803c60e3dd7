"""Whether the torch modules between distributed layers do on blocks what they would do on whole tensors.

An activation does. A convolution, a pooling or a norm does not, and no worker can notice: each computes some result,
and a parameter that should be one becomes one copy for each worker, and the copies train apart. So the network is
inspected before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import batchnorm, conv, instancenorm, loss, padding, pooling

from distdl.nn.module import Module
from distdl.nn.placement import parameter_layouts
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.workers import name_layers

Dims = Callable[[Any, int], Iterable[int]]  # the dims in which a module mixes cells, of a tensor of so many dims


@checks_arguments
def check(network: nn.Module, allowed: Collection[str] = ()) -> None:
    """Check that no torch module of a network treats blocks as whole tensors.

    It only inspects the network: nothing is computed, no message is sent, and every worker comes to the same result.
    Layers of distdl are accepted. Refused are

    - a module with parameters of its own, however simple: every worker has a copy, which gets only the worker's share
      of the gradient, and the copies would train apart;
    - a module of torch that mixes cells (by windows, sums, a softmax) along a dim that a partition of one of the
      network's distributed layers splits.

    The check looks inside the user's own modules, as inside torch's containers. Parameters that they list in
    ``parameter_layouts`` are blocks, not copies. What a ``forward`` calls cannot be seen from outside, so a user's own
    module without parameters is assumed to be right.

    The layers learn their paths in the network (see :func:`distdl.name_layers`).

    Args:
        network: a module; it may itself be a layer.
        allowed: paths of modules to accept, with everything inside them: because the tensor is whole where they stand,
            or because the shares of their gradients are added up.
    Raises: ValueError, which names every refused module by its path, and says what to use instead.
    """
    name_layers(network)
    modules = dict(network.named_modules())
    unknown = sorted(set(allowed) - modules.keys())
    if unknown:
        raise ValueError(f"check needs paths of modules to allow; the network has no {', '.join(unknown)}")
    blocks = parameter_layouts(network)
    partitions = list(dict.fromkeys(P for module in modules.values() for P in _partitions(module)))
    problems = [
        f"  {path or 'the network itself'}: {type(module).__name__} {problem}"
        for path, module in _plain(network, "", allowed, set())
        if (problem := _problem(module, _copies(module, path, blocks), partitions))
    ]
    if problems:
        listed = "\n".join(problems)
        raise ValueError(
            f"a module between distributed layers is given blocks, and these need the whole tensor:\n{listed}\n"
            "Pass the paths of those that are right as they are to check(network, allowed=[...])."
        )


def _plain(module: nn.Module, path: str, allowed: Collection[str], seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that are not layers of distdl, and not inside one, nor inside a module of torch with parameters."""
    if type(module).__module__.startswith("distdl.") or path in allowed or id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    if type(module).__module__.startswith("torch.nn.") and module._parameters:
        return  # the parts of such a module, as of attention, would say nothing more
    for name, child in module.named_children():
        yield from _plain(child, f"{path}.{name}" if path else name, allowed, seen)


def _copies(module: nn.Module, path: str, blocks: Collection[str]) -> list[str]:
    """The parameters of a module of which every worker has a copy."""
    prefix = f"{path}." if path else ""
    return [name for name, _ in module.named_parameters(recurse=False) if prefix + name not in blocks]


def _partitions(module: nn.Module) -> Iterator[Partition]:
    """The partitions of the tensors that a distributed layer takes and returns."""
    if isinstance(module, Module):
        for P in (getattr(module, "P_x", None), getattr(module, "P_y", None)):
            if isinstance(P, Partition) and P.cartesian:
                yield P


def _problem(module: nn.Module, copies: Collection[str], partitions: Iterable[Partition]) -> str:
    if copies:
        named = ", ".join(copies)
        return f"has parameters ({named}), of which every worker would train a copy by itself; {_advice(module, True)}"
    for kinds, dims, _ in _MIXING:
        if isinstance(module, kinds):
            for P in partitions:
                shape = P.workers.shape
                split = [dim for dim in sorted({*dims(module, len(shape))}) if 0 <= dim < len(shape) and shape[dim] > 1]
                if split:
                    return f"mixes the cells along dim {split[0]}, which P {P} splits; {_advice(module, False)}"
            return ""
    return ""


def _advice(module: nn.Module, trained: bool) -> str:
    ours = next((name(module) for kinds, _, name in _MIXING if isinstance(module, kinds)), "")
    if ours:
        return f"put distdl.nn.{ours} there"
    if trained:
        return "put a module without parameters there, or a layer of your own (docs: Add a layer)"
    return "put a distdl.nn.Repartition before it, so that the dim is whole, or a layer of your own (docs: Add a layer)"


# -- which of torch's modules mix cells: along which dims, and what is there instead


def _space(module: Any, dims: int) -> Iterable[int]:
    return range(2, dims)


def _all(module: Any, dims: int) -> Iterable[int]:
    return range(dims)


def _no_batch(module: Any, dims: int) -> Iterable[int]:
    return range(1, dims)


def _no_channels(module: Any, dims: int) -> Iterable[int]:
    return (0, *range(2, dims))


def _given(module: Any, dims: int) -> Iterable[int]:
    """The module's option ``dim``. If it is None, torch chooses one by the rank, so any dim may be meant."""
    return range(dims) if not isinstance(module.dim, int) else [module.dim % dims]


def _normalised(module: Any, dims: int) -> Iterable[int]:
    return range(dims - len(module.normalized_shape), dims)


def _padded(module: Any, dims: int) -> Iterable[int]:
    return range(dims - len(module.padding) // 2, dims)


def _flattened(module: Any, dims: int) -> Iterable[int]:
    return range(module.start_dim % dims + 1, module.end_dim % dims + 1)  # the first one may be split


def _summed(module: Any, dims: int) -> Iterable[int]:
    return () if getattr(module, "reduction", None) == "none" else range(dims)


def _channels(module: Any, dims: int) -> Iterable[int]:
    return [1]


def _channels_of_images(module: Any, dims: int) -> Iterable[int]:
    return [dims - 3]


def _last(module: Any, dims: int) -> Iterable[int]:
    return [dims - 1]


def _nothing(module: Any) -> str:
    return ""


def _same_name(module: Any) -> str:
    """The layer with the name of torch's module; also for a lazy module, or one derived from it."""
    kind = next(kind for kind in type(module).__mro__ if getattr(nn, kind.__name__, None) is kind)
    return f"Distributed{kind.__name__.removeprefix('Lazy')}"


def _without_dims(module: Any) -> str:
    """The same for layers that have one class for any number of dims."""
    return _same_name(module).rstrip("123d")


_SUMMED_BY_US = (
    nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.BCELoss, nn.BCEWithLogitsLoss,
    nn.KLDivLoss,
)  # fmt: skip
_MIXING: tuple[tuple[tuple[type[nn.Module], ...], Dims, Callable[[Any], str]], ...] = (
    ((conv._ConvNd,), _all, _same_name),
    ((nn.Linear, nn.Embedding), _last, _same_name),
    ((nn.SyncBatchNorm, batchnorm._BatchNorm), _no_channels, lambda module: "DistributedBatchNorm"),
    ((instancenorm._InstanceNorm,), _space, _without_dims),
    ((nn.GroupNorm,), _no_batch, _same_name),
    ((nn.LayerNorm, nn.RMSNorm), _normalised, _same_name),
    (
        (
            pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._LPPoolNd, pooling._AdaptiveAvgPoolNd,
            pooling._AdaptiveMaxPoolNd,
        ),
        _space,
        _same_name,
    ),
    ((pooling._MaxUnpoolNd, nn.FractionalMaxPool2d, nn.FractionalMaxPool3d), _space, _nothing),
    ((nn.Upsample,), _space, lambda module: "DistributedUpsample"),
    (
        (padding._ConstantPadNd, padding._ReflectionPadNd, padding._ReplicationPadNd, padding._CircularPadNd),
        _padded,
        lambda module: "DistributedPad",
    ),
    (_SUMMED_BY_US, _summed, _same_name),
    ((nn.NLLLoss, nn.CrossEntropyLoss), lambda module, dims: _summed(module, dims) or [1], _same_name),
    ((loss._Loss,), _summed, _nothing),
    ((nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.CosineSimilarity, nn.Unflatten), _given, _nothing),
    ((nn.Softmax2d, nn.PixelShuffle), _channels_of_images, _nothing),
    ((nn.LocalResponseNorm, nn.CrossMapLRN2d, nn.ChannelShuffle), _channels, _nothing),
    ((nn.PixelUnshuffle, nn.Fold, nn.Unfold), _no_batch, _nothing),
    ((nn.Flatten,), _flattened, _nothing),
    ((nn.PairwiseDistance,), _last, _nothing),
)  # fmt: skip
