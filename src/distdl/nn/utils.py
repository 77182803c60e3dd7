"""Norms of gradients over all workers, and clipping by them: torch's functions, for parameters that are split.

They take the network, or its parameters. Each block of a parameter lives on one worker, so the norm of all gradients is
the norm of the workers' norms. Every worker calls these functions, and every worker gets the same bits.

A network may also have modules of torch between its distributed layers. Every worker has a copy of their parameters. If
the network is passed, each such parameter counts once. Its copies must have the same gradient, so the gradients of all
workers have to be added up beforehand (``P.allreduce_data``). A copy whose gradient is None or zero is ignored. If only
parameters are passed, copies cannot be told from blocks, and each counts as a block; but for those of models that
:func:`distdl.distribute` has made, whose gradients are whole: each counts once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch.nn.utils import clip_grad_value_ as clip_locally
from torch.nn.utils import clip_grads_with_norm_
from torch.nn.utils import get_total_norm as local_norm

from distdl.nn.parametrised import orthogonal, spectral_norm, weight_norm
from distdl.nn.placement import distributed_models, parameter_layouts
from distdl.partition import Partition
from distdl.partition.arguments import checks_arguments
from distdl.partition.layout import Layout
from distdl.workers.worlds import world

__all__ = ["clip_grad_norm_", "clip_grad_value_", "get_total_norm", "orthogonal", "spectral_norm", "weight_norm"]

Tensors = torch.Tensor | Iterable[torch.Tensor]
_SAME = 1e-4  # relative difference that norms of copies may have: sums may be rounded in another order


@checks_arguments
def clip_grad_norm_(
    network: torch.nn.Module | Tensors,
    max_norm: float,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    P: Partition | None = None,
) -> torch.Tensor:
    """Scale the gradients of all workers so that their norm, taken together, is at most ``max_norm``.

    Args:
        network: a network, or parameters.
        norm_type, error_if_nonfinite, foreach: as in torch.
        P: the workers that take part; by default the whole world.
    Returns: the norm before clipping, as :func:`get_total_norm`.
    Raises: as :func:`get_total_norm`.
    """
    parameters = _tensors(network)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total = get_total_norm(
        network if isinstance(network, torch.nn.Module) else gradients, norm_type, error_if_nonfinite, foreach, P=P
    )
    clip_grads_with_norm_(parameters, max_norm, total, foreach)
    return total


@checks_arguments
def clip_grad_value_(network: torch.nn.Module | Tensors, clip_value: float, foreach: bool | None = None) -> None:
    """Clip the gradients to between ``-clip_value`` and ``clip_value``. No messages are sent."""
    parameters = [parameter for parameter in _tensors(network) if parameter.grad is not None]
    # torch raises an error if there are none, as on a worker that stores no weight
    if parameters:
        clip_locally(parameters, clip_value, foreach)


@checks_arguments
def get_total_norm(
    network: torch.nn.Module | Tensors,
    norm_type: float | str = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    P: Partition | None = None,
) -> torch.Tensor:
    r"""The norm of the gradients of a network, or of tensors, over all workers, as if they were one vector.

    .. math:: \Big( \sum_\text{workers} \sum_\text{blocks} \|g\|_p^p \Big)^{1/p}

    Args:
        network: a network, for the norm of its gradients; or tensors.
        norm_type: p, larger than 0; ``inf`` for the largest element.
        error_if_nonfinite: whether to raise RuntimeError, on every worker, if the norm is not a finite number.
        foreach: as in torch.
        P: the workers that take part; by default the whole world. Every one of them calls this.
    Returns: a 0-d tensor in float64, the same on every worker.
    Raises: ValueError for another norm_type; on every worker, if copies of a parameter have different gradients.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"the norm of gradients needs norm_type larger than 0; got {norm_type}")
    everyone = world() if P is None else P
    blocks, whole = _sorted(network, everyone)
    copies = {name: _norm(tensors, order, foreach) for name, tensors in whole.items()}
    received = everyone.allgather_data((_norm(blocks, order, foreach), copies))
    norms = [norm for norm, _ in received] + _once([copies for _, copies in received])
    total: torch.Tensor = torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), order)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients of all workers is {total.item()}, so it cannot be "
            "clipped; pass error_if_nonfinite=False to scale by it anyway"
        )
    return total


def _sorted(
    network: torch.nn.Module | Tensors, everyone: Partition
) -> tuple[list[torch.Tensor], dict[str, list[torch.Tensor]]]:
    """The gradients of a network, or the tensors: blocks, and by names those of which every worker has the whole."""
    blocks: list[torch.Tensor] = []
    whole: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    if isinstance(network, torch.nn.Module):
        named = {name: one.grad for name, one in network.named_parameters() if one.grad is not None}
        split = set(parameter_layouts(network))
    else:
        named = {f"tensor {place}": one for place, one in enumerate(_tensors(network))}
        known = {id(one) for model in list(distributed_models(everyone.comm)) for one in _copies(model)}
        split = {name for name, one in named.items() if id(one) not in known}
    for name, one in named.items():
        if isinstance(one.layout, Layout):  # torch's functions of global tensors give every worker the same
            whole["the shares of a model"].append(one)
        elif name in split:
            blocks.append(one)
        else:
            whole[name if isinstance(network, torch.nn.Module) else "weights of distributed models"].append(one)
    return blocks, whole


def _copies(model: torch.nn.Module) -> Iterator[torch.Tensor | None]:
    """The parameters of a distributed model and their gradients, but for those of layers that split theirs."""
    layouts = parameter_layouts(model)
    for name, parameter in model.named_parameters():
        if name not in layouts:
            yield from (parameter, parameter.grad)


def _norm(tensors: list[torch.Tensor], order: float, foreach: bool | None) -> float:
    # torch raises an error for the largest element of a tensor without elements
    filled = [tensor.detach() for tensor in tensors if tensor.numel()]
    return float(local_norm(filled, order, False, foreach)) if filled else 0.0


def _once(received: list[dict[str, float]]) -> list[float]:
    """The norm of each parameter of which workers have copies, from the norms that the workers gathered."""
    found = []
    for name in dict.fromkeys(name for copies in received for name in copies):
        norms = {worker: copies[name] for worker, copies in enumerate(received) if copies.get(name, 0.0) != 0}
        least, most = min(norms.values(), default=0.0), max(norms.values(), default=0.0)
        if most - least > _SAME * most:
            raise ValueError(
                f"workers have copies of {name}, whose gradients have to be equal: add them up over the workers first; "
                f"their norms are {', '.join(f'{norm:g} (rank {rank})' for rank, norm in norms.items())}"
            )
        found.append(math.nan if any(map(math.isnan, norms.values())) else most)
    return found


def _tensors(network: torch.nn.Module | Tensors) -> list[torch.Tensor]:
    if isinstance(network, torch.nn.Module):
        return list(network.parameters())
    return [network] if isinstance(network, torch.Tensor) else list(network)
