"""Audit the dependencies against the lock, ``constraints.txt``, without a network: ``make audit``.

It checks that

1. everything that ``pyproject.toml`` names is pinned in the lock, with ``==``, once;
2. everything of that which is installed here, and all that it depends on in turn, is pinned, and of the pinned version;
3. every file that these packages have installed has the SHA-256 that its wheel stated.

It does not look for known vulnerabilities: that needs a database which changes daily (``pip-audit -r constraints.txt``
asks one over the network). It does not check where a wheel came from: whoever can alter an installed file can alter
the statement beside it. And it does not see what builds the package (hatchling) nor what a GPU build of torch adds
unless that is installed here.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
OWN = "distdl"


def read_lock(text: str) -> tuple[dict[str, str], list[str]]:
    """The pinned versions by name, and what is wrong with the lock's lines."""
    pins: dict[str, str] = {}
    problems = []
    for line in text.splitlines():
        content = line.partition("#")[0].strip()
        found = re.fullmatch(r"([\w.-]+)==([\w.!+-]+)", content)
        if found is None and content:
            problems.append(f"constraints.txt: {content!r} is no pin of the form name==version")
        elif found is not None and canonicalize_name(found[1]) in pins:
            problems.append(f"constraints.txt: {found[1]} is pinned twice")
        elif found is not None:
            pins[canonicalize_name(found[1])] = found[2]
    return pins, problems


def named_in(project: str) -> set[str]:
    """The names of all packages that the text of a ``pyproject.toml`` names."""
    table = tomllib.loads(project)["project"]
    lists = [table.get("dependencies", []), *table.get("optional-dependencies", {}).values()]
    return {canonicalize_name(Requirement(one).name) for named in lists for one in named} - {OWN}


def closure(names: Iterable[str]) -> tuple[dict[str, Distribution], set[str]]:
    """What is installed of these packages and of all that they depend on; and the names that are not installed."""
    installed: dict[str, Distribution] = {}
    absent: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "") for name in names]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            found = distribution(name)
        except PackageNotFoundError:
            absent.add(name)
            continue
        installed[name] = found
        for text in found.requires or []:
            one = Requirement(text)
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(one.name), also) for also in ("", *one.extras)]
    return installed, absent


def differing(pins: dict[str, str], installed: dict[str, Distribution]) -> Iterator[str]:
    """What is installed and not pinned, or of another version. (``+cpu`` and the like name a build of a version.)"""
    for name, found in sorted(installed.items()):
        version = found.version.partition("+")[0]
        if name not in pins:
            yield f"{name} {found.version} is installed and not pinned"
        elif version != pins[name].partition("+")[0]:
            yield f"{name} is pinned at {pins[name]}, and {found.version} is installed"


def altered(found: Distribution) -> Iterator[str]:
    """The installed files of a package that are missing, or differ from what its wheel stated."""
    for file, stated, *_ in filter(None, csv.reader((found.read_text("RECORD") or "").splitlines())):
        kind, _, expected = stated.partition("=")
        if kind != "sha256":
            continue
        path = Path(str(found.locate_file(file)))
        if not path.is_file():
            yield f"{found.name}: {file} is missing"
            continue
        with path.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != expected:
            yield f"{found.name}: {file} differs from what was installed"


def main() -> int:
    pins, problems = read_lock((ROOT / "constraints.txt").read_text())
    names = named_in((ROOT / "pyproject.toml").read_text())
    problems += [f"{name} is named in pyproject.toml and not pinned" for name in sorted(names - set(pins))]
    installed, absent = closure(names)
    problems += differing(pins, installed)
    for found in installed.values():
        problems += altered(found)
    print(*problems, sep="\n", end="\n" if problems else "")
    print(
        f"{len(pins)} pins, {len(installed)} packages installed and checked, {len(problems)} problems. Not installed "
        f"here, so not checked: {', '.join(sorted(absent)) or 'none'}. Known vulnerabilities are not looked for: that "
        f"needs a network (pip-audit -r constraints.txt)."
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
