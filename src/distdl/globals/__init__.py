"""Global tensors: tensors that know that they are blocks, and the models that compute with them."""

from distdl.globals import handlers
from distdl.globals.entry import distribute_tensor
from distdl.globals.local_map import local_map
from distdl.globals.models import distribute, suggest, summary
from distdl.globals.register import register
from distdl.globals.tensor import GlobalTensor

__all__ = [
    "GlobalTensor",
    "distribute",
    "distribute_tensor",
    "handlers",
    "local_map",
    "register",
    "suggest",
    "summary",
]
