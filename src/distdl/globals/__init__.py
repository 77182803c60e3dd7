"""Global tensors: tensors that know that they are blocks, and the models that compute with them."""

from distdl.globals import (
    adopting,
    attention,
    autograd,
    convolutions,
    exponentials,
    extremes,
    fallback,
    foreach,
    fourier,
    indexing,
    joining,
    lookups,
    losses,
    normalising,
    norms,
    pointwise,
    products,
    random,
    reductions,
    register,
    resizing,
    scans,
    shapes,
    values,
)
from distdl.globals.distribute import distribute
from distdl.globals.entry import distribute_tensor
from distdl.globals.local_map import local_map
from distdl.globals.register import register
from distdl.globals.summary import suggest, summary
from distdl.globals.tensor import GlobalTensor

__all__ = ["GlobalTensor", "distribute", "distribute_tensor", "local_map", "register", "suggest", "summary"]
