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
    """Finds one module as the finders behind this one do, and acts when it has been executed.

    It stays there: Python goes through the list while it imports, also in another thread, and would leave one out.
    """

    def __init__(self, name: str, act: Callable[[], object]) -> None:
        self._name = name
        self._act: Callable[[], object] | None = act  # until it has been done

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None, /
    ) -> ModuleSpec | None:
        if name != self._name or self._act is None:
            return None
        # Asks only finders behind itself: two of these, of two imports of distdl, would ask each other for ever.
        place = next((place for place, one in enumerate(sys.meta_path) if one is self), -1)
        # finders without find_spec are of the kind before Python 3.4, which Python 3.12 passes over, too
        finds = [one.find_spec for one in sys.meta_path[place + 1 :] if hasattr(one, "find_spec")]
        found = next((spec for find in finds if (spec := find(name, path, target)) is not None), None)
        if found is not None and found.loader is not None:
            execute = found.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                if self._act is not None:
                    self._act()
                    self._act = None

            # the loader belongs to this module alone
            found.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return found
