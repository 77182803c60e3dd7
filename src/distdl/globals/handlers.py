"""All families of functions: to import them fills the table from torch functions to handlers, and that of methods."""

# ruff: noqa: F401  (nobody names them)

from distdl.globals.blocks import modules
from distdl.globals.consistency import comparing, debug
from distdl.globals.functions import (
    as_strided,
    attention,
    attributes,
    class_losses,
    complex_views,
    composites,
    convolutions,
    counting,
    creation,
    diagonals,
    differences,
    dropout,
    einsum,
    extremes,
    foreach,
    fourier,
    gather_scatter,
    getitem,
    grouped,
    initial,
    interpolation,
    joining,
    lookups,
    losses,
    masks,
    matrices,
    normalising,
    norms,
    number_arguments,
    ordering,
    padding,
    plain_random,
    pointwise,
    pooling,
    products,
    random,
    rearranging,
    recurrent,
    reductions,
    sampling,
    scans,
    shapes,
    slicing,
    softmax,
    unfolding,
    values,
    variances,
)
from distdl.globals.gradients import autograd, replicated
from distdl.globals.moving import conversion
from distdl.globals.tensor import local, nn_modules, torch_dispatch, torch_function
from distdl.globals.views import strides
