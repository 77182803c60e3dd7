"""distdl: model-parallel deep learning for PyTorch, done as linear algebra."""

from distdl import amp, backend, backends, data, nn, utilities
from distdl.agreement import fixed_shapes
from distdl.checkpoint import export_state, finish_saving, import_state, load, save
from distdl.drawing import draw
from distdl.globals import (
    GlobalTensor,
    distribute,
    distribute_tensor,
    load_optimizer_state_dict,
    local_map,
    optimizer_state_dict,
    register,
)
from distdl.globals.summary import suggest, summary
from distdl.nn.checking import check
from distdl.partition import CartesianPartition, Partition
from distdl.programs import compile
from distdl.reporting import report
from distdl.tracing import trace
from distdl.transport.communicator import CommunicationError
from distdl.verification import verify
from distdl.workers.launch import run_workers
from distdl.workers.ledger import ledger, name_layers
from distdl.workers.reproducible import reproducible
from distdl.workers.termination import on_terminate
from distdl.workers.worlds import world

__version__ = "0.1.0"

__all__ = [
    "CartesianPartition",
    "CommunicationError",
    "GlobalTensor",
    "Partition",
    "amp",
    "backend",
    "backends",
    "check",
    "compile",
    "data",
    "distribute",
    "distribute_tensor",
    "draw",
    "export_state",
    "finish_saving",
    "fixed_shapes",
    "import_state",
    "ledger",
    "load",
    "load_optimizer_state_dict",
    "local_map",
    "name_layers",
    "nn",
    "on_terminate",
    "optimizer_state_dict",
    "register",
    "report",
    "reproducible",
    "run_workers",
    "save",
    "suggest",
    "summary",
    "trace",
    "utilities",
    "verify",
    "world",
]
