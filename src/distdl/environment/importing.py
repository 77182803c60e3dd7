"""What is to be done behind the import of a module, whenever a program imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def behind(name: str, act: Callable[[], object]) -> None:
    """Do something once a module has been imported: now, if it has been, else behind its import.

    For modules that take long to import, and that few programs need.

    Args:
        name: of the module, whole.
    """
    if name in sys.modules:
        act()
    else:
        sys.meta_path.insert(0, _Behind(name, act))


class _Behind(MetaPathFinder):
    """Finds one module as the other finders do, and acts when it has been executed."""

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        others = [one for one in sys.meta_path if one is not self]
        found = next((spec for one in others if (spec := one.find_spec(name, path, target)) is not None), None)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                self._act()

            found.loader.exec_module = execute_and_act  # type: ignore[method-assign]  # (a loader of this one alone)
        return found
