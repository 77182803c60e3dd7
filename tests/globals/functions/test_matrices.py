"""Functions of small matrices, of which a tensor has many."""

from math import inf

import pytest
import torch
from same import Global, assert_raises_the_same, assert_same, noise

import distdl

A = noise(5, 7, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)
SYMMETRIC = A + A.mT
GRIDS = [(2, 2, 1, 1), (1, 3, 1, 1), (2, 1, 2, 1), (1, 1, 2, 2)]
OF_EACH = {
    "det": lambda a: (torch.det(a), a.det(), torch.linalg.det(a), torch.logdet(a), *torch.slogdet(a)),
    "inverse": lambda a: (torch.inverse(a), a.inverse(), torch.linalg.inv(a), torch.linalg.pinv(a)),
    "cholesky": lambda a: torch.linalg.cholesky(a @ a.mT),
    "eigh": lambda a: (*torch.linalg.eigh(a + a.mT)[:1], torch.linalg.eigvalsh(a + a.mT)),
    "svd": lambda a: (torch.linalg.svdvals(a), torch.linalg.svd(a[..., :2]).S, torch.linalg.cond(a)),
    "qr": lambda a: (*torch.linalg.qr(a[..., :2]), torch.linalg.matrix_rank(a)),
    "inv_ex": lambda a: (*torch.linalg.inv_ex(a), *torch.linalg.cholesky_ex(a @ a.mT, upper=True)),
    "lu": lambda a: (*torch.linalg.lu(a), *torch.linalg.lu_factor(a[..., :2])),
    "matrix_exp": lambda a: (torch.matrix_exp(a / 4), torch.matrix_power(a, 3), torch.linalg.matrix_power(a, -1)),
}


@pytest.mark.parametrize("function", OF_EACH)
def test_of_each(function):
    assert_same(OF_EACH[function], Global(A), grids=GRIDS, tolerance=1e-10)


B = noise(5, 7, 3, 2)
APART = {
    "norms": lambda a, b: [torch.linalg.matrix_norm(a, kind) for kind in (1, -inf, 2, "nuc")],
    "norms of other dims": lambda a, b: (torch.linalg.norm(a, 1, (0, -1), True), torch.norm(a, "nuc", (2, 0))),
    "lstsq": lambda a, b: torch.linalg.lstsq(a[..., :2], b)[:3],
    "lu_solve": lambda a, b: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b),
    "lu_unpack": lambda a, b: torch.lu_unpack(*torch.linalg.lu_factor(a)),
    "solve_ex": lambda a, b: torch.linalg.solve_ex(a, b),
    "householder": lambda a, b: torch.linalg.householder_product(a[..., :2], torch.sin(b[..., 0, :])),
    "inverse of a triangle": lambda a, b: torch.cholesky_inverse(a.tril()),
}


@pytest.mark.parametrize("function", APART)
def test_functions_that_one_worker_computes(function):
    for other in (Global(B), B):
        assert_same(APART[function], Global(A), other, falls_back=True, grids=GRIDS[:3], tolerance=1e-10)


def test_nothing_is_nan_where_no_matrix_is():
    def work():
        x = distdl.distribute_tensor(SYMMETRIC[0, :2], distdl.world().reshape(3, 1, 1)).requires_grad_()
        torch.linalg.eigh(x).eigenvectors.square().sum().backward()
        return x.grad.full_tensor()

    with torch.autograd.set_detect_anomaly(True):  # (a switch of the process)
        gradients = distdl.run_workers(work, 3, "threads")
    assert not any(gradient.isnan().any() for gradient in gradients)


def test_types_of_results():
    assert_same(lambda a: type(torch.linalg.eigh(a)).__name__, Global(SYMMETRIC), grids=GRIDS[:1])


def test_results_of_one_matrix_have_names():
    def function(a):
        return torch.linalg.svd(a).S, torch.linalg.eigh(a + a.mT).eigenvalues, torch.linalg.lstsq(a, a[:, :2]).solution

    assert_same(function, Global(A[0, 0]), falls_back=True, tolerance=1e-10)
    assert_same(lambda a: type(torch.linalg.qr(a)).__name__, Global(A[0, 0]), falls_back=True)


def test_second_derivatives():
    assert_same(lambda a: (torch.det(a), torch.inverse(a)), Global(A), grids=GRIDS[:2], twice=True, tolerance=1e-10)


def test_fields_of_tensors():
    """The principal strains of a deformation, and how volumes change, along with their derivatives."""

    def strains(u):
        gradients = torch.stack(torch.gradient(u, dim=(2, 3)), 2).permute(0, 3, 4, 1, 2)
        deformed = gradients + 3 * torch.eye(2, dtype=u.dtype)
        return torch.det(deformed), torch.linalg.eigvalsh(deformed.mT @ deformed)

    assert_same(strains, Global(noise(2, 2, 6, 5)), tolerance=1e-10)


SYSTEMS = {
    "matrices": ((5, 7, 3, 3), (5, 7, 3, 2), {}),
    "vectors": ((5, 7, 3, 3), (5, 7, 3), {}),
    "broadcast": ((5, 7, 3, 3), (3, 2), {}),
    "fewer systems": ((5, 1, 3, 3), (5, 7, 3, 2), {}),
    "one vector": ((5, 7, 3, 3), (3,), {}),
    "right": ((5, 7, 3, 3), (5, 7, 2, 3), {"left": False}),
}


@pytest.mark.parametrize("which", ["both", "matrices", "right sides"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_solve(system, which):
    first, second, options = SYSTEMS[system]
    a, b = noise(*first) + 4 * torch.eye(3, dtype=torch.float64), noise(*second, seed=1)
    if which == "right sides" and b.dim() < 3:
        return
    given = [Global(a) if which != "right sides" else a, Global(b) if which != "matrices" else b]
    grids = GRIDS if which != "right sides" else [(2, 2, *[1] * (b.dim() - 2)), (1, 3, *[1] * (b.dim() - 2))]
    assert_same(lambda a, b: torch.linalg.solve(a, b, **options), *given, grids=grids, tolerance=1e-10)


ONE_MATRIX = {
    "solve": (torch.linalg.solve, (3, 7)),
    "solve a vector": (torch.linalg.solve, (3,)),
    "solve from the right": (lambda a, b: torch.linalg.solve(a, b, left=False), (7, 3)),
    "a triangle": (lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False), (3, 7)),
    "by its older name": (lambda a, b: tuple(torch.triangular_solve(b, a, transpose=True, unitriangular=True)), (3, 7)),
    "a triangle that is known": (lambda a, b: torch.cholesky_solve(b, a.tril()), (3, 7)),
}


@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
@pytest.mark.parametrize("which", ["both", "matrix", "right sides"])
@pytest.mark.parametrize("name", ONE_MATRIX)
def test_solve_for_many_right_sides(name, which):
    """The columns are solved by themselves, so it does not fall back; the matrix is whole where they are."""
    function, shape = ONE_MATRIX[name]
    a, b = noise(3, 3) + 4 * torch.eye(3, dtype=torch.float64), noise(*shape, seed=1)
    given = [Global(a) if which != "right sides" else a, Global(b) if which != "matrix" else b]
    grids = [(3,), (2,)] if which == "right sides" and b.dim() == 1 else [(1, 3), (2, 1), (2, 2)]
    assert_same(function, *given, grids=grids, workers=4, twice=True, tolerance=1e-10)


def test_matrices_are_not_taken_for_vectors_where_the_shape_of_a_block_fits():
    a, b = noise(6, 3, 3) + 4 * torch.eye(3, dtype=torch.float64), noise(3, 3, seed=1)
    assert_same(lambda a, b: torch.linalg.solve(a, b), Global(a), b, grids=[(2, 1, 1), (3, 1, 1)], tolerance=1e-10)
    a, b = noise(2, 6, 3, 3) + 4 * torch.eye(3, dtype=torch.float64), noise(6, 3, 3, seed=1)
    assert_same(lambda a, b: torch.linalg.solve(a, b), Global(a), b, grids=[(1, 2, 1, 1)], tolerance=1e-10)


REFUSED = torch.eye(3, dtype=torch.float64).repeat(4, 1, 1) * torch.tensor([-1.0, 1, 1, 1])[:, None, None]
SINGULAR = torch.stack([torch.zeros(2, 2), torch.eye(2)]).double()


def test_a_matrix_that_torch_refuses_is_an_error_on_every_worker():
    def with_jitter(x):
        for jitter in (0.0, 2.0):
            try:
                return torch.linalg.cholesky(x + jitter * torch.eye(3, dtype=torch.float64)).sum().item()
            except torch.linalg.LinAlgError:
                pass
        raise AssertionError

    def work():
        x = distdl.distribute_tensor(REFUSED, distdl.world()[:2].reshape(2, 1, 1))
        one = distdl.distribute_tensor(SINGULAR, distdl.world()[:2].reshape(2, 1, 1))
        texts = []
        for refused in (torch.linalg.inv, lambda one: torch.linalg.solve(one, torch.ones(2, 1).double())):
            with pytest.raises(torch.linalg.LinAlgError, match=r"on worker 0: .*singular") as caught:
                refused(one)
            texts.append(str(caught.value))
        return with_jitter(x), texts

    found = distdl.run_workers(work, 3, "threads")
    assert found[0] == found[1] == found[2]
    assert abs(found[0][0] - with_jitter(REFUSED)) < 1e-12


@pytest.mark.parametrize(
    ("function", "number"),
    [
        (torch.linalg.lu_factor, 0),
        (torch.linalg.eig, torch.nan),
    ],
)
def test_a_matrix_that_torch_refuses_is_an_error_of_its_kind(function, number):
    """Not of each of these is it a LinAlgError, and the other workers have matrices that torch takes."""
    whole = torch.eye(2, dtype=torch.float64).repeat(4, 1, 1)
    whole[1] *= number
    with pytest.raises(RuntimeError) as theirs:
        function(whole)

    def work():
        x = distdl.distribute_tensor(whole, distdl.world()[:2].reshape(2, 1, 1))
        with pytest.raises(RuntimeError, match="on worker 0") as ours:
            function(x)
        return type(ours.value), str(ours.value)

    found = distdl.run_workers(work, 3, "threads")
    assert found[0][0] is type(theirs.value)
    assert len(set(found)) == 1


def test_powers_of_what_torch_does_not_multiply_are_refused_on_every_worker():
    def work():
        x = distdl.distribute_tensor(torch.ones(4, 3, 3).bool(), distdl.world()[:2].reshape(2, 1, 1))
        with pytest.raises(NotImplementedError) as caught:
            torch.linalg.matrix_power(x, 3)
        return str(caught.value)

    assert len(set(distdl.run_workers(work, 3, "threads"))) == 1


def test_triangles_of_a_reduced_decomposition():
    assert_same(lambda a: tuple(one.detach() for one in torch.linalg.qr(a, mode="r")), Global(A), falls_back=True)


@pytest.mark.filterwarnings("ignore:.*has no op")
def test_norms_of_one_matrix():
    matrix = noise(5, 6)
    assert_same(
        lambda a: (torch.linalg.norm(a, 2), torch.norm(a, "nuc")), Global(matrix), falls_back=True, tolerance=1e-10
    )
    for refused in (lambda a: torch.linalg.matrix_norm(a, 3), lambda a: torch.linalg.norm(a, 1, (0, 0))):
        assert_raises_the_same(refused, matrix)
    whole, imaginary = matrix.long(), matrix + 1j * matrix
    for kind in (1, 2, "nuc", "fro"):
        assert_raises_the_same(lambda a, kind=kind: torch.linalg.matrix_norm(a, kind, dtype=torch.float32), whole)
        assert_raises_the_same(lambda a, kind=kind: torch.linalg.norm(a, kind, dtype=torch.float64), imaginary)
    for arguments in ((2,), (1, (0, 1, 2)), (inf, (0, 1, 2)), (None, (0, 1, 2)), ("fro", 0)):
        assert_raises_the_same(lambda a, rest=arguments: torch.linalg.norm(a, *rest), noise(3, 4, 5), text=True)


def test_solve_by_triangles():
    b = noise(5, 7, 3, 2, seed=1)
    assert_same(
        lambda a, b: (torch.cholesky_solve(b, a.tril()), b.cholesky_solve(a.triu()[0, 0], upper=True)),
        Global(A), Global(b), grids=GRIDS, tolerance=1e-10,
    )  # fmt: skip


@pytest.mark.parametrize("left", [True, False])
def test_solve_triangular(left):
    b = noise(5, 7, 3, 2, seed=1) if left else noise(5, 7, 2, 3, seed=1)
    assert_same(
        lambda a, b: torch.linalg.solve_triangular(a.triu(), b, upper=True, left=left),
        Global(A), Global(b), grids=GRIDS, tolerance=1e-10,
    )  # fmt: skip


def test_matrices_that_are_not_square():
    def work():
        x = distdl.distribute_tensor(noise(4, 3, 2), distdl.world().reshape(3, 1, 1))
        with pytest.raises(RuntimeError, match="square"):
            torch.linalg.inv(x)

    distdl.run_workers(work, 3)
