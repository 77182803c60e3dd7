"""Products of global tensors: linear maps, matmul and related functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch.nn import functional

from distdl.globals.rules.applying import autocast_dtype, zeroed
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import check_dtypes
from distdl.globals.rules.work import check_shapes, work_on
from distdl.globals.tensor.entering import entered
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.local import block_of
from distdl.globals.tensor.replicas import Replica
from distdl.globals.tensor.table import TABLE, by_name, handles
from distdl.tensors.connection import local, zeros_on
from distdl.tensors.dtypes import can_be_added, without_autocast
from distdl.tensors.memory import without_memory


def contract(
    func: Callable[..., torch.Tensor],
    operands: Sequence[Any],
    labels: Sequence[Sequence[Hashable]],
    out: Sequence[Hashable],
    name: str,
) -> GlobalTensor:
    """Apply a function that is linear in each operand and sums over the labels that the result does not have.

    Sparse operands fall back, because no parts can be taken of them, and so do small floats, which cannot be added up.

    Args:
        labels: of the dims of each operand; dims with the same label are multiplied.
        out: labels of the result's dims.
    """
    if any(_is_sparse(one) or (one.is_floating_point() and not can_be_added(one.dtype)) for one in operands):

        def product(*factors: Any) -> Any:
            return func(*factors)

        product.__name__ = name
        y: GlobalTensor = fall_back(product, tuple(operands), {})
        return y
    return work_on(operands, labels, out)(func, operands, name)


@handles("linear", "functional")
@by_name
def linear(func: Any, input: Any, weight: Any, bias: Any = None) -> Any:
    """``x W^T + b``. Each worker needs the whole features of its rows; if these are split, another dim is instead."""
    is_map = weight.dim() == 2 and weight.shape[1] and (bias is None or bias.shape == weight.shape[:1])
    is_local = type(input) is GlobalTensor and input.dim() and input._layout.partition.workers.shape[-1] == 1
    if is_map and is_local and not _is_sparse(weight) and GlobalTensor not in (type(weight), type(bias)):
        return _local_linear(func, input, weight, bias)
    check_shapes(func, [one for one in (input, weight, bias) if one is not None], compares=True)
    if bias is not None and bias.dtype is not weight.dtype:
        check_dtypes(func, input, weight, bias)
    if GlobalTensor not in (type(input), type(weight)):  # only the bias is split
        y = functional.linear(input, weight)
    else:
        lead, outputs = batch_labels(input, 1), ("o",) * (weight.dim() - 1)
        labels = [(*lead, "k"), (*outputs, "k")]
        y = contract(functional.linear, [input, weight], labels, (*lead, *outputs), "linear")
    if bias is not None and bias.shape != weight.shape[:1]:
        _check_addend(bias, y)
    return y if bias is None else y + _cast_like(bias, y)


def _local_linear(func: Any, input: GlobalTensor, weight: torch.Tensor, bias: torch.Tensor | None) -> GlobalTensor:
    """The linear map of an input whose features are whole, by weights that every worker has: nothing moves."""
    layout, context = input._layout, input._context
    check_shapes(func, [input, weight] if bias is None else [input, weight, bias], compares=True)
    target = context.keep(
        ("linear", layout, weight.shape[0]),
        lambda: context.layout(layout.partition.workers, (*layout.intervals[:-1], ((0, weight.shape[0]),))),
    )
    w, b = entered(weight, context), None if bias is None else entered(bias, context)
    y = local(func, target.local, (block_of(input), (1,) * input.dim()), (w, (1, 1)), (b, (1,)))
    return GlobalTensor._of(y, target)


def _cast_like(x: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
    """What is added to a product, in the product's dtype under autocast, where torch casts it with the operands."""
    if x.dtype is product.dtype or autocast_dtype(product) is None:
        return x
    return x.to(product.dtype)


def batch_labels(x: torch.Tensor, last: int, name: str = "b") -> tuple[Hashable, ...]:
    """Labels of all dims but the last ones, counted backward from these, as in broadcasting."""
    return tuple((name, place) for place in range(x.dim() - last, 0, -1))


@handles("matmul mm bmm mv dot inner vdot spmm __matmul__", "torch Tensor")
def matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The product of two tensors over one dim, by torch's operator of that name."""
    return _multiply(func, *args, *kwargs.values())


def _multiply(func: Any, a: Any, b: Any) -> Any:
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return func(a, b)
    operator = _OPERATORS.get(getattr(func, "__name__", "matmul"), func)
    check_shapes(operator, [a, b], compares=True)
    if operator is torch.inner and a.dim() and b.dim():
        i, j = batch_labels(a, 1, "i"), batch_labels(b, 1, "j")
        return contract(operator, [a, b], [(*i, "k"), (*j, "k")], (*i, *j), "inner")
    if operator is torch.inner:
        return a * b
    left: tuple[Hashable, ...] = (*batch_labels(a, 2), "i", "k") if a.dim() > 1 else ("k",)
    right: tuple[Hashable, ...] = (*batch_labels(b, 2), "k", "j") if b.dim() > 1 else ("k",)
    both = max(batch_labels(a, 2), batch_labels(b, 2), key=len)
    out = (*both, *(("i",) if a.dim() > 1 else ()), *(("j",) if b.dim() > 1 else ()))
    if _is_sparse(a) or _is_sparse(b):
        return _multiply_sparse(operator, [a, b], [left, right], out)
    return contract(operator, [a, b], [left, right], out, "matmul")


def _is_sparse(x: torch.Tensor) -> bool:
    """Whether a tensor is a plain sparse one; global tensors are not sparse."""
    if type(x) is GlobalTensor:
        return False
    plain = x._plain if type(x) is Replica else x
    return plain.layout is not torch.strided


def _multiply_sparse(
    operator: Any, factors: Sequence[Any], labels: Sequence[Sequence[Hashable]], out: Sequence[Hashable]
) -> Any:
    """Multiply with a sparse constant. No parts can be taken of it, so the work is split along the other dims."""
    at = 0 if _is_sparse(factors[0]) else 1
    dense, name = factors[1 - at], operator.__name__
    if type(dense) is not GlobalTensor:
        return fall_back(operator, tuple(factors), {})
    whole = [label for label in labels[at] if label in out]
    work = work_on(factors, labels, out, adds=False, whole=whole)
    parts = [entered(factors[at], work.context)] * 2
    parts[1 - at] = block = work.needs[1 - at](dense, work.context, name)
    parts[at] = without_memory(parts[at]) if block.is_meta else parts[at]
    idle = not block.numel() or 0 in work.partial
    if idle:  # the operator runs on zeros, so that it raises, casts and saves as on the other workers
        least = [n if label in labels[at] else 1 for label, n in zip(labels[1 - at], dense.shape, strict=True)]
        parts[1 - at] = zeros_on(block, least)
    y = operator(*parts)
    return work.finish(zeros_on(y, work.partial) if idle else y, name)


def _sparse_mm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The product of a sparse and a dense matrix; with other options it falls back."""
    return fall_back(func, args, kwargs) if len(args) != 2 or kwargs else matmul(func, args, kwargs)


TABLE[torch.sparse.mm] = _sparse_mm

# the operator of blocks for the name of a function or method
_OPERATORS: dict[str, Any] = {
    **{name: getattr(torch, name) for name in ("matmul", "mm", "bmm", "mv", "dot", "inner", "vdot")},
    "_sparse_mm": torch.sparse.mm,
    "__matmul__": torch.matmul,
    "spmm": torch.mm,
}


@handles("__rmatmul__", "Tensor")
def rmatmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.matmul(args[1], args[0])


@handles("addmm baddbmm", "torch Tensor")
def add_product(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``beta * input + alpha * (one @ other)``."""
    factors = {"mat1": "one", "batch1": "one", "mat2": "other", "batch2": "other"}

    def run(input: Any, one: Any, other: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
        if input.dtype is not one.dtype:
            check_dtypes(func, input, one, other)
        product: Any = torch.mm(one, other) if func.__name__ == "addmm" else torch.bmm(one, other)
        _check_addend(input, product)
        if not (product.is_floating_point() or product.is_complex()):
            alpha, beta = int(alpha), int(beta)
        return _add_scaled(product if alpha == 1 else product * alpha, input, beta)

    return run(*args, **{factors.get(name, name): value for name, value in kwargs.items()})


def _add_scaled(product: Any, x: Any, beta: Any) -> Any:
    """``product + beta * x``. As in torch, with beta 0 the values of x are ignored, even nan; its gradient is zeros."""
    if beta == 0 and not (x.requires_grad and torch.is_grad_enabled()):
        return product
    x = _cast_like(x, product)
    if beta == 0:
        return product + zeroed(x)
    return product + (x if beta == 1 else x * beta)


def _check_addend(x: Any, product: Any) -> None:
    """Check that what is added to a product can be expanded to the product's shape.

    Raises: what torch raises, on every worker, if it cannot.
    """
    if x.shape != product.shape:
        torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape).expand(product.shape)


@handles("outer ger", "torch Tensor")
def outer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GlobalTensor:
    """The products of all pairs of elements of two vectors."""
    operands = [*args, *kwargs.values()]
    check_shapes(torch.outer, operands, compares=True)
    return contract(torch.outer, operands, [("i",), ("j",)], ("i", "j"), "outer")


@handles("bilinear", "functional torch")
@by_name
def bilinear(func: Any, input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """``x1^T W_o x2 + b_o`` for each output feature o."""
    check_shapes(functional.bilinear, [one for one in (input1, input2, weight, bias) if one is not None], compares=True)
    if bias is not None and bias.dtype is not weight.dtype:
        check_dtypes(func, input1, input2, weight, bias)
    with without_autocast(weight.device):  # torch's bilinear is not cast either
        y = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
        return y if bias is None else y + bias


@handles("tensordot", "torch")
@by_name
def tensordot(func: Any, a: Any, b: Any, dims: Any = 2) -> Any:
    """The product of two tensors over pairs of dims, or over the last dims of one and the first of the other."""
    if isinstance(dims, torch.Tensor):
        dims = dims.tolist()
    if isinstance(dims, (list, tuple)):
        first, second = dims
    else:
        first, second = list(range(a.dim() - int(dims), a.dim())), list(range(int(dims)))
    first = [first] if isinstance(first, int) else list(first)
    second = [second] if isinstance(second, int) else list(second)
    pairs = (tuple(first), tuple(second))
    check_shapes(torch.tensordot, [a, b], pairs, compares=True)
    left: list[tuple[str, int]] = [("a", dim) for dim in range(a.dim())]
    right: list[tuple[str, int]] = [("b", dim) for dim in range(b.dim())]
    for place, (one, other) in enumerate(zip(first, second, strict=True)):
        left[one] = right[other] = ("k", place)
    out_labels = [label for label in (*left, *right) if label[0] != "k"]
    return contract(lambda a, b: torch.tensordot(a, b, pairs), [a, b], [left, right], out_labels, "tensordot")


@handles("cdist", "torch functional")
@by_name
def cdist(
    func: Any, x1: Any, x2: Any, p: float = 2.0, compute_mode: Any = "use_mm_for_euclid_dist_if_necessary"
) -> Any:
    """Distances of all pairs of rows. Each worker needs whole rows."""
    check_shapes(torch.cdist, [x1, x2], compares=True)
    both = max(batch_labels(x1, 2), batch_labels(x2, 2), key=len)
    labels = [(*batch_labels(x1, 2), "i", "m"), (*batch_labels(x2, 2), "j", "m")]
    work = work_on([x1, x2], labels, (*both, "i", "j"), adds=False)
    return work(lambda a, b: torch.cdist(a, b, p, compute_mode), [x1, x2], "cdist")
