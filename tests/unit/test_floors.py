"""The floors of the library: a folder imports only from the folders that stand before it in this list."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import distdl

SOURCE = Path(distdl.__file__).parent
FOLDERS = [
    "environment", "geometry", "tensors", "transport", "partition", "plan", "agreement", "exchange", "backends",
    "workers", "ops", "nn", "globals", "programs", "drawing", "checkpoint", "data", "amp",
    "verification", "tracing", "reporting", "commands",
]  # fmt: skip
# the rooms of globals: a file in a room imports only from the rooms before it; the files in no room put them together
ROOMS = [
    "layouts", "tensor", "views", "moving", "rules", "functions", "gradients", "consistency", "blocks", "models",
    "summary", "extras",
]  # fmt: skip
# published names that nothing in the core imports: folders, and files that stand in a folder of the core
PUBLISHED = {"utilities", "backend"}
ALIASES = {
    "backends.mpi.buffer", "backends.mpi.partition", "nn.transpose", "nn.conv_feature", "nn.conv_channel",
    "nn.conv_general", "nn.mixins", "nn.mixins.conv_mixin", "nn.mixins.halo_mixin", "nn.mixins.pooling_mixin",
}  # fmt: skip
TOP = {"", "testing", "__main__"}
# they import a back-end when a world of its kind is opened; methods that are functions of files that need the class;
# torch.distributed.checkpoint, a second of imports, when something is converted
LAZY = {
    "workers.worlds": "backends.", "backends.mpi": "backends.",
    "checkpoint.converting": "checkpoint.dcp",
}  # fmt: skip

# the files that bind private names of torch; the last two import modules of torch that few programs need
PRIVATE = "tensors.private_torch"
PRIVATE_OF_EXTRAS = {"tensors.private_transforms", "tensors.private_flex"}
# names that begin with an underscore and stand where they are used, as users use them, too
OFFERED = {
    r"torch\._foreach_\w+": "functions of lists, which users call, and for which globals has handlers",
    r"torch\._assert_async": "an assertion that waits for no GPU, which users call",
    r"torch\.ops\.aten\._\w+": "operators, with which torch calls __torch_dispatch__",
}


def path_of(module: str) -> Path:
    base = SOURCE.joinpath(*module.split(".")) if module else SOURCE
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


@functools.cache
def modules_on_disk() -> set[str]:
    found = set()
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


@functools.cache
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


def folder_of(module: str) -> str:
    return module.partition(".")[0]


ALL = sorted(modules_on_disk())
CORE = [module for module in ALL if folder_of(module) in FOLDERS and module not in ALIASES]


def test_every_module_has_a_floor():
    others = {module for module in ALL if folder_of(module) not in FOLDERS}
    assert {folder_of(module) for module in others} == PUBLISHED | TOP
    assert set(ALL) >= ALIASES


@pytest.mark.parametrize("module", CORE)
def test_imports_point_down(module):
    folder = folder_of(module)
    allowed = set(FOLDERS[: FOLDERS.index(folder) + 1])
    for imported, at_top in imports_of(module):
        assert folder_of(imported) in allowed, f"{module} imports {imported}, which does not stand above it"
        # a folder hands on its public names last, so its own files import each other (not the registry)
        assert imported != folder or folder == "backends" or module == folder, f"{module} imports its own folder"
        assert at_top or imported.startswith(LAZY.get(module, "none")), f"{module}: {imported} not at the top"


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if parts[0] == "globals" and len(parts) > 1 else ""


NO_ROOM = {"globals.handlers", "globals.patches"}
IN_ROOMS = [module for module in CORE if module.startswith("globals.") and module not in NO_ROOM]


def test_every_file_of_globals_stands_in_a_room():
    assert {room_of(module) for module in IN_ROOMS} == set(ROOMS)


def test_every_file_of_functions_is_imported():
    """A file that nothing imports enters no function into the table: its functions would fall back, right and slow."""
    imported = {name for module in ALL for name, _ in imports_of(module)}
    assert {module for module in ALL if module.startswith("globals.functions.")} <= imported


@pytest.mark.parametrize("module", IN_ROOMS)
def test_imports_between_rooms_point_down(module):
    room = room_of(module)
    allowed = {"", *ROOMS[: ROOMS.index(room) + 1]}
    for imported, _ in imports_of(module):
        assert room_of(imported) in allowed, f"{module} imports {imported}, whose room does not stand before its own"
        assert imported != "globals", f"{module} imports the folder of all rooms"


@pytest.mark.parametrize("module", [module for module in CORE if folder_of(module) == "globals"])
def test_only_what_changes_torch_imports_by_a_name(module):
    """So it can import a room late, at the first call of a function that it has replaced."""
    tree = ast.parse(path_of(module).read_text())
    called = {ast.unparse(node.func).rpartition(".")[2] for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert module == "globals.patches" or not called & {"import_module", "__import__", "resolve_name"}


def names_of_torch(tree: ast.Module) -> Iterator[str]:
    """Yield what a file imports from torch, and every path from there that it reads, as ``torch._C._nn``."""
    bound: dict[str, str] = {}

    def path(node: ast.AST) -> str | None:
        """The path that an expression reads, also by getattr with a name; None for other expressions."""
        match node:
            case ast.Name(name):
                return bound.get(name)
            case ast.Attribute(whole, name) | ast.Call(ast.Name("getattr"), [whole, ast.Constant(str(name)), *_]) if (
                start := path(whole)
            ):
                return f"{start}.{name}"
        return None

    nodes = list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if (whole := base + alias.name).split(".")[0] == "torch":
                    yield whole
                    plain = not base and not alias.asname  # import torch.x binds torch
                    bound[alias.asname or alias.name.split(".")[0]] = "torch" if plain else whole
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and (whole := path(node.value)):
            bound[node.targets[0].id] = whole
    yield from filter(None, map(path, nodes))


def private_names(text: str) -> list[str]:
    named = {name for name in names_of_torch(ast.parse(text)) if re.search(r"\._(?!_)", name)}
    return sorted(name for name in named if not any(re.match(rf"{one}(\.|$)", name) for one in OFFERED))


@pytest.mark.parametrize("module", sorted({"globals", "globals.handlers", *IN_ROOMS}))
def test_private_names_of_torch_stand_in_one_place(module):
    found = private_names(path_of(module).read_text())
    assert not found, f"{module} uses {', '.join(found)}, for which {PRIVATE} is the place"


@pytest.mark.parametrize("text", [
    "import torch\ntorch._C._nn.gelu(x)", "from torch._functorch import vmap", "import torch._higher_order_ops",
    "from torch.utils import _pytree as pytree", "def f():\n    from torch.utils._pytree import tree_map",
    "import torch\naten = torch.nn\naten._reduction.f()", "from torch.nn import functional as F\ngetattr(F, '_pad')",
])  # fmt: skip
def test_a_private_name_of_torch_is_found(text):
    assert private_names(text)


@pytest.mark.parametrize("text", [
    "import torch\ntorch._foreach_add_([x], 1)", "import torch\nops = torch.ops.aten\nops._to_copy.default",
    "import torch\ntorch.add.__name__", "x._version", "from distdl._x import y",
])  # fmt: skip
def test_other_names_are_no_private_ones_of_torch(text):
    assert not private_names(text)


@pytest.mark.parametrize("module", CORE)
def test_only_extras_import_private_names_of_transforms(module):
    extras = module.startswith("globals.extras.")
    assert extras or not {imported for imported, _ in imports_of(module)} & PRIVATE_OF_EXTRAS


@pytest.mark.parametrize("module", [module for module in CORE if folder_of(module) == "backends"])
def test_backends_import_the_transport_and_the_registry_and_nothing_else_that_stands_above_them(module):
    package = ".".join(module.split(".")[:2])  # MPI's has several files
    for imported, _ in imports_of(module):
        beside = imported == package or imported.startswith(f"{package}.")
        assert folder_of(imported) in ("environment", "transport") or beside or imported == "backends"


@pytest.mark.parametrize("module", ALL)
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


@pytest.mark.parametrize("module", [module for module in CORE if module != "nn"])  # which hands on all names
def test_the_core_imports_no_alias(module):
    assert not {imported for imported, _ in imports_of(module)} & ALIASES
    assert not {folder_of(imported) for imported, _ in imports_of(module)} & PUBLISHED
