"""The names that are public, and the reference that is made of them: ``python docs/public_names.py`` prints it.

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
HEAD = """# Reference

This page is made from the docstrings of all public names, each under the shortest path by which it is imported.
"""


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


def page() -> str:
    """The text of the reference."""
    found = public_names()
    parts, module, listed = [HEAD], "", {full_name(value) for value in found.values()}
    for path, value in sorted(found.items(), key=lambda item: (item[0].rpartition(".")[0], item[0])):
        if path.rpartition(".")[0] != module:
            module = path.rpartition(".")[0]
            parts.append(f"## {module}\n")
        kind = "class" if inspect.isclass(value) else "function"
        parts.append(f"```{{eval-rst}}\n.. auto{kind}:: {path}\n{_options(value, listed)}```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
