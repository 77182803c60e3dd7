"""Linear algebra of batches of small matrices: each worker computes the matrices that it holds whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.layouts.spreading import pencils
from distdl.globals.moving.alignment import block_in
from distdl.globals.moving.writes_into_plain import split_beside
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import as_key, check_once
from distdl.globals.rules.single_worker import LinAlgError
from distdl.globals.rules.work import Work, work_on
from distdl.globals.tensor.global_tensor import GlobalTensor
from distdl.globals.tensor.replicas import plain_of
from distdl.globals.tensor.structures import tensors_in
from distdl.globals.tensor.table import by_name, handles
from distdl.partition.sharing import gather_values
from distdl.tensors.connection import zeros_on


@handles(
    "det logdet slogdet inv inverse cholesky eigh eigvalsh eigvals svd svdvals qr pinv pinverse matrix_exp "
    "matrix_power inv_ex cholesky_ex lu lu_factor lu_factor_ex",
    "torch Tensor linalg",
)
@handles("eig matrix_rank cond", "linalg")
def of_each(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply a function of one matrix to each matrix of a batch. The matrices become whole, the batch dims are split.

    A single matrix falls back, and so do other tensors among the arguments and results without elements.
    """
    name, x, rest = func.__name__, args[0] if args else None, args[1:]
    if type(x) is not GlobalTensor or x.dim() < 3 or not x.numel() or tensors_in((rest, kwargs)):
        return fall_back(func, args, kwargs)
    layout = pencils(x._layout, [x.dim() - 2, x.dim() - 1])
    context = layout.context
    sample = _sample_matrix(tuple(x.shape[-2:]), x.dtype).to(x.device)

    def describe() -> tuple[Any, list[Shape]]:
        """The type of the result, and the shape of each tensor in it for one matrix; no shapes if one is empty."""
        with torch.no_grad():
            y = func(sample[None], *rest, **kwargs)
        kind = None if isinstance(y, torch.Tensor) else type(y)
        found = [y] if kind is None else list(y)
        return kind, [tuple(one.shape[1:]) for one in found] if all(one.numel() for one in found) else []

    key = ("of each matrix", func, x.device.type, sample.shape, x.dtype, as_key(rest), as_key(kwargs))
    kind, shapes = context.keep(key, describe)
    if not shapes:  # an empty result, such as Q of an empty matrix, does not follow from each matrix
        return fall_back(func, args, kwargs)
    block = block_in(x, layout, name)
    active = block.numel() > 0
    matrices = block if active else zeros_on(block, (1, *sample.shape)) + sample
    y = _raise_everywhere(context, name, lambda: func(matrices, *rest, **kwargs))
    made = []
    for one, shape in zip([y] if kind is None else y, shapes, strict=True):
        target = _batch_layout(layout, shape)
        made.append(GlobalTensor._of(one if active else zeros_on(one, target.local), target))
    return made[0] if kind is None else kind(tuple(made))


def _sample_matrix(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A diagonal matrix at which every function here has a derivative: all eigenvalues and singular values differ."""
    return (torch.eye(*shape) * torch.arange(1, shape[1] + 1)).to(dtype)


def _raise_everywhere(context: Context, name: str, compute: Callable[[], Any]) -> Any:
    """Return what this worker computes of its own matrices. Collective for functions that refuse some matrices.

    Raises: LinAlgError or RuntimeError on every worker, if torch raises it on one, say for a singular matrix.
    """
    if name.removeprefix("linalg_") not in _REFUSING or context.comm.imagined:
        return compute()
    problem, y = None, None
    try:
        y = compute()
    except RuntimeError as error:
        problem = error
    mine = None if problem is None else (isinstance(problem, LinAlgError), str(problem))
    problems = gather_values(context.comm, context.everyone, name, mine)
    for worker, one in zip(context.everyone, problems, strict=True):
        if one is not None:
            kind = LinAlgError if one[0] else RuntimeError
            raise kind(f"{name} of a global tensor, on worker {worker}: {one[1]}") from problem
    return y


# functions that raise for the values of some matrices
_REFUSING = {
    "inv", "inverse", "cholesky", "eigh", "eigvalsh", "eig", "eigvals", "svd", "svdvals", "pinv", "pinverse",
    "matrix_power", "matrix_rank", "cond", "solve", "inv_ex", "cholesky_ex", "lu_factor", "lu_factor_ex",
}  # fmt: skip


def _batch_layout(layout: KnownLayout, shape: Shape) -> KnownLayout:
    """The layout of a batch of results of this shape, from the layout of the batch of matrices."""
    context = layout.context

    def make() -> KnownLayout:
        workers = layout.partition.workers[..., 0, 0]
        workers = workers.reshape(workers.shape + (1,) * len(shape))
        return context.layout(workers, [*layout.intervals[:-2], *(((0, n),) for n in shape)])

    return context.keep(("of matrices", layout, shape), make)


@handles("solve solve_triangular", "linalg")
@by_name
def solve(func: Any, A: Any, B: Any, **options: Any) -> Any:
    """Solve small systems of equations, each on a worker that has its whole matrix.

    The batch dims are split, and also the columns of B, since each column has a solution of its own.
    """
    vectors = func is torch.linalg.solve and (B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1]))
    if max(A.dim(), B.dim()) < 2 or not A.numel() or not B.numel():
        return NotImplemented
    if not (A.is_floating_point() or A.is_complex()):
        func(*(torch.zeros(1, 1, dtype=one.dtype) for one in (A, B)), **options)  # raises torch's error
    if vectors:
        return _solve(func, A, B.unsqueeze(-1), options).squeeze(-1)
    return _solve(func, A, B, options)


def _solve(func: Callable[..., torch.Tensor], A: Any, B: Any, options: dict[str, Any]) -> Any:
    """Solve A X = B, or X A = B with ``left=False``, for matrices B."""
    if B.dim() < A.dim():  # with fewer dims than A, torch might take blocks of B for vectors
        B = B.reshape((1,) * (A.dim() - B.dim()) + tuple(B.shape))
    check_once(func, (A, B), options)
    left = options.get("left", True)
    # both dims of A are whole, so the labels "row" of B and "solution" of X are, too; columns are split
    labels = [
        (*_batch_labels(A), "row", "solution"),
        (*_batch_labels(B), "row", "column") if left else (*_batch_labels(B), "column", "row"),
    ]
    front = range(max(A.dim(), B.dim()) - 2, 0, -1)
    out = (*front, "solution", "column") if left else (*front, "column", "solution")
    work = work_on([A, B], labels, out, adds=False, whole=["solution"])
    return _solve_blocks(work, lambda a, b: func(a, b, **options), [A, B], func.__name__)


@handles("triangular_solve", "torch Tensor")
@by_name
def triangular_solve(
    func: Any, input: Any, A: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    """``solve_triangular`` under its older name, which also returns a copy of the matrices."""
    if input.dim() < 2 or A.dim() < 2 or not input.numel() or not A.numel():
        return NotImplemented
    matrices, upper = (A.mT, not upper) if transpose else (A, upper)
    y = torch.linalg.solve_triangular(matrices, input, upper=upper, unitriangular=unitriangular)
    like = A if type(A) is GlobalTensor else split_beside(plain_of(A), y)
    return torch.return_types.triangular_solve((y, like.expand(*y.shape[:-2], *A.shape[-2:]).clone()))


@handles("cholesky_solve", "torch Tensor")
@by_name
def cholesky_solve(func: Any, input: Any, input2: Any, upper: bool = False) -> Any:
    """Solve systems whose matrices are given by their Cholesky factors ``input2``, for right-hand sides ``input``."""
    if max(input.dim(), input2.dim()) < 2:
        return NotImplemented
    return solve(_cholesky_solve, (input2, input), {"upper": upper})


def _cholesky_solve(A: torch.Tensor, B: torch.Tensor, upper: bool) -> torch.Tensor:
    """``torch.cholesky_solve`` with its first two arguments in the order of ``solve``."""
    return torch.cholesky_solve(B, A, upper)


def _batch_labels(x: Any) -> list[int]:
    """Labels of the batch dims, counted backward from the matrices, as in broadcasting."""
    return list(range(x.dim() - 2, 0, -1))


def _solve_blocks(work: Work, func: Callable[..., torch.Tensor], operands: Sequence[Any], name: str) -> GlobalTensor:
    """Solve this worker's systems. A worker without any solves one with the identity, to have the same graph."""
    parts = work.parts(operands, name)
    if 0 not in work.partial and all(one.numel() for one in parts):
        return work.finish(_raise_everywhere(work.context, name, lambda: func(*parts)), name)
    a, b = (zeros_on(one, need.least) for one, need in zip(parts, work.needs, strict=True))
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    y = _raise_everywhere(work.context, name, lambda: func(a + identity, b))
    return work.finish(zeros_on(y, work.partial), name)
