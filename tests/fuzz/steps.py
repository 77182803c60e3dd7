"""Random steps of programs, one function for each family. Each gets a tensor, and returns a step, or None."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from picking import Pick
from programs import Ref, Step

UNARY = [
    "relu", "exp", "tanh", "sigmoid", "abs", "neg", "sin", "square", "erf", "softplus", "gelu", "silu", "elu",
    "leaky_relu", "hardtanh", "logsigmoid",
]  # fmt: skip
IN_PLACE = ["mul_", "add_", "sub_", "div_", "clamp_min_", "fill_"]
COMPARISONS = ["gt", "le", "ne"]
OVER_DIMS = [
    "torch.sum", "torch.mean", "torch.amax", "torch.amin", "torch.logsumexp", "torch.var", "torch.std",
    "linalg.vector_norm",
]  # fmt: skip
ALONG = ["softmax", "log_softmax", "cumsum", "cumprod", "sort", "cummax", "logcumsumexp"]
SHAPES = [
    "reshape", "reshape", "permute", "transpose", "flatten", "unsqueeze", "squeeze", "expand", "movedim",
    "unflatten",
]  # fmt: skip
PARTS = [
    "getitem", "getitem", "setitem", "narrow", "select", "index_select", "flip", "roll", "split", "tril", "chunk",
    "diagonal", "mask", "gather", "indexed", "indexed",
]  # fmt: skip
LOSSES = [
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div",
    "poisson_nll_loss",
]  # fmt: skip
WINDOWS = [
    "conv", "conv", "conv_transpose", "max_pool", "avg_pool", "pad", "interpolate", "adaptive_avg_pool",
    "adaptive_max_pool", "lp_pool",
]  # fmt: skip
NUMBERS = (0.5, -1.25, 2, 3.0)


def named(name: str) -> str:
    space = "torch" if hasattr(torch, name) else "functional"
    return f"{space}.{name}"


def floating(x: torch.Tensor) -> bool:
    return x.is_floating_point()


def unary(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    if not floating(x):
        return Step(pick.of("Tensor.double", "Tensor.float"), (ref,))
    if pick.rarely():
        return Step(
            pick.of("Tensor.float", "Tensor.double", "Tensor.detach", "Tensor.clone", "Tensor.contiguous"), (ref,)
        )
    return Step(named(pick.of(*UNARY)), (ref,))


def _beside(pick: Pick, x: torch.Tensor) -> Any:
    """What may stand beside a tensor: a number, or a tensor that broadcasts with it."""

    def fits(y: torch.Tensor) -> bool:
        pairs = zip(x.shape[::-1], y.shape[::-1], strict=False)
        return y.is_floating_point() and all(1 in pair or pair[0] == pair[1] for pair in pairs) and y.dim() < 5

    return pick.of(*NUMBERS) if pick.of(0, 1, 2) == 0 else pick.tensor(fits) or pick.of(*NUMBERS)


def binary(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    if not floating(x):
        return None
    other = _beside(pick, x)
    if isinstance(other, Ref) and pick.of(0, 1, 2) == 0:
        return Step(pick.of("torch.maximum", "torch.minimum", "torch.atan2", "torch.hypot"), (ref, other))
    return Step(
        pick.of("torch.add", "torch.sub", "torch.mul", "Tensor.__rsub__", "torch.mul", "torch.add"), (ref, other)
    )


def compare(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    if not floating(x):
        other = pick.tensor(lambda y: y.is_floating_point() and x.dtype is torch.bool and _broadcast(x, y))
        return None if other is None else Step("torch.where", (ref, other, 0.75))
    return Step(f"torch.{pick.of(*COMPARISONS)}", (ref, 0.3137))


def _broadcast(x: torch.Tensor, y: torch.Tensor) -> bool:
    return all(1 in pair or pair[0] == pair[1] for pair in zip(x.shape[::-1], y.shape[::-1], strict=False))


def reduction(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    keep = (("keepdim", True),) if pick.flag() else ()
    if not x.dim() or pick.rarely():
        return Step(pick.of("torch.sum", "torch.mean") if floating(x) else "torch.sum", (ref,))
    if x.dtype is torch.bool:
        return Step(pick.of("torch.all", "torch.any", "torch.sum"), (ref, pick.dim(x)), keep)
    if not floating(x):
        return Step(pick.of("torch.sum", "torch.amax"), (ref, pick.dim(x)), keep)
    if pick.flag():
        dims = pick.some(range(x.dim()))
        dims = dims[0] if len(dims) == 1 and pick.flag() else dims
        name = pick.of(*OVER_DIMS)
        return Step(name, (ref,) if pick.rarely() and name != "torch.logsumexp" else (ref, dims), keep)
    name = pick.of(*ALONG, "prod", "max", "min", "argmax", "norm", "median")
    if name in ALONG:
        return Step(f"torch.{name}", (ref, pick.dim(x)))
    if name == "norm":
        return Step("torch.norm", (ref, pick.of(1, 2, 3, float("inf")), pick.dim(x)), keep)
    return Step(f"torch.{name}", (ref, pick.dim(x)), keep)


COMPLEX = ["exp", "sin", "tanh", "abs", "neg", "square", "real", "imag", "angle", "conj", "view_as_real", "reciprocal"]


def complex_numbers(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    """Of complex tensors; of others, one is made."""
    if x.dtype is torch.float64 and x.dim() and x.shape[-1] == 2 and pick.flag():
        return Step("torch.view_as_complex", (ref,))
    if not x.is_complex():
        other = pick.tensor(lambda y: y.dtype is x.dtype and y.shape == x.shape)
        return Step(pick.of("torch.complex", "torch.polar"), (ref, other)) if x.dtype is torch.float64 else None
    name = pick.of("unary", "unary", "binary", "reduction", "matmul")
    if name == "unary" or not x.dim():
        return Step(f"torch.{pick.of(*COMPLEX)}", (ref,))
    if name == "binary":
        other = pick.tensor(lambda y: (y.is_complex() or y.dtype is torch.float64) and _broadcast(x, y) and y.dim() < 5)
        return Step(pick.of("torch.mul", "torch.add", "torch.sub", "torch.div", "Tensor.mul_"), (ref, other or 0.5j))
    if name == "matmul":
        return Step("torch.matmul", (ref, ref)) if x.dim() > 1 and x.shape[-1] == x.shape[-2] else None
    dims = pick.some(range(x.dim()))
    reduced = pick.of("torch.sum", "torch.mean", "torch.cumsum", "torch.prod", "torch.cumprod", "linalg.vector_norm")
    return Step(reduced, (ref, dims[0] if "cum" in reduced or "prod" in reduced else dims))


def arranging(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    """The same tensor, split otherwise."""
    return Step("ours.redistributed", (ref, pick.blocks(x.shape))) if 0 < x.dim() < 6 else None


def reshape(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    name = pick.of(*SHAPES)
    if name == "unsqueeze":
        return Step("torch.unsqueeze", (ref, pick.number(-x.dim() - 1, x.dim()))) if x.dim() < 5 else None
    if not x.dim():
        return Step("Tensor.reshape", (ref, (1,)))
    if name == "reshape":
        shape = _factors(pick, x.numel()) if x.numel() else [*x.shape[::-1]]
        if pick.flag() and x.numel():
            shape[pick.number(0, len(shape) - 1)] = -1
        return Step(pick.of("Tensor.reshape", "Tensor.view"), (ref, tuple(shape)))
    if name == "permute":
        return Step("torch.permute", (ref, pick.order(range(x.dim()))))
    if name in ("transpose", "movedim"):
        return Step(f"torch.{name}", (ref, pick.dim(x), pick.dim(x)))
    if name == "flatten":
        start = pick.number(0, x.dim() - 1)
        return Step("torch.flatten", (ref, start, pick.number(start, x.dim() - 1)))
    if name == "squeeze":
        return Step("torch.squeeze", (ref,) if pick.flag() else (ref, pick.dim(x)))
    if name == "expand":
        shape = tuple(pick.number(2, 3) if n == 1 and pick.flag() else n for n in x.shape)
        return Step("Tensor.expand", (ref, *([pick.number(1, 2)] if x.dim() < 4 and pick.flag() else []), *shape))
    dim = pick.dim(x)
    return Step("Tensor.unflatten", (ref, dim, tuple(_factors(pick, x.shape[dim], 2)))) if x.shape[dim] else None


def _factors(pick: Pick, number: int, most: int = 4) -> list[int]:
    """Numbers of this product, each at least 1."""
    found = []
    for _ in range(pick.number(0, most - 1)):
        divisors = [n for n in range(1, number + 1) if number % n == 0]
        found.append(pick.of(*divisors))
        number //= found[-1]
    return [*found, number]


def _slice(pick: Pick, extent: int) -> slice:
    start = pick.of(None, pick.number(-extent - 1, extent))
    stop = pick.of(None, pick.number(-extent - 1, extent + 1))
    return slice(start, stop, pick.of(None, None, 1, 2, 3))


def _subscript(pick: Pick, x: torch.Tensor) -> tuple[Any, ...]:
    items: list[Any] = []
    lists = 0
    for extent in x.shape[: pick.number(1, x.dim())]:
        kind = pick.of("slice", "slice", "number", "list", "new", "rest")
        if kind == "number" and extent:
            items.append(pick.number(-extent, extent - 1))
        elif kind == "list" and extent and not lists:
            lists += 1
            items.append([pick.number(-extent, extent - 1) for _ in range(pick.number(1, 3))])
        elif kind == "rest" and Ellipsis not in items:
            items.append(Ellipsis)
        else:
            items += [None] * (kind == "new" and x.dim() < 5) + [_slice(pick, extent)]
    return tuple(items)


def subscript(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    if not x.dim():
        return None
    name = pick.of(*PARTS)
    dim = pick.dim(x)
    extent = x.shape[dim]
    if name == "getitem":
        return Step("Tensor.__getitem__", (ref, _subscript(pick, x)))
    if name == "setitem":
        return Step("Tensor.__setitem__", (ref, _subscript(pick, x), pick.of(*NUMBERS))) if floating(x) else None
    if name == "narrow":
        start = pick.number(0, extent)
        return Step("torch.narrow", (ref, dim, start, pick.number(0, extent - start)))
    if name == "select":
        return Step("torch.select", (ref, dim, pick.number(-extent, extent - 1))) if extent else None
    if name == "indexed":
        return _indexed(pick, ref, x)
    if name in ("index_select", "gather"):

        def fits(y: torch.Tensor) -> bool:
            return (
                y.dtype is torch.int64 and (y.dim() == 1 if name == "index_select" else y.dim() == x.dim())
                and (not y.numel() or (int(y.max()) < extent and int(y.min()) >= 0))
                and (name == "index_select" or all(a <= b for a, b in zip(y.shape, x.shape, strict=True)))
            )  # fmt: skip

        index = pick.tensor(fits)
        return None if index is None else Step(f"torch.{name}", (ref, dim, index))
    if name == "flip":
        return Step("torch.flip", (ref, pick.some(range(x.dim()))))
    if name == "roll":
        return Step("torch.roll", (ref, pick.number(-3, 3), dim))
    if name in ("split", "chunk"):
        return Step(f"torch.{name}", (ref, pick.number(1, 3), dim)) if extent else None
    if name == "mask":
        mask = pick.tensor(lambda y: y.dtype is torch.bool and y.shape == x.shape)
        kind = pick.of("Tensor.masked_fill", "Tensor.masked_fill_", "Tensor.__getitem__")
        return None if mask is None or not floating(x) else Step(kind, (ref, mask, 0.5)[: 2 if "get" in kind else 3])
    if x.dim() < 2:
        return None
    return Step(f"torch.{name}", (ref, pick.number(-2, 2)))


def _indexed(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    """By a tensor of places, two of them, or one of truth values, behind or in front of other dims."""
    first = pick.number(0, x.dim() - 1)

    def fits(y: torch.Tensor, dim: int) -> bool:
        if y.dtype is torch.bool:
            return y.dim() > 0 and y.shape == x.shape[dim : dim + y.dim()]
        most = int(y.max()) if y.dtype is torch.int64 and y.numel() and y.dim() < 3 else x.numel()
        return dim < x.dim() and most < x.shape[dim]

    index = pick.tensor(lambda y: fits(y, first))
    if index is None:
        return None
    places: tuple[Any, ...] = (*[slice(None)] * first, index)
    behind = first + max(1, pick.value(index).dim() if pick.value(index).dtype is torch.bool else 1)
    if pick.flag() and behind < x.dim():
        second = pick.tensor(
            lambda y: y.shape == pick.value(index).shape and y.dtype is torch.int64 and fits(y, behind)
        )
        places += (pick.of(slice(None, None, 2), None, 0 if x.shape[behind] else None) if second is None else second,)
    if floating(x) and pick.rarely():
        return Step("Tensor.__setitem__", (ref, places, pick.of(*NUMBERS)))
    return Step("Tensor.__getitem__", (ref, places))


def joining(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    if not x.dim():
        return None
    dim = pick.number(0, x.dim() - 1)

    def fits(y: torch.Tensor) -> bool:
        return y.dim() == x.dim() and all(
            a == b for d, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if d != dim
        )

    if x.dim() < 5 and pick.flag():
        other = pick.tensor(lambda y: y.shape == x.shape)
        return Step("torch.stack", ((ref, other), pick.number(-x.dim() - 1, x.dim())))
    if pick.rarely():
        return Step("Tensor.repeat", (ref, *(pick.number(1, 2) for _ in x.shape)))
    return Step("torch.cat", ((ref, pick.tensor(fits)), dim))


def in_place(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    if not floating(x):
        return None
    if pick.rarely():
        return Step(pick.of("Tensor.relu_", "Tensor.zero_", "Tensor.tanh_", "Tensor.neg_"), (ref,))
    name = pick.of(*IN_PLACE)
    if name in ("fill_", "clamp_min_", "div_"):
        return Step(f"Tensor.{name}", (ref, pick.of(*NUMBERS)))
    return Step(f"Tensor.{name}", (ref, _beside(pick, x)))


def products(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    if not floating(x) or not x.dim():
        return None
    other = pick.tensor(lambda y: y.dtype == x.dtype and 0 < y.dim() < 4 and y.shape[max(-2, -y.dim())] == x.shape[-1])
    if other is not None and pick.flag():
        y = pick.value(other)
        if (
            _broadcast(x[..., 0, 0] if x.dim() > 1 else x[..., 0], y[..., 0, 0] if y.dim() > 1 else y[..., 0])
            if (x.numel() and y.numel())
            else x.dim() <= 2 >= y.dim()
        ):
            return Step("torch.matmul", (ref, other))
    weight = pick.tensor(lambda y: y.dtype == x.dtype and y.dim() == 2 and y.shape[1] == x.shape[-1])
    if weight is not None:
        return Step("functional.linear", (ref, weight))
    if x.dim() == 2:
        return Step("torch.einsum", (pick.of("ij,ij->i", "ij,kj->ik", "ij,ij->", "ij,ik->kj"), ref, ref))
    return None


def normalising(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    if not floating(x) or x.dim() < 2 or not x.numel():
        return None
    name = pick.of("layer_norm", "group_norm", "batch_norm", "instance_norm", "normalize", "rms_norm")
    if name in ("layer_norm", "rms_norm"):
        return Step(f"functional.{name}", (ref, tuple(x.shape[pick.number(1, x.dim() - 1) :])))
    if name == "normalize":
        return Step("functional.normalize", (ref, 2.0, pick.dim(x)))
    if name == "group_norm":
        return Step(
            "functional.group_norm", (ref, pick.of(*(n for n in range(1, x.shape[1] + 1) if x.shape[1] % n == 0)))
        )
    if name == "batch_norm":
        return Step("functional.batch_norm", (ref, None, None), (("training", True),))
    return Step("functional.instance_norm", (ref,)) if x.dim() > 2 else None


def losses(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    if not floating(x):
        return None
    reduction = (("reduction", pick.of("mean", "sum", "none")),)
    if pick.flag() and x.dim() >= 2:
        shape = (x.shape[0], *x.shape[2:])
        target = pick.tensor(lambda y: y.dtype is torch.int64 and y.shape == shape)
        if target is None or not pick.value(target).numel() or int(pick.value(target).max()) >= x.shape[1]:
            return None
        return Step(pick.of("functional.cross_entropy", "functional.nll_loss"), (ref, target), reduction)
    target = pick.tensor(lambda y: y.dtype == x.dtype and y.shape == x.shape)
    name = pick.of(*LOSSES)
    return Step(f"functional.{name}", (ref, target), reduction)


def windows(pick: Pick, ref: Ref, x: torch.Tensor) -> Step | None:
    """Convolutions, pooling, padding and resizing of a tensor with a batch and channels."""
    dims = x.dim() - 2
    if not floating(x) or not 1 <= dims <= 2 or not prod(x.shape[:2]):
        return None
    name = pick.of(*WINDOWS)
    if name.startswith("conv"):
        channels = 1 if name == "conv" else 0
        weight = pick.tensor(lambda w: w.dtype == x.dtype and w.dim() == x.dim() and w.shape[channels] == x.shape[1])
        options = [("stride", pick.number(1, 2)), ("padding", pick.number(0, 2)), ("dilation", pick.number(1, 2))]
        return None if weight is None else Step(f"functional.{name}{dims}d", (ref, weight), tuple(options))
    if name == "pad":
        sizes = tuple(pick.number(0, 2) for _ in range(2 * pick.number(1, dims)))
        mode = pick.of("constant", "constant", "replicate", "reflect", "circular")
        sizes = sizes if mode == "constant" else (sizes * 2)[: 2 * dims]
        return Step("functional.pad", (ref, sizes, mode))
    if name == "interpolate":
        mode = pick.of("nearest", "linear" if dims == 1 else "bilinear")
        size = tuple(pick.number(1, 6) for _ in range(dims))
        return Step("functional.interpolate", (ref,), (("size", size), ("mode", mode)))
    if name.startswith("adaptive"):
        return Step(f"functional.{name}{dims}d", (ref, tuple(pick.number(1, 4) for _ in range(dims))))
    kernel = pick.number(1, 3)
    if name == "lp_pool":
        return Step(f"functional.lp_pool{dims}d", (ref, 2.0, kernel, pick.number(1, 3)))
    return Step(
        f"functional.{name}{dims}d", (ref, kernel, pick.number(1, 3), pick.number(0, kernel // 2)),
        (("ceil_mode", pick.flag()),),
    )  # fmt: skip


FAMILIES = (
    unary, binary, binary, compare, reduction, reduction, reshape, reshape, subscript, subscript, joining,
    in_place, products, complex_numbers, arranging, normalising, losses, windows, windows,
)  # fmt: skip
