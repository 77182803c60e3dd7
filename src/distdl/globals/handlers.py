"""All families of functions: to import them fills the table from torch functions to handlers, and that of methods."""

# ruff: noqa: F401  (nobody names them)

from distdl.globals.blocks import modules
from distdl.globals.functions import (
    attention,
    attributes,
    composites,
    convolutions,
    counting,
    diagonals,
    differences,
    drawing,
    equations,
    exponentials,
    extremes,
    foreach,
    fourier,
    grouped,
    indexing,
    initial,
    joining,
    lines,
    lookups,
    losses,
    masks,
    matrices,
    normalising,
    norms,
    numbers,
    ordering,
    pointwise,
    products,
    random,
    recurrent,
    reductions,
    resizing,
    sampling,
    scans,
    shapes,
    subscripts,
    values,
    windows,
)
from distdl.globals.gradients import autograd, replicated
from distdl.globals.moving import entry
from distdl.globals.views import strides
