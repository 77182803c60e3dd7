"""The names that are public, and the reference of a page each: ``python docs/public_names.py`` prints all pages.

Public is what the ``__all__`` of a package or module hands on, what the README, a page or an example imports or names,
and what was published. A name that several modules hand on is listed once, at its shortest path.
"""

from __future__ import annotations

import inspect
import pkgutil
import re
import sys
from collections.abc import Collection
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
WHOLE = ("distdl.nn.init", "distdl.nn.utils")  # modules of which all functions are public, as of torch's own
# The groups of the reference: file, title, and the paths in it. A path belongs to the first group that it fits.
GROUPS = {
    "distribute": (
        "Distribute a model",
        r"distdl\.(distribute|distribute_tensor|GlobalTensor|world|Partition|CartesianPartition|run_workers|compile|"
        r"local_map|register|reproducible|fixed_shapes|on_terminate|CommunicationError)",
    ),
    "look": (
        "Choose a split, look inside, prove",
        r"distdl\.(suggest|summary|check|draw|ledger|name_layers|trace|verify)|"
        r"distdl\.(drawing|tracing|verification|programs|workers)\..*",
    ),
    "save": ("Save and load", r"distdl\.(save|load|\w*state\w*|finish_saving)"),
    "data": ("Data and mixed precision", r"distdl\.(data|amp)\..*"),
    "losses": ("Losses", r"distdl\.nn\.Distributed\w*Loss\w*"),
    "layers": ("Layers", r"distdl\.nn\.(Distributed\w+|Interpolate|local|repeat_calls)"),
    "primitives": (
        "Primitives",
        r"distdl\.nn\.(Broadcast|SumReduce|AllSumReduce|Repartition|HaloExchange|AllGather|ReduceScatter)",
    ),
    "weights": ("Weights: initialise, clip, place", r"distdl\.nn\.(init|utils|placement)\..*"),
    "published": ("Names of the published DistDL", r"distdl\.(utilities|backends\.mpi)\..*|distdl\.nn\.mixins\..*"),
    "parts": ("Parts to build layers, primitives and back-ends of", r".*"),
}
HEAD = (
    "# Reference\n\nEvery public name has a page, made from its docstring, under the shortest path that imports it.\n"
)


def pages() -> str:
    """All that users read: the README, the pages, and the code of the pages and examples."""
    found = [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("docs/code/*.py"),
        *ROOT.glob("examples/*.py"),
    ]
    return "\n".join(
        path.read_text() for path in found if not {"reference", "_build"} & {*path.relative_to(ROOT).parts}
    )


def named(text: str) -> set[str]:
    """The dotted paths below ``distdl`` that a text imports or names."""
    paths = set(re.findall(r"\bdistdl(?:\.\w+)+", text))
    for module, inside, plain in re.findall(r"from (distdl[\w.]*) import (?:\(([^)]*)\)|([^\n(]+))", text):
        paths |= {f"{module}.{word.split()[0]}" for word in (inside or plain).split(",") if word.strip()}
    return paths


def resolve(path: str) -> tuple[str, str, Any] | None:
    """The module that a path leads to, the name in it ('' for the module itself), and the object; or None."""
    module, _, rest = path, "", ""
    while module:
        try:
            found: Any = import_module(module)
        except ImportError:
            module, _, last = module.rpartition(".")
            rest = f"{last}.{rest}" if rest else last
            continue
        name = rest.partition(".")[0]  # of a method or attribute, its class
        if not name:
            return module, "", found
        return (module, name, getattr(found, name)) if hasattr(found, name) else None
    return None


def public_names() -> dict[str, Any]:
    """Every public class and function by its path."""
    import distdl

    found: dict[str, Any] = {}
    with mock.patch.dict(sys.modules, {"mpi4py": mock.MagicMock(), "mpi4py.MPI": mock.MagicMock()}):
        for module in ["distdl", *(one.name for one in pkgutil.walk_packages(distdl.__path__, "distdl."))]:
            if not module.endswith("__main__"):
                loaded = import_module(module)
                found |= {f"{module}.{name}": getattr(loaded, name) for name in getattr(loaded, "__all__", ())}
        for path in [*named(pages()), *published()]:
            place = resolve(path)
            if place is not None and place[1]:
                found[f"{place[0]}.{place[1]}"] = place[2]
        for module in WHOLE:
            values = vars(import_module(module)).items()
            found |= {f"{module}.{name}": value for name, value in values if _is_defined_in(value, module)}
        mocked = ("mpi4py", "distdl.backends.mpi")
        others = {name: loaded for name, loaded in sys.modules.items() if not name.startswith(mocked)}
    sys.modules.update(others)  # (imported twice, classes would be two, and some modules of torch cannot be)
    return _once({path: value for path, value in found.items() if _has_an_entry(path, value)})


def published() -> list[str]:
    """The paths of the published interface."""
    with mock.patch.object(sys, "path", [str(ROOT / "tests" / "names"), *sys.path]):
        rows = [*import_module("published").ROWS, *import_module("published_further").FURTHER]
    return [f"{row.module}.{row.name}" for row in rows]


def _is_defined_in(value: Any, module: str) -> bool:
    return inspect.isfunction(value) and value.__module__ == module


def _has_an_entry(path: str, value: Any) -> bool:
    # (a global tensor says that it is torch's, for libraries that ask)
    ours = str(getattr(value, "__module__", "")).startswith("distdl") or path.endswith(".GlobalTensor")
    return (
        ours and (inspect.isclass(value) or inspect.isfunction(value)) and not path.rpartition(".")[2].startswith("_")
    )


def _once(found: dict[str, Any]) -> dict[str, Any]:
    def key(path: str) -> tuple[bool, int, str]:  # an alias only where there is no path with the object's own name
        return path.rpartition(".")[2] != found[path].__name__, path.count("."), path

    shortest: dict[int, str] = {}
    for path in sorted(found, key=key):
        shortest.setdefault(id(found[path]), path)
    return {path: found[path] for path in sorted(shortest.values())}


def full_name(value: Any) -> str:
    """Module and name of a class or function: with mpi4py replaced, some classes are there twice."""
    return f"{value.__module__}.{value.__qualname__}"


def listed_bases(kind: type, listed: Collection[str]) -> list[type]:
    """The bases of a class; in place of one of ours that has no entry of its own, its bases.

    Args:
        listed: the full names of what has an entry.
    """
    found: dict[type, None] = {}
    for base in kind.__bases__:
        ours = base.__module__.startswith("distdl") and full_name(base) not in listed
        found |= dict.fromkeys(listed_bases(base, listed) if ours else [base])
    return list(found)


def _options(value: Any, listed: Collection[str]) -> str:
    """How a class is shown: with its own members, and with those of bases that have no entry of their own."""
    if not inspect.isclass(value):
        return ""
    shown, bases = "   :members:\n   :show-inheritance:\n", listed_bases(value, listed)
    if bases == list(value.__bases__):
        return shown
    elsewhere = dict.fromkeys(one.__name__ for base in bases for one in base.__mro__ if one is not object)
    return f"{shown}   :inherited-members: {', '.join(elsewhere)}\n"  # (all but those of these classes)


def _first_line(value: Any) -> str:
    """The first line of a docstring as a cell of a table."""
    line = (inspect.getdoc(value) or "").partition("\n")[0].replace("|", "\\|")
    return re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", line).replace("``", "`")


def grouped(found: Collection[str]) -> dict[str, list[str]]:
    """The paths of each group: in the order in which its pattern names them, then by their names."""

    def place(path: str, pattern: str) -> tuple[int, str]:
        named = re.search(rf"[(|]{path.rpartition('.')[2]}[|)]", pattern)
        return named.start() if named else len(pattern), path.rpartition(".")[2]

    groups: dict[str, list[str]] = {name: [] for name in GROUPS}
    for path in found:
        groups[next(name for name, (_, pattern) in GROUPS.items() if re.fullmatch(pattern, path))].append(path)
    return {name: sorted(paths, key=lambda path: place(path, GROUPS[name][1])) for name, paths in groups.items()}


def reference() -> dict[str, str]:
    """The pages of the reference: the text of each by the name of its file, without its ending."""
    found = public_names()
    listed = {full_name(value) for value in found.values()}
    groups = grouped(found)
    overview = [HEAD]
    written = {}
    for group, paths in groups.items():
        title = GROUPS[group][0]
        links = [f"[`{path.removeprefix('distdl.')}`]({path}.md)" for path in paths]
        rows = [f"| {link} | {_first_line(found[path])} |" for link, path in zip(links, paths, strict=True)]
        table = "\n".join(["| name | what it is |", "| --- | --- |", *rows])
        overview.append(f"## [{title}]({group}.md)\n\n{', '.join(links)}\n")
        written[group] = f"# {title}\n\n{table}\n\n{_toctree(paths)}"
    written = {"index": "\n".join([*overview, _toctree(groups)]), **written}
    for paths in groups.values():
        written |= {path: _entry(path, found[path], listed) for path in paths}
    return written


def _toctree(names: Collection[str]) -> str:
    return "```{eval-rst}\n.. toctree::\n   :hidden:\n\n" + "".join(f"   {name}\n" for name in names) + "```\n"


def _entry(path: str, value: Any, listed: Collection[str]) -> str:
    """The page of one name."""
    kind = "class" if inspect.isclass(value) else "function"
    module, _, name = path.rpartition(".")
    head = f"# {name}\n\n`from {module} import {name}`\n\n"
    return f"{head}```{{eval-rst}}\n.. auto{kind}:: {path}\n{_options(value, listed)}```\n"


def write(folder: Path) -> None:
    """Write the reference into a folder, in the place of what was there."""
    folder.mkdir(exist_ok=True)
    written = reference()
    for old in folder.glob("*.md"):
        if old.name[:-3] not in written:
            old.unlink()
    for name, text in written.items():
        (folder / f"{name}.md").write_text(text)


if __name__ == "__main__":
    print("\n".join(reference().values()), end="")
