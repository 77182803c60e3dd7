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
# what travels between workers, by the module that has the functions. "Whole" means: redistributed, so that this dim is
# not split, and another one is split instead.
MOVES = {
    "extras.flex.attention": "keys and values, to the workers that have the queries",
    "functions.as_strided": "the cells that the strides name, where they lie elsewhere",
    "functions.attention": "all keys and values that a worker's queries read",
    "functions.attributes": "nothing",
    "functions.class_losses": "one number for each worker; if classes are split, one for each place, too",
    "functions.complex_views": "nothing",
    "functions.composites": "what the functions move that they call",
    "functions.convolutions": "halos: the cells beside a block that its windows read",
    "functions.counting": "the values found in each block, with their counts, to every worker",
    "functions.creation": "nothing; the ends of a range if they are tensors, and the largest class number",
    "functions.diagonals": "nothing; cells of the diagonal where the result is split otherwise",
    "functions.differences": "one slice beside each block",
    "functions.dropout": "nothing",
    "functions.einsum": "operands, to the workers that multiply them, or partial sums of products",
    "functions.extremes": "one entry for each block along the dims that are reduced",
    "functions.fourier": "all cells, so that a dim is whole while it is transformed",
    "functions.gather_scatter": "all cells, so that the indexed dim is whole",
    "functions.getitem": "nothing for slices; all cells for index tensors, so that the indexed dim is whole",
    "functions.grouped": "rows, so that each worker has whole ones",
    "functions.interpolation": "halos; for `grid_sample`, whole images",
    "functions.joining": "the cells that lie elsewhere in the result",
    "functions.lookups": "nothing if every worker has the table; a split table becomes whole where it is read",
    "functions.losses": "one number for each worker; the operand that is split otherwise",
    "functions.masks": "how many elements each worker selects; the mask, to the rows of the tensor",
    "functions.matrices": "all cells, so that each matrix is whole on one worker, if matrices are split",
    "functions.normalising": "the moments of each block",
    "functions.norms": "one entry for each block along the dims that are reduced",
    "functions.number_arguments": "the number",
    "functions.ordering": "all cells, so that the sorted dim is whole; counts alone for the median of all elements",
    "functions.padding": "the cells that lie elsewhere in the padded tensor",
    "functions.pointwise": "nothing if operands are split alike; else the smaller operand, to the larger",
    "functions.pooling": "halos: the cells beside a block that its windows read",
    "functions.products": "nothing for `linear` of whole features; else operands, or partial sums of products",
    "functions.random": "nothing",
    "functions.rearranging": "the cells that lie on another worker afterwards",
    "functions.recurrent": "all cells, so that steps and features are whole, if these are split",
    "functions.reductions": "one entry for each block along the dims that are reduced",
    "functions.scans": "the total of each block along the dim; all cells for `cummax`, `cummin` and `logcumsumexp`",
    "functions.shapes": "nothing, unless the new dims cut the old blocks: then the cells that lie elsewhere",
    "functions.slicing": "nothing for slices and pieces, which stay where their cells are; all cells for index tensors",
    "functions.softmax": "a maximum and a sum for each block along the dim",
    "functions.unfolding": "all cells, so that a dim is whole; nothing for windows side by side",
    "functions.values": "all cells, to every worker; of one element, that one",
    "functions.variances": "mean and squares for each block along the dims",
    "gradients.autograd": "what the backward of each function moves: the adjoint of its forward",
    "tensor.torch_dispatch": "nothing",
}
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
    listed = {module: names_of(functions) for module, functions in families.items()}
    modules = sorted((one for one in listed if listed[one]), key=title_of)
    parts = [HEAD, "## What moves\n", "| functions | what moves in the forward |\n| --- | --- |"]
    parts[-1] += "".join(f"\n| {title_of(one)} | {MOVES[one.removeprefix('distdl.globals.')]} |" for one in modules)
    parts[-1] += "\n\nThe backward moves the adjoint: gradients go back along the same ways, and are added.\n"
    parts.append("## Native\n")
    parts += [f"**{title_of(one)}.** {listed[one]}\n" for one in modules]
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
