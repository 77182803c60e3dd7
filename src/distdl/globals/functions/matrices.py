"""Functions of small matrices, of which a global tensor has many: each worker computes those that it holds whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl.geometry.boxes import Shape
from distdl.globals.layouts.context import Context, KnownLayout
from distdl.globals.layouts.spreading import pencils
from distdl.globals.moving.alignment import moved
from distdl.globals.moving.writes_into_plain import split_beside
from distdl.globals.rules.fallback import fall_back
from distdl.globals.rules.meta_checks import frozen, judged
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
    """Of each matrix by itself: matrices are whole, the dims in front of them are split. A single one falls back."""
    name, x, rest = func.__name__, args[0] if args else None, args[1:]
    if type(x) is not GlobalTensor or x.dim() < 3 or not x.numel() or tensors_in((rest, kwargs)):
        return fall_back(func, args, kwargs)
    layout = pencils(x._layout, [x.dim() - 2, x.dim() - 1])
    context = layout.context
    matrix = _simple(tuple(x.shape[-2:]), x.dtype).to(x.device)

    def describe() -> tuple[Any, list[Shape]]:
        """The type of the result, and the shape that each tensor of it has for one matrix; none if one has no cells."""
        with torch.no_grad():
            y = func(matrix[None], *rest, **kwargs)
        kind = None if isinstance(y, torch.Tensor) else type(y)
        found = [y] if kind is None else list(y)
        return kind, [tuple(one.shape[1:]) for one in found] if all(one.numel() for one in found) else []

    key = ("of each matrix", func, x.device.type, matrix.shape, x.dtype, frozen(rest), frozen(kwargs))
    kind, shapes = context.keep(key, describe)
    if not shapes:  # a result without cells, such as Q of an empty matrix, does not follow from each matrix
        return fall_back(func, args, kwargs)
    block = moved(x, layout, name)
    active = block.numel() > 0
    given = block if active else zeros_on(block, (1, *matrix.shape)) + matrix
    y = _alike(context, name, lambda: func(given, *rest, **kwargs))
    made = []
    for one, shape in zip([y] if kind is None else y, shapes, strict=True):
        target = _of_matrices(layout, shape)
        made.append(GlobalTensor._of(one if active else zeros_on(one, target.local), target))
    return made[0] if kind is None else kind(tuple(made))


def _simple(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A matrix of which every function has a derivative: its eigenvalues and singular values differ."""
    return (torch.eye(*shape) * torch.arange(1, shape[1] + 1)).to(dtype)


def _alike(context: Context, name: str, compute: Callable[[], Any]) -> Any:
    """What each worker computes of its own matrices.

    Raises: on every worker what torch raises on one that it refuses the numbers of (of a singular matrix, say), a
        LinAlgError or another RuntimeError.
    """
    if name.removeprefix("linalg_") not in _REFUSING or context.comm.imagined:
        return compute()
    problem, y = None, None
    try:
        y = compute()
    except RuntimeError as error:
        problem = error
    mine = None if problem is None else (isinstance(problem, LinAlgError), str(problem))
    told = gather_values(context.comm, context.everyone, name, mine)
    for worker, one in zip(context.everyone, told, strict=True):
        if one is not None:
            kind = LinAlgError if one[0] else RuntimeError
            raise kind(f"{name} of a global tensor, on worker {worker}: {one[1]}") from problem
    return y


_REFUSING = {
    "inv", "inverse", "cholesky", "eigh", "eigvalsh", "eig", "eigvals", "svd", "svdvals", "pinv", "pinverse",
    "matrix_power", "matrix_rank", "cond", "solve", "inv_ex", "cholesky_ex", "lu_factor", "lu_factor_ex",
}  # fmt: skip


def _of_matrices(layout: KnownLayout, shape: Shape) -> KnownLayout:
    """The layout of what has these dims in the place of the last two, which are whole."""
    context = layout.context

    def make() -> KnownLayout:
        workers = layout.partition.workers[..., 0, 0]
        workers = workers.reshape(workers.shape + (1,) * len(shape))
        return context.layout(workers, [*layout.intervals[:-2], *(((0, n),) for n in shape)])

    return context.keep(("of matrices", layout, shape), make)


@handles("solve", "linalg")
@handles("solve_triangular", "linalg")
@by_name
def solve(func: Any, A: Any, B: Any, **options: Any) -> Any:
    """The solutions of small systems of equations; each is solved where its matrix is whole.

    Of one system, too, the right sides are split: each has a solution of its own.
    """
    vectors = func is torch.linalg.solve and (B.dim() == 1 or (B.dim() == A.dim() - 1 and B.shape == A.shape[:-1]))
    if max(A.dim(), B.dim()) < 2 or not A.numel() or not B.numel():
        return NotImplemented
    if not (A.is_floating_point() or A.is_complex()):
        func(*(torch.zeros(1, 1, dtype=one.dtype) for one in (A, B)), **options)  # (for torch's error)
    if vectors:
        return _solve(func, A, B.unsqueeze(-1), options).squeeze(-1)
    return _solve(func, A, B, options)


def _solve(func: Callable[..., torch.Tensor], A: Any, B: Any, options: dict[str, Any]) -> Any:
    if B.dim() < A.dim():  # (as many dims as A, or torch takes it for vectors where the shapes of blocks fit)
        B = B.reshape((1,) * (A.dim() - B.dim()) + tuple(B.shape))
    judged(func, (A, B), options)
    left = options.get("left", True)
    # (A is square; what it meets of B is whole, and so is what it makes of it)
    pair = [(*_batch(A), "met", "made"), (*_batch(B), "met", "free") if left else (*_batch(B), "free", "met")]
    front = range(max(A.dim(), B.dim()) - 2, 0, -1)
    out = (*front, "made", "free") if left else (*front, "free", "made")
    work = work_on([A, B], pair, out, adds=False, whole=["made"])
    return _solved(work, lambda a, b: func(a, b, **options), [A, B], func.__name__)


@handles("triangular_solve", "torch Tensor")
@by_name
def triangular_solve(
    func: Any, input: Any, A: Any, upper: bool = True, transpose: bool = False, unitriangular: bool = False
) -> Any:
    """The older name, which gives the matrices of the systems, too."""
    if input.dim() < 2 or A.dim() < 2 or not input.numel() or not A.numel():
        return NotImplemented
    matrices, upper = (A.mT, not upper) if transpose else (A, upper)
    y = torch.linalg.solve_triangular(matrices, input, upper=upper, unitriangular=unitriangular)
    like = A if type(A) is GlobalTensor else split_beside(plain_of(A), y)
    return torch.return_types.triangular_solve((y, like.expand(*y.shape[:-2], *A.shape[-2:]).clone()))


@handles("cholesky_solve", "torch Tensor")
@by_name
def cholesky_solve(func: Any, input: Any, input2: Any, upper: bool = False) -> Any:
    """The same where the triangles of the matrices are known."""
    if max(input.dim(), input2.dim()) < 2:
        return NotImplemented
    return solve(_of_triangles, (input2, input), {"upper": upper})


def _of_triangles(A: torch.Tensor, B: torch.Tensor, upper: bool) -> torch.Tensor:
    return torch.cholesky_solve(B, A, upper)


def _batch(x: Any) -> list[int]:
    """Labels of the dims in front of the matrices, counted from these."""
    return list(range(x.dim() - 2, 0, -1))


def _solved(work: Work, func: Callable[..., torch.Tensor], operands: Sequence[Any], name: str) -> GlobalTensor:
    """What each worker solves; one without cells solves the equations of the identity."""
    parts = work.parts(operands, name)
    if 0 not in work.partial and all(one.numel() for one in parts):
        return work.finish(_alike(work.context, name, lambda: func(*parts)), name)
    a, b = (zeros_on(one, need.least) for one, need in zip(parts, work.needs, strict=True))
    y = _alike(work.context, name, lambda: func(a + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device), b))
    return work.finish(zeros_on(y, work.partial), name)
