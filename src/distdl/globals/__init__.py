"""Global tensors: tensors that know that they are blocks, and the models that compute with them."""

from distdl.globals import handlers, patches
from distdl.globals.blocks.local_map import local_map
from distdl.globals.blocks.register import register
from distdl.globals.functions import autocast, number_arguments
from distdl.globals.models import distribute, load_optimizer_state_dict, optimizer_state_dict
from distdl.globals.moving.conversion import distribute_tensor
from distdl.globals.tensor.global_tensor import GlobalTensor

number_arguments.install()
autocast.install()
patches.arrange()

__all__ = [
    "GlobalTensor",
    "distribute",
    "distribute_tensor",
    "handlers",
    "load_optimizer_state_dict",
    "local_map",
    "optimizer_state_dict",
    "register",
]
