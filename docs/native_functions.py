"""Which torch functions have an op for global tensors, and which fall back: ``python docs/native_functions.py``."""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from inspect import unwrap
from typing import Any

import torch
import torch.nn.attention.flex_attention  # (whose op is entered behind its import)
from torch.overrides import get_overridable_functions

from distdl.globals.rules.fallback import fall_back
from distdl.globals.tensor.table import TABLE

HEAD = """# What is native, what falls back

This page is made from the table of functions. *Native* functions compute on blocks, for any split of any dim, and
exchange only the cells that they need. All others *fall back*: the tensor comes together on one worker, torch's
function runs there, and the result is split again. That is right, but it is not parallel: it warns,
{func}`distdl.summary` lists it, and `distdl.distribute(model, P, fallback="error")` refuses it. A native function may
fall back for an option that it does not have; it warns then, too. {func}`distdl.register` enters an op of your own.
"""
SPACES = {torch: "torch", torch.Tensor: "Tensor", torch.nn.functional: "functional"}


def names_of(functions: Any) -> str:
    """The names of functions, each once, dunder names apart."""
    found = sorted({getattr(one, "__name__", str(one)) for one in functions})
    return ", ".join(f"`{name}`" for name in found if not name.startswith("_"))


def title_of(module: str) -> str:
    lines = (sys.modules[module].__doc__ or module).strip().splitlines()
    return lines[0].rstrip(".")


def page() -> str:
    """The text of the page."""
    families: dict[str, list[Any]] = defaultdict(list)
    table = {function: handler for function, handler in TABLE.items() if function and unwrap(handler) is not fall_back}
    for function, handler in table.items():
        if getattr(function, "__name__", "__get__") != "__get__":
            families[handler.__module__].append(function)
    parts = [HEAD, "## Native\n"]
    for module, functions in sorted(families.items(), key=lambda item: title_of(item[0])):
        listed = names_of(functions)
        if listed:
            parts.append(f"**{title_of(module)}.** {listed}\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        overridable = get_overridable_functions()
    native = {getattr(function, "__name__", "") for function in table}
    parts.append("## Falling back\n")
    for space, name in SPACES.items():
        missing = [one for one in overridable.get(space, []) if getattr(one, "__name__", "") not in native]
        public = [one for one in missing if not getattr(one, "__name__", "_").startswith("_")]
        parts.append(f"**{name}.** {names_of(public)}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
