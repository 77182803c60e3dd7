"""The floors of the library: a module imports only from the modules that stand before it in this list."""

import ast
from pathlib import Path

import pytest

import distdl

SOURCE = Path(distdl.__file__).parent
CORE = [
    # floor 0: values
    "boxes", "windows", "transposed", "borders", "memory", "view", "comm", "label", "derivatives", "encoding", "groups",
    "sharing", "partition", "cartesian", "layout",
    # floor 1: plans
    "plan", "planning", "rows", "header", "agreement",
    # floor 2: exchange, back-ends, worlds
    "exchange.packing", "exchange.program", "exchange.operator", "exchange", "route", "recording", "jobs", "backends",
    "backends.serial", "backends.threaded", "backends.torch_distributed",
    "backends.mpi.process", "backends.mpi.messages", "backends.mpi.communicator", "backends.mpi",
    "worlds", "processes", "launch",
    "bookkeeping",
    # floor 3: primitives
    "nn.compiling", "nn.module", "nn.broadcast", "nn.sum_reduce", "nn.all_sum_reduce", "nn.repartition",
    "nn.halo_exchange", "nn.all_gather", "nn.reduce_scatter",
    # floor 4: layers
    "nn.fixed", "nn.parametrised",
    "nn.uniform", "nn.placement", "nn.checking", "nn.init", "nn.utils", "nn.padding", "nn.weights", "nn.movements",
    "nn.contraction", "nn.linear", "nn.conv", "nn.conv_transpose",
    "nn.window_pooling", "nn.pooling", "nn.runs", "nn.adaptive_pooling", "nn.adaptive_max_pooling",
    "nn.affine", "nn.merging", "nn.moments", "nn.normalisation", "nn.batchnorm", "nn.layernorm",
    "nn.resampling", "nn.interpolate", "nn.upsampling", "nn.repeats", "nn.dropout", "nn.embedding",
    "nn.loss_base", "nn.loss", "nn.class_loss", "nn.nll", "nn.cross_entropy",
]  # fmt: skip
NAMES = [
    "utilities", "utilities.debug", "utilities.dtype", "utilities.index_tricks", "utilities.slicing",
    "utilities.tensor_decomposition", "utilities.torch", "backend", "backend.backend", "backends.mpi.buffer",
    "backends.mpi.partition", "nn.transpose", "nn.conv_feature", "nn.conv_channel", "nn.conv_general", "nn.mixins",
    "nn.mixins.conv_mixin", "nn.mixins.halo_mixin", "nn.mixins.pooling_mixin",
]  # fmt: skip
TOP = ["", "nn", "testing", "__main__"]
LAZY = {"worlds", "backends.mpi"}  # they import a back-end when a world of its kind is opened


def path_of(module: str) -> Path:
    base = SOURCE.joinpath(*module.split(".")) if module else SOURCE
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def modules_on_disk() -> set[str]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def imports_of(module: str) -> list[tuple[str, bool]]:
    """Imported modules of ours, as ``(name, at the top of the file)``."""
    tree = ast.parse(path_of(module).read_text())
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "distdl":
            base = node.module.partition(".")[2]
            for alias in node.names:
                whole = f"{base}.{alias.name}" if base else alias.name
                found.append((whole if whole in modules_on_disk() else base, id(node) in top))
        elif isinstance(node, ast.Import):
            found += [
                (a.name.partition(".")[2], id(node) in top) for a in node.names if a.name.split(".")[0] == "distdl"
            ]
    return found


def test_every_module_has_a_floor():
    assert modules_on_disk() == set(CORE + NAMES + TOP)


@pytest.mark.parametrize("module", CORE)
def test_imports_point_down(module):
    allowed = set(CORE[: CORE.index(module)])
    for imported, at_top in imports_of(module):
        assert imported in allowed, f"{module} imports {imported}, which does not stand below it"
        assert at_top or (module in LAZY and imported.startswith("backends.")), f"{module}: {imported} not at the top"


@pytest.mark.parametrize("module", [m for m in CORE if m.startswith("backends.")])
def test_backends_import_comm_and_the_registry_and_nothing_else_of_ours(module):
    package = ".".join(module.split(".")[:2])  # MPI's has several files
    beside = {other for other in CORE if other == package or other.startswith(f"{package}.")}
    assert {imported for imported, _ in imports_of(module)} <= {"comm", "jobs", "backends"} | beside


@pytest.mark.parametrize("module", CORE + NAMES + TOP)
def test_mpi4py_is_imported_in_its_own_place_only(module):
    tree = ast.parse(path_of(module).read_text())
    names = [
        name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""])
    ]
    if not module.startswith("backends.mpi"):
        assert not any(name.split(".")[0] == "mpi4py" for name in names)


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_no_alias(module):
    assert not {imported for imported, _ in imports_of(module)} & set(NAMES)
